"""Middleware base class, and the channel that sends queries through a chain of middleware.

A middleware is an object between the server and the clients that may change queries and replies. A
sink is a function that receives clients' updates as soon as they arrive, before the whole reply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from typing import Any, ClassVar, Literal, cast

from fedclade.core import (
    Ask,
    Clients,
    Query,
    R,
    Sink,
    Updates,
    check_settings,
    name_of,
    settings_of,
)


class Middleware:
    """Base class of objects that change queries to clients and the clients' replies.

    A subclass overrides :meth:`before`, :meth:`after`, or both. A subclass that may send several
    queries in place of a single query, or none at all, overrides :meth:`around` instead.

    A subclass that is a dataclass may have settings: fields made by :func:`fedclade.core.setting`.
    The settings are checked when an object is created, are the keys of the section
    ``[middleware.NAME]`` of a config, and are recorded in the config of a run.

    Attributes
    ----------
    queries
        Classes of queries that the middleware handles. All other queries, and their replies, pass
        unchanged.
    """

    queries: ClassVar[tuple[type[Query[Any]], ...]] = (Query,)

    def __post_init__(self) -> None:
        """Check the settings of a middleware that is a dataclass.

        Python calls this method only for dataclasses.
        """
        if settings_of(type(self)):
            check_settings(self, f"middleware.{name_of('middleware', type(self), {})}")

    def handles(self, query: Query[Any]) -> bool:
        """Return whether this middleware acts on a query; other queries pass unchanged.

        By default the middleware acts on queries of the classes in :attr:`queries`. A subclass that
        acts on fewer queries should override this method. The channel then skips the middleware for
        all other queries, so that updates in their replies can pass on as soon as they arrive.
        """
        return isinstance(query, self.queries)

    def before(self, query: Any) -> Any:
        """Return the query that is sent on to the clients in place of ``query``.

        An exception refuses the query: no client receives it.
        """
        return query

    def after(self, query: Any, reply: Any) -> Any:
        """Return the reply that is passed back to the server in place of ``reply``.

        If updates arrive in several groups, the method is called once for each group.

        Parameters
        ----------
        query
            The query that was sent on to the clients, as :meth:`before` returned it.
        reply
            The clients' reply to that query.
        """
        return reply

    def around(self, query: Any, ask: Ask) -> Any:
        """Send a query on to the clients, once or several times or never, and return the reply.

        A subclass that overrides this method replaces the calls of :meth:`before` and
        :meth:`after`.

        Parameters
        ----------
        query
            The query.
        ask
            Function that sends a query on and returns the reply. The sender of the query may have
            provided a sink, a function that receives updates as soon as they arrive. By default
            these updates go directly to the sink, and are not in the reply. A subclass that needs
            all updates in the reply calls ``ask(query, None)``.
        """
        return self.after(query, ask(self.before(query)))

    def weights(self, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Return the aggregation weight of each client, as this middleware changes it.

        The weight of a client is the number of training examples with which the client counts.

        Parameters
        ----------
        sizes
            Weight of each client, by client id, before this middleware.
        """
        return sizes

    def weigh(self, weights: Mapping[int, float]) -> Mapping[int, float]:
        """Return the weights of clients in means over clients, as this middleware changes them.

        ``weights`` has the weight of each client, by client id, before this middleware.
        """
        return weights


class Channel(Clients):
    """Clients whose queries and replies pass through a chain of middleware.

    The middleware is given in order from the clients' end to the server's end, so a query passes
    the last middleware first, and a reply passes the first middleware first.
    """

    def __init__(self, clients: Clients, *middleware: Middleware) -> None:
        self._clients = clients
        self._middleware = middleware
        self._is_around = [type(each).around is not Middleware.around for each in middleware]

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""
        return self._clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples with which each client counts, by client id.

        The numbers are those that the clients report, as changed by all middleware.
        """
        return reduce(
            lambda sizes, each: each.weights(sizes), self._middleware, self._clients.sizes
        )

    def weigh(self, weights: Mapping[int, float]) -> Mapping[int, float]:
        """Return the weights of clients in means over clients, as all middleware changes them."""
        return reduce(
            lambda mine, each: each.weigh(mine), self._middleware, self._clients.weigh(weights)
        )

    @property
    def undivided(self) -> Collection[int]:
        """Ids of the clients whose training examples cannot be divided into parts."""
        return self._clients.undivided

    def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
        """Send a query through all middleware to the clients, and return the reply."""
        return cast("R", self._ask_from(len(self._middleware), sink, query))

    def _ask_from(
        self,
        position: int,
        inherited: Sink | None,
        query: Query[Any],
        /,
        sink: Sink | Literal["inherited"] | None = "inherited",
    ) -> Any:
        """Send a query through the first ``position`` middleware, and return the reply.

        Positions are counted from the clients' end of the chain. Updates that arrive early go to
        ``sink``. With the default ``"inherited"``, they go to the sink ``inherited``: the sink that
        came with the query that the calling middleware handles.
        """
        if sink == "inherited":
            sink = inherited
        passed: list[tuple[Middleware, Query[Any]]] = []
        while position > 0:
            position -= 1
            each = self._middleware[position]
            if not each.handles(query):
                continue
            if self._is_around[position]:
                # A nested function in place of `partial` would add a frame to the call stack for
                # each middleware.
                ask_below = cast("Ask", partial(self._ask_from, position, sink))
                reply = each.around(query, ask_below)
                break
            query = each.before(query)
            passed.append((each, query))
            if sink is not None:
                sink = _behind(each, query, sink)
        else:
            reply = self._clients.ask(query, sink)
        for each, its_query in reversed(passed):
            reply = each.after(its_query, reply)
        return reply


def _behind(middleware: Middleware, query: Query[Any], sink: Sink) -> Callable[[Updates], None]:
    """Return a sink that passes updates through a middleware before another sink receives them.

    A sink is a function that receives clients' updates as soon as they arrive.
    """
    return lambda updates: sink(middleware.after(query, updates))
