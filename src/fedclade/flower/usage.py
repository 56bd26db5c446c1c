"""The count of what a client has answered, over all its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedclade.flower.lasting_record import LastingRecord, RecordKind
from fedclade.flower.models_sent import models_of_mixture
from fedclade.flower.wire import Content, shown

FILE = "policy.json"  # in the client's folder


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a client has answered so far; ``policy.json`` has these fields."""

    releases: int = 0  # updates, gradients, subspaces and descriptors, each replicate by itself
    partings: int = 0  # equations from sums over parts of the data, as SplitLog counts them
    evaluations: int = 0  # scored models, choices of one, models trained for the client itself, words on shifts

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


class UsageLog:
    """A client's usage, over all its runs.

    A query is counted when it is accepted, before anything is computed for it. So a query that is
    refused later, that fails, or that a crash ends counts as one that was answered.
    """

    def __init__(self, folder: Path | None) -> None:
        self._record = LastingRecord(folder, _KIND)

    def usage(self, state: RecordDict | None = None) -> Usage:
        """Return the usage so far; a PolicyError if the file is damaged."""
        return self._record.read(state)

    def book(self, cost: Usage, check: Callable[[Usage], object], state: RecordDict | None = None) -> None:
        """Count a query that was accepted; if that fails, or ``check`` refuses the sum, there must be no reply."""
        with self._record.alone():  # another process may have answered meanwhile
            usage = self.usage(state) + cost
            check(usage)
            self._record.write(usage, state)


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


def _decoded(stored: Mapping[str, Any]) -> Usage:
    if any(type(value) is not int or value < 0 for value in stored.values()):
        raise ValueError(f"{shown(dict(stored))} is no count")
    return Usage(**stored)


def _larger(one: Usage, other: Usage) -> Usage:
    """Return the larger of two counts, each kind by itself."""
    return Usage(**{name: max(value, getattr(other, name)) for name, value in asdict(one).items()})


_KIND = RecordKind(
    file=FILE,
    what="the count of what this client has answered",
    consequence="nothing leaves it",
    empty=Usage,
    encoded=asdict,
    decoded=_decoded,
    combined=_larger,
)
