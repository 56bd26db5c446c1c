"""Federations: the set of clients of a run with their data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from fedclade.core import (
    LEAST_DIVIDED,
    ArrayMapping,
    ClientRegistry,
    DataError,
    Displayed,
    Indices,
    Positions,
    Split,
    checked,
    is_choice,
    shown,
)
from fedclade.data.agreement import Encoding
from fedclade.data.arrays import whole_number
from fedclade.data.attributes import as_attributes, check_attributes
from fedclade.data.client_data import (
    Augment,
    ClientData,
    Stage,
    check_examples,
    check_stages,
    report_no_examples,
    resolve_augment,
)
from fedclade.data.client_table import ClientTable
from fedclade.data.pool import Pool

if TYPE_CHECKING:
    from torch import Tensor


@checked()
@dataclass(frozen=True, eq=False)
class Federation(Displayed):
    """Set of clients with their data, on which algorithms run.

    Parameters
    ----------
    pool
        The examples of all clients.
    clients
        At least one client. Ids are distinct, and each client has training and test examples. A
        :class:`~fedclade.data.client_table.ClientTable` stores millions of clients.
    true_clusters
        True cluster of each client by its id; None if unknown. True clusters are for scoring only:
        the ``oracle`` is the only algorithm that uses them.
    description
        Description of the data, the partition and the shift, for reports.
    newcomers
        Clients that are excluded from training and join afterwards, with ids that no other client
        has; None without such clients.
    augment
        Function of the inputs ``[B, ...]`` of every training batch (B examples), which returns
        changed inputs; not applied in evaluation. The function treats each example separately, and
        draws from torch's generators.
    stages
        Data of the clients from later rounds on, if the data changes during a run. Empty if
        ``clients`` is a client table.
    encoding
        Schema by which tables or texts were encoded; None for data that was given as numbers.
    attributes
        Attributes of clients by name, such as a hospital's country. Reports compare clusters by
        these attributes, which are never inputs of a model. See :meth:`with_attributes`.

    Raises
    ------
    DataError
        If there are no clients, two clients have the same id, or a client has no training or no
        test examples, examples that are not in the pool, or inputs that are NaN or infinite.
    """

    pool: Pool
    clients: tuple[ClientData, ...] | ClientTable
    true_clusters: Mapping[int, int] | None = None
    description: str = ""
    newcomers: Federation | None = None
    augment: Augment | None = None
    stages: tuple[Stage, ...] = ()
    encoding: Encoding | None = field(default=None, repr=False)
    attributes: Mapping[str, Mapping[str, float | str | None]] | None = field(
        default=None, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "augment", resolve_augment(self.augment))
        if not self.clients:
            raise DataError("a federation should have at least 1 client, got 0")
        if isinstance(self.clients, ClientTable):
            if self.stages:
                raise DataError(
                    "a federation with a client table cannot have stages, as the clients of a "
                    "table have the same data in all rounds; pass the clients as a tuple"
                )
            self.clients.check(self.pool)
        else:
            self._check_clients(self.clients)
            check_stages(self.stages, self.clients)
        self._check_true_clusters()
        self._check_label_maps()
        self._check_newcomers()

    def _check_clients(self, clients: tuple[ClientData, ...]) -> None:
        """Check that clients have distinct ids, and training and test examples in the pool.

        A client table does the same in :meth:`ClientTable.check`.
        """
        ids = [client.id for client in clients]
        if len(set(ids)) < len(ids):
            repeated = sorted({client for client in ids if ids.count(client) > 1})
            raise DataError(f"client ids should be distinct, got these more than once: {repeated}")
        # Many clients may be tested on one array of examples, which is checked only once.
        checked_arrays: set[int] = set()
        for client in clients:
            for split in get_args(Split):
                indices: Indices = getattr(client, split)
                if len(indices) == 0 and split != "validation":
                    raise report_no_examples(client.id, client.name, split, len(clients))
                if len(indices) and id(indices) not in checked_arrays:
                    name = f"client {client.id} ({client.name!r})"
                    check_examples(self.pool, indices, split, name)
                checked_arrays.add(id(indices))

    def _check_true_clusters(self) -> None:
        """Check that the true clusters have a whole number for every client, and no other entry."""
        truth = self.true_clusters
        if truth is None:
            return
        if isinstance(truth, ArrayMapping) and truth.positions.sequence == self.ids:
            return  # an array of whole numbers
        if set(truth) != set(self.ids):
            odd = sorted(set(truth) ^ set(self.ids))
            raise DataError(
                "true_clusters should name every client of the federation and no other client; "
                f"missing or unknown are: {odd}"
            )
        for client, cluster in truth.items():
            whole_number(cluster, f"the true cluster of client {client}")

    def _check_label_maps(self) -> None:
        """Check that clients have label maps only if the targets of the pool are labels."""
        if self.pool.y.is_floating_point() and self.label_maps:
            raise DataError(
                f"clients can have a label_map only if targets are labels, got targets of a "
                f"{self.pool.task} task"
            )

    def _check_newcomers(self) -> None:
        """Check that newcomers have other ids than the clients."""
        if self.newcomers is None:
            return
        both = sorted(set(self.ids) & set(self.newcomers.ids))
        if both:
            raise DataError(
                "newcomers should have ids that no other client has, got these ids of other "
                f"clients: {both}"
            )

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        return f"Federation({str(self)!r})"

    def __str__(self) -> str:
        return self.description or f"{self.pool.name}, {len(self)} clients"

    def with_attributes(self, source: Any) -> Federation:
        """Return the federation with attributes of its clients, such as a country, for reports.

        Parameters
        ----------
        source
            A CSV, TSV or Parquet file or a data frame with a row for each client, whose name is in
            the column ``client`` or else in the first column; or a mapping of clients' names to
            mappings of attributes.

        Raises
        ------
        DataError
            If the source has another form, has two rows for a client, or has no client of this
            federation.
        """
        attributes = as_attributes(source)
        check_attributes(attributes, list(self._client_names.values()))
        return replace(self, attributes=attributes)

    def in_round(self, number: int) -> Federation:
        """Return the federation with the data of one round (counted from 1), without stages.

        The returned object is the same for all rounds of a stage.
        """
        return self.each_stage[self.stage_in(number)]

    @property
    def truth(self) -> tuple[Mapping[int, int] | None, dict[int, Mapping[int, int]]]:
        """True clusters of the clients before the first stage, and in each stage.

        The first element has the true clusters before the first stage, or is None if they are
        unknown. The second element has the true clusters of each stage by the first round of the
        stage. Stages with unknown true clusters are left out.
        """
        later = {
            stage.first_round: stage.true_clusters
            for stage in self.stages
            if stage.true_clusters is not None
        }
        return self.true_clusters, later

    def stage_in(self, number: int) -> int:
        """Return the number of the stage that a round belongs to: 0 before the first stage."""
        return sum(stage.first_round <= number for stage in self.stages)

    @cached_property
    def each_stage(self) -> tuple[Federation, ...]:
        """Federations without stages: one before the first stage, and one for each stage."""
        if not self.stages and (self.newcomers is None or not self.newcomers.stages):
            return (self,)
        first = Stage(1, tuple(self.clients), self.true_clusters)

        def build(stage: Stage) -> Federation:
            """Build the federation of one stage, including its newcomers."""
            newcomers = self.newcomers
            if newcomers is not None:
                newcomers = newcomers.in_round(stage.first_round)
            return replace(
                self,
                clients=stage.clients,
                true_clusters=stage.true_clusters,
                newcomers=newcomers,
                stages=(),
            )

        return tuple(build(stage) for stage in (first, *self.stages))

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """Position of each client in the order of the clients, by the id of the client."""
        if isinstance(self.clients, ClientTable):
            return self.clients.positions
        return {client.id: place for place, client in enumerate(self.clients)}

    @cached_property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in order."""
        positions = self.positions
        if isinstance(positions, Positions):
            return positions.sequence
        return tuple(positions)

    @cached_property
    def by_id(self) -> Mapping[int, ClientData]:
        """The clients by their ids."""
        if isinstance(self.clients, ClientTable):
            return ArrayMapping(self.clients.positions, self.clients)
        return {client.id: client for client in self.clients}

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client by its id."""
        if isinstance(self.clients, ClientTable):
            return ArrayMapping(self.clients.positions, self.clients.train.counts)
        return {client.id: len(client.train) for client in self.clients}

    def find_related(self, client: int) -> Indices | None:
        """Return the group of each training example of a client, ``[n]``; None without groups.

        Examples of the same group depend on each other, see :class:`Pool`.
        """
        if self.pool.related is None:
            return None
        return self.pool.related[self.by_id[client].train]

    @cached_property
    def undivided(self) -> frozenset[int]:
        """Ids of the clients with too few groups of dependent examples to be divided into parts."""
        related = self.pool.related
        if related is None:
            return frozenset()
        return frozenset(
            client.id
            for client in self.clients
            if len(np.unique(related[client.train])) < LEAST_DIVIDED
        )

    @cached_property
    def keys(self) -> Mapping[int, int]:
        """Key of each client by its id. The key seeds the client's random draws."""
        if isinstance(self.clients, ClientTable):
            return ArrayMapping(self.clients.positions, self.clients.keys)
        return {client.id: client.key for client in self.clients}

    @property
    def _client_names(self) -> Mapping[int, str]:
        """Name of each client by its id."""
        if isinstance(self.clients, ClientTable):
            return ArrayMapping(self.clients.positions, self.clients.all_names)
        return {client.id: client.name for client in self.clients}

    @property
    def without_validation(self) -> Sequence[int]:
        """Ids of the clients that have no validation data."""
        if isinstance(self.clients, ClientTable):
            places = np.flatnonzero(self.clients.validation.counts == 0).tolist()
            return [self.ids[place] for place in places]
        return [client.id for client in self.clients if len(client.validation) == 0]

    @cached_property
    def label_maps(self) -> Sequence[Tensor]:
        """The distinct label maps of the clients; empty if no client has a label map."""
        if isinstance(self.clients, ClientTable):
            maps = self.clients.label_maps
            if maps is None:
                return ()
            return maps.unbind()
        all_maps = [client.label_map for client in self.clients if client.label_map is not None]
        return list({id(label_map): label_map for label_map in all_maps}.values())

    @property
    def roster(self) -> ClientRegistry:
        """Registry of clients for a server: names, sizes and true clusters, but no examples."""
        later = [
            (stage.first_round, federation.roster)
            for stage, federation in zip(self.stages, self.each_stage[1:], strict=True)
        ]
        columns: Mapping[str, object] = {}
        if self.pool.columns is not None:
            columns = self.pool.columns.described
        return ClientRegistry(
            self.pool.schema,
            str(self),
            names=self._client_names,
            sizes=self.sizes,
            true_clusters=self.true_clusters,
            columns=columns,
            stages=later,
        )

    def alone(self, client: int) -> Federation:
        """Return a federation of a single client of this federation.

        Raises
        ------
        DataError
            If no client has this id.
        """
        data = self._find_client(client)
        truth = None
        if self.true_clusters is not None:
            truth = {client: self.true_clusters[client]}
        return replace(
            self,
            clients=(data,),
            true_clusters=truth,
            newcomers=None,
            stages=tuple(stage.of({client}) for stage in self.stages),
            description=str(self),
        )

    def _find_client(self, client: int) -> ClientData:
        """Return the client with an id; raise a DataError if no client has this id."""
        try:
            return self.by_id[client]
        except (LookupError, TypeError, ValueError, OverflowError):
            first = min(self.ids)
            last = max(self.ids)
            raise DataError(
                f"the federation has no client {shown(client)}; {self} has clients {first} to "
                f"{last}"
            ) from None

    def shard(self, clients: Collection[int]) -> Federation:
        """Return a federation of the clients with the given ids, over the same pool.

        True clusters and newcomers are left out.
        """
        chosen: tuple[ClientData, ...] | ClientTable
        if isinstance(self.clients, ClientTable):
            places = np.sort(self.clients.positions.of(list(clients)))
            chosen = self.clients.take(places)
        else:
            chosen = tuple(client for client in self.clients if client.id in clients)
        stages = [replace(stage.of(clients), true_clusters=None) for stage in self.stages]
        return replace(
            self,
            clients=chosen,
            true_clusters=None,
            newcomers=None,
            stages=tuple(stages),
            description=str(self),
        )

    def join(self, others: Federation) -> Federation:
        """Return a federation of these clients and the clients of another federation.

        Both federations have the same pool. The result has no newcomers.
        """
        truth = None
        if self.true_clusters is not None and others.true_clusters is not None:
            truth = {**self.true_clusters, **others.true_clusters}
        clients: tuple[ClientData, ...] | ClientTable
        if isinstance(self.clients, ClientTable) and isinstance(others.clients, ClientTable):
            clients = self.clients.join(others.clients)
        else:
            clients = (*self.clients, *others.clients)
        first_rounds = {stage.first_round for stage in (*self.stages, *others.stages)}
        stages: list[Stage] = []
        for number in sorted(first_rounds):
            both = self.in_round(number).join(others.in_round(number))
            stages.append(Stage(number, tuple(both.clients), both.true_clusters))
        return replace(
            self, clients=clients, true_clusters=truth, newcomers=None, stages=tuple(stages)
        )

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all data on which training depends.

        The hash covers the examples of the pool, the scaling of targets, the name of the
        augmentation, and the indices, the label map and the rotation of each client.
        """
        digest = hashlib.sha256()
        if self.pool.digest is not None:
            digest.update(self.pool.digest.encode())
        else:
            for tensor in (self.pool.x, self.pool.y):
                digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().data)
        if self.pool.columns is not None and self.pool.columns.target_mean is not None:
            digest.update(f"{self.pool.columns.target_mean}{self.pool.columns.target_std}".encode())
        if self.pool.related is not None:
            digest.update(self.pool.related.tobytes())
        for structure in (self.pool.structure, self.pool.target_structure):
            if structure is not None:
                digest.update(structure.described.encode())
        if self.augment is not None:
            name = getattr(self.augment, "__qualname__", "")
            digest.update(f"{self.augment.__module__}:{name}".encode())
        if isinstance(self.clients, ClientTable):
            digest.update(self.clients.digest().encode())
            return digest.hexdigest()
        if self.stages:
            first_rounds = [stage.first_round for stage in self.stages]
            digest.update(json.dumps(first_rounds).encode())
        for clients in (self.clients, *(stage.clients for stage in self.stages)):
            for client in clients:
                _add_client(digest, client)
        return digest.hexdigest()

    def examples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one split as a client sees them.

        These are the examples of the pool after the client's rotation and label map.

        Parameters
        ----------
        client
            Id of the client.
        split
            ``train``, ``validation`` or ``test``.

        Returns
        -------
        tuple
            Inputs ``[n, ...]`` for the model, and targets of the client's n examples.

        Raises
        ------
        DataError
            If no client has this id, or the split is unknown.
        """
        if not is_choice(split, Split):
            splits = ", ".join(get_args(Split))
            raise DataError(f"unknown data split {shown(split)}; expected one of {splits}")
        data = self._find_client(client)
        indices: Indices = getattr(data, split)
        targets = self.pool.y[torch.from_numpy(indices)]
        return self.pool.inputs(indices, data.quarter_turns), data.labels(targets)


def _add_client(digest: Any, client: ClientData) -> None:
    """Update a hash with a client's id, key, rotation, label map and pool indices."""
    if client.label_map is None:
        labels = None
    else:
        labels = client.label_map.tolist()
    fields = [client.id, client.key, client.quarter_turns, labels]
    digest.update(json.dumps(fields).encode())
    for indices in (client.train, client.validation, client.test):
        digest.update(f"{len(indices)}:".encode())
        digest.update(np.ascontiguousarray(indices, dtype=np.int64).data)
