"""Budget of training steps: how many steps clients have taken, and how many may still be added."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedclade.core import Clients, ClientWork, LocalTraining, Query, R, Sink, TrainQuery


def count_steps(
    work: ClientWork, local: LocalTraining, sizes: Mapping[int, int], ids: Sequence[int]
) -> int:
    """Return the number of training steps that clients take for one query.

    A client that trains on several parts of its data takes the steps of all parts. The computation
    of a gradient counts as no step.

    Parameters
    ----------
    work
        Work of each client.
    local
        Settings of local training.
    sizes
        Number of training examples of each client, by client id.
    ids
        Ids of the queried clients.
    """
    if work.is_gradient:
        return 0
    local = work.steps.settings(local)
    splits = work.splits
    if splits is None:
        return sum(work.steps.count_steps(local, sizes[client]) for client in ids)
    on_part = local.on_part(splits.count, splits.size)
    total = 0
    for client in ids:
        size = splits.size or max(1, sizes[client] // splits.count)
        total += splits.count * work.steps.count_steps(on_part, size)
    return total


class CountingClients(Clients):
    """Clients whose training steps are counted.

    All queries are passed on to other clients.

    Parameters
    ----------
    clients
        The clients to which queries are passed on.

    Attributes
    ----------
    steps
        Number of training steps for all queries so far.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.steps = 0

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""
        return self._clients.ids

    @property
    def reachable(self) -> Sequence[int]:
        """Ids of the clients that are available in this round."""
        return self._clients.reachable

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client, by client id."""
        return self._clients.sizes

    @property
    def undivided(self) -> Collection[int]:
        """Ids of the clients whose data cannot be divided into parts."""
        return self._clients.undivided

    @property
    def stage(self) -> int:
        """Number of the current data stage."""
        return self._clients.stage

    def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
        """Pass a query on, and count its training steps."""
        self.steps += self._count(query)
        return self._clients.ask(query, sink)

    def _count(self, query: Query[Any]) -> int:
        """Return the number of training steps for a query; 0 if clients do not train."""
        if not isinstance(query, TrainQuery):
            return 0
        return count_steps(query.work, query.round.local, self.sizes, query.ids)
