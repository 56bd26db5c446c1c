"""Middleware: what a query passes through on its way to clients, and its reply on the way back."""

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
    """A function ``(query, ask) -> reply``; a query that no method overrides passes on."""

    def __call__(self, query: Query[R], ask: Ask) -> R:
        """Put a query; return the reply."""
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
        """Return how many training examples each client counts with, of those that arrive here."""
        return sizes


class Channel(Clients):
    """Clients behind middleware, given from the clients' end to the server's: a query passes the last first."""

    def __init__(self, clients: Clients, *middleware: Middleware) -> None:
        self._clients = clients
        self._middleware = middleware
        self._ask: Ask = clients.ask
        for each in middleware:
            self._ask = cast("Ask", partial(each, ask=self._ask))

    @property
    def ids(self) -> Sequence[int]:
        """All clients, in a fixed order."""
        return self._clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples that each client counts with."""
        return reduce(
            lambda sizes, each: each.weights(sizes), self._middleware, self._clients.sizes
        )

    def ask(self, query: Query[R], /) -> R:
        """Put a query; return the reply."""
        return self._ask(query)
