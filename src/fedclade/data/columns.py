"""Columns of tables: reading and encoding.

Errors name the table, the column and the row.
"""

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
from fedclade.data.schema import MOST_CATEGORIES, InputColumn, SchemaError, show_names

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
    """A table and its origin.

    Parameters
    ----------
    table
        The table.
    where
        Name of the table in messages, such as its path.
    client
        Name of the client that owns all of its rows; None if they belong to several.
    csv
        The CSV file that the table was read from, if any.
    """

    table: Table
    where: str
    client: str | None
    csv: CsvFile | None = None


class Rows:
    """Concatenated rows of several tables. Messages name the table and the row, from 1.

    Raises
    ------
    DataError
        If a table has no rows.
    """

    def __init__(self, sheets: Sequence[Sheet]) -> None:
        self.sheets = sheets
        self.tables = [sheet.table for sheet in sheets]
        self._categories: dict[str, tuple[NDArray[np.str_], NDArray[np.int64]]] = {}
        for sheet in sheets:
            if sheet.table.num_rows == 0:
                raise DataError(f"{sheet.where} has no rows")

    def list_other_columns(self, reserved: Sequence[str]) -> list[str]:
        """Return all columns that are not reserved; a DataError if tables have other columns."""
        first = self.sheets[0]
        expected = set(first.table.column_names)
        for sheet in self.sheets[1:]:
            present = set(sheet.table.column_names)
            problems: list[str] = []
            if missing := expected - present:
                problems.append(f"lacks {show_names(sorted(missing))}")
            if extra := present - expected:
                problems.append(f"has besides {show_names(sorted(extra))}")
            if problems:
                raise DataError(
                    f"{sheet.where} should have the columns of {first.where}, but "
                    f"{' and '.join(problems)}; name 'inputs'"
                )
        others = [column for column in first.table.column_names if column not in reserved]
        if not others:
            raise DataError(
                f"{first.where} has no column to predict from besides {show_names(reserved)}"
            )
        return others

    def kind(self, column: str) -> ColumnKind:
        """Return the kind of a column's values.

        Raises
        ------
        DataError
            If tables differ in it, or the values can be neither numbers nor texts.
        """
        kinds: list[ColumnKind | None] = [
            _detect_kind(sheet.table, column, sheet.where) for sheet in self.sheets
        ]
        different: set[ColumnKind] = {kind for kind in kinds if kind is not None}
        if different <= {"whole", "number"}:
            return "whole" if different == {"whole"} else "number"
        if different <= {"bool", "text"}:
            return "bool" if different == {"bool"} else "text"
        known: list[tuple[ColumnKind, str]] = [
            (kind, sheet.where)
            for kind, sheet in zip(kinds, self.sheets, strict=True)
            if kind is not None
        ]
        (one, here), *rest = known
        other, there = next(each for each in rest if is_number(each[0]) != is_number(one))
        raise DataError(
            f"column {column!r} should hold the same kind of values everywhere, got "
            f"{IN_WORDS[one]} in {here} and {IN_WORDS[other]} in "
            f"{there}{self._show_odd_text(column, kinds)}"
        )

    def _show_odd_text(self, column: str, kinds: Sequence[ColumnKind | None]) -> str:
        """Return the first text that is no number, for a message; empty if there is none."""
        for sheet, kind in zip(self.sheets, kinds, strict=True):
            if kind != "text":
                continue
            odd = first_other_text(sheet.table[column])
            if odd is not None:
                row, text = odd
                return f", such as {shown(text)} in row {row} of {sheet.where}"
        return ""

    def numbers(self, column: str) -> NDArray[np.float64]:
        """Return a column of numbers, float64 ``[N]``; a DataError if a cell is empty."""
        import pyarrow as pa

        parts = [table[column].cast(pa.float64()).to_numpy() for table in self.tables]
        self.refuse([~np.isfinite(part) for part in parts], column, parts)
        return np.concatenate(parts)

    def texts(self, column: str, *, empty: bool = False) -> NDArray[np.object_]:
        """Return a column of any kind as texts ``[N]``; ``empty`` allows empty texts."""
        import pyarrow as pa

        for sheet in self.sheets:
            _check_column(sheet.table, column, sheet.where)
        parts: list[NDArray[Any]] = []
        refused: list[NDArray[np.bool_]] = []
        for table in self.tables:
            texts = table[column].cast(pa.string()).to_numpy(zero_copy_only=False)
            parts.append(texts)
            refused.append(
                np.array([text is None or (not empty and not text) for text in texts], bool)
            )
        self.refuse(refused, column, parts)
        return np.concatenate(parts)

    def refuse(
        self,
        refused: Sequence[NDArray[np.bool_]],
        column: str,
        values: Sequence[NDArray[Any]],
        rule: str = "",
    ) -> None:
        """Raise a DataError for the first row that is refused.

        Parameters
        ----------
        refused
            Whether each row is refused, ``[n]`` for each table.
        column
            Name of the column.
        values
            Values of the column, ``[n]`` for each table.
        rule
            Advice for the user; by default that for empty cells.
        """
        for sheet, rows, cells in zip(self.sheets, refused, values, strict=True):
            if not rows.any():
                continue
            first = int(rows.argmax())
            more = ""
            if rows.sum() > 1:
                more = f" (and {rows.sum() - 1} more)"
            value: Any = cells[first : first + 1].tolist()[0]
            # NaN alone differs from itself.
            is_empty = value is None or value == "" or value != value
            what = "an empty cell" if is_empty else shown(value)
            fix = rule or "fill it in, or leave the row or the column out"
            raise DataError(
                f"{sheet.where}: column {column!r} has {what} in row {first + 1}{more}; {fix}"
            )

    def categories(self, column: str) -> tuple[str, ...]:
        """Return the categories of a column in sorted order, and those that pandas declares."""
        present, _ = self._find_categories(column)
        categories: set[str] = {*present}
        for table in self.tables:
            categories.update(_list_declared_categories(table, column))
        return tuple(sorted(categories))

    def describe_inputs(self, columns: Sequence[str]) -> tuple[InputColumn, ...]:
        """Return the descriptions of columns for a schema, with their categories."""
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
        """Encode the input columns of a schema, float64 ``[N, F]``.

        Raises
        ------
        SchemaError
            If a column has another kind than in the schema, or a category that it lacks.
        """
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
        """Return the position of each row's text among categories or labels, int64 ``[N]``.

        ``what`` names an entry of the list, for messages.
        """
        present, inverse = self._find_categories(column)
        place_of = {category: place for place, category in enumerate(categories)}
        places = np.array([place_of.get(category, -1) for category in present], dtype=np.int64)
        self.refuse_unknown(
            places[inverse] < 0, column, present[inverse], known=categories, what=what
        )
        return places[inverse]

    def refuse_unknown(
        self,
        refused: NDArray[np.bool_],
        column: str,
        values: NDArray[Any],
        *,
        known: Sequence[object],
        what: str,
    ) -> None:
        """Raise a SchemaError for the first row whose value is not in the schema.

        Parameters
        ----------
        refused
            Whether the value of each row is unknown, ``[N]``.
        column
            Name of the column.
        values
            Values of all rows, ``[N]``.
        known
            The values of the schema.
        what
            Name of such a value in messages, such as ``"label"``.
        """
        if not refused.any():
            return
        row = int(refused.argmax())
        unknown_values = list(dict.fromkeys(values[refused].tolist()))
        more = ""
        if len(unknown_values) > 1:
            more = f" (and {len(unknown_values) - 1} more)"
        where, row = self._locate_row(row)
        listed = ", ".join(map(str, known[:SHOWN_CATEGORIES]))
        if len(known) > SHOWN_CATEGORIES:
            listed += ", ..."
        rule = f"no {what} of the schema"
        fix = "add it to the schema, or leave the row out"
        raise SchemaError(
            f"{where}: column {column!r} has {shown(unknown_values[0])} in row {row + 1}{more}, "
            f"which is {rule} ({listed}); {fix}",
            f"column {column!r} has a value that is {rule}; {fix}",
        )

    def _locate_row(self, row: int) -> tuple[str, int]:
        """Return the name of a row's table, and the row's number in that table, from 0."""
        for sheet in self.sheets:
            if row < sheet.table.num_rows:
                return sheet.where, row
            row -= sheet.table.num_rows
        raise IndexError(row)

    def _find_categories(self, column: str) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
        """Return the sorted different texts of a column, and the position of each row's text."""
        if column not in self._categories:
            texts = self.texts(column).astype(np.str_)
            self._categories[column] = np.unique(texts, return_inverse=True)
        return self._categories[column]


