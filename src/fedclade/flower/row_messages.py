"""Row queries in messages: the fields of a query are sent, and one row of numbers is returned.

Plain fields travel as values and models as vectors, under the names of the fields. A row of one
number is returned as a value, and any other row as a vector. A reply to a query of a round repeats
the round's number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Array, RecordDict
from torch import Tensor

from fedclade.core import ConfigError, RowQuery, UpdateError, field_types, models_of
from fedclade.flower import wire
from fedclade.flower.wire import Content, shown


def values_of(query: RowQuery) -> dict[str, Any]:
    """Return the plain values of a query."""
    plain = field_types(type(query)).plain
    return {name: kind(getattr(query, name)) for name, kind in plain.items()}


def vectors_of(query: RowQuery) -> dict[str, Array]:
    """Return the vectors of a query."""
    return {name: wire.raw_vector(model) for name, model in models_of(query).items()}


def read_query(
    kind: type[RowQuery], client: int, content: Content, read_model: Callable[[str], Tensor]
) -> RowQuery:
    """Return the query in a message to a client.

    Parameters
    ----------
    kind
        Class of the query.
    client
        Client that is queried.
    content
        Content of the message.
    read_model
        Function that returns the model ``[S]`` with a name in the message.

    Raises
    ------
    UpdateError
        If the message cannot be read, or its values are not possible.
    """
    types = field_types(kind)
    fields: dict[str, Any] = {name: content.get(name, of) for name, of in types.plain.items()}
    for name in types.models:
        fields[name] = read_model(name)
    try:
        return kind(ids=[client], **fields)
    except ConfigError as error:
        raise UpdateError(f"asked for {kind.kind} that are not possible: {error}") from error


def reply_with(query: RowQuery, row: Tensor) -> RecordDict:
    """Return a client's reply with its row."""
    name = query.reply_name or query.kind
    values = {"round": query.round_number} if query.round_number else {}
    if row.dim() == 0:
        return wire.record({**values, name: row.item()})
    return wire.record(values, {name: wire.raw_vector(row.flatten())})


def read_row(query: RowQuery, content: Content, shape: tuple[int, ...]) -> Tensor:
    """Check and read the row of a client.

    Raises
    ------
    UpdateError
        If the reply is of another round, or the row has another shape or is not valid.
    """
    name = query.reply_name or query.kind
    content.has_only((name,) if shape else ())
    if query.round_number and (number := content.get("round", int)) != query.round_number:
        raise UpdateError(f"answer of round {shown(number)}, expected {query.round_number}")
    row = (
        _read_vector(content, name, shape, query.dtype)
        if shape
        else _read_number(content, name, query.dtype)
    )
    if not query.is_valid(row):
        raise UpdateError(f"{query.kind} that no client's data has, or that are not finite")
    return row


def largest_reply(query: RowQuery, shape: tuple[int, ...]) -> int:
    """Return the largest number of bytes of the vectors of a reply."""
    return math.prod(shape) * query.dtype.itemsize if shape else 0


def _read_number(content: Content, name: str, dtype: torch.dtype) -> Tensor:
    kind = {torch.bool: bool, torch.int64: int}.get(dtype, float)
    value = content.get(name, kind)
    try:
        return torch.tensor(value, dtype=dtype)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise UpdateError(f"{name} {shown(value)} is no number of type {dtype}") from error


def _read_vector(content: Content, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype != torch.bool:
        return wire.read_vector(content.vector(name), shape, dtype, name)
    bits = wire.read_vector(content.vector(name), shape, torch.uint8, name)
    if bool((bits > 1).any()):
        raise UpdateError(f"{name} should be a vector of 0 and 1, got {int(bits.max())}")
    return bits.bool()
