"""The count of what a client has answered, over all its runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedclade.core import PolicyError, alone, appear
from fedclade.flower.models_sent import models_of_mixture
from fedclade.flower.wire import Content, shown

FILE = "policy.json"  # in the client's folder

_STATE = "fedclade.policy"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a client has answered so far; ``policy.json`` has these fields."""

    releases: int = 0  # updates, gradients, subspaces and descriptors, each replicate by itself
    partings: int = 0  # equations from sums over parts of the data, as SplitLog counts them
    evaluations: int = 0  # scored models, choices of one, models trained for the client itself, words on shifts

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


class UsageLog:
    """A client's usage: in a file in its folder, for its life, or else in memory, for that of its SuperNode.

    A query is counted when it is accepted, before anything is computed for it. So a query that is
    refused later, that fails, or that a crash ends counts as one that was answered. ``state`` is what
    Flower stores of a client between two messages, where it has no folder.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._usage = Usage()

    def usage(self, state: RecordDict | None = None) -> Usage:
        """Return the usage so far; a PolicyError if the file is damaged."""
        if self._path is not None:
            return _read(self._path)
        kept = (state or {}).get(_STATE)
        if isinstance(kept, ConfigRecord):
            before = _checked({field.name: kept.get(field.name) for field in fields(Usage)})
            return Usage(**{name: max(value, getattr(self._usage, name)) for name, value in asdict(before).items()})
        return self._usage

    def book(self, cost: Usage, check: Callable[[Usage], object], state: RecordDict | None = None) -> None:
        """Count a query that was accepted; if that fails, or ``check`` refuses the sum, there must be no reply."""
        with nullcontext() if self._path is None else alone(self._path):  # another process may have answered meanwhile
            usage = self.usage(state) + cost
            check(usage)
            self._usage = usage
            if self._path is not None:
                text = json.dumps({"format": _FORMAT, **asdict(usage)})
                appear(self._path, lambda beside: beside.write_text(text), private=True)
            elif state is not None:
                state[_STATE] = ConfigRecord(asdict(usage))


def cost_of(kind: str, content: Content, *, is_closed: bool = False) -> Usage:
    """Return what the answer to a query adds to the client's usage; a client that ``is_closed`` withholds losses."""
    if kind in ("train", "gradients"):
        # Of a model that the client keeps the loss alone leaves, as of one that is scored.
        if kind == "train" and content.get("own", bool) and not content.get("shares", bool):
            return Usage(evaluations=0 if is_closed else 1)
        replicates = max(1, content.get("replicates", int))  # a query counts before it is checked
        models = max(1, models_of_mixture(content))  # an update of each leaves
        return Usage(releases=replicates * models)
    if kind == "evaluate":
        return Usage(evaluations=max(1, len(content.vectors)))  # without any it is the client's own
    if kind == "choose":
        return Usage(evaluations=1)  # one number leaves, whatever it is chosen from
    return Usage(releases=int(kind in ("subspaces", "descriptors")), evaluations=int(kind == "shifts"))


def _read(path: Path) -> Usage:
    try:
        kept = json.loads(path.read_bytes())
        if kept.pop("format") != _FORMAT:
            raise ValueError("another format")
        return _checked(kept)
    except FileNotFoundError:
        return Usage()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PolicyError(
            f"{path}, the count of what this client has answered, is damaged, so nothing leaves it; restore the file "
            f"from a backup ({type(error).__name__}: {error})"
        ) from error


def _checked(kept: Mapping[str, Any]) -> Usage:
    if any(type(value) is not int or value < 0 for value in kept.values()):
        raise ValueError(f"{shown(dict(kept))} is no count")
    return Usage(**kept)
