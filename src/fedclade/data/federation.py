"""The clients' data: which examples of a pool each client holds, and how it sees them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fedclade.core import (
    ArrayMapping,
    ClientRegistry,
    DataError,
    Displayed,
    Indices,
    Positions,
    Split,
    checked,
    shown,
)
from fedclade.data.agreement import Encoding
from fedclade.data.arrays import whole_number
from fedclade.data.client_data import (
    Augment,
    ClientData,
    Stage,
    check_held,
    check_stages,
    report_no_examples,
    resolve_augment,
)
from fedclade.data.client_table import ClientTable
from fedclade.data.pool import Pool


@checked()
@dataclass(frozen=True, eq=False)
class Federation(Displayed):
    """N clients with their data.

    Parameters
    ----------
    pool
        The examples that they share.
    clients
        At least one, with distinct ids; each with training and test examples. Very many come as a
        :class:`~fedclade.data.client_table.ClientTable`.
    true_clusters
        Cluster of each client by id, where it is known. For scoring only: no algorithm sees it, but
        the ``oracle``.
    description
        For people: data, partition, shift.
    newcomers
        Clients that were held back from training, with ids of their own; None where there are none.
    augment
        A function that every training batch's inputs ``[B, ...]`` go through on their way to the
        model, and no other inputs do. It treats each example by itself, and draws from torch's
        generators.
    stages
        What clients hold from later rounds on, where their data changes during a run; of a table,
        none.
    encoding
        The schema that tables or texts were encoded by; None for data that came as numbers.

    Raises
    ------
    DataError
        If there are no clients, two share an id, or one has no training or no test examples,
        examples that the pool has not, or inputs that are NaN or infinite.
    """

    pool: Pool
    clients: tuple[ClientData, ...] | ClientTable
    true_clusters: Mapping[int, int] | None = None
    description: str = ""
    newcomers: Federation | None = None
    augment: Augment | None = None
    stages: tuple[Stage, ...] = ()
    encoding: Encoding | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "augment", resolve_augment(self.augment))
        if not self.clients:
            raise DataError("a federation should have at least 1 client, got 0")
        if isinstance(self.clients, ClientTable):
            if self.stages:
                raise DataError(
                    "the clients of a table hold the same data in all rounds, and it was given "
                    "stages"
                )
            self.clients.check(self.pool)
        else:
            self._check_clients(self.clients)
            check_stages(self.stages, self.clients)
        self._check_truth()
        self._check_together()

    def _check_clients(self, clients: tuple[ClientData, ...]) -> None:
        """Check what a table checks itself."""
        ids = [client.id for client in clients]
        if len(set(ids)) < len(ids):
            twice = sorted({i for i in ids if ids.count(i) > 1})
            raise DataError(f"client ids should be distinct, got these more than once: {twice}")
        seen: set[int] = set()
        for client in clients:
            for split in get_args(Split):
                indices: Indices = getattr(client, split)
                if len(indices) == 0 and split != "validation":
                    raise report_no_examples(client.id, client.name, split, len(clients))
                if len(indices) and id(indices) not in seen:  # many clients are tested on the same
                    check_held(self.pool, indices, split, f"client {client.id} ({client.name!r})")
                seen.add(id(indices))

    def _check_truth(self) -> None:
        truth = self.true_clusters
        if truth is None:
            return
        if (
            isinstance(truth, ArrayMapping) and truth.positions.sequence == self.ids
        ):  # whose numbers are whole
            return
        if set(truth) != set(self.ids):
            odd = sorted(set(truth) ^ set(self.ids))
            raise DataError(
                f"true_clusters should name every client exactly once; these do not match: {odd}"
            )
        for client, cluster in truth.items():
            whole_number(cluster, f"the true cluster of client {client}")

    def _check_together(self) -> None:
        if self.pool.y.is_floating_point() and self.label_maps:
            raise DataError(
                f"clients can have a label_map only of labels, got targets of a {self.pool.task} "
                "task"
            )
        if self.newcomers is not None and (both := sorted(set(self.ids) & set(self.newcomers.ids))):
            raise DataError(
                f"newcomers should have ids of their own, got these of other clients: {both}"
            )

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        return f"Federation({str(self)!r})"

    def __str__(self) -> str:
        return self.description or f"{self.pool.name}, {len(self)} clients"

    def in_round(self, number: int) -> Federation:
        """Return the clients with what they hold in a round, from 1, and no stages; the same in a whole stage."""
        return self.each_stage[self.stage_in(number)]

    @property
    def truth(self) -> tuple[Mapping[int, int] | None, dict[int, Mapping[int, int]]]:
        """The true clusters at first, and those from the first round of each stage on, as far as they are known."""
        return self.true_clusters, {
            s.first_round: s.true_clusters for s in self.stages if s.true_clusters is not None
        }

    def stage_in(self, number: int) -> int:
        """Return which stage a round is in: 0 before the first."""
        return sum(stage.first_round <= number for stage in self.stages)

    @cached_property
    def each_stage(self) -> tuple[Federation, ...]:
        """The clients with what they hold before the first stage, and in each."""
        if not self.stages and (self.newcomers is None or not self.newcomers.stages):
            return (self,)
        first = Stage(
            1, tuple(self.clients), self.true_clusters
        )  # which is checked no more than the others

        def held(stage: Stage) -> Federation:
            late = None if self.newcomers is None else self.newcomers.in_round(stage.first_round)
            return replace(
                self,
                clients=stage.clients,
                true_clusters=stage.true_clusters,
                newcomers=late,
                stages=(),
            )

        return tuple(held(stage) for stage in (first, *self.stages))

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """At which place in the order of the clients each id stands."""
        if isinstance(self.clients, ClientTable):
            return self.clients.positions
        return {client.id: place for place, client in enumerate(self.clients)}

    @cached_property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in order."""
        positions = self.positions
        return positions.sequence if isinstance(positions, Positions) else tuple(positions)

    @cached_property
    def by_id(self) -> Mapping[int, ClientData]:
        """The clients by their ids."""
        return self._by_id("by_id")

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client."""
        return self._by_id("sizes")

    @cached_property
    def keys(self) -> Mapping[int, int]:
        """Number of each client for its random draws."""
        return self._by_id("keys")

    @property
    def without_validation(self) -> Sequence[int]:
        """Ids of the clients that have no validation data."""
        if isinstance(clients := self.clients, ClientTable):
            return [
                self.ids[place] for place in np.flatnonzero(clients.validation.counts == 0).tolist()
            ]
        return [client.id for client in clients if len(client.validation) == 0]

    def _by_id(self, what: str) -> Mapping[int, Any]:
        """Return something of each client, of a table as its arrays have it."""
        if isinstance(clients := self.clients, ClientTable):
            of_all = {
                "by_id": clients,
                "names": clients.all_names,
                "sizes": clients.train.counts,
                "keys": clients.keys,
            }
            return ArrayMapping(clients.positions, of_all[what])
        of_one: dict[str, Callable[[ClientData], Any]] = {
            "by_id": lambda client: client,
            "names": lambda client: client.name,
            "sizes": lambda client: len(client.train),
            "keys": lambda client: client.key,
        }
        return {client.id: of_one[what](client) for client in clients}

    @cached_property
    def label_maps(self) -> Sequence[Tensor]:
        """The label maps that clients have, each once."""
        if isinstance(self.clients, ClientTable):
            return () if self.clients.label_maps is None else self.clients.label_maps.unbind()
        return [
            *{
                id(c.label_map): c.label_map for c in self.clients if c.label_map is not None
            }.values()
        ]

    @property
    def roster(self) -> ClientRegistry:
        """What a server knows of the clients."""
        columns = {} if self.pool.columns is None else self.pool.columns.described
        known = (
            self.pool.schema,
            str(self),
            self._by_id("names"),
            self.sizes,
            self.true_clusters,
            columns,
        )
        later = zip(self.stages, self.each_stage[1:], strict=True)
        return ClientRegistry(*known, [(stage.first_round, held.roster) for stage, held in later])

    def alone(self, client: int) -> Federation:
        """Return a federation of one client.

        Raises
        ------
        DataError
            If there is no such client.
        """
        one = self._client(client)
        truth = None if self.true_clusters is None else {client: self.true_clusters[client]}
        more = {
            "stages": tuple(stage.of({client}) for stage in self.stages),
            "description": str(self),
        }
        return replace(self, clients=(one,), true_clusters=truth, newcomers=None, **more)

    def _client(self, client: int) -> ClientData:
        """Return a client by its id; a DataError if there is none."""
        try:
            return self.by_id[client]
        except (LookupError, TypeError, ValueError, OverflowError):
            first, last = min(self.ids), max(self.ids)
            raise DataError(
                f"there is no client {shown(client)}; {self} has clients {first} to {last}"
            ) from None

    def shard(self, clients: Collection[int]) -> Federation:
        """Return a federation of some of the clients, over the same pool, without true clusters and newcomers."""
        if isinstance(self.clients, ClientTable):
            places = np.sort(self.clients.positions.of(list(clients)))
            some: tuple[ClientData, ...] | ClientTable = self.clients.taken(places)
        else:
            some = tuple(client for client in self.clients if client.id in clients)
        stages = tuple(replace(stage.of(clients), true_clusters=None) for stage in self.stages)
        more = {"stages": stages, "description": str(self)}
        return replace(self, clients=some, true_clusters=None, newcomers=None, **more)

    def joined(self, others: Federation) -> Federation:
        """Return these clients and those of another federation over the same pool; no newcomers are left."""
        mine, theirs, truth = self.clients, others.clients, None
        if self.true_clusters is not None and others.true_clusters is not None:
            truth = {**self.true_clusters, **others.true_clusters}
        if isinstance(mine, ClientTable) and isinstance(theirs, ClientTable):
            clients = mine.joined(theirs)
        else:
            clients = (*mine, *theirs)
        stages: list[Stage] = []
        for number in sorted({stage.first_round for of in (self, others) for stage in of.stages}):
            both = self.in_round(number).joined(others.in_round(number))
            stages.append(Stage(number, tuple(both.clients), both.true_clusters))
        return replace(
            self, clients=clients, true_clusters=truth, newcomers=None, stages=tuple(stages)
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that training depends on: the examples, and which of them each client holds and how."""
        found = hashlib.sha256()
        if self.pool.digest is not None:
            found.update(self.pool.digest.encode())
        for tensor in (self.pool.x, self.pool.y) if self.pool.digest is None else ():
            found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().numpy().data)
        if self.augment is not None:
            found.update(
                f"{self.augment.__module__}:{getattr(self.augment, '__qualname__', '')}".encode()
            )
        if isinstance(self.clients, ClientTable):
            found.update(self.clients.digest().encode())
            return found.hexdigest()
        later = (client for stage in self.stages for client in stage.clients)
        found.update(
            json.dumps([stage.first_round for stage in self.stages]).encode()
            if self.stages
            else b""
        )
        for client in (*self.clients, *later):
            labels = None if client.label_map is None else client.label_map.tolist()
            found.update(json.dumps([client.id, client.key, client.quarter_turns, labels]).encode())
            for indices in (client.train, client.validation, client.test):
                found.update(f"{len(indices)}:".encode())
                found.update(np.ascontiguousarray(indices, dtype=np.int64).data)
        return found.hexdigest()

    def examples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """Return one split of one client as it sees it: inputs ``[n, ...]`` and targets ``[n]`` or ``[n, T]``."""
        if not isinstance(split, str) or split not in get_args(Split):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"split should be one of {', '.join(get_args(Split))}, got {shown(split)}"
            )
        data = self._client(client)
        indices: Indices = getattr(data, split)
        return self.pool.inputs(indices, data.quarter_turns), data.labels(
            self.pool.y[torch.from_numpy(indices)]
        )
