"""Data of one client: its examples, and its view of them (labels and rotation)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast, get_args

import numpy as np
from torch import Tensor

from fedclade.core import IGNORED, ConfigError, DataError, Indices, Split, checked, imported, shown
from fedclade.data.arrays import as_indices, check_name, check_range, whole_number
from fedclade.data.pool import Pool


@dataclass(frozen=True, eq=False)
class ClientData:
    """Data of one client.

    Parameters
    ----------
    id
        Number by which the server knows the client.
    name
        Name for people; results do not depend on it.
    key
        The client's own number for its random draws, which stays if the server renumbers clients.
    train, validation, test
        Indices of its examples in the pool; ``validation`` may be empty.
    label_map
        int64 ``[outputs]``: the client sees label ``label_map[y]`` in place of ``y``.
    quarter_turns
        Number of rotations of its images by 90°.

    Raises
    ------
    DataError
        If the name is no string, or a number or an index is not whole.
    """

    id: int
    name: str
    key: int
    train: Indices
    validation: Indices
    test: Indices
    label_map: Tensor | None = None
    quarter_turns: int = 0

    def __post_init__(self) -> None:
        check_name(self.name, f"the name of client {self.id}")
        owner = f"of client {self.name!r}"
        for name in ("id", "key", "quarter_turns"):
            value = whole_number(getattr(self, name), f"the {name} {owner}")
            object.__setattr__(self, name, value)
        for name in get_args(Split):
            indices = as_indices(getattr(self, name), f"{name} {owner}")
            object.__setattr__(self, name, indices)

    def __repr__(self) -> str:
        held = ", ".join(f"{split}={len(getattr(self, split))}" for split in get_args(Split))
        return f"ClientData({self.id}, {self.name!r}, {held})"

    def labels(self, y: Tensor) -> Tensor:
        """Return targets of the pool as this client sees them, of the same shape."""
        return y if self.label_map is None else map_labels(y, self.label_map)


def map_labels(y: Tensor, label_map: Tensor) -> Tensor:
    """Map targets by a label map; ignored targets do not change. The shape is the same."""
    return label_map[y.clamp(min=0)].where(y != IGNORED, IGNORED)


def check_examples(pool: Pool, indices: Indices, split: Split, client: str) -> None:
    """Check that a pool has the examples of a client, and that their inputs are finite."""
    check_range(indices, len(pool.x), f"the {split} indices of {client}")
    if len(pool.not_finite) == 0:
        return
    refused = np.flatnonzero(np.isin(indices, pool.not_finite))
    if len(refused) == 0:
        return
    row = int(indices[refused[0]])
    position: list[int] = (~pool.x[row].isfinite()).nonzero()[0].tolist()
    value = float(pool.x[row][tuple(position)])
    column = position
    if len(position) == 1:
        column = position[0]
    more = ""
    if len(refused) > 1:
        more = f" and in {len(refused) - 1} more"
    raise DataError(
        f"{client} has {value} in column {column} of {split} example {refused[0]} (example {row} "
        f"of pool {pool.name!r}){more}; fill such inputs in, or leave these examples out"
    )


def report_no_examples(client: int, name: str, split: Split, clients: int) -> DataError:
    """Return the error of a client without examples, given the number of clients."""
    what = "training" if split == "train" else split
    return DataError(
        f"client {client} ({name!r}) has no {what} examples; ask for fewer clients (now "
        f"{clients}), more examples, or a partition that gives every client some"
    )


# Stages: data of all clients from a given round on, if it changes during a run.


@checked()
@dataclass(frozen=True, eq=False)
class Stage:
    """Data of all clients from a round on, until the next stage.

    Parameters
    ----------
    first_round
        First round, from 2 on. The data before the first stage is that of the federation.
    clients
        The federation's clients in its order, with their ids, names and keys, and their new data.
    true_clusters
        Cluster of each client by its id in this stage, if known.
    """

    first_round: int
    clients: tuple[ClientData, ...]
    true_clusters: Mapping[int, int] | None = None

    def of(self, ids: Collection[int]) -> Stage:
        """Return the stage of some of the clients."""
        clients = tuple(client for client in self.clients if client.id in ids)
        truth = None
        if self.true_clusters is not None:
            known = self.true_clusters.items()
            truth = {client: cluster for client, cluster in known if client in ids}
        return replace(self, clients=clients, true_clusters=truth)


def check_stages(stages: Sequence[Stage], clients: Sequence[ClientData]) -> None:
    """Check that stages are in order, and that all have the same clients.

    The data of the clients is not checked.
    """
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


# Augmentation: random changes of the inputs of a batch, in training alone.

Augment = Callable[[Tensor], Tensor]
"""Function of the inputs of a batch ``[B, ...]`` that returns the inputs for the model.

It treats each example separately, and draws from torch's generators, so that the run's seed
determines the draws.
"""


def resolve_augment(given: object) -> Augment | None:
    """Return an augmentation, given as a function or by ``module:function``.

    Raises
    ------
    ConfigError
        If it cannot be imported, or is no function of the inputs alone.
    """
    if given is None:
        return None
    function: Any = given
    if isinstance(given, str):
        function = imported(given, "augment")
    if not callable(function):
        raise ConfigError(f"augment should be a function of a batch of inputs, got {shown(given)}")
    try:
        parameters = inspect.signature(function).parameters.values()
    # ``inspect`` has no signature of some functions that are not written in Python.
    except ValueError:
        return cast("Augment", function)
    required = [each for each in parameters if each.default is each.empty]
    positional = [
        each for each in required if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(positional) > 1:
        names = ", ".join(each.name for each in required)
        raise ConfigError(
            f"augment should be a function of the inputs x alone, got {shown(given)} of ({names}); "
            "what changes the targets too cannot be done in a batch"
        )
    return cast("Augment", function)
