"""Middleware between a server and clients, which may change queries and replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, cast

from fedclade.core import (
    Ask,
    Clients,
    DataQuery,
    Evaluation,
    EvaluationQuery,
    Query,
    R,
    UpdateQuery,
    Updates,
)


class Middleware:
    """Function ``(query, ask) -> reply`` that may change a query and its reply.

    Subclasses override the method of each kind of query that they handle. Other queries pass
    unchanged.
    """

    def __call__(self, query: Query[R], ask: Ask) -> R:
        """Send a query and return the reply."""
        return cast("R", self._handle(query, ask))

    def _handle(self, query: Query[Any], ask: Ask) -> Any:
        if isinstance(query, UpdateQuery):
            return self.updates(query, ask)
        if isinstance(query, EvaluationQuery):
            return self.evaluation(query, ask)
        if isinstance(query, DataQuery):
            return self.data(query, ask)
        return self.other(query, ask)

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates of the clients that reply."""
        return ask(query)

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return the scores of the clients that reply."""
        return ask(query)

    def data(self, query: DataQuery[R], ask: Ask) -> R:
        """Return the reply to a query that each client answers from its own data."""
        return ask(query)

    def other(self, query: Query[Any], ask: Ask) -> Any:
        """Return the reply to a query of another class."""
        return ask(query)

    def weights(self, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Return the weight of each client, given the weights that arrive here.

        A weight is the number of training examples with which a client counts.
        """
        return sizes


class Channel(Clients):
    """Clients behind a chain of middleware.

    The middleware is given in order from the clients' end to the server's end, so a query passes
    the last one first.
    """

    def __init__(self, clients: Clients, *middleware: Middleware) -> None:
        self._clients = clients
        self._middleware = middleware
        self._ask: Ask = clients.ask
        for each in middleware:
            self._ask = cast("Ask", partial(each, ask=self._ask))

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""
        return self._clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples with which each client counts."""
        return reduce(
            lambda sizes, each: each.weights(sizes), self._middleware, self._clients.sizes
        )

    def ask(self, query: Query[R], /) -> R:
        """Send a query and return the reply."""
        return self._ask(query)
