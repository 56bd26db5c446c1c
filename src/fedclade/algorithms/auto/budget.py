"""Count of the training steps that clients take for the queries of an algorithm."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedclade.core import Clients, Query, R, Sink, TrainQuery, count_steps


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

    def weigh(self, weights: Mapping[int, float]) -> Mapping[int, float]:
        """Return the weights of clients in means over clients."""
        return self._clients.weigh(weights)

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
