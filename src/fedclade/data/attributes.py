"""Attributes of clients for reports, such as the size or country of a hospital.

Reports compare clusters by these attributes. Attributes are never inputs of a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fedclade.core import DataError, shown
from fedclade.data.columns import arrow_table, read_sheet

Value = float | str | None
"""A number, a text, or None for an empty cell."""

Attributes = Mapping[str, Mapping[str, Value]]
"""Values of attributes by the name of the client, then by the name of the attribute."""

CLIENT = "client"
"""Name of the column with the clients' names; if missing, the first column is used."""


def read_attributes(path: str | Path) -> Attributes:
    """Read clients' attributes from a CSV, TSV or Parquet file with a row for each client.

    The names of the clients are in the column ``client``, or else in the first column.

    Raises
    ------
    DataError
        If the file cannot be read, has no column of attributes, or has two rows for one client.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"cannot read attributes of clients: there is no file {path}; check the path"
        )
    return _attributes_of(read_sheet(path).table, str(path))


def as_attributes(source: Any) -> Attributes:
    """Convert a path, a data frame, or a mapping of mappings to attributes of clients.

    Raises
    ------
    DataError
        If the source has another form, or a table cannot be used for one of the reasons that
        :func:`read_attributes` lists.
    """
    if isinstance(source, str | Path):
        return read_attributes(source)
    if not isinstance(source, Mapping):
        return _attributes_of(arrow_table(source), "the data frame of attributes")
    found: dict[str, dict[str, Value]] = {}
    for name, values in cast("Mapping[Any, Any]", source).items():
        if not isinstance(values, Mapping):
            raise DataError(
                "attributes should map the name of each client to a mapping of its attributes, "
                f"got {shown(values)} for {shown(name)}"
            )
        entries = cast("Mapping[Any, Any]", values).items()
        found[str(name)] = {str(key): _as_value(value) for key, value in entries}
    return found


def check_attributes(attributes: Attributes, names: Sequence[str]) -> None:
    """Check that at least one of the clients in ``names`` has attributes.

    If no client has attributes, names of clients are probably misspelled.

    Raises
    ------
    DataError
        If no client has attributes. The message has the first names in the attributes, and the
        first names of the federation's clients.
    """
    if any(name in attributes for name in names):
        return
    raise DataError(
        f"the attributes describe clients named {shown(sorted(attributes)[:3])}, but the "
        "federation has no client of these names; use the names of the federation's clients, such "
        f"as {shown(list(names)[:3])}"
    )


def _attributes_of(table: Any, where: str) -> Attributes:
    names = list(table.column_names)
    if len(set(names)) < len(names):
        raise DataError(f"{where} should have columns with different names, got {shown(names)}")
    if len(names) < 2:
        raise DataError(
            f"{where} should have a column with the names of the clients, and other columns with "
            f"their attributes, got the columns {shown(names)}"
        )
    key = CLIENT if CLIENT in names else names[0]
    others = [name for name in names if name != key]
    columns = {name: _as_values(table[name].to_pylist()) for name in others}
    found: dict[str, dict[str, Value]] = {}
    for row, cell in enumerate(table[key].to_pylist()):
        client = _name_of(cell)
        if client in found:
            raise DataError(
                f"{where} should have one row for each client, got client {client!r} again in row "
                f"{row + 1}"
            )
        found[client] = {name: column[row] for name, column in columns.items()}
    return found


def _name_of(cell: object) -> str:
    """Return a client's name as text, given its cell in a table.

    A whole number is written without decimals, as a column of numbers may contain client 3 as 3.0.
    """
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if cell is None:
        return ""
    return str(cell).strip()


def _as_values(cells: Sequence[object]) -> list[Value]:
    """Convert a column to numbers if all non-empty cells are numbers, otherwise to texts."""
    values = [_as_value(cell) for cell in cells]
    numbers = [_as_number(value) for value in values]
    if all(
        value is None or number is not None for value, number in zip(values, numbers, strict=True)
    ):
        return list(numbers)
    return [value if value is None else _as_text(value) for value in values]


def _as_value(cell: object) -> Value:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int | float):
        if not math.isfinite(cell):
            return None
        return float(cell)
    if cell is None or not str(cell).strip():
        return None
    return str(cell).strip()


def _as_number(value: Value) -> float | None:
    if isinstance(value, float):
        return value
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _as_text(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}"
