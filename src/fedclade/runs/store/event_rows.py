"""Events of a run in its folder: their rows, and typed events that are made of the rows.

Rows are converted by the type hints of the events' classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from fedclade.core import Event, shown
from fedclade.runs.store.contents import Row, Shape, check_node, check_shape

E = TypeVar("E", bound=Event)


def read_events(path: Path, nodes: int) -> list[Row]:
    """Read the rows of a run's events from a file with one JSON object in each line.

    Parameters
    ----------
    path
        The file.
    nodes
        Number of nodes of the run's parameter tree.

    Raises
    ------
    OSError, ValueError, RecursionError
        If the file cannot be read, or an event lacks its round, kind or node.
    """
    events: list[Row] = []
    for i, line in enumerate(path.read_text().splitlines(), start=1):
        event = json.loads(line)
        where = f"line {i} of {path.name}"
        check_shape(event, {"round": int, "kind": str, "node": int}, where)
        check_node(event["node"], nodes, f"{where}: node")
        events.append(event)
    return events


def events_of(rows: Sequence[Row], *types: type[E]) -> list[tuple[int, E]]:
    """Return the events of the given types from the rows of a run, in order, each with its round.

    Rows that lack some fields of their event type are left out: a user's own algorithm may report
    events of the same kind with fewer fields.
    """
    found = (
        (row["round"], event_of(row, each))
        for row in rows
        for each in types
        if row["kind"] == each.kind
    )
    return [(number, event) for number, event in found if event is not None]


def event_of(row: Row, event_type: type[E]) -> E | None:
    """Convert a row to an event of the given type; None if the row lacks some of its fields."""
    hints = _hints_of(event_type)
    wanted = [
        each.name for each in fields(event_type) if each.name in row or each.default is not None
    ]
    types = {name: hints[name] for name in wanted}
    try:
        check_shape(row, {name: _shape_of(each) for name, each in types.items()}, "it")
        return event_type(**{name: _value_of(each, row[name]) for name, each in types.items()})
    except ValueError:
        return None


_hints_of = cache(get_type_hints)
"""Cached function that returns the type hints of an event type, for runs with many rows."""


def _shape_of(hint: Any) -> Shape:
    """Convert a type hint to the shape that a JSON value must have to be read as this type.

    See :data:`Shape` for shapes.
    """
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is UnionType:
        shapes = [None if each is NoneType else _shape_of(each) for each in inner]
        # A row leaves out a list that is None, so that a list in a row must have its shape.
        lists = [each for each in shapes if isinstance(each, list)]
        return lists[0] if lists else tuple(shapes)
    if origin is tuple:
        if inner[-1] is not ...:  # a tuple of a fixed length, whose entries are numbers
            return [(int, float)]
        return [_shape_of(inner[0])]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {...: _shape_of(inner[1])}
    return hint


def _value_or_none(hint: Any, value: Any) -> Any:
    """Convert a JSON value that may be None to the type that a type hint names."""
    return None if value is None else _value_of(hint, value)


def _value_of(hint: Any, value: Any) -> Any:
    """Convert a JSON value to the type that a type hint names, such as a list to a tuple."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is UnionType:
        return _value_or_none(next(each for each in inner if each is not NoneType), value)
    if origin is tuple:
        if inner[-1] is ...:
            inner = (inner[0],) * len(value)
        return tuple(_value_of(part, entry) for part, entry in zip(inner, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {inner[0](key): _value_of(inner[1], entry) for key, entry in value.items()}
    if hint is int and not isinstance(value, int):
        raise ValueError(
            f"in the events of a run, a number should be a whole number, got {shown(value)}"
        )
    return value
