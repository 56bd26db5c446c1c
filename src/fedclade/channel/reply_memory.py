"""Memory of clients' replies, from which clients answer a query that the server repeats.

A check of changed data in replicated clustering sends the query of round 1 again: the same parts of
the data, the same initial model, the same random draws. As long as a client's data stays the same,
so does its reply. The client then sends the stored reply, and does not train.

Only such queries are remembered: training of round 1 on compared parts of a fixed size, with
nothing that the client stores between rounds. All other training moves on from round to round, and
never repeats a query.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    Ask,
    ClientWork,
    Common,
    FromServer,
    Layout,
    Nothing,
    Query,
    Round,
    Sgd,
    TrainQuery,
    Updates,
)

LARGEST_MEMORY = 2**27
"""Largest number of bytes of all stored replies of the clients in one process: 128 MiB."""


class ReplyMemory:
    """The latest reply of each client to a query that the server may repeat.

    A client stores one reply. All clients together store at most ``budget`` bytes; replies that
    have not been used for the longest time are removed first. A reply is a row of each column of
    :class:`~fedclade.core.Updates`.

    Parameters
    ----------
    budget
        Largest number of bytes of all replies.
    """

    def __init__(self, budget: int = LARGEST_MEMORY) -> None:
        self._budget = budget
        self._bytes = 0
        # Digest of the query, and the reply, by client; the one that was used last is the last one.
        self._replies = OrderedDict[int, tuple[str, Mapping[str, Tensor]]]()

    def recall(self, client: int, digest: str) -> Mapping[str, Tensor] | None:
        """Return a client's reply to a query, or None if it is not stored.

        Parameters
        ----------
        client
            Id of the client.
        digest
            Digest of the query, and of everything else on which the reply depends.
        """
        known, reply = self._replies.get(client, ("", None))
        if reply is None or known != digest:
            return None
        self._replies.move_to_end(client)
        return reply

    def store(self, client: int, digest: str, reply: Mapping[str, Tensor]) -> None:
        """Store a client's reply to a query in place of its earlier reply.

        See :meth:`recall` for the parameters. A reply of more than ``budget`` bytes is not stored.
        """
        copies = {name: row.detach().cpu().clone() for name, row in reply.items()}
        size = _count_bytes(copies)
        if client in self._replies:
            self._remove(client)
        if size > self._budget:
            return
        while self._bytes + size > self._budget:
            self._remove(next(iter(self._replies)))
        self._replies[client] = digest, copies
        self._bytes += size

    def tensors(self) -> dict[str, Tensor]:
        """Return all replies, by names of the form ``<place>/<client>/<digest>/<column>``.

        The reply with the place 0 is the first one to be removed.
        """
        return {
            f"{place}/{client}/{digest}/{name}": row
            for place, (client, (digest, reply)) in enumerate(self._replies.items())
            for name, row in reply.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all replies by tensors that :meth:`tensors` returned.

        Raises
        ------
        ValueError
            If a name does not have the form ``<place>/<client>/<digest>/<column>``.
        """
        found: dict[tuple[int, int, str], dict[str, Tensor]] = {}
        for name, row in tensors.items():
            place, client, digest, column = name.split("/", 3)
            found.setdefault((int(place), int(client), digest), {})[column] = row
        self._replies.clear()
        self._bytes = 0
        for place, client, digest in sorted(found):
            self.store(client, digest, found[place, client, digest])

    def _remove(self, client: int) -> None:
        """Remove the stored reply of a client."""
        _, reply = self._replies.pop(client)
        self._bytes -= _count_bytes(reply)


def _count_bytes(reply: Mapping[str, Tensor]) -> int:
    """Return the number of bytes of a reply."""
    return sum(row.nbytes for row in reply.values())


