"""Tables with the same columns, read column by column; what is of no use is refused by table, column and row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import DataError, shown, unknown
from fedclade.data.cell_values import first_other_text
from fedclade.data.csv_format import CsvFile
from fedclade.data.schema import MOST_CATEGORIES, InputColumn, SchemaError

Table = Any
"""A ``pyarrow.Table``: pyarrow is imported where a table is read."""

SHOWN_CATEGORIES = 5
"""Number of known categories that a message lists."""

ColumnKind = Literal["whole", "number", "bool", "text"]

IN_WORDS: Mapping[ColumnKind, str] = {
    "whole": "whole numbers",
    "number": "numbers",
    "bool": "truth values",
    "text": "texts",
}


@dataclass(frozen=True, eq=False)
class Sheet:
    """One table, where it is from, and whose it is, if it is one client's alone."""

    table: Table
    where: str
    client: str | None
    csv: CsvFile | None = None  # that the table was read from


class Rows:
    """The rows of several tables, one behind the other; every message names the table and the row, from 1 on."""

    def __init__(self, sheets: Sequence[Sheet]) -> None:
        self.sheets, self.tables = sheets, [sheet.table for sheet in sheets]
        self._found: dict[str, tuple[NDArray[np.str_], NDArray[np.int64]]] = {}
        for sheet in sheets:
            if sheet.table.num_rows == 0:
                raise DataError(f"{sheet.where} has no rows")

    def others(self, apart: Sequence[str]) -> list[str]:
        """Return all columns but some; all tables must have the same."""
        first = self.sheets[0]
        for sheet in self.sheets[1:]:
            there, expected = set(sheet.table.column_names), set(first.table.column_names)
            if there != expected:
                differ = {"lacks": expected - there, "has besides": there - expected}
                what = " and ".join(
                    f"{verb} {', '.join(map(repr, sorted(odd)))}"
                    for verb, odd in differ.items()
                    if odd
                )
                raise DataError(
                    f"{sheet.where} should have the columns of {first.where}, but {what}; name "
                    "'inputs'"
                )
        found = [column for column in first.table.column_names if column not in apart]
        if not found:
            raise DataError(
                f"{first.where} has no column to predict from besides {', '.join(map(repr, apart))}"
            )
        return found

    def kind(self, column: str) -> ColumnKind:
        """Return what a column holds; a DataError if that differs, or is of no use."""
        kinds: list[ColumnKind | None] = [
            _kind(sheet.table, column, sheet.where) for sheet in self.sheets
        ]
        found: set[ColumnKind] = {kind for kind in kinds if kind is not None}
        if found <= {"whole", "number"}:
            return "whole" if found == {"whole"} else "number"
        if found <= {"bool", "text"}:
            return "bool" if found == {"bool"} else "text"
        known: list[tuple[ColumnKind, str]] = [
            (kind, sheet.where) for kind, sheet in zip(kinds, self.sheets, strict=True) if kind
        ]
        (one, here), *rest = known
        other, there = next(each for each in rest if is_number(each[0]) != is_number(one))
        raise DataError(
            f"column {column!r} should hold the same kind of values everywhere, got "
            f"{IN_WORDS[one]} in {here} and {IN_WORDS[other]} in "
            f"{there}{self._odd_text(column, kinds)}"
        )

    def _odd_text(self, column: str, kinds: Sequence[ColumnKind | None]) -> str:
        """Return the first text that is no number, for a message; empty if there is none."""
        for sheet, kind in zip(self.sheets, kinds, strict=True):
            found = first_other_text(sheet.table[column]) if kind == "text" else None
            if found is not None:
                row, text = found
                return f", such as {shown(text)} in row {row} of {sheet.where}"
        return ""

    def numbers(self, column: str) -> NDArray[np.float64]:
        """Return a column of numbers."""
        import pyarrow as pa

        parts = [table[column].cast(pa.float64()).to_numpy() for table in self.tables]
        self.refuse([~np.isfinite(part) for part in parts], column, parts)
        return np.concatenate(parts)

    def texts(self, column: str, *, empty: bool = False) -> NDArray[np.object_]:
        """Return a column as texts, whatever it holds, which may be ``empty`` ones."""
        import pyarrow as pa

        for sheet in self.sheets:
            _require(sheet.table, column, sheet.where)
        parts = [
            table[column].cast(pa.string()).to_numpy(zero_copy_only=False) for table in self.tables
        ]
        self.refuse(
            [
                np.array([text is None or (not empty and not text) for text in p], bool)
                for p in parts
            ],
            column,
            parts,
        )
        return np.concatenate(parts)

    def refuse(
        self,
        odd: Sequence[NDArray[np.bool_]],
        column: str,
        values: Sequence[NDArray[Any]],
        rule: str = "",
    ) -> None:
        """Raise a DataError for the first row that is odd."""
        for sheet, rows, held in zip(self.sheets, odd, values, strict=True):
            if rows.any():
                first, more = (
                    int(rows.argmax()),
                    f" (and {rows.sum() - 1} more)" if rows.sum() > 1 else "",
                )
                value: Any = held[first : first + 1].tolist()[0]
                what = (
                    "an empty cell"
                    if value is None or value == "" or value != value
                    else shown(value)
                )
                fix = rule or "fill it in, or leave the row or the column out"
                raise DataError(
                    f"{sheet.where}: column {column!r} has {what} in row {first + 1}{more}; {fix}"
                )

    def categories(self, column: str) -> tuple[str, ...]:
        """Return the categories of a column in sorted order, with those that a pandas data frame declares."""
        found, _ = self._categories_of(column)
        declared = {
            category for table in self.tables for category in _declared_categories(table, column)
        }
        return tuple(sorted({*found, *declared}))

    def describe_inputs(self, columns: Sequence[str]) -> tuple[InputColumn, ...]:
        """Return the columns as a schema has them, with their categories."""
        described: list[InputColumn] = []
        for column in columns:
            if is_number(self.kind(column)):
                described.append(InputColumn(column))
                continue
            categories = self.categories(column)
            if len(categories) > MOST_CATEGORIES:
                raise DataError(
                    f"column {column!r} holds {len(categories):,} different texts, too many to "
                    "encode by category; leave it out of 'inputs', or take its words as the only "
                    f"input by text = {column!r}"
                )
            described.append(InputColumn(column, "category", categories))
        return tuple(described)

    def encode_inputs(self, columns: Sequence[InputColumn]) -> Tensor:
        """Return the input columns of a schema as float64 ``[N, F]``; a SchemaError if they do not fit it."""
        parts: list[NDArray[Any]] = []
        for column in columns:
            kind = self.kind(column.name)
            if is_number(kind) != (column.kind == "number"):
                expected = "numbers" if column.kind == "number" else "texts"
                raise SchemaError(
                    f"{self.sheets[0].where}: column {column.name!r} should hold {expected} by the "
                    f"schema, got {IN_WORDS[kind]}"
                )
            if column.kind == "number":
                parts.append(self.numbers(column.name))
                continue
            places = self.category_places(column.name, column.categories, "category")
            parts += [places == number for number in range(len(column.categories))]
        return torch.from_numpy(np.stack(parts, axis=1).astype(np.float64))

    def category_places(
        self, column: str, categories: Sequence[str], what: str
    ) -> NDArray[np.int64]:
        """Return the place of each row's text among the categories or labels of a schema, int64 ``[N]``."""
        found, inverse = self._categories_of(column)
        place_of = {category: place for place, category in enumerate(categories)}
        places = np.array([place_of.get(category, -1) for category in found], dtype=np.int64)
        self.refuse_unknown(places[inverse] < 0, column, found[inverse], categories, what)
        return places[inverse]

    def refuse_unknown(
        self,
        odd: NDArray[np.bool_],
        column: str,
        values: NDArray[Any],
        known: Sequence[object],
        what: str,
    ) -> None:
        """Raise a SchemaError for the first row whose value is not in the schema."""
        if not odd.any():
            return
        row = int(odd.argmax())
        unknown_values = list(dict.fromkeys(values[odd].tolist()))
        more = f" (and {len(unknown_values) - 1} more)" if len(unknown_values) > 1 else ""
        where, row = self._place_of(row)
        listed = ", ".join(map(str, known[:SHOWN_CATEGORIES]))
        listed += ", ..." if len(known) > SHOWN_CATEGORIES else ""
        rule = f"no {what} of the schema"
        fix = "add it to the schema, or leave the row out"
        raise SchemaError(
            f"{where}: column {column!r} has {shown(unknown_values[0])} in row {row + 1}{more}, "
            f"which is {rule} ({listed}); {fix}",
            f"column {column!r} has a value that is {rule}; {fix}",
        )

    def _place_of(self, row: int) -> tuple[str, int]:
        """Return the table of a row, and its place in that table."""
        for sheet in self.sheets:
            if row < sheet.table.num_rows:
                return sheet.where, row
            row -= sheet.table.num_rows
        raise IndexError(row)

    def _categories_of(self, column: str) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
        """Return the different texts of a column in sorted order, and the place of each row's text among them."""
        if column not in self._found:
            self._found[column] = np.unique(self.texts(column).astype(np.str_), return_inverse=True)
        return self._found[column]


