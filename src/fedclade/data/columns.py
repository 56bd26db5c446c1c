"""Reading of tables from files and data frames, and encoding of their columns as numbers.

A *sheet* is a table and the file or data frame that it comes from. Errors name the sheet, the
column and the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import DataError, shown, unknown
from fedclade.data.cell_values import arrow_compute, as_strings, first_other_text
from fedclade.data.csv_format import DEFAULT_SEPARATORS, CsvFile
from fedclade.data.schema import MOST_CATEGORIES, InputColumn, SchemaError, show_names

if TYPE_CHECKING:
    from torch import Tensor

Table = Any
"""A ``pyarrow.Table``: pyarrow is imported where a table is read."""

PARQUET = ".parquet"

SHOWN_CATEGORIES = 5
"""Largest number of known categories that an error message lists."""

ColumnKind = Literal["whole", "number", "bool", "text"]

IN_WORDS: Mapping[ColumnKind, str] = {
    "whole": "whole numbers",
    "number": "numbers",
    "bool": "truth values",
    "text": "texts",
}


@dataclass(frozen=True, eq=False)
class Sheet:
    """A table and the file or data frame that it comes from.

    Parameters
    ----------
    table
        Rows and columns as an Arrow table.
    where
        Name of the table in messages, such as its path.
    client
        Name of the client that owns all rows of the table; not used if a column names the client of
        each row. None for a data frame.
    csv
        The CSV file that the table was read from; None for other files and data frames.
    numbers
        Number of each row of the table in the file or data frame, from 1; None if no row was left
        out.
    """

    table: Table
    where: str
    client: str | None
    csv: CsvFile | None = None
    numbers: NDArray[np.int64] | None = None

    def number_row(self, row: int) -> int:
        """Return the number by which messages name a row: its number in the file or data frame.

        The result counts from 1 and includes rows that were left out of the table. ``row`` counts
        the rows of the table from 0.
        """
        if self.numbers is None:
            return row + 1
        return int(self.numbers[row])

    def without(self, is_left_out: NDArray[np.bool_]) -> Sheet:
        """Return the sheet without the rows for which ``is_left_out`` is true."""
        if not is_left_out.any():
            return self
        kept = np.flatnonzero(~is_left_out)
        if self.numbers is None:
            numbers = kept + 1
        else:
            numbers = self.numbers[kept]
        return replace(self, table=self.table.take(kept), numbers=numbers)


def read_sheet(path: Path, separator: str | None = None, encoding: str | None = None) -> Sheet:
    """Read a CSV, TSV or Parquet file.

    The field ``client`` of the sheet is the name of the file without its suffix.

    Parameters
    ----------
    path
        The file.
    separator, encoding
        Character between cells, and encoding of a text file; detected if None.

    Raises
    ------
    DataError
        If the file name has another suffix, or the file cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in (*DEFAULT_SEPARATORS, PARQUET):
        raise DataError(
            f"{path} should end in {', '.join(DEFAULT_SEPARATORS)} or {PARQUET}; save the table in "
            "one of these formats"
        )
    if suffix == PARQUET:
        return Sheet(_read_parquet(path), str(path), path.stem)
    file = CsvFile.detect(path, separator, encoding)
    return Sheet(file.read(), str(path), path.stem, file)


def _read_parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path.absolute()) as parquet:
            return parquet.read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"cannot read {path}, which should be a Parquet file: {error}; check its permissions, or "
            "save the table again"
        ) from error


