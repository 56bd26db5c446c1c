"""What a client allows the server to ask, whatever the run says: its own limits, and the count of what it answered."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedclade.core import (
    ConfigError,
    LocalSpec,
    PolicyError,
    appear,
    require,
    unknown,
)
from fedclade.flower.wire import shown

QUESTIONS = ("train", "evaluate", "gradients", "subspaces")
"""Kinds of questions that are about a client's data, and need its leave."""

FORBIDS = "the client's policy forbids"
"""How a refusal begins by which the server sees that it will not get this answer, however often it asks."""

EXAMPLES_A_PARTING = 4
"""Training examples for each time that a client parts its data: see :class:`Policy`."""

FILE = "policy.json"
"""In the client's folder: what it has answered so far."""

_IN_ALL = {
    "max_releases": "updates in all",
    "max_partings": "questions for replicates in all",
    "max_evaluations": "scored models in all",
}
_STATE = "fedclade.policy"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a client has answered so far.

    Parameters
    ----------
    releases
        Updates, gradients and subspaces, each replicate by itself.
    partings
        Questions for replicates: each parts the data anew.
    evaluations
        Models that were scored.
    """

    releases: int = 0
    partings: int = 0
    evaluations: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What one client allows. It belongs to the client: no run can change it.

    The defaults let every algorithm run with its own defaults, but for those that ask for gradients (CFL with
    ``similarity = "gradients"``, IFCA with ``average = "gradients"``) and for subspaces (PACFL).

    A server that asks for replicates gets sums over parts of the data. It knows which examples are in which part, so
    with as many partings as there are examples it could solve for every single one: hence ``max_partings``.

    Parameters
    ----------
    allow
        Kinds of questions that are answered, of :data:`QUESTIONS`.
    max_epochs, max_steps
        Of local training, all replicates together for the steps.
    max_models
        That one question asks to be scored, or drawn.
    max_replicates
        That one question asks for.
    min_part
        Fewest training examples that a replicate may be made from.
    max_partings
        Questions for replicates, in all; None for one to every :data:`EXAMPLES_A_PARTING` training examples.
    max_vectors
        Of a subspace.
    max_releases, max_evaluations
        Updates that leave, and models that are scored, in all.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    allow: tuple[str, ...] = ("train", "evaluate")
    max_epochs: int = 100
    max_steps: int = 50_000
    max_models: int = 64
    max_replicates: int = 4
    min_part: int = 10
    max_partings: int | None = None
    max_vectors: int = 5
    max_releases: int = 5_000
    max_evaluations: int = 50_000

    def __post_init__(self) -> None:
        problems = [unknown("question in allow:", kind, QUESTIONS) for kind in self.allow if kind not in QUESTIONS]
        if problems:
            raise ConfigError("\n".join(problems))
        limits = {name: value for name, value in asdict(self).items() if name != "allow" and value is not None}
        lowest = {name: 0 if name in _IN_ALL else 1 for name in limits}
        require(*((_key(n), value, value >= lowest[n], f"at least {lowest[n]}") for n, value in limits.items()))

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Policy:
        """Return what a node's config allows: the keys are those of this class, with ``-`` for ``_``.

        Raises
        ------
        ConfigError
            If a value is of a wrong type or out of range, or a key that begins with ``max-`` or ``min-`` is unknown: a
            limit that is misspelt must not be left out in silence.
        """
        names = {_key(field.name): field.name for field in fields(cls)}
        given: dict[str, Any] = {}
        problems: list[str] = []
        for key, value in node_config.items():
            if key == "allow":
                if isinstance(value, str):
                    given["allow"] = tuple(value.replace(",", " ").split())
                else:
                    problems.append(f"allow in the node config should be names of questions, got {shown(value)}")
            elif key in names and type(value) is int:
                given[names[key]] = value
            elif key in names:
                problems.append(f"{key} in the node config should be a whole number, got {shown(value)}")
            elif key.startswith(("max-", "min-")):
                problems.append(unknown("limit in the node config:", key, names.keys() - {"allow"}))
        if problems:
            raise ConfigError("\n".join(problems))
        return cls(**given)

    def check_kind(self, what: str) -> None:
        """Check that a kind of question is answered.

        Raises
        ------
        PolicyError
            If it is not; says how to allow it.
        """
        if what in QUESTIONS and what not in self.allow:
            allowed = " ".join([*self.allow, what])
            raise PolicyError(f'{FORBIDS} the question {what!r}; to allow it, set allow="{allowed}" in its node config')

    def check_training(self, spec: LocalSpec, replicates: int, examples: int) -> None:
        """Check what local training a client is asked for, given how many training examples it has.

        Raises
        ------
        PolicyError
            If it is beyond a limit; names it.
        """
        steps = spec.epochs * sum(
            -(-len(range(part, examples, replicates)) // spec.batch_size) for part in range(min(replicates, examples))
        )
        self._check("replicates", replicates, "max_replicates")
        if replicates > 1 and examples // replicates < self.min_part:
            raise PolicyError(
                f"{FORBIDS} {replicates} replicates from {examples} training examples, since each must be made from at "
                f"least {self.min_part} (min-part in its node config)"
            )
        self._check("epochs", spec.epochs, "max_epochs")
        self._check("steps", steps, "max_steps")

    def check_models(self, count: int) -> None:
        """Check how many models one question is about; raises as :meth:`check_training`."""
        self._check("models in one question", count, "max_models")

    def check_vectors(self, count: int) -> None:
        """Check how many vectors of its inputs a client is asked for; raises as :meth:`check_training`."""
        self._check("vectors of its data", count, "max_vectors")

    def check_spent(self, after: Spent, examples: int) -> None:
        """Check what a client would have answered in all, were it to answer once more.

        Raises
        ------
        PolicyError
            If that is more than it may; names the limit.
        """
        allowed = self if self.max_partings is not None else replace(self, max_partings=examples // EXAMPLES_A_PARTING)
        for limit, what in _IN_ALL.items():
            allowed._check(what, getattr(after, limit.removeprefix("max_")), limit)

    def _check(self, what: str, value: int, limit: str) -> None:
        most = getattr(self, limit)
        if value > most:
            raise PolicyError(f"{FORBIDS} {shown(value)} {what}, at most {most} ({_key(limit)} in its node config)")


class Account:
    """What a client has answered so far: in a file in its folder, for its life, or else for that of its SuperNode.

    An answer is booked before it leaves, so a crash may count one too many, and never misses one. One process at a time
    may write it.

    Parameters
    ----------
    folder
        The client's; None for none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._spent = Spent()

    def spent(self, state: RecordDict | None = None) -> Spent:
        """Return what was answered so far.

        Parameters
        ----------
        state
            What Flower keeps of this client between two messages; used by a client without a folder.

        Raises
        ------
        PolicyError
            If the file is damaged.
        """
        if self._path is not None:
            return _read(self._path)
        kept = (state or {}).get(_STATE)
        if isinstance(kept, ConfigRecord):
            before = _spent({name: kept.get(name) for name in _names()})
            return Spent(**{name: max(value, getattr(self._spent, name)) for name, value in asdict(before).items()})
        return self._spent

    def book(self, spent: Spent, state: RecordDict | None = None) -> None:
        """Write down what will have been answered with the answer that is about to leave.

        Raises
        ------
        OSError
            If it cannot be written; then nothing may leave.
        """
        self._spent = spent
        if self._path is not None:
            text = json.dumps({"format": _FORMAT, **asdict(spent)})
            appear(self._path, lambda beside: beside.write_text(text), private=True)
        elif state is not None:
            state[_STATE] = ConfigRecord(asdict(spent))


def _read(path: Path) -> Spent:
    try:
        kept = json.loads(path.read_bytes())
        if kept.pop("format") != _FORMAT:
            raise ValueError("another format")
        return _spent(kept)
    except FileNotFoundError:
        return Spent()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PolicyError(
            f"{path}, the count of what this client has answered, is damaged, so nothing leaves it; restore the file "
            f"from a backup ({type(error).__name__}: {error})"
        ) from error


def _spent(kept: Mapping[str, Any]) -> Spent:
    if any(type(value) is not int or value < 0 for value in kept.values()):
        raise ValueError(f"{shown(dict(kept))} is no count")
    return Spent(**kept)


def _names() -> Collection[str]:
    return [field.name for field in fields(Spent)]


def _key(name: str) -> str:
    return name.replace("_", "-")