def arrow_table(frame: Any) -> Table:
    """Return a data frame as an Arrow table."""
    import pyarrow as pa

    try:
        if isinstance(frame, pa.Table):
            return frame
        if hasattr(frame, "to_arrow"):  # polars
            return frame.to_arrow()
        if type(frame).__module__.partition(".")[0] == "pandas":
            return pa.Table.from_pandas(frame, preserve_index=False)
        return pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        if hasattr(frame, "columns"):  # the reason names the column
            reason = " ".join(map(str, error.args))
            raise DataError(
                f"the data frame should have values of one type in each column: {reason}"
            ) from error
        raise DataError(
            f"the data frame should be one of pandas or polars, or Arrow's, got {shown(frame)}: "
            f"{error}"
        ) from error


def is_number(kind: ColumnKind) -> bool:
    """Return whether a column holds numbers."""
    return kind in ("whole", "number")


def _require(table: Table, column: str, where: str) -> None:
    if column not in table.column_names:
        raise DataError(unknown(f"column of {where}:", column, table.column_names))
    if table.column_names.count(column) > 1:
        raise DataError(
            f"{where} has {table.column_names.count(column)} columns {column!r}; their names "
            "should differ"
        )


def _kind(table: Table, column: str, where: str) -> ColumnKind | None:
    """Return what a column of a table holds; None if all its cells are empty."""
    import pyarrow.types as types

    _require(table, column, where)
    found = table.schema.field(column).type
    found = found.value_type if types.is_dictionary(found) else found
    if types.is_null(found):
        return None
    if types.is_boolean(found):
        return "bool"
    if types.is_integer(found):
        return "whole"
    if types.is_floating(found) or types.is_decimal(found):
        return "number"
    if types.is_string(found) or types.is_large_string(found) or types.is_string_view(found):
        return "text"
    if types.is_binary(found) or types.is_large_binary(found):
        raise DataError(
            f"{where}: column {column!r} holds bytes and no texts; leave it out by 'drop'"
        )
    raise DataError(
        f"{where}: column {column!r} should hold numbers or texts, got {found}; leave it out of "
        "'inputs'"
    )


def _declared_categories(table: Table, column: str) -> list[str]:
    """Return the categories that a pandas data frame declares for a column, whether its rows have them or not."""
    import pyarrow as pa
    import pyarrow.types as types

    is_of_pandas = b"pandas" in (table.schema.metadata or {})
    if not is_of_pandas or not types.is_dictionary(table.schema.field(column).type):
        return []
    chunks = [chunk.dictionary.cast(pa.string()).to_pylist() for chunk in table[column].chunks]
    return [category for chunk in chunks for category in chunk if category]
