"""Table of the kinds of queries that a client replies to over a network.

A client refuses a query of a kind that is not in the table. For each kind of query about a client's
data, the table has the class of the query, which declares what a reply reveals. Clients with
differential privacy or secure aggregation refuse a query whose class declares nothing.

A row query, whose reply is one row of numbers (:class:`~fedclade.RowQuery`), is fully described by
its class. A package or a user adds such a class by ``client_app(queries=[...])`` or by an entry
point of the group ``fedclade.queries``, never by a name in a message. A client replies to an added
query only if its policy allows the kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedclade.algorithms import DescriptorQuery, ShiftQuery, SubspaceQuery
from fedclade.core import (
    ChoiceQuery,
    ConfigError,
    EvaluationQuery,
    Query,
    RowQuery,
    TrainQuery,
    check_kind,
    field_types,
    installed,
    loaded,
    shown,
)
from fedclade.data import StatisticsQuery
from fedclade.flower.gain_query import GainQuery

RESERVED = frozenset(
    {
        "agreed",
        "count",
        "labels",
        "layout",
        "means",
        "numbers",
        "protocol",
        "refused",
        "run",
        "squares",
        "what",
    }
)
"""Names of values in every message, which the fields of a query cannot have."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Entry of the table of queries: properties of one kind of query.

    Parameters
    ----------
    query
        Class of the query; None for a request that is only part of a protocol, such as
        registration, and not about the client's data.
    allowed_as
        Name by which a client's policy allows this kind of query; empty if no permission is needed.
    takes_sums
        Whether the message contains statistics of all clients' examples, in runs that use such
        statistics to scale inputs or to weight labels.
    """

    query: type[Query[Any]] | None = None
    allowed_as: str = ""
    takes_sums: bool = False

    @property
    def row_query(self) -> type[RowQuery] | None:
        """Class of the query if a reply is one row of numbers (a row query); None otherwise."""
        if self.query is not None and issubclass(self.query, RowQuery):
            return self.query
        return None


def kind_of_rows(query: type[RowQuery]) -> Kind:
    """Return the entry in the table of queries for a class of row queries."""
    return Kind(query=query, allowed_as=query.kind, takes_sums=True)


KINDS: dict[str, Kind] = {
    "hello": Kind(),
    "initial": Kind(),
    "train": Kind(query=TrainQuery, allowed_as="train", takes_sums=True),
    "gradients": Kind(query=TrainQuery, allowed_as="gradients", takes_sums=True),
    "evaluate": Kind(query=EvaluationQuery, allowed_as="evaluate", takes_sums=True),
    "gains": Kind(query=GainQuery, allowed_as="evaluate", takes_sums=True),
    "choose": Kind(query=ChoiceQuery, allowed_as="evaluate", takes_sums=True),
    "subspaces": kind_of_rows(SubspaceQuery),
    "statistics": Kind(query=StatisticsQuery, allowed_as="statistics"),
    "shifts": kind_of_rows(ShiftQuery),
    "descriptors": kind_of_rows(DescriptorQuery),
    "keys": Kind(allowed_as="train"),
    "shares": Kind(allowed_as="train"),
    "masked": Kind(query=TrainQuery, allowed_as="train", takes_sums=True),
    "agree": Kind(allowed_as="train"),
    "unmask": Kind(allowed_as="train"),
}
"""All kinds of queries that this process knows, by the kind's name in a message.

:func:`register_query` adds a kind.
"""

SKETCH = "sketch"
"""Name in a policy's ``disclose`` for the signs of random projections of masked updates.

Clients send these signs unmasked, so that the server can compare the updates.
"""

ALWAYS = ("update", "nothing")
"""Values of a query's ``discloses`` that need not be in a policy's ``disclose``.

A closed client sends updates only masked or with noise, and "nothing" stands for no disclosure.
"""


def register_query(query: type[RowQuery]) -> None:
    """Add a class of row queries to the table of queries, so that clients reply to such queries.

    Parameters
    ----------
    query
        Subclass of :class:`~fedclade.RowQuery`.

    Raises
    ------
    ConfigError
        If the class is not a subclass of RowQuery, lacks a required declaration, cannot be sent in
        messages, or if another kind of query has the same name.
    """
    if not (isinstance(query, type) and issubclass(query, RowQuery)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"queries should be subclasses of fedclade.RowQuery, got {shown(query)}")
    check_travels(query)
    known = KINDS.get(query.kind)
    # A cell of a notebook that runs again defines the same class again. The latest definition
    # replaces the earlier one.
    is_same = known is not None and _name_of(known.query) == _name_of(query)
    if known is not None and not is_same:
        raise ConfigError(
            f"kind {query.kind!r} of {query.__name__} is the name of another kind of query; choose "
            "another value of 'kind' in the class"
        )
    KINDS[query.kind] = kind_of_rows(query)


def check_travels(query: type[RowQuery]) -> None:
    """Check that messages can contain the queries of a class.

    Raises
    ------
    ConfigError
        If the class lacks a required declaration, or if one of its fields has a name that is
        reserved for values of every message.
    """
    check_kind(query)
    if (name := query.reply_name or query.kind) in RESERVED | {"round"}:
        raise ConfigError(
            f"the reply to a {query.__name__} cannot have the name {name!r}, which is reserved for "
            "a value of every message; choose another value of 'kind' or 'reply_name'"
        )
    types = field_types(query)
    names = {*types.plain, *types.models}
    if taken := sorted(names & RESERVED):
        raise ConfigError(
            f"field {taken[0]!r} of {query.__name__} has a name that is reserved for a value of "
            "every message; give the field another name"
        )


def load_installed(names: Iterable[str]) -> None:
    """Add queries from installed packages to the table of queries.

    Parameters
    ----------
    names
        Names of the kinds of queries to add, as in a policy's ``allow``. Known kinds, and names
        that no installed package provides, are skipped.

    Raises
    ------
    ConfigError
        If an entry point cannot be loaded, or if its name differs from the kind of its query.
    """
    points = installed("queries")
    for name in names:
        if name in KINDS or name not in points:
            continue
        query = loaded(points[name], "query")
        kind = getattr(query, "kind", name)
        if kind != name:
            raise ConfigError(
                f"entry point {name!r} of the group fedclade.queries is a query of kind {kind!r}; "
                "the name of the entry point should equal the kind"
            )
        register_query(query)


def allowable() -> tuple[str, ...]:
    """Return the names of all kinds of queries that a policy may list in ``allow``.

    Names of queries from installed packages come last.
    """
    names = [kind.allowed_as for kind in KINDS.values() if kind.allowed_as]
    return tuple(dict.fromkeys([*names, *installed("queries")]))


def disclosures() -> tuple[str, ...]:
    """Return the names of all kinds of data that a policy may list in ``disclose``."""
    declared = [kind.query.discloses for kind in KINDS.values() if kind.query is not None]
    return tuple(
        dict.fromkeys([SKETCH, *(name for name in declared if name and name not in ALWAYS)])
    )


def _name_of(query: type[Query[Any]] | None) -> str:
    """Return the module and qualified name of a class of queries; empty for None."""
    return "" if query is None else f"{query.__module__}.{query.__qualname__}"
