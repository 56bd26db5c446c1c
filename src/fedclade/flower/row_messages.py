"""Messages of row queries, which request one row of numbers about a client's data.

Plain fields of a query are sent as values and models as vectors, under the names of the fields. A
row of one number is returned as a value, and any other row as a vector. The reply to a query that
belongs to a round repeats the number of the round.
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
    """Return the plain fields of a row query by name, for a message."""
    plain = field_types(type(query)).plain
    return {name: kind(getattr(query, name)) for name, kind in plain.items()}


def vectors_of(query: RowQuery) -> dict[str, Array]:
    """Return the models of a row query by field name, as vectors for a message."""
    return {name: wire.raw_vector(model) for name, model in models_of(query).items()}


def read_query(
    kind: type[RowQuery], client: int, content: Content, read_model: Callable[[str], Tensor]
) -> RowQuery:
    """Read a row query from a message to a client.

    Parameters
    ----------
    kind
        Class of the query.
    client
        Client that is queried.
    content
        Content of the message.
    read_model
        Function that returns the model with a given name in the message, as a vector ``[S]``.

    Raises
    ------
    UpdateError
        If a value is missing, malformed or out of range.
    """
    types = field_types(kind)
    fields: dict[str, Any] = {name: content.get(name, of) for name, of in types.plain.items()}
    for name in types.models:
        fields[name] = read_model(name)
    try:
        return kind(ids=[client], **fields)
    except ConfigError as error:
        raise UpdateError(f"the query for {kind.kind} has an invalid value: {error}") from error


def reply_with(query: RowQuery, row: Tensor) -> RecordDict:
    """Return a client's reply to a row query: a message with the row of numbers."""
    name = query.reply_name or query.kind
    values = {"round": query.round_number} if query.round_number else {}
    if row.dim() == 0:
        return wire.record({**values, name: row.item()})
    return wire.record(values, {name: wire.raw_vector(row.flatten())})


def read_row(query: RowQuery, content: Content, shape: tuple[int, ...]) -> Tensor:
    """Check and read a client's reply to a row query.

    Parameters
    ----------
    query
        The query.
    content
        Content of the reply.
    shape
        Expected shape of the row; empty for a single number.

    Raises
    ------
    UpdateError
        If the reply belongs to another round, or the row has another shape or invalid numbers.
    """
    name = query.reply_name or query.kind
    content.has_only((name,) if shape else ())
    if query.round_number and (number := content.get("round", int)) != query.round_number:
        raise UpdateError(
            f"the reply has the round {shown(number)}, expected {query.round_number} as in the "
            "request, so the server ignores it"
        )
    row = (
        _read_vector(content, name, shape, query.dtype)
        if shape
        else _read_number(content, name, query.dtype)
    )
    if not query.is_valid(row):
        raise UpdateError(
            f"the numbers in the reply to the query {query.kind!r} are not finite, or outside the "
            "range that the query allows"
        )
    return row


def largest_reply(query: RowQuery, shape: tuple[int, ...]) -> int:
    """Return the largest number of bytes of the vectors in a reply to a row query.

    ``shape`` is the shape of the row; it is empty for a single number, which is no vector.
    """
    return math.prod(shape) * query.dtype.itemsize if shape else 0


def _read_number(content: Content, name: str, dtype: torch.dtype) -> Tensor:
    """Read a row that is a single number from a reply; raise an UpdateError if it is invalid."""
    kind = {torch.bool: bool, torch.int64: int}.get(dtype, float)
    value = content.get(name, kind)
    try:
        return torch.tensor(value, dtype=dtype)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise UpdateError(
            f"{name!r} of the reply should be a number of type {dtype}, got {shown(value)}"
        ) from error


def _read_vector(content: Content, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Read a row of several numbers from a reply; raise an UpdateError if it is invalid.

    Booleans are sent as bytes of 0 and 1.
    """
    if dtype != torch.bool:
        return wire.read_vector(content.vector(name), shape, dtype, name)
    bits = wire.read_vector(content.vector(name), shape, torch.uint8, name)
    if bool((bits > 1).any()):
        raise UpdateError(
            f"vector {name!r} of the reply should contain only 0 and 1, got {int(bits.max())}"
        )
    return bits.bool()
