"""Data of one client, changes of the data during a run, and augmentation of training batches.

The data of a client is a list of examples in a *pool* (the examples of all clients) and a *view*:
a label map and a rotation, through which the client sees these examples. A *stage* is the data of
all clients from a given round on, if the data changes during a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, cast, get_args

import numpy as np
import torch

from fedclade.core import IGNORED, ConfigError, DataError, Indices, Split, checked, imported, shown
from fedclade.data.arrays import as_indices, check_name, check_range, whole_number
from fedclade.data.pool import Pool


@dataclass(frozen=True, eq=False)
class ClientData:
    """Data of one client: its examples in the pool, and its view of them.

    Parameters
    ----------
    id
        Number by which the server identifies the client.
    name
        Name for people; results do not depend on it.
    key
        Number that seeds the client's random draws; unchanged if the server renumbers clients.
    train, validation, test
        Indices of its examples in the pool; ``validation`` may be empty.
    label_map
        int64 ``[outputs]``: the client sees label ``label_map[y]`` in place of ``y``. None if the
        client sees the labels of the pool.
    quarter_turns
        Number of rotations of its images by 90°.

    Raises
    ------
    DataError
        If the name is not a string, or a number or an index is not a whole number.
    """

    id: int
    name: str
    key: int
    train: Indices
    validation: Indices
    test: Indices
    label_map: torch.Tensor | None = None
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

    def labels(self, y: torch.Tensor) -> torch.Tensor:
        """Apply this client's label map, if any, to targets of the pool, in the same shape."""
        if self.label_map is None:
            return y
        return map_labels(y, self.label_map)


def map_labels(y: torch.Tensor, label_map: torch.Tensor) -> torch.Tensor:
    """Replace each label ``y`` by ``label_map[y]``.

    The result has the shape of ``y``. Targets equal to :data:`~fedclade.core.IGNORED` do not change.
    """
    return label_map[y.clamp(min=0)].where(y != IGNORED, IGNORED)


def check_examples(pool: Pool, indices: Indices, split: Split, client: str) -> None:
    """Check a client's examples: their indices are rows of the pool, and their inputs are finite.

    Parameters
    ----------
    pool
        The examples of all clients.
    indices
        Indices of the client's examples in the pool.
    split, client
        The split that the examples belong to, and a description of the client, for messages.

    Raises
    ------
    DataError
        If an index is not in the pool, or an input is NaN or infinite.
    """
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
        f"of pool {pool.name!r}){more}; replace such inputs by finite numbers, or leave these "
        "examples out"
    )


def report_no_examples(client: int, name: str, split: Split, clients: int) -> DataError:
    """Return the error for a client that has no examples in a split (train, validation or test).

    ``clients`` is the number of all clients, for the message.
    """
    what = "training" if split == "train" else split
    return DataError(
        f"client {client} ({name!r}) has no {what} examples; request fewer clients (now "
        f"{clients}), more examples, or a partition that gives every client examples"
    )


# Stages: data of all clients from a given round on, if it changes during a run.


@checked()
@dataclass(frozen=True, eq=False)
class Stage:
    """Data of all clients from a given round until the next stage.

    Parameters
    ----------
    first_round
        First round of the stage, at least 2. Before the first stage, clients have the data in the
        field ``clients`` of the federation.
    clients
        The clients of the federation in the same order and with unchanged ids, names and keys, but
        with the data of this stage.
    true_clusters
        True cluster of each client in this stage, by the id of the client; None if unknown.
    """

    first_round: int
    clients: tuple[ClientData, ...]
    true_clusters: Mapping[int, int] | None = None

    def of(self, ids: Collection[int]) -> Stage:
        """Return a copy of the stage that is restricted to the clients with the given ids."""
        clients = tuple(client for client in self.clients if client.id in ids)
        truth = None
        if self.true_clusters is not None:
            known = self.true_clusters.items()
            truth = {client: cluster for client, cluster in known if client in ids}
        return replace(self, clients=clients, true_clusters=truth)


def check_stages(stages: Sequence[Stage], clients: Sequence[ClientData]) -> None:
    """Check that first rounds of stages are ascending, and that all stages have the same clients.

    The data of the clients is not checked.
    """
    rounds = [1, *(stage.first_round for stage in stages)]
    if any(later <= earlier for earlier, later in pairwise(rounds)):
        raise DataError(
            f"first rounds of stages should be at least 2 and in ascending order, got {rounds[1:]}"
        )
    expected = [(client.id, client.name, client.key) for client in clients]
    for stage in stages:
        if [(client.id, client.name, client.key) for client in stage.clients] != expected:
            raise DataError(
                f"the stage from round {stage.first_round} on should have the federation's "
                "clients, in the order of the federation, with the same ids, names and keys"
            )


# Augmentation: random changes of the inputs of a batch, only in training.


class Augment(Protocol):
    """Function of the inputs of a batch ``[B, ...]`` that returns the inputs for the model.

    The function treats each example separately, and draws from torch's generators, so that the
    run's seed determines the draws.
    """

    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor:
        """Return the augmented inputs of a batch."""
        ...


def resolve_augment(given: object) -> Augment | None:
    """Return the augmentation of training batches, given as a function or as ``module:function``.

    Returns None if ``given`` is None.

    Raises
    ------
    ConfigError
        If the function cannot be imported, or requires more arguments than the inputs.
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
            f"augment should be a function of the inputs x alone, got {shown(given)} with the "
            f"parameters ({names}); an augmentation cannot change the targets"
        )
    return cast("Augment", function)
