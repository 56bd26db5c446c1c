"""The kinds of questions that a client answers over a network: the one table of them.

A kind that is not in the table is refused. A kind that is about a client's data names the class of
its query, which declares what a reply reveals. Clients with privacy or secure aggregation refuse a
class that declares nothing.

Kinds of :class:`~fedclade.RowQuery` need no more than their class. A package or a user brings one
by ``client_app(queries=[...])`` or by an entry point of the group ``fedclade.queries``, never by a
name in a message, and a client answers it only if its policy names the kind.
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
"""Names of values that a message has anyway, so no field of a query can have them."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is known of a kind of question.

    Parameters
    ----------
    query
        Class of its query; None for a question of the protocol, which is not about the client's
        data.
    allowed_as
        Name by which a client's policy allows it; empty if it needs no permission.
    takes_sums
        Whether the question carries the statistics of all clients' examples, if these scale inputs
        or weight labels.
    """

    query: type[Query[Any]] | None = None
    allowed_as: str = ""
    takes_sums: bool = False

    @property
    def row_query(self) -> type[RowQuery] | None:
        """Class of its query, if the reply is one row of numbers."""
        if self.query is not None and issubclass(self.query, RowQuery):
            return self.query
        return None


def kind_of_rows(query: type[RowQuery]) -> Kind:
    """Return the kind of question of a class of row queries."""
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
"""Every kind that this process knows, by the name in a message; :func:`register_query` adds to it."""

SKETCH = "sketch"
"""What a policy calls the signs of a sketch of an update, which leave unmasked beside a masked update."""

ALWAYS = ("update", "nothing")
"""What needs no name in a policy's ``disclose``: updates leave masked or with noise, and nothing is nothing."""


def register_query(query: type[RowQuery]) -> None:
    """Add a class of row queries to the table of kinds.

    Raises
    ------
    ConfigError
        If it is no class of row queries, does not declare what it must, cannot travel, or has the
        name of another kind.
    """
    if not (isinstance(query, type) and issubclass(query, RowQuery)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"queries should be subclasses of fedclade.RowQuery, got {shown(query)}")
    check_travels(query)
    known = KINDS.get(query.kind)
    # A notebook that is run again defines its class again, so the latest class counts.
    is_same = known is not None and _name_of(known.query) == _name_of(query)
    if known is not None and not is_same:
        raise ConfigError(
            f"kind {query.kind!r} of {query.__name__} is the name of another kind of question; "
            "give it another in its class"
        )
    KINDS[query.kind] = kind_of_rows(query)


def check_travels(query: type[RowQuery]) -> None:
    """Check that a class of row queries can travel over a network.

    Raises
    ------
    ConfigError
        If it does not declare what it must, or a field has a name that messages use otherwise.
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
    """Add those kinds of some names to the table that installed packages bring.

    Raises
    ------
    ConfigError
        If an entry point cannot be loaded, or its name is not that of the kind.
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
    """Return the names of what a policy may disclose, each once, in the order of the table."""
    declared = [kind.query.discloses for kind in KINDS.values() if kind.query is not None]
    return tuple(
        dict.fromkeys([SKETCH, *(name for name in declared if name and name not in ALWAYS)])
    )


def _name_of(query: type[Query[Any]] | None) -> str:
    return "" if query is None else f"{query.__module__}.{query.__qualname__}"
