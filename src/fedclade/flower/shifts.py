"""Whether the labels of clients have shifted, in messages: a number in the query, and a yes or no in the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from flwr.app import MessageType, RecordDict
from torch import Tensor

from fedclade.core import ShiftQuery, UpdateError
from fedclade.flower.policy import check_allowed
from fedclade.flower.wire import Content, shown

Request = Callable[
    [Mapping[int, RecordDict], str, str, Callable[[int, Content], bool], dict[int, str]], Iterator[tuple[int, bool]]
]


def described(query: ShiftQuery) -> dict[str, Any]:
    """Return the query as plain values of a message."""
    return {"round": query.round, "share": query.share, "by_label": query.by_label}


def read_query(client: int, content: Content) -> ShiftQuery:
    """Return the query that a message to a client puts; an UpdateError if it cannot be."""
    number, share = content.get("round", int), content.get("share", float)
    if number < 1 or not 0 <= share <= 2:
        raise UpdateError(f"asked for shifts by {shown(share)} of the examples in round {shown(number)}")
    return ShiftQuery([client], number, share, content.get("by_label", bool))


def asked(query: ShiftQuery, content: RecordDict, ask: Request, connected: int) -> Tensor:
    """Ask clients, and return who has shifted, bool ``[n]``: who does not answer has not.

    An UpdateError is raised if no client allows the question, of most that are connected.
    """
    left_out: dict[int, str] = {}

    def read(client: int, content: Content) -> bool:
        content.has_only(())
        if (number := content.get("round", int)) != query.round:
            raise UpdateError(f"answer of round {shown(number)}, expected {query.round}")
        return content.get("shifted", bool)

    answers = dict(ask(dict.fromkeys(query.ids, content), MessageType.QUERY, "shifts", read, left_out))
    check_allowed("shifts", query.ids, left_out, connected)
    return torch.tensor([answers.get(client, False) for client in query.ids], dtype=torch.bool)
