"""Table of the kinds of queries that a client replies to over a network.

A kind that is not in the table is refused. A kind that is about a client's data names the class of
its query, which declares what a reply reveals. Clients with privacy or secure aggregation refuse a
class that declares nothing.

Kinds of :class:`~fedclade.RowQuery` need only their class. A package or a user adds one by
``client_app(queries=[...])`` or by an entry point of the group ``fedclade.queries``, never by a
name in a message, and a client replies to it only if its policy names the kind.
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
    UpdateQuery,
    check_kind,
    field_types,
    installed,
    loaded,
    shown,
)
from fedclade.data import StatisticsQuery

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
"""Names of values that messages use themselves, so no field of a query can have them."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Properties of a kind of query.

    Parameters
    ----------
    query
        Class of the query; None for a request of the protocol, which is not about the client's
        data.
    allowed_as
        Name by which a client's policy allows the kind; empty if it needs no permission.
    takes_sums
        Whether the message carries statistics of all clients' examples. It does so in runs that use
        them to scale inputs or to set the weights of labels.
    """

    query: type[Query[Any]] | None = None
    allowed_as: str = ""
    takes_sums: bool = False

    @property
    def row_query(self) -> type[RowQuery] | None:
        """Class of the query, if the reply is one row of numbers; else None."""
        if self.query is not None and issubclass(self.query, RowQuery):
            return self.query
        return None


def kind_of_rows(query: type[RowQuery]) -> Kind:
    """Return the kind of query of a class of row queries."""
    return Kind(query=query, allowed_as=query.kind, takes_sums=True)


KINDS: dict[str, Kind] = {
    "hello": Kind(),
    "initial": Kind(),
    "train": Kind(query=UpdateQuery, allowed_as="train", takes_sums=True),
    "gradients": Kind(query=UpdateQuery, allowed_as="gradients", takes_sums=True),
    "evaluate": Kind(query=EvaluationQuery, allowed_as="evaluate", takes_sums=True),
    "choose": Kind(query=ChoiceQuery, allowed_as="evaluate", takes_sums=True),
    "subspaces": kind_of_rows(SubspaceQuery),
    "statistics": Kind(query=StatisticsQuery, allowed_as="statistics"),
    "shifts": kind_of_rows(ShiftQuery),
    "descriptors": kind_of_rows(DescriptorQuery),
    "keys": Kind(allowed_as="train"),
    "shares": Kind(allowed_as="train"),
    "masked": Kind(query=UpdateQuery, allowed_as="train", takes_sums=True),
    "agree": Kind(allowed_as="train"),
    "unmask": Kind(allowed_as="train"),
}
"""All kinds that this process knows, by the name in a message.

:func:`register_query` adds a kind.
"""

SKETCH = "sketch"
"""Name in a policy for the signs of a sketch, which leave unmasked with a masked update."""

ALWAYS = ("update", "nothing")
"""Values of a query's ``discloses`` that a policy need not name.

Updates leave masked or with noise, and "nothing" discloses nothing.
"""


def register_query(query: type[RowQuery]) -> None:
    """Add a class of row queries to the table of kinds.

    Raises
    ------
    ConfigError
        If the class is no class of row queries, lacks a required declaration, cannot be sent in a
        message, or has the name of another kind.
    """
    if not (isinstance(query, type) and issubclass(query, RowQuery)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"queries should be subclasses of fedclade.RowQuery, got {shown(query)}")
    check_travels(query)
    known = KINDS.get(query.kind)
    # A notebook that is run again defines its class again, so the latest class replaces it.
    is_same = known is not None and _name_of(known.query) == _name_of(query)
    if known is not None and not is_same:
        raise ConfigError(
            f"kind {query.kind!r} of {query.__name__} is the name of another kind of question; "
            "give it another in its class"
        )
    KINDS[query.kind] = kind_of_rows(query)


def check_travels(query: type[RowQuery]) -> None:
    """Check that a class of row queries can be sent in messages.

    Raises
    ------
    ConfigError
        If it lacks a required declaration, or a field has a name that messages use themselves.
    """
    check_kind(query)
    if (name := query.reply_name or query.kind) in RESERVED | {"round"}:
        raise ConfigError(
            f"the row of a {query.__name__} cannot travel as {name!r}, as every message has a "
            "value of that name; give the kind, or reply_name, another name"
        )
    types = field_types(query)
    names = {*types.plain, *types.models}
    if taken := sorted(names & RESERVED):
        raise ConfigError(
            f"field {taken[0]!r} of {query.__name__} cannot travel to a client, as every message "
            "has a value of that name; give the field another name"
        )


def load_installed(names: Iterable[str]) -> None:
    """Add the kinds of these names that installed packages provide to the table.

    Raises
    ------
    ConfigError
        If an entry point cannot be loaded, or its name is not the name of the kind.
    """
    points = installed("queries")
    for name in names:
        if name in KINDS or name not in points:
            continue
        query = loaded(points[name], "query")
        kind = getattr(query, "kind", name)
        if kind != name:
            raise ConfigError(
                f"entry point {name!r} of fedclade.queries names a query of kind {kind!r}; give it "
                "the name of the kind"
            )
        register_query(query)


def allowable() -> tuple[str, ...]:
    """Return the names that a policy may allow, each once, in the order of the table."""
    names = [kind.allowed_as for kind in KINDS.values() if kind.allowed_as]
    return tuple(dict.fromkeys([*names, *installed("queries")]))


def disclosures() -> tuple[str, ...]:
    """Return the names that a policy may disclose, each once, in the order of the table."""
    declared = [kind.query.discloses for kind in KINDS.values() if kind.query is not None]
    return tuple(
        dict.fromkeys([SKETCH, *(name for name in declared if name and name not in ALWAYS)])
    )


def _name_of(query: type[Query[Any]] | None) -> str:
    return "" if query is None else f"{query.__module__}.{query.__qualname__}"
