"""Conversion of text columns to numbers and dates, by all tables together.

Tables of files and of data frames go through the same rules before their columns are encoded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedclade.core import DataError, shown, unknown
from fedclade.data.cell_values import (
    DATE_UNIT,
    DECIMAL_MARKS,
    DURATION_UNIT,
    TIME_UNIT,
    Notation,
    Reading,
    are_numbers,
    arrow_compute,
    as_strings,
    in_days,
    in_hours,
    is_present,
    look_like_dates,
    read_numbers,
    short_date_format,
)
from fedclade.data.columns import Sheet, Table

FEW_TEXTS = 10
"""Number of different texts up to which a column is categories, however few rows it has."""

MANY_CATEGORIES = 50
"""Columns that are encoded as more than this number of columns are reported."""

MOST_STEPS = 0.95
"""Share of steps of +1 between consecutive rows from which on a column is a row number.

The numbers may begin again with each client.
"""

_INDEX_NAME = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""Names of unnamed columns: in CSV files, in CSV files read by pandas, in pandas' Parquet files."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ColumnRoles:
    """Roles of the columns of tables.

    Parameters
    ----------
    targets
        Columns to predict.
    inputs
        Columns to predict from; None: all others.
    as_texts
        Columns whose texts are taken as they are: the client, and texts to learn from.
    drop
        Columns to leave out.
    """

    targets: tuple[str, ...] = ()
    inputs: tuple[str, ...] | None = None
    as_texts: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()

    def is_typed(self, column: str) -> bool:
        """Return whether the values of a column are used as numbers, dates or categories."""
        if column in self.as_texts:
            return False
        return self.inputs is None or column in (*self.inputs, *self.targets)


def prepare_sheets(sheets: Sequence[Sheet], roles: ColumnRoles, notation: Notation) -> list[Sheet]:
    """Drop columns and indices, and convert texts of numbers and dates to numbers.

    All assumptions are reported in one line.

    Raises
    ------
    DataError
        If a column of ``drop`` is unknown, texts may be read in two ways and nothing decides
        between them, a column of numbers has other texts, or nearly all texts of a column differ.
    """
    report = Report(len(sheets))
    for sheet in sheets:
        if sheet.csv is None:
            continue
        for assumption in sheet.csv.assumed:
            report.add(assumption, sheet.where)
    try:
        return _prepare_all(sheets, roles, notation, report)
    finally:  # also before an error, which an assumption may explain
        report.log()


def _prepare_all(
    sheets: Sequence[Sheet], roles: ColumnRoles, notation: Notation, report: Report
) -> list[Sheet]:
    prepared = _drop_columns(sheets, roles.drop)
    if roles.inputs is None:
        used = (*roles.targets, *roles.as_texts)
        prepared = [_drop_index(sheet, used, report) for sheet in prepared]
    prepared = _convert_texts(prepared, roles, notation, report)
    prepared = [_convert_dates(sheet, roles, report) for sheet in prepared]
    _check_texts(prepared, roles, report)
    _report_row_numbers(prepared, roles, report)
    return prepared


@dataclass
class Report:
    """Assumptions about tables, with the names of the tables."""

    tables: int
    places: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def add(self, assumption: str, where: str | None = None) -> None:
        """Note an assumption about a table, or about all of them."""
        places = self.places.setdefault(assumption, [])
        if where is not None and where not in places:
            places.append(where)

    def log(self) -> None:
        """Write all assumptions in one line."""
        if self.places:
            _log.warning("how the data is read: %s", "; ".join(map(self._in_words, self.places)))

    def _in_words(self, assumption: str) -> str:
        places = self.places[assumption]
        if len(places) in (0, self.tables):
            return assumption
        more = ""
        if len(places) > 1:
            more = f" and {len(places) - 1} more of {self.tables}"
        return f"{assumption} (in {places[0]}{more})"


@dataclass(frozen=True)
class _TextColumn:
    """Column of texts with its possible readings.

    Parameters
    ----------
    sheet, place
        Number of the table, and position of the column in it.
    name
        Name of the column.
    texts
        Arrow array of the texts.
    present
        Arrow array: whether each cell is not empty.
    readings
        The possible readings.
    """

    sheet: int
    place: int
    name: str
    texts: Any
    present: Any
    readings: Sequence[Reading]

    @property
    def witness(self) -> Reading | None:
        """The only possible reading, which also decides for other columns; None if not unique."""
        if len(self.readings) == 1:
            return self.readings[0]
        return None

    @property
    def decided(self) -> Reading | None:
        """The reading if it is the only one, or if all readings have the same values; else None."""
        first, *others = self.readings
        if all(first.values.equals(other.values) for other in others):
            return first
        return None

    @property
    def may_have_decimal_commas(self) -> bool:
        """Whether a comma may be the decimal mark, and this changes the values."""
        notations = [reading.notation for reading in self.readings]
        return "," in notations and (len(notations) == 1 or self.decided is None)

    @property
    def has_marks(self) -> bool:
        """Whether a text is more than a sign and digits."""
        pc = arrow_compute()
        written = self.texts.filter(self.present)
        return not pc.all(pc.match_substring_regex(written, r"^\s*[-+]?\d+\s*$")).as_py()

    def values(self, reading: Reading) -> Any:
        """Return the values of all rows, null where a cell is empty."""
        import pyarrow as pa

        present = self.present.to_numpy(zero_copy_only=False)
        return reading.values.take(pa.array(np.cumsum(present) - 1, mask=~present))

    def example(self) -> tuple[int, str]:
        """Return the first row with a value, from 1 on, and its text."""
        row = int(np.argmax(self.present.to_numpy(zero_copy_only=False)))
        return row + 1, self.texts[row].as_py()


def is_text(column: Any) -> bool:
    """Return whether an Arrow column has texts that are not declared categories."""
    import pyarrow.types as types

    return (
        types.is_string(column.type)
        or types.is_large_string(column.type)
        or types.is_string_view(column.type)
    )


def _drop_columns(sheets: Sequence[Sheet], drop: Collection[str]) -> list[Sheet]:
    known = {column for sheet in sheets for column in sheet.table.column_names}
    for column in drop:
        if column not in known:
            raise DataError(unknown(f"column in drop, of {sheets[0].where}:", column, known))
    if not drop:
        return list(sheets)

    def drop_columns(sheet: Sheet) -> Sheet:
        return _keep(sheet, [name not in drop for name in sheet.table.column_names])

    return [drop_columns(sheet) for sheet in sheets]


def _keep(sheet: Sheet, kept: Sequence[bool]) -> Sheet:
    places = [place for place, is_kept in enumerate(kept) if is_kept]
    return replace(sheet, table=sheet.table.select(places))


def _drop_index(sheet: Sheet, used: Collection[str], report: Report) -> Sheet:
    """Leave out unnamed columns that are empty or an index, as spreadsheets and pandas write."""
    kept = [True] * sheet.table.num_columns
    for place, name in enumerate(sheet.table.column_names):
        if name in used or not _INDEX_NAME.fullmatch(name):
            continue
        column = sheet.table.column(place)
        if column.null_count == len(column):
            kept[place] = False
            report.add("an empty column without a name is left out", sheet.where)
        elif _tells_rows_apart(column):
            kept[place] = False
            what = f"column {name!r}" if name else "a column without a name"
            report.add(f"{what} is an index and left out", sheet.where)
        elif not name:
            raise DataError(
                f"{sheet.where}: column {place + 1} has no name, but values, such as "
                f"{shown(column[0].as_py())} in row 1; name it in the header, or leave it out by "
                "drop = ['']"
            )
    return sheet if all(kept) else _keep(sheet, kept)


def _tells_rows_apart(column: Any) -> bool:
    import pyarrow.types as types

    possible = types.is_integer(column.type) or is_text(column)
    return possible and column.null_count == 0 and len(column.unique()) == len(column)


def _convert_texts(
    sheets: Sequence[Sheet], roles: ColumnRoles, notation: Notation, report: Report
) -> list[Sheet]:
    """Replace columns of texts that are numbers or dates by their values."""
    texts = [
        column
        for number, sheet in enumerate(sheets)
        for column in _read_text_columns(number, sheet, roles, notation)
    ]
    texts += _reread_numbers(sheets, texts, roles, notation)
    texts = _leave_out_codes(sheets, texts)
    tables: list[Table] = [sheet.table for sheet in sheets]
    for column in texts:
        reading = column.decided or _decide(sheets, column, texts)
        where = sheets[column.sheet].where
        values = column.values(reading)
        table = tables[column.sheet]
        tables[column.sheet] = table.set_column(column.place, column.name, values)
        if reading.kind == "date":
            order = f" ({reading.notation})"
            if notation.dates == reading.setting:
                order = ""
            report.add(f"column {column.name!r} in {DATE_UNIT}{order}", where)
        elif notation.decimal is None:
            _report_number(reading, column, where, report)
    return [replace(sheet, table=table) for sheet, table in zip(sheets, tables, strict=True)]


def _report_number(reading: Reading, column: _TextColumn, where: str, report: Report) -> None:
    pc = arrow_compute()
    if reading.notation == ",":
        report.add("decimal mark ','", where)
    elif pc.any(pc.match_substring(column.texts, ",")).as_py():
        report.add("',' between thousands", where)


def _read_text_columns(
    number: int, sheet: Sheet, roles: ColumnRoles, notation: Notation
) -> Iterable[_TextColumn]:
    """Yield the columns of texts that can be read as numbers or dates."""
    names = sheet.table.column_names
    for place, name in enumerate(names):
        column = sheet.table.column(place)
        if names.count(name) == 1 and roles.is_typed(name) and is_text(column):
            text_column = _read_text_column(number, place, name, column, notation=notation)
            if text_column.readings:
                yield text_column
            else:
                _check_given_notation(text_column, sheet, notation)


def _read_text_column(
    number: int, place: int, name: str, column: Any, *, notation: Notation
) -> _TextColumn:
    """Return a column of texts with its possible readings."""
    texts = as_strings(column)
    present = is_present(texts)
    readings = notation.readings(texts.filter(present))
    return _TextColumn(number, place, name, texts=texts, present=present, readings=readings)


def _check_given_notation(column: _TextColumn, sheet: Sheet, notation: Notation) -> None:
    """Refuse texts that are numbers with the other decimal mark, or dates that need a format."""
    written = column.texts.filter(column.present)
    if not len(written):
        return
    row, text = column.example()
    where = f"{sheet.where}: column {column.name!r} has {shown(text)} in row {row}"
    if notation.decimal is not None:
        other = next(mark for mark in DECIMAL_MARKS if mark != notation.decimal)
        if read_numbers(written, other) is not None:
            raise DataError(
                f"{where}, which is no number with decimal = {notation.decimal!r}; leave 'decimal' "
                "out, or make all files alike"
            )
    if notation.dates is None:
        short = short_date_format(written.unique().to_pylist())
        if short is not None:
            raise DataError(
                f"{where}, which looks like a date with a year of two digits; say by 'dates' what "
                f"it is, such as dates = {short!r}"
            )


def _reread_numbers(
    sheets: Sequence[Sheet], texts: Sequence[_TextColumn], roles: ColumnRoles, notation: Notation
) -> list[_TextColumn]:
    """Return the text columns of numbers in which a point may separate thousands.

    Such columns are in tables with a number that may have a decimal comma, and in all tables with
    the same cell separator, unless it is a comma. They are also in tables with semicolons between
    cells, as written in countries with decimal commas.
    """
    with_commas = {column.sheet for column in texts if column.may_have_decimal_commas}
    separators = {_get_separator(sheets[number]) for number in with_commas} - {","} | {";"}
    found: list[_TextColumn] = []
    for number, sheet in enumerate(sheets):
        is_suspect = (
            number in with_commas or _get_separator(sheet) in separators or notation.decimal == ","
        )
        if sheet.csv is not None and is_suspect and notation.decimal != ".":
            found += _reread_sheet(number, sheet, sheet.csv.read, roles=roles, notation=notation)
    return found


def _reread_sheet(
    number: int, sheet: Sheet, read: Any, *, roles: ColumnRoles, notation: Notation
) -> Iterable[_TextColumn]:
    import pyarrow.types as types

    table = sheet.table
    names = table.column_names
    places = [
        place
        for place, name in enumerate(names)
        if types.is_floating(table.column(place).type)
        and names.count(name) == 1
        and roles.is_typed(name)
    ]
    if not places:
        return
    written = read([names[place] for place in places])
    for place in places:
        found = _read_text_column(
            number, place, names[place], written[names[place]], notation=notation
        )
        if found.readings:
            yield found
        else:
            _check_given_notation(found, sheet, notation)


def _get_separator(sheet: Sheet) -> str | None:
    return None if sheet.csv is None else sheet.csv.format.separator


def _leave_out_codes(sheets: Sequence[Sheet], columns: Sequence[_TextColumn]) -> list[_TextColumn]:
    """Leave out text columns of whole numbers in a data frame or a Parquet file.

    These formats have types, so a text column was chosen on purpose, and its numbers are codes of
    categories.
    """
    in_marks = {
        column.name
        for column in columns
        if sheets[column.sheet].csv is not None or column.has_marks
    }
    return [column for column in columns if column.name in in_marks]


def _decide(
    sheets: Sequence[Sheet], column: _TextColumn, columns: Sequence[_TextColumn]
) -> Reading:
    """Choose one of several readings, by columns that can be read in one way only.

    The columns of the same table decide, and if it has none, those of all tables with the same
    separator.
    """
    kind = column.readings[0].kind
    separator = _get_separator(sheets[column.sheet])
    deciding = [
        other for other in columns if other.witness is not None and other.witness.kind == kind
    ]
    same_table = [other for other in deciding if other.sheet == column.sheet]
    similar = [other for other in deciding if _get_separator(sheets[other.sheet]) == separator]
    for witnesses in (same_table, similar):
        notations = {other.witness.notation for other in witnesses if other.witness is not None}
        fitting = [reading for reading in column.readings if reading.notation in notations]
        if len(fitting) == 1:
            return fitting[0]
    raise _report_ambiguous(sheets[column.sheet], column)


def _report_ambiguous(sheet: Sheet, column: _TextColumn) -> DataError:
    """Return the error of a column that can be read in several ways."""
    row, text = column.example()
    where = f"{sheet.where}: column {column.name!r} has {shown(text)} in row {row}"
    first, second, *_ = column.readings
    if first.kind == "number":
        first_value = f"{first.values[0].as_py():g}"
        second_value = f"{second.values[0].as_py():g}"
        return DataError(
            f"{where}, which is {first_value} by decimal = {first.setting!r} and {second_value} by "
            f"decimal = {second.setting!r}, and no other number decides; say which is right"
        )
    settings = [f"dates = {reading.setting!r}" for reading in column.readings]
    first_part = first.notation.partition(",")[0]
    second_part = second.notation.partition(",")[0]
    return DataError(
        f"{where}, which may begin with the {first_part} or the {second_part}, and no other date "
        f"decides; say which by {' or '.join(settings)}"
    )


def _convert_dates(sheet: Sheet, roles: ColumnRoles, report: Report) -> Sheet:
    """Replace columns of the types date and time by numbers."""
    import pyarrow.types as types

    table = sheet.table
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if not roles.is_typed(name):
            continue
        if types.is_dictionary(column.type) and types.is_temporal(column.type.value_type):
            column = column.cast(column.type.value_type)
        if types.is_time(column.type):
            unit = TIME_UNIT
            values = in_hours(column)
        elif types.is_date(column.type) or types.is_timestamp(column.type):
            unit = DATE_UNIT
            values = in_days(column)
        elif types.is_duration(column.type):
            unit = DURATION_UNIT
            values = in_days(column)
        else:
            continue
        table = table.set_column(place, name, values)
        report.add(f"column {name!r} in {unit}", sheet.where)
    return replace(sheet, table=table)


def _check_texts(sheets: Sequence[Sheet], roles: ColumnRoles, report: Report) -> None:
    """Refuse text columns that cannot be categories, and report those with many categories."""
    inputs = sheets[0].table.column_names if roles.inputs is None else roles.inputs
    for name in dict.fromkeys([*roles.targets, *inputs]):
        if not roles.is_typed(name):
            continue
        with_column = [sheet for sheet in sheets if sheet.table.column_names.count(name) == 1]
        if with_column and all(is_text(sheet.table[name]) for sheet in with_column):
            _check_categories(with_column, name, name in roles.targets, report)


def _check_categories(sheets: Sequence[Sheet], name: str, is_target: bool, report: Report) -> None:
    """Refuse a text column that cannot be a category, and report one with many categories."""
    import pyarrow as pa

    texts = pa.concat_arrays([as_strings(sheet.table[name]) for sheet in sheets])
    unique = texts.filter(is_present(texts)).unique()
    what = f"the target {name!r}" if is_target else f"column {name!r}"
    _check_marks(unique, what)
    if len(unique) <= FEW_TEXTS:
        return
    is_value = look_like_dates(unique.to_pylist())
    for mark in DECIMAL_MARKS:
        is_value |= are_numbers(unique, mark).to_numpy(zero_copy_only=False)
    if 0.5 < is_value.mean() < 1:
        odd = unique[int(np.argmin(is_value))].as_py()
        where, row = _find_text(sheets, name, odd)
        raise DataError(
            f"{where}: {what} has {shown(odd)} in row {row + 1} among numbers or dates (different "
            f"texts of this kind: {int((~is_value).sum())}); fill it in, or leave the row or the "
            "column out"
        )
    if 2 * len(unique) > len(texts):
        examples = " and ".join(shown(text) for text in unique[:2].to_pylist())
        many = (
            f"{what} has {len(unique):,} different texts in {len(texts):,} rows, such as {examples}"
        )
        if is_value.all():
            raise DataError(
                f"{many}, which are numbers or dates; make them such, or categories of pandas"
            )
        fix = "take another target"
        if not is_target:
            fix = (
                f"leave it out by drop = [{name!r}], or take its words as the only input by text = "
                f"{name!r}"
            )
        raise DataError(f"{many}, so it is an id, a name or a free text and no category; {fix}")
    if len(unique) > MANY_CATEGORIES and not is_target:
        report.add(f"column {name!r} becomes {len(unique):,} columns, one for each of its texts")


def _find_text(sheets: Sequence[Sheet], name: str, text: str) -> tuple[str, int]:
    """Find the first cell of column ``name`` that equals ``text``; return its table and row."""
    pc = arrow_compute()
    for sheet in sheets:
        row = pc.index(as_strings(sheet.table[name]), text).as_py()
        if row >= 0:
            return sheet.where, row
    raise LookupError(text)


def _check_marks(unique: Any, what: str) -> None:
    """Refuse columns in which some numbers have a decimal point and others a decimal comma."""
    with_point, with_comma = (
        are_numbers(unique, mark).to_numpy(zero_copy_only=False) for mark in DECIMAL_MARKS
    )
    if (
        len(unique)
        and (with_point | with_comma).all()
        and not with_point.all()
        and not with_comma.all()
    ):
        point, comma = (unique[int(np.argmin(fits))].as_py() for fits in (with_comma, with_point))
        raise DataError(
            f"{what} has numbers with a decimal point and with a decimal comma, such as "
            f"{shown(point)} and {shown(comma)}; write them alike"
        )


def _report_row_numbers(sheets: Sequence[Sheet], roles: ColumnRoles, report: Report) -> None:
    """Report inputs that number the rows, which may be the index of a table."""
    names = sheets[0].table.column_names if roles.inputs is None else roles.inputs
    for name in names:
        if name in (*roles.targets, *roles.as_texts):
            continue
        if all(_is_row_number(sheet.table, name) for sheet in sheets):
            report.add(
                f"column {name!r} numbers the rows, but is an input (drop = [{name!r}] leaves it "
                "out)"
            )


def _is_row_number(table: Table, name: str) -> bool:
    import pyarrow.types as types

    if table.column_names.count(name) != 1 or table.num_rows <= FEW_TEXTS:
        return False
    column = table[name]
    if not types.is_integer(column.type) or column.null_count:
        return False
    return bool((np.diff(column.to_numpy()) == 1).mean() > MOST_STEPS)