def arrow_table(frame: Any) -> Table:
    """Convert a data frame to an Arrow table; a DataError if that is not possible."""
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
        if hasattr(frame, "columns"):
            # The arguments of pyarrow's error name the column.
            reason = " ".join(map(str, error.args))
            raise DataError(
                f"the data frame should have values of one type in each column: {reason}"
            ) from error
        raise DataError(
            f"the data frame should be one of pandas or polars, or Arrow's, got {shown(frame)}: "
            f"{error}"
        ) from error


def is_number(kind: ColumnKind) -> bool:
    """Return whether a column of this kind has numbers."""
    return kind in ("whole", "number")


def _check_column(table: Table, column: str, where: str) -> None:
    """Check that a table has exactly one column of a name."""
    if column not in table.column_names:
        raise DataError(unknown(f"column of {where}:", column, table.column_names))
    if table.column_names.count(column) > 1:
        raise DataError(
            f"{where} has {table.column_names.count(column)} columns {column!r}; their names "
            "should differ"
        )


def _detect_kind(table: Table, column: str, where: str) -> ColumnKind | None:
    """Return the kind of a column's values in one table; None if all its cells are empty."""
    import pyarrow.types as types

    _check_column(table, column, where)
    found = table.schema.field(column).type
    if types.is_dictionary(found):
        found = found.value_type
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


def _list_declared_categories(table: Table, column: str) -> list[str]:
    """Return the categories that pandas declares for a column, also those that no row has."""
    import pyarrow as pa
    import pyarrow.types as types

    is_of_pandas = b"pandas" in (table.schema.metadata or {})
    if not is_of_pandas or not types.is_dictionary(table.schema.field(column).type):
        return []
    categories: list[str] = []
    for chunk in table[column].chunks:
        categories += chunk.dictionary.cast(pa.string()).to_pylist()
    return [category for category in categories if category]
