"""Middleware: what a query passes through on its way to clients, and its reply on the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any, cast

from torch import Tensor

from fedclade.core import (
    Ask,
    Clients,
    DescriptorQuery,
    Evaluation,
    EvaluationQuery,
    Handlers,
    Query,
    R,
    ShiftQuery,
    Statistics,
    StatisticsQuery,
    SubspaceQuery,
    UpdateQuery,
    Updates,
)


class Middleware:
    """A function ``(query, ask) -> reply`` with a method for each kind of query; what is not overridden passes on."""

    def __call__(self, query: Query[R], ask: Ask) -> R:
        """Put a query; return the reply."""
        updates, evaluation = partial(self.updates, ask=ask), partial(self.evaluation, ask=ask)
        subspaces, statistics = partial(self.subspaces, ask=ask), partial(self.statistics, ask=ask)
        shifts, descriptors = partial(self.shifts, ask=ask), partial(self.descriptors, ask=ask)
        other = partial(self.other, ask=ask)
        return query.handled(Handlers(updates, evaluation, subspaces, statistics, shifts, descriptors, other))

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates of the clients that reply."""
        return ask(query)

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return the scores of the clients that reply."""
        return ask(query)

    def subspaces(self, query: SubspaceQuery, ask: Ask) -> Tensor:
        """Return singular vectors, ``[n, L, d, p]``."""
        return ask(query)

    def statistics(self, query: StatisticsQuery, ask: Ask) -> Statistics:
        """Return what the training examples of all clients come to."""
        return ask(query)

    def descriptors(self, query: DescriptorQuery, ask: Ask) -> Tensor:
        """Return descriptors, ``[n, 2 + B, C]``."""
        return ask(query)

    def shifts(self, query: ShiftQuery, ask: Ask) -> Tensor:
        """Return whose labels have shifted, bool ``[n]``."""
        return ask(query)

    def other(self, query: Query[Any], ask: Ask) -> Any:
        """Return the reply to a kind of query that fedclade does not know."""
        return ask(query)

    def weights(self, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Return how many training examples each client counts with, of those that arrive here."""
        return sizes


class Channel(Clients):
    """Clients behind middleware, given from the clients' end to the server's: a query passes the last first."""

    def __init__(self, clients: Clients, *middleware: Middleware) -> None:
        self._clients, self._middleware = clients, middleware
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
        return reduce(lambda sizes, each: each.weights(sizes), self._middleware, self._clients.sizes)

    def ask(self, query: Query[R], /) -> R:
        """Put a query; return the reply."""
        return self._ask(query)
