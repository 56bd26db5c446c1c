"""What one client holds, and how it sees it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

import numpy as np
from torch import Tensor

from fedclade.core import IGNORED, ConfigError, DataError, Indices, Split, checked, imported, shown
from fedclade.data.arrays import as_indices, check_name, check_range, whole_number
from fedclade.data.pool import Pool


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds, and how it sees it.

    A name that is no string, or a number or an index that is not whole, raises a DataError.
    """

    id: int  # by which the server knows the client
    name: str  # for people; results do not depend on it
    key: int  # the client's own number for its random draws, which stays when the server renames the client
    train: Indices  # into the pool
    validation: Indices  # may be empty
    test: Indices
    label_map: Tensor | None = (
        None  # int64 [outputs]: where the pool has label y, the client sees label_map[y]
    )
    quarter_turns: int = 0  # its images are turned by so many times 90°

    def __post_init__(self) -> None:
        check_name(self.name, f"the name of client {self.id}")
        for name in ("id", "key", "quarter_turns"):
            object.__setattr__(
                self, name, whole_number(getattr(self, name), f"the {name} of client {self.name!r}")
            )
        for name in get_args(Split):
            object.__setattr__(
                self, name, as_indices(getattr(self, name), f"{name} of client {self.name!r}")
            )

    def __repr__(self) -> str:
        held = ", ".join(f"{split}={len(getattr(self, split))}" for split in get_args(Split))
        return f"ClientData({self.id}, {self.name!r}, {held})"

    def labels(self, y: Tensor) -> Tensor:
        """Return pool targets as this client sees them, same shape; those that are ignored stay as they are."""
        return y if self.label_map is None else map_labels(y, self.label_map)


def map_labels(y: Tensor, label_map: Tensor) -> Tensor:
    """Return targets as a label map shows them, same shape; those that are ignored stay as they are."""
    return label_map[y.clamp(min=0)].where(y != IGNORED, IGNORED)


def check_held(pool: Pool, indices: Indices, split: Split, client: str) -> None:
    """Check that a pool has these examples, and that none of their inputs is NaN or infinite."""
    check_range(indices, len(pool.x), f"the {split} indices of {client}")
    if (
        len(pool.not_finite) == 0
        or len(odd := np.flatnonzero(np.isin(indices, pool.not_finite))) == 0
    ):
        return
    row = int(indices[odd[0]])
    place: list[int] = (~pool.x[row].isfinite()).nonzero()[0].tolist()
    column = place[0] if len(place) == 1 else place
    more = f" and in {len(odd) - 1} more" if len(odd) > 1 else ""
    raise DataError(
        f"{client} has {float(pool.x[row][tuple(place)])} in column {column} of {split} example "
        f"{odd[0]} (example {row} of pool {pool.name!r}){more}; fill such inputs in, or leave "
        "these examples out"
    )


def report_no_examples(client: int, name: str, split: Split, clients: int) -> DataError:
    """Return the error of a client, one of so many, without examples of a split."""
    what = "training" if split == "train" else split
    return DataError(
        f"client {client} ({name!r}) has no {what} examples; ask for fewer clients (now "
        f"{clients}), more examples, or a partition that gives every client some"
    )


# Stages: what clients hold from some round on, where their data changes during a run.


@checked()
@dataclass(frozen=True, eq=False)
class Stage:
    """What all clients hold from a round on, until the next stage.

    Parameters
    ----------
    first_round
        From 2 on; what clients hold before the first stage is the federation's own.
    clients
        The federation's clients, by ids, names and keys, in its order, with what they hold now.
    true_clusters
        Cluster of each client by id in this stage, where it is known.
    """

    first_round: int
    clients: tuple[ClientData, ...]
    true_clusters: Mapping[int, int] | None = None

    def of(self, ids: Collection[int]) -> Stage:
        """Return the stage of some of the clients."""
        mine = tuple(client for client in self.clients if client.id in ids)
        truth = (
            None
            if self.true_clusters is None
            else {c: k for c, k in self.true_clusters.items() if c in ids}
        )
        return replace(self, clients=mine, true_clusters=truth)


def check_stages(stages: Sequence[Stage], clients: Sequence[ClientData]) -> None:
    """Check that stages follow each other, and that all have the same clients; what they hold is not looked at."""
    rounds = [1, *(stage.first_round for stage in stages)]
    if any(later <= earlier for earlier, later in pairwise(rounds)):
        raise DataError(
            f"stages should begin after round 1, each after the one before, got {rounds[1:]}"
        )
    expected = [(client.id, client.name, client.key) for client in clients]
    for stage in stages:
        if [(client.id, client.name, client.key) for client in stage.clients] != expected:
            raise DataError(
                f"the stage from round {stage.first_round} on should have the federation's "
                "clients, in its order, with their names and keys"
            )


# Augmentation: a function that changes the inputs of a batch, in training alone.

Augment = Callable[[Tensor], Tensor]
"""Takes the inputs of a batch ``[B, ...]``, as the model would, and returns what the model gets in their place.

It treats each example by itself, and what it draws, it draws from torch's generators, so that the
run's seed sets it.
"""


def resolve_augment(given: object) -> Augment | None:
    """Return an augmentation given as a function or by ``module:function``.

    Raises
    ------
    ConfigError
        If it cannot be imported, or is no function of the inputs alone.
    """
    if given is None:
        return None
    found: Augment = imported(given, "augment") if isinstance(given, str) else given  # pyright: ignore[reportAssignmentType]  (checked next)
    if not callable(found):
        raise ConfigError(f"augment should be a function of a batch of inputs, got {shown(given)}")
    try:
        needed = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty]
    except ValueError:  # of some functions that are not written in Python
        return found
    if sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed) > 1:
        raise ConfigError(
            f"augment should be a function of the inputs x alone, got {shown(given)} of "
            f"({', '.join(p.name for p in needed)}); what changes the targets too cannot be done "
            "in a batch"
        )
    return found