def is_repeatable(work: ClientWork, this_round: Round, layout: Layout) -> bool:
    """Return whether a server may repeat a training query, and the replies are then the same.

    Parameters
    ----------
    work
        Work of each client.
    this_round
        The round, with the settings of local training.
    layout
        Layout of the model. Personal parameters stay with the client, and change between rounds.
    """
    splits = work.compared_splits
    return (
        this_round.number == 1
        and splits is not None
        and splits.size > 0
        and isinstance(work.start, FromServer)
        and isinstance(work.steps, Sgd)
        and isinstance(work.store, Nothing)
        and not this_round.local.keep_state
        and not layout.personal
    )


@dataclass(frozen=True, eq=False)
class Remembering(Middleware):
    """Middleware by which simulated clients answer a repeated query from memory.

    It must be at the clients' end, behind everything that changes updates by a function of the
    query alone, and before simulated faults. It must not be used if replies have noise or come from
    adversaries, since a repeated query then has another reply.

    Parameters
    ----------
    memory
        The stored replies.
    layout
        Layout of the model.
    stage_of
        Function that returns the number of the clients' data stage in a round, from 0. Its
        parameter is the number of the round, from 1. A reply is not used after the data changed.
    """

    queries = (TrainQuery,)

    memory: ReplyMemory
    layout: Layout
    stage_of: Callable[[int], int]

    def handles(self, query: Query[Any]) -> bool:
        """Return whether a query is one that the server may repeat."""
        return isinstance(query, TrainQuery) and is_repeatable(query.work, query.round, self.layout)

    def around(self, query: TrainQuery, ask: Ask) -> Updates:
        """Query the clients that do not remember their reply, and return all replies.

        The column :attr:`~fedclade.core.Updates.remembered` states which replies are from memory.
        """
        digests = self._digest_of_clients(query)
        known: dict[int, Mapping[str, Tensor]] = {}
        for client in query.ids:
            reply = self.memory.recall(client, digests[client])
            if reply is not None:
                known[client] = reply
        asked = [client for client in query.ids if client not in known]
        if not asked:
            return self._build_updates(query, known)
        updates = ask(query.select(asked), None)
        for row, client in enumerate(updates.ids):
            reply = {name: column[row] for name, column in updates.columns.items()}
            self.memory.store(client, digests[client], reply)
        if not known:
            return updates
        return self._build_updates(query, known).concat(updates).select(query.ids)

    def _digest_of_clients(self, query: TrainQuery) -> dict[int, str]:
        """Return, for each client, the digest of all values on which its reply depends."""
        this_round = query.round
        stage = self.stage_of(query.data_round or this_round.number)
        common = repr(
            (stage, this_round.number, this_round.seed, this_round.purpose, this_round.local)
        )
        common += repr(query.work)
        of_row: dict[int, str] = {}
        for row in set(query.models.start):
            digest = hashlib.sha256(common.encode())
            model = query.models.vectors[row].detach().cpu().contiguous()
            digest.update(model.view(torch.uint8).numpy().data)
            of_row[row] = digest.hexdigest()
        return {
            client: of_row[row] for client, row in zip(query.ids, query.models.start, strict=True)
        }

    def _build_updates(
        self, query: TrainQuery, replies: Mapping[int, Mapping[str, Tensor]]
    ) -> Updates:
        """Return updates from the stored replies of some clients."""
        return build_remembered(replies, query.models.vectors.device, self.layout.n_parameters)


def build_remembered(
    replies: Mapping[int, Mapping[str, Tensor]], device: torch.device, n_parameters: int
) -> Updates:
    """Build updates from stored replies.

    Parameters
    ----------
    replies
        The stored reply of each client, by client id: a row of each column; at least one.
    device
        Device of the updates.
    n_parameters
        Number of parameters of the model, without buffers.
    """
    rows = [*replies.values()]
    columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    for name in ("deltas", "parts"):  # all other columns are on the CPU
        columns[name] = columns[name].to(device)
    columns["remembered"] = torch.ones(len(rows), dtype=torch.bool)
    return Updates(ids=tuple(replies), columns=columns, common=Common(n_parameters))
