"""The kinds of questions that a client answers over a network: the one table of them.

What is not in it is refused. A kind that is about a client's data names the class of its query, which
declares what a reply reveals. Clients with privacy or secure aggregation refuse a class that declares
nothing, so a new kind is closed to them until somebody has thought about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict

from fedclade.channel import Channel
from fedclade.core import (
    ChoiceQuery,
    DescriptorQuery,
    EvaluationQuery,
    Query,
    ShiftQuery,
    StatisticsQuery,
    SubspaceQuery,
    UpdateQuery,
)
from fedclade.flower.wire import Content

Answer = Callable[[Channel, int, Content], RecordDict]
"""Answers a question, given the client as it can be queried, its id, and the content of the question."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is known of a kind of question.

    Parameters
    ----------
    query
        The class of its query; None for a question of the protocol, which is not about the client's data.
    allowed_as
        The name by which a client's policy allows it; empty if it needs no permission.
    takes_sums
        Whether the question carries what all clients' examples come to, where they scale inputs or
        weigh labels by that.
    answer
        How a client answers a kind that is not one of fedclade's own.
    """

    query: type[Query[Any]] | None = None
    allowed_as: str = ""
    takes_sums: bool = False
    answer: Answer | None = None


KINDS: dict[str, Kind] = {
    "hello": Kind(),
    "initial": Kind(),
    "train": Kind(query=UpdateQuery, allowed_as="train", takes_sums=True),
    "gradients": Kind(query=UpdateQuery, allowed_as="gradients", takes_sums=True),
    "evaluate": Kind(query=EvaluationQuery, allowed_as="evaluate", takes_sums=True),
    "choose": Kind(query=ChoiceQuery, allowed_as="evaluate", takes_sums=True),
    "subspaces": Kind(query=SubspaceQuery, allowed_as="subspaces", takes_sums=True),
    "statistics": Kind(query=StatisticsQuery, allowed_as="statistics"),
    "shifts": Kind(query=ShiftQuery, allowed_as="shifts"),
    "descriptors": Kind(query=DescriptorQuery, allowed_as="descriptors", takes_sums=True),
    "keys": Kind(allowed_as="train"),
    "shares": Kind(allowed_as="train"),
    "masked": Kind(query=UpdateQuery, allowed_as="train", takes_sums=True),
    "agree": Kind(allowed_as="train"),
    "unmask": Kind(allowed_as="train"),
}
"""Every kind, by the name that a question says. A package may add kinds of its own, each with an ``answer``."""

SKETCH = "sketch"
"""What a policy calls the signs of a sketch of an update, which leave unmasked beside a masked update."""

ALWAYS = ("update", "nothing")
"""What needs no name in a policy's ``disclose``: updates leave masked or with noise, and nothing is nothing."""


def allowable() -> tuple[str, ...]:
    """Return the names that a policy may allow, each once, in the order of the table."""
    return tuple(dict.fromkeys(kind.allowed_as for kind in KINDS.values() if kind.allowed_as))


def disclosures() -> tuple[str, ...]:
    """Return the names of what a policy may disclose, each once, in the order of the table."""
    declared = [kind.query.discloses for kind in KINDS.values() if kind.query is not None]
    return tuple(dict.fromkeys([SKETCH, *(name for name in declared if name and name not in ALWAYS)]))