class Rows:
    """Concatenated rows of the tables of several sheets, read and encoded column by column.

    N is the number of rows of all tables. Errors name the table and the row, from 1.

    Raises
    ------
    DataError
        If a table has no rows.
    """

    def __init__(self, sheets: Sequence[Sheet]) -> None:
        self.sheets = sheets
        self.tables = [sheet.table for sheet in sheets]
        self._gaps: dict[str, NDArray[np.bool_]] = {}
        self._categories: dict[str, tuple[NDArray[np.str_], NDArray[np.int64]]] = {}
        for sheet in sheets:
            if sheet.table.num_rows == 0:
                raise DataError(f"{sheet.where} should have at least 1 row, got none")

    def list_other_columns(self, reserved: Sequence[str]) -> list[str]:
        """Return the columns that are not reserved for another role, such as target or client.

        Raises
        ------
        DataError
            If tables differ in their columns, or no column remains.
        """
        first = self.sheets[0]
        expected = set(first.table.column_names)
        for sheet in self.sheets[1:]:
            present = set(sheet.table.column_names)
            problems: list[str] = []
            if missing := expected - present:
                problems.append(f"lacks {show_names(sorted(missing))}")
            if extra := present - expected:
                problems.append(f"also has {show_names(sorted(extra))}")
            if problems:
                raise DataError(
                    f"{sheet.where} should have the columns of {first.where}, but "
                    f"{' and '.join(problems)}; list the input columns as 'inputs', or leave "
                    "columns out by 'exclude'"
                )
        others = [column for column in first.table.column_names if column not in reserved]
        if not others:
            raise DataError(
                f"{first.where} should have at least 1 input column, got only columns with another "
                f"role: {show_names(reserved)}"
            )
        return others

    def kind(self, column: str) -> ColumnKind:
        """Return the kind of a column's values in all tables, such as ``number`` or ``text``.

        Raises
        ------
        DataError
            If tables differ in the kind, or the values are neither numbers nor texts.
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
            f"column {column!r} should have values of the same kind in all tables, got "
            f"{IN_WORDS[one]} in {here} and {IN_WORDS[other]} in "
            f"{there}{self._show_odd_text(column, kinds)}"
        )

    def _show_odd_text(self, column: str, kinds: Sequence[ColumnKind | None]) -> str:
        """Describe the first cell that is a text and not a number, as a part of an error message.

        The result is empty if there is no such cell.
        """
        for sheet, kind in zip(self.sheets, kinds, strict=True):
            if kind != "text":
                continue
            odd = first_other_text(sheet.table[column])
            if odd is not None:
                row, text = odd
                return f", such as {shown(text)} in row {row} of {sheet.where}"
        return ""

    def is_empty(self, column: str) -> bool:
        """Return whether all cells of a column are empty in all tables."""
        return all(
            _detect_kind(sheet.table, column, sheet.where) is None
            or bool(find_empty(sheet.table[column]).all())
            for sheet in self.sheets
        )

    def gaps(self, column: str) -> NDArray[np.bool_]:
        """Return a mask ``[N]`` of the rows whose cell in a column is empty."""
        if column not in self._gaps:
            for sheet in self.sheets:
                _check_column(sheet.table, column, sheet.where)
            self._gaps[column] = np.concatenate(
                [find_empty(table[column]) for table in self.tables]
            )
        return self._gaps[column]

    def numbers(self, column: str, *, gaps: bool = False) -> NDArray[np.float64]:
        """Return a column of numbers, float64 ``[N]`` (one entry per row of all tables).

        Parameters
        ----------
        column
            Name of the column.
        gaps
            Whether empty cells are allowed and become NaN.

        Raises
        ------
        DataError
            If a number is infinite, or a cell is empty and ``gaps`` is false.
        """
        import pyarrow as pa

        parts = [table[column].cast(pa.float64()).to_numpy() for table in self.tables]
        refused = [np.isinf(part) if gaps else ~np.isfinite(part) for part in parts]
        self.refuse(refused, column, parts)
        return np.concatenate(parts)

    def texts(self, column: str, *, empty: bool = False) -> NDArray[np.object_]:
        """Return a column of any kind as texts ``[N]`` (one entry per row of all tables).

        Parameters
        ----------
        column
            Name of the column.
        empty
            Whether empty cells are allowed and become empty texts. Otherwise an empty cell raises
            a DataError.
        """
        import pyarrow as pa

        for sheet in self.sheets:
            _check_column(sheet.table, column, sheet.where)
        parts: list[NDArray[Any]] = []
        refused: list[NDArray[np.bool_]] = []
        for table in self.tables:
            cells = table[column].cast(pa.string())
            if empty:
                cells = cells.fill_null("")
            texts = cells.to_numpy(zero_copy_only=False)
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
        """Raise a DataError that names the first row with an invalid cell, if there is one.

        Parameters
        ----------
        refused
            Whether the cell of each row is invalid, ``[n]`` for each table.
        column
            Name of the column.
        values
            Values of the column, ``[n]`` for each table.
        rule
            Requirement or advice at the end of the message; by default advice on empty cells.
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
            if is_empty:
                what = "an empty cell"
            else:
                what = shown(value)
            fix = rule or "correct the cell, or leave the row or the column out"
            raise DataError(
                f"{sheet.where}: column {column!r} has {what} in row "
                f"{sheet.number_row(first)}{more}; {fix}"
            )

    def categories(self, column: str) -> tuple[str, ...]:
        """Return the sorted categories of a column.

        These are the texts that occur, and the categories that a pandas column declares.
        """
        present, _ = self._find_categories(column)
        categories = {text for text in present.tolist() if text}
        for table in self.tables:
            categories.update(_list_declared_categories(table, column))
        return tuple(sorted(categories))

    def describe_inputs(self, columns: Sequence[str]) -> tuple[InputColumn, ...]:
        """Describe input columns for a schema: their names, kinds and categories.

        Raises
        ------
        DataError
            If a column has more than :data:`MOST_CATEGORIES` categories.
        """
        described: list[InputColumn] = []
        for column in columns:
            kind = self.kind(column)
            if self.is_empty(column):
                described.append(InputColumn(column, "empty"))
                continue
            if is_number(kind):
                described.append(InputColumn(column))
                continue
            categories = self.categories(column)
            if len(categories) > MOST_CATEGORIES:
                raise DataError(
                    f"column {column!r} has {len(categories):,} different texts, too many to "
                    "encode by category; leave it out (remove it from 'inputs' if set, or add it "
                    f"to 'exclude'), or take its words as the only input by text = {column!r}"
                )
            described.append(InputColumn(column, "category", categories))
        return tuple(described)

    def encode_inputs(self, columns: Sequence[InputColumn]) -> Tensor:
        """Encode input columns by their descriptions in a schema, float64 ``[N, F]``.

        N is the number of rows of all tables, and F the number of encoded columns: one for a column
        of numbers, one per category for a column of categories, and one per indicator of empty
        cells. An empty cell of a column of numbers is filled by the value in the schema. An empty
        cell of a column of categories has 0 for all categories.

        Raises
        ------
        SchemaError
            If a column has another kind than in the schema, a category that the schema lacks, or an
            empty cell for which the schema has no value.
        """
        parts: list[NDArray[Any]] = []
        for column in columns:
            self._check_kind(column)
            gaps = self.gaps(column.name)
            if column.kind == "number":
                parts.append(self._fill_gaps(column, gaps))
            else:
                places = self.category_places(column.name, column.categories, "category", gaps)
                parts += [places == number for number in range(len(column.categories))]
            if column.indicator:
                parts.append(gaps)
        return torch.from_numpy(np.stack(parts, axis=1).astype(np.float64))

    def _check_kind(self, column: InputColumn) -> None:
        """Check that a column has the kind (numbers or texts) that the schema states.

        A column without any value fits both kinds.
        """
        kind = self.kind(column.name)
        if is_number(kind) == (column.kind == "number") or self.is_empty(column.name):
            return
        expected = "numbers" if column.kind == "number" else "texts"
        raise SchemaError(
            f"{self.sheets[0].where}: column {column.name!r} should have {expected} according to "
            f"the schema, got {IN_WORDS[kind]}"
        )

    def _fill_gaps(self, column: InputColumn, gaps: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return a column of numbers, with empty cells filled by the schema, float64 ``[N]``."""
        if not gaps.any():
            return self.numbers(column.name)
        if column.fill is None:
            where, row = self._locate_row(int(gaps.argmax()))
            reason = (
                "and no client reported a value to fill it with; declare a value in "
                f'[data.schema.inputs] ({column.name!r} = {{ kind = "number", fill = 0 }}), or '
                f"leave the column out by exclude = [{column.name!r}]"
            )
            raise SchemaError(
                f"{where}: column {column.name!r} has an empty cell in row {row}, {reason}",
                f"column {column.name!r} has an empty cell, {reason}",
            )
        values = np.full(len(gaps), column.fill)
        if not gaps.all():
            values[~gaps] = self.numbers(column.name, gaps=True)[~gaps]
        return values

    def category_places(
        self,
        column: str,
        categories: Sequence[str],
        what: str,
        gaps: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Return the position of each row's text in a list of categories or labels, int64 ``[N]``.

        Parameters
        ----------
        column
            Name of the column with the texts.
        categories
            The known categories or labels.
        what
            Name of an entry of ``categories`` in messages, such as ``"label"``.
        gaps
            Mask ``[N]`` of the rows with an empty cell, whose position is -1; None if empty cells
            are not allowed.

        Raises
        ------
        SchemaError
            If a text is not in the list.
        """
        present, inverse = self._find_categories(column)
        place_of = {category: place for place, category in enumerate(categories)}
        places = np.array([place_of.get(category, -1) for category in present], dtype=np.int64)
        refused = places[inverse] < 0
        if gaps is not None:
            refused &= ~gaps
        self.refuse_unknown(refused, column, present[inverse], known=categories, what=what)
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
        """Raise a SchemaError that names the first row whose value is not in the schema, if any.

        Parameters
        ----------
        refused
            Whether the value of each row is unknown, ``[N]``.
        column
            Name of the column.
        values
            Values of all rows, ``[N]``.
        known
            The values that the schema lists.
        what
            Name of a known value in messages, such as ``"label"``.
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
            f"{where}: column {column!r} has {shown(unknown_values[0])} in row {row}{more}, "
            f"which is {rule} ({listed}); {fix}",
            f"column {column!r} has a value that is {rule}; {fix}",
        )

    def _locate_row(self, row: int) -> tuple[str, int]:
        """Return the name of the table that has a row, and the row number in its file, from 1.

        ``row`` counts from 0 over all tables.
        """
        for sheet in self.sheets:
            if row < sheet.table.num_rows:
                return sheet.where, sheet.number_row(row)
            row -= sheet.table.num_rows
        raise IndexError(row)

    def _find_categories(self, column: str) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
        """Return the distinct texts of a column.

        The text of an empty cell is empty. Results are cached, since columns are read repeatedly.

        Returns
        -------
        tuple
            The distinct texts in sorted order, and the position of each row's text among them.
        """
        if column not in self._categories:
            for sheet in self.sheets:
                _check_column(sheet.table, column, sheet.where)
            parts = [as_strings(table[column]) for table in self.tables]
            texts = np.concatenate([part.to_numpy(zero_copy_only=False) for part in parts])
            texts = texts.astype(np.str_)
            self._categories[column] = np.unique(texts, return_inverse=True)
        return self._categories[column]


def arrow_table(frame: Any) -> Table:
    """Convert a data frame of pandas, polars or Arrow to an Arrow table.

    Raises
    ------
    DataError
        If the object is not a data frame, or a column has values of several types.
    """
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
            f"the data frame should be a pandas, polars or Arrow table, got {shown(frame)}: {error}"
        ) from error


def find_empty(column: Any) -> NDArray[np.bool_]:
    """Return a mask of the empty cells of an Arrow column: nulls, NaN and empty texts."""
    import pyarrow.types as types

    pc = arrow_compute()
    if types.is_dictionary(column.type):
        kind = column.type.value_type
    else:
        kind = column.type
    is_empty = pc.is_null(column, nan_is_null=True)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        is_empty = pc.or_(is_empty, pc.equal(as_strings(column), ""))
    return is_empty.to_numpy(zero_copy_only=False).astype(bool)


def is_number(kind: ColumnKind) -> bool:
    """Return whether a kind of columns is numeric (``whole`` or ``number``)."""
    return kind in ("whole", "number")


def _check_column(table: Table, column: str, where: str) -> None:
    """Check that a table has exactly one column with the given name."""
    if column not in table.column_names:
        raise DataError(unknown(f"column of {where}:", column, table.column_names))
    if table.column_names.count(column) > 1:
        raise DataError(
            f"{where} should have columns with different names, got "
            f"{table.column_names.count(column)} columns {column!r}"
        )


def _detect_kind(table: Table, column: str, where: str) -> ColumnKind | None:
    """Return the kind of a column's values in one table by its Arrow type.

    The kind is None for Arrow's type ``null``, as a column of this type has only empty cells.
    """
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
            f"{where}: column {column!r} should have numbers or texts, got bytes; leave it out: "
            "remove it from 'inputs' if set, or add it to 'exclude'"
        )
    raise DataError(
        f"{where}: column {column!r} should have numbers or texts, got {found}; leave it out: "
        "remove it from 'inputs' if set, or add it to 'exclude'"
    )


def _list_declared_categories(table: Table, column: str) -> list[str]:
    """Return the categories that a pandas column declares, including categories without rows.

    The list is empty for columns of other origins.
    """
    import pyarrow as pa
    import pyarrow.types as types

    is_of_pandas = b"pandas" in (table.schema.metadata or {})
    if not is_of_pandas or not types.is_dictionary(table.schema.field(column).type):
        return []
    categories: list[str] = []
    for chunk in table[column].chunks:
        categories += chunk.dictionary.cast(pa.string()).to_pylist()
    return [category for category in categories if category]
