"""The events of a run: reading their rows, and from rows to typed events by the types of their fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from fedclade.core import Event
from fedclade.runs.store.contents import Row, check_node
from fedclade.runs.store.shape import Shape, check_shape

E = TypeVar("E", bound=Event)


def read_events(path: Path, nodes: int) -> list[Row]:
    """Read the events of a run whose tree has so many nodes.

    Raises
    ------
    OSError, ValueError, RecursionError
        If they cannot be read, or one does not say when, what and where.
    """
    events: list[Row] = []
    for i, line in enumerate(path.read_text().splitlines(), start=1):
        event, where = json.loads(line), f"line {i} of {path.name}"
        check_shape(event, {"round": int, "kind": str, "node": int}, where)
        check_node(event["node"], nodes, where)
        events.append(event)
    return events


def events_of(rows: Sequence[Row], *types: type[E]) -> list[tuple[int, E]]:
    """Return the events of some types among the rows of a run, in order, each with its round.

    Rows whose ``kind`` is that of a type, but which lack some of its fields, are passed over: a method of one's own may
    have events of the same names, and say less.
    """
    found = ((row["round"], event_of(row, each)) for row in rows for each in types if row["kind"] == each.kind)
    return [(number, event) for number, event in found if event is not None]


def event_of(row: Row, event_type: type[E]) -> E | None:
    """Return the event of this type that a row holds; None if the row does not have what its fields need."""
    hints = _hints_of(event_type)
    wanted = [each.name for each in fields(event_type) if each.name in row or each.default is not None]
    types = {name: hints[name] for name in wanted}
    try:
        check_shape(row, {name: _shape_of(each) for name, each in types.items()}, "it")
        return event_type(**{name: _value_of(each, row[name]) for name, each in types.items()})
    except ValueError:
        return None


_hints_of = cache(get_type_hints)
"""Looked up once for each type, as a run can have many rows."""


def _shape_of(hint: Any) -> Shape:
    """Return the shape that a value of a type has in JSON, see :func:`check_shape`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return tuple(None if each is NoneType else _shape_of(each) for each in inner)
    if origin is tuple:
        return [_shape_of(inner[0])] if inner[-1] is ... else [(int, float)]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {...: _shape_of(inner[1])}
    return hint


def _value_of(hint: Any, value: Any) -> Any:
    """Return a value of JSON as its type has it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple:
        each = [inner[0]] * len(value) if inner[-1] is ... else inner
        return tuple(_value_of(part, entry) for part, entry in zip(each, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {inner[0](key): _value_of(inner[1], entry) for key, entry in value.items()}
    if hint is int and not isinstance(value, int):
        raise ValueError(f"a whole number should be one, got {value}")
    return value
