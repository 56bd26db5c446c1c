"""The clients' data: which examples of a pool each client holds, and how it sees them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from fedclade.core import IGNORED, ClientRegistry, DataError, Split, checked
from fedclade.data.arrays import Indices, as_indices, check_name, check_range, whole_number
from fedclade.data.augment import Augment, augment_of
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
    label_map: Tensor | None = None  # int64 [outputs]: where the pool has label y, the client sees label_map[y]
    quarter_turns: int = 0  # its images are turned by so many times 90°

    def __post_init__(self) -> None:
        check_name(self.name, f"the name of client {self.id}")
        for name in ("id", "key", "quarter_turns"):
            object.__setattr__(self, name, whole_number(getattr(self, name), f"the {name} of client {self.name!r}"))
        for name in get_args(Split):
            object.__setattr__(self, name, as_indices(getattr(self, name), f"{name} of client {self.name!r}"))

    def labels(self, y: Tensor) -> Tensor:
        """Return pool targets as this client sees them, same shape; those that are ignored stay as they are."""
        return y if self.label_map is None else self.label_map[y.clamp(min=0)].where(y != IGNORED, IGNORED)


def _check_held(pool: Pool, indices: Indices, split: Split, client: str) -> None:
    """Check that a pool has these examples, and that none of their inputs is NaN or infinite."""
    check_range(indices, len(pool.x), f"the {split} indices of {client}")
    if len(pool.not_finite) == 0 or len(odd := np.flatnonzero(np.isin(indices, pool.not_finite))) == 0:
        return
    row = int(indices[odd[0]])
    place: list[int] = (~pool.x[row].isfinite()).nonzero()[0].tolist()
    column = place[0] if len(place) == 1 else place
    more = f" and in {len(odd) - 1} more" if len(odd) > 1 else ""
    raise DataError(
        f"{client} has {float(pool.x[row][tuple(place)])} in column {column} of {split} example {odd[0]} (example "
        f"{row} of pool {pool.name!r}){more}; fill such inputs in, or leave these examples out"
    )


@checked()
@dataclass(frozen=True, eq=False)
class Federation:
    """N clients with their data.

    Parameters
    ----------
    pool
        The examples that they share.
    clients
        At least one, with distinct ids; each with training and test examples.
    true_clusters
        Cluster of each client by id, where it is known. For scoring only: no algorithm sees it, but the ``oracle``.
    description
        For people: data, partition, shift.
    newcomers
        Clients that were held back from training, with ids of their own; None where there are none.
    augment
        A function that every training batch's inputs ``[B, ...]`` go through on their way to the model, and no other
        inputs do. It treats each example by itself, and draws from torch's generators.

    Raises
    ------
    DataError
        If there are no clients, two share an id, or one has no training or no test examples, examples that the pool has
        not, or inputs that are NaN or infinite.
    """

    pool: Pool
    clients: tuple[ClientData, ...]
    true_clusters: Mapping[int, int] | None = None
    description: str = ""
    newcomers: Federation | None = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "augment", augment_of(self.augment))
        self._check_clients()
        seen: set[int] = set()
        for client in self.clients:
            for split in get_args(Split):
                indices: Indices = getattr(client, split)
                if len(indices) and id(indices) not in seen:  # many clients are tested on the same
                    _check_held(self.pool, indices, split, f"client {client.id} ({client.name!r})")
                seen.add(id(indices))

    def _check_clients(self) -> None:
        if not self.clients:
            raise DataError("a federation should have at least 1 client, got 0")
        ids = [client.id for client in self.clients]
        if len(set(ids)) < len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise DataError(f"client ids should be distinct, got these more than once: {twice}")
        for client in self.clients:
            for split, indices in (("training", client.train), ("test", client.test)):
                if len(indices) == 0:
                    raise DataError(
                        f"client {client.id} ({client.name!r}) has no {split} examples; ask for fewer clients "
                        f"(now {len(ids)}), more examples, or a partition that gives every client some"
                    )
        if self.true_clusters is not None and set(self.true_clusters) != set(ids):
            odd = sorted(set(self.true_clusters) ^ set(ids))
            raise DataError(f"true_clusters should name every client exactly once; these do not match: {odd}")
        if self.pool.y.is_floating_point() and any(client.label_map is not None for client in self.clients):
            raise DataError(f"clients can have a label_map only of labels, got targets of a {self.pool.task} task")
        for client, cluster in (self.true_clusters or {}).items():
            whole_number(cluster, f"the true cluster of client {client}")
        if self.newcomers is not None and (both := sorted(set(ids) & set(self.newcomers.ids))):
            raise DataError(f"newcomers should have ids of their own, got these of other clients: {both}")

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        return f"Federation({str(self)!r})"

    def __str__(self) -> str:
        return self.description or f"{self.pool.name}, {len(self)} clients"

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all clients, in order."""
        return tuple(client.id for client in self.clients)

    @cached_property
    def by_id(self) -> Mapping[int, ClientData]:
        """The clients by their ids."""
        return {client.id: client for client in self.clients}

    @property
    def roster(self) -> ClientRegistry:
        """What a server knows of the clients."""
        names = {client.id: client.name for client in self.clients}
        sizes = {client.id: len(client.train) for client in self.clients}
        columns = {} if self.pool.columns is None else self.pool.columns.described
        return ClientRegistry(self.pool.schema, str(self), names, sizes, self.true_clusters, columns)

    def alone(self, client: int) -> Federation:
        """Return a federation of one client; raise a DataError if there is no such client."""
        if client not in self.by_id:
            raise DataError(f"there is no client {client}; {self} has clients {min(self.ids)} to {max(self.ids)}")
        truth = None if self.true_clusters is None else {client: self.true_clusters[client]}
        return replace(self, clients=(self.by_id[client],), true_clusters=truth, newcomers=None, description=str(self))

    def shard(self, clients: Collection[int]) -> Federation:
        """Return a federation of some of the clients, over the same pool, without true clusters and newcomers."""
        some = tuple(client for client in self.clients if client.id in clients)
        return replace(self, clients=some, true_clusters=None, newcomers=None, description=str(self))

    def joined(self, others: Federation) -> Federation:
        """Return these clients and those of another federation over the same pool; no newcomers are left."""
        truth = None
        if self.true_clusters is not None and others.true_clusters is not None:
            truth = {**self.true_clusters, **others.true_clusters}
        return replace(self, clients=(*self.clients, *others.clients), true_clusters=truth, newcomers=None)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that training depends on: the examples, and which of them each client holds and how."""
        found = hashlib.sha256()
        for tensor in (self.pool.x, self.pool.y):
            found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().numpy().data)
        if self.augment is not None:
            found.update(f"{self.augment.__module__}:{getattr(self.augment, '__qualname__', '')}".encode())
        for client in self.clients:
            labels = None if client.label_map is None else client.label_map.tolist()
            found.update(json.dumps([client.id, client.key, client.quarter_turns, labels]).encode())
            for indices in (client.train, client.validation, client.test):
                found.update(f"{len(indices)}:".encode())
                found.update(np.ascontiguousarray(indices, dtype=np.int64).data)
        return found.hexdigest()

    def examples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """Return one split of one client as it sees it: inputs ``[n, ...]`` and targets ``[n]`` or ``[n, T]``."""
        data = self.by_id[client]
        indices: Indices = getattr(data, split)
        return self.pool.inputs(indices, data.quarter_turns), data.labels(self.pool.y[torch.from_numpy(indices)])
