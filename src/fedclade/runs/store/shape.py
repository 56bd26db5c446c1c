"""The shape of what is read again: which keys there must be, and of what type, before anybody relies on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fedclade.core import shown

LARGEST = 2**53
"""Whole numbers beyond are not read: as a float they would be another number."""

Shape = Any
"""What a value should be like.

``str``, ``bool``; ``int`` for a whole number of at least 0; ``float`` for any number, and ``complex`` for one that is
finite; ``object`` for anything; ``None``; a tuple of alternatives; ``[shape]`` for a list; ``{"key": shape}`` for a
table, where ``"key?"`` may be missing and others may be there; ``{...: shape}`` for the shape of all other keys.
"""

_NAMES = {
    **{int: "a whole number of at least 0", float: "a number", complex: "a finite number", str: "a text"},
    **{bool: "true or false", None: "nothing"},
}


def check_shape(value: object, shape: Shape, where: str) -> None:
    """Check that a value from JSON, TOML or a table has a shape; if not, raise a ValueError that says where."""
    if isinstance(shape, dict):
        _check_table(value, cast("dict[Any, Shape]", shape), where)
    elif isinstance(shape, list):
        (each,) = cast("list[Shape]", shape)
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} should be a list, got {shown(value)}")
        for i, entry in enumerate(cast("list[object]", value)):
            check_shape(entry, each, f"{where}[{i}]")
    elif not any(_is(value, each) for each in _alternatives(shape)):
        expected = " or ".join(_NAMES[each] for each in _alternatives(shape))
        raise ValueError(f"{where} should be {expected}, got {shown(value)}")


def _check_table(value: object, shape: dict[Any, Shape], where: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} should be a table, got {shown(value)}")
    table = cast("Mapping[str, object]", value)
    named = {name: each for name, each in shape.items() if name is not ...}
    for key in table if ... in shape else ():
        if key not in named and f"{key}?" not in named:
            check_shape(table[key], shape[...], f"{where}: {key}")
    for name, each in named.items():
        key = name.removesuffix("?")
        if key in table:
            check_shape(table[key], each, f"{where}: {key}")
        elif key == name:
            raise ValueError(f"{where} lacks {key}")


def _alternatives(shape: Shape) -> Sequence[Shape]:
    return cast("tuple[Shape, ...]", shape) if isinstance(shape, tuple) else (shape,)


def _is(value: object, shape: Shape) -> bool:
    if shape is object:
        return True
    if shape is None:
        return value is None
    if shape in (int, float, complex):
        if isinstance(value, int) and not isinstance(value, bool):
            return (0 if shape is int else -LARGEST) <= value <= LARGEST
        return isinstance(value, float) and shape is not int and (shape is float or math.isfinite(value))
    return isinstance(value, shape)
