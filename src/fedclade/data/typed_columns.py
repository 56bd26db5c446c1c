"""Conversion of the text columns of tables to numbers and dates, before columns are encoded.

The same rules apply to the tables of files and of data frames. All tables together determine the
*notation* (decimal mark and date format) of ambiguous columns. A *reading* is an interpretation of
a column by one notation.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
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
"""Number of different texts up to which a column always counts as categories."""

MANY_CATEGORIES = 50
"""Number of categories above which a column is reported, as it becomes as many columns."""

MOST_STEPS = 0.95
"""Share of steps of +1 between consecutive rows above which a column counts as a row number.

The share is below 1, as the numbers may restart with each client.
"""

_INDEX_NAME = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""Pattern of the names of unnamed columns in CSV files and in files that pandas wrote."""

_ID_NAME = re.compile(r"(?i:(^|[^a-z])[a-z]?(id|nr|number)s?#?$)|[a-z]I[dD]s?$")
"""Pattern of the names of columns that are ids of persons or rows."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ColumnRoles:
    """Roles of the columns of tables.

    Parameters
    ----------
    targets
        Columns to predict.
    inputs
        Columns from which the target is predicted; None for all other columns.
    as_texts
        Columns whose texts are not converted to numbers or categories: the column with the name of
        the client, the column of ``groups``, and the column of the setting ``text``, whose words
        are the inputs of the model.
    drop
        Columns to leave out.
    typed
        Columns whose values are needed as numbers or dates even if they are not inputs, such as a
        time by which rows are ordered.
    categorical
        Input columns whose values are categories, even if the values are numbers.
    """

    targets: tuple[str, ...] = ()
    inputs: tuple[str, ...] | None = None
    as_texts: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()

    @property
    def no_inputs(self) -> tuple[str, ...]:
        """Columns that are not encoded as numbers or categories for the input of a model.

        These are the targets, the columns of ``as_texts``, and those columns of ``typed`` that are
        not listed in ``inputs``.
        """
        named = self.inputs or ()
        typed = tuple(column for column in self.typed if column not in named)
        return (*self.targets, *self.as_texts, *typed)

    def is_typed(self, column: str) -> bool:
        """Return whether the values of a column are used as numbers, dates or categories."""
        if column in self.as_texts:
            return False
        return self.inputs is None or column in (*self.inputs, *self.targets, *self.typed)


def prepare_sheets(sheets: Sequence[Sheet], roles: ColumnRoles, notation: Notation) -> list[Sheet]:
    """Drop unused columns of tables, and convert texts that are numbers or dates to numbers.

    All assumptions about the data are logged in one line.

    Raises
    ------
    DataError
        If a column of ``drop`` is unknown, the decimal mark or the date format of a column is
        ambiguous, a column of numbers also has texts that are not numbers, or nearly all texts of a
        column differ.
    """
    with Report(len(sheets)).written() as report:
        return prepare_reported(sheets, roles, notation, report)


def prepare_reported(
    sheets: Sequence[Sheet],
    roles: ColumnRoles,
    notation: Notation,
    report: Report,
    *,
    are_roles_known: bool = True,
) -> list[Sheet]:
    """Prepare tables as :func:`prepare_sheets` does, and add all assumptions to a report.

    If the roles are unknown, as in an inspection, text columns are not checked for ids and free
    texts, since such columns are not known to be inputs.
    """
    for sheet in sheets:
        if sheet.csv is None:
            continue
        for assumption in sheet.csv.assumed:
            report.add(assumption, sheet.where)
    prepared = _drop_columns(sheets, roles.drop)
    if roles.inputs is None:
        used = (*roles.targets, *roles.as_texts)
        prepared = [_drop_index(sheet, used, report) for sheet in prepared]
    prepared = _convert_texts(prepared, roles, notation, report)
    prepared = [_convert_dates(sheet, roles, report) for sheet in prepared]
    prepared = _convert_categories(prepared, roles.categorical)
    if not are_roles_known:
        return prepared
    _check_texts(prepared, roles, report)
    _report_numbered(prepared, roles, report)
    return prepared


@dataclass
class Report:
    """Collection of the assumptions under which tables are read, for one line of the log.

    Parameters
    ----------
    tables
        Number of tables.
    places
        Names of the tables to which an assumption applies, by the text of the assumption.
    """

    tables: int
    places: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def add(self, assumption: str, where: str | None = None) -> None:
        """Add an assumption about one table, named ``where``, or about all tables if None."""
        places = self.places.setdefault(assumption, [])
        if where is not None and where not in places:
            places.append(where)

    @contextmanager
    def written(self) -> Generator[Report]:
        """Log all assumptions at the end of a ``with`` block, even if the block raises an error."""
        try:
            yield self
        finally:  # An assumption may explain the error.
            self.log()

    def log(self) -> None:
        """Log all assumptions in one line, if there are assumptions."""
        if self.places:
            _log.warning("how the data is read: %s", "; ".join(self.in_words()))

    def in_words(self) -> list[str]:
        """Return the text of each assumption, with the tables to which it applies."""
        return [self._show_assumption(assumption) for assumption in self.places]

    def _show_assumption(self, assumption: str) -> str:
        places = self.places[assumption]
        if len(places) in (0, self.tables):
            return assumption
        more = ""
        if len(places) > 1:
            more = f" and {len(places) - 1} more of {self.tables}"
        return f"{assumption} (in {places[0]}{more})"


@dataclass(frozen=True)
class _TextColumn:
    """Column of texts in one table, with its possible readings as numbers or dates.

    Parameters
    ----------
    sheet, place
        Number of the table, and position of the column in the table.
    name
        Name of the column.
    texts
        Arrow array of the texts.
    present
        Arrow array: whether each cell is not empty.
    readings
        All possible interpretations of the texts as numbers or dates.
    """

    sheet: int
    place: int
    name: str
    texts: Any
    present: Any
    readings: Sequence[Reading]

    @property
    def witness(self) -> Reading | None:
        """The reading if it is the only possible reading, otherwise None.

        Such a reading shows which notation the table uses, also for ambiguous columns.
        """
        if len(self.readings) == 1:
            return self.readings[0]
        return None

    @property
    def decided(self) -> Reading | None:
        """The first reading if all possible readings have the same values; None if they differ."""
        first, *others = self.readings
        if all(first.values.equals(other.values) for other in others):
            return first
        return None

    @property
    def may_have_decimal_commas(self) -> bool:
        """Whether a comma may be the decimal mark and this choice changes the values."""
        notations = [reading.notation for reading in self.readings]
        return "," in notations and (len(notations) == 1 or self.decided is None)

    @property
    def has_marks(self) -> bool:
        """Whether a text has other characters than a sign and digits, such as a decimal mark."""
        pc = arrow_compute()
        written = self.texts.filter(self.present)
        return not pc.all(pc.match_substring_regex(written, r"^\s*[-+]?\d+\s*$")).as_py()

    @property
    def has_question_marks(self) -> bool:
        """Whether a cell is a question mark, which denotes an empty cell."""
        pc = arrow_compute()
        return pc.any(pc.equal(pc.utf8_trim_whitespace(self.texts), "?")).as_py() is True

    def values(self, reading: Reading) -> Any:
        """Return the values of all rows by a reading, as an Arrow array; empty cells are null."""
        import pyarrow as pa

        present = self.present.to_numpy(zero_copy_only=False)
        return reading.values.take(pa.array(np.cumsum(present) - 1, mask=~present))

    def example(self) -> tuple[int, str]:
        """Return the row (from 1) and the text of the first non-empty cell, for messages."""
        row = int(np.argmax(self.present.to_numpy(zero_copy_only=False)))
        return row + 1, self.texts[row].as_py()


def is_text(column: Any) -> bool:
    """Return whether an Arrow column has a text type that declares no categories."""
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
            raise DataError(unknown(f"column in exclude, of {sheets[0].where}:", column, known))
    if not drop:
        return list(sheets)

    def drop_columns(sheet: Sheet) -> Sheet:
        return _select_columns(sheet, [name not in drop for name in sheet.table.column_names])

    return [drop_columns(sheet) for sheet in sheets]


def _select_columns(sheet: Sheet, kept: Sequence[bool]) -> Sheet:
    places = [place for place, is_kept in enumerate(kept) if is_kept]
    return replace(sheet, table=sheet.table.select(places))


def _drop_index(sheet: Sheet, used: Collection[str], report: Report) -> Sheet:
    """Leave out unnamed columns that are empty or an index, as spreadsheets and pandas write them.

    Columns in ``used`` are not left out.
    """
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
            if name:
                what = f"column {name!r}"
            else:
                what = "a column without a name"
            report.add(f"{what} is an index and is left out", sheet.where)
        elif not name:
            raise DataError(
                f"{sheet.where}: column {place + 1} has values, such as {shown(column[0].as_py())} "
                "in row 1, but no name; add a name to the header, or leave the column out by "
                "exclude = ['']"
            )
    if all(kept):
        return sheet
    return _select_columns(sheet, kept)


def _tells_rows_apart(column: Any) -> bool:
    import pyarrow.types as types

    possible = types.is_integer(column.type) or is_text(column)
    return possible and column.null_count == 0 and len(column.unique()) == len(column)


def _convert_texts(
    sheets: Sequence[Sheet], roles: ColumnRoles, notation: Notation, report: Report
) -> list[Sheet]:
    """Replace text columns that can be read as numbers or dates by their values.

    Ambiguous columns are read in the notation of unambiguous columns; see :func:`_choose_reading`.
    """
    texts = [
        column
        for number, sheet in enumerate(sheets)
        for column in _read_text_columns(number, sheet, roles, notation)
    ]
    texts += _reread_numbers(sheets, texts, roles, notation)
    texts = _leave_out_codes(sheets, texts)
    tables: list[Table] = [sheet.table for sheet in sheets]
    for column in texts:
        reading = column.decided or _choose_reading(sheets, column, texts)
        where = sheets[column.sheet].where
        values = column.values(reading)
        table = tables[column.sheet]
        tables[column.sheet] = table.set_column(column.place, column.name, values)
        if column.has_question_marks:
            report.add(f"'?' in column {column.name!r} is an empty cell", where)
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
    """Yield the text columns of one table that can be read as numbers or dates.

    ``number`` is the number of the table.
    """
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
    """Find the possible readings of one text column as numbers or dates.

    ``number`` is the number of the table, and ``place`` the position of the column in the table.
    """
    texts = as_strings(column)
    present = is_present(texts)
    readings = notation.readings(texts.filter(present))
    return _TextColumn(number, place, name, texts=texts, present=present, readings=readings)


def _check_given_notation(column: _TextColumn, sheet: Sheet, notation: Notation) -> None:
    """Raise a DataError for texts that are numbers or dates, but not in the given notation.

    These are numbers with the other decimal mark, and dates with two-digit years, whose format the
    user must specify.
    """
    written = column.texts.filter(column.present)
    if not len(written):
        return
    row, text = column.example()
    where = f"{sheet.where}: column {column.name!r}"
    if notation.decimal is not None:
        other = next(mark for mark in DECIMAL_MARKS if mark != notation.decimal)
        if read_numbers(written, other) is not None:
            raise DataError(
                f"{where} has {shown(text)} in row {row}, which is not a number with decimal = "
                f"{notation.decimal!r}; leave out 'decimal', or use the same decimal mark in all "
                "files"
            )
    if notation.dates is None:
        short = short_date_format(written.unique().to_pylist())
        if short is not None:
            raise DataError(
                f"{where} has {shown(text)} in row {row}, which looks like a date with a year of "
                f"two digits; set the format of dates, such as dates = {short!r}"
            )


def _reread_numbers(
    sheets: Sequence[Sheet], texts: Sequence[_TextColumn], roles: ColumnRoles, notation: Notation
) -> list[_TextColumn]:
    """Read columns of numbers in CSV files again as texts if a point may separate thousands.

    The CSV reader takes 1.234 as a number with a decimal point. In a table with decimal commas, the
    same text means 1234. If the user declares that the decimal mark is a point, no column is read
    again. Otherwise the columns of a table are read again in each of these cases:

    - The user declares that the decimal mark is a comma.
    - The table has a number that may have a decimal comma.
    - The table has the same separator between cells (other than a comma) as another table that has
      such a number.
    - The separator between cells is the semicolon, as is usual in countries with decimal commas.
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
    if sheet.csv is None:
        return None
    return sheet.csv.format.separator


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


def _choose_reading(
    sheets: Sequence[Sheet], column: _TextColumn, columns: Sequence[_TextColumn]
) -> Reading:
    """Choose the reading of an ambiguous column by the notation of unambiguous columns.

    The unambiguous columns of the same table determine the notation. If they do not, the
    unambiguous columns of all tables with the same separator between cells determine it.

    Raises
    ------
    DataError
        If these columns have none, or more than one, of the possible notations.
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
    """Return the error that the notation of a column of numbers or dates is ambiguous."""
    row, text = column.example()
    where = f"{sheet.where}: column {column.name!r} has {shown(text)} in row {row}"
    first, second, *_ = column.readings
    if first.kind == "number":
        first_value = f"{first.values[0].as_py():g}"
        second_value = f"{second.values[0].as_py():g}"
        return DataError(
            f"{where}, which is {first_value} with decimal = {first.setting!r} and {second_value} "
            f"with decimal = {second.setting!r}, and no other number shows the decimal mark; set "
            "'decimal'"
        )
    settings = [f"dates = {reading.setting!r}" for reading in column.readings]
    first_part = first.notation.partition(",")[0]
    second_part = second.notation.partition(",")[0]
    return DataError(
        f"{where}, which may begin with the {first_part} or the {second_part}, and no other date "
        f"shows the order; set {' or '.join(settings)}"
    )


def _convert_dates(sheet: Sheet, roles: ColumnRoles, report: Report) -> Sheet:
    """Replace columns that have date, time or duration types by numbers."""
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


def _convert_categories(sheets: Sequence[Sheet], categorical: Collection[str]) -> list[Sheet]:
    """Convert the columns that the user declares categorical to texts.

    Whole numbers are written without a fraction, so that 1, 1.0 and "1" are the same category in
    all files.
    """
    known = {column for sheet in sheets for column in sheet.table.column_names}
    for column in categorical:
        if column not in known:
            raise DataError(unknown(f"column in categorical, of {sheets[0].where}:", column, known))

    def convert(sheet: Sheet) -> Sheet:
        table = sheet.table
        for place, name in enumerate(table.column_names):
            if name in categorical:
                table = table.set_column(place, name, _as_categories(table.column(place)))
        return replace(sheet, table=table)

    return [convert(sheet) for sheet in sheets]


def _as_categories(column: Any) -> Any:
    """Convert an Arrow column of categories to texts, with numbers in the shortest form."""
    import pyarrow as pa
    import pyarrow.types as types

    if types.is_floating(column.type) or types.is_decimal(column.type):
        numbers = column.cast(pa.float64()).to_pylist()
        return pa.array([_show_number(number) for number in numbers], pa.string())
    if types.is_integer(column.type) or types.is_null(column.type):
        return column.cast(pa.string())
    return column


def _show_number(number: float | None) -> str | None:
    if number is None or number != number:
        return None
    if number.is_integer():
        return str(int(number))
    return repr(number)


def _check_texts(sheets: Sequence[Sheet], roles: ColumnRoles, report: Report) -> None:
    """Check all text columns that would become categories; see :func:`_check_categories`."""
    if roles.inputs is None:
        inputs = sheets[0].table.column_names
    else:
        inputs = roles.inputs
    for name in dict.fromkeys([*roles.targets, *inputs]):
        is_target = name in roles.targets
        if not roles.is_typed(name) or name in roles.categorical:
            continue
        if name in roles.no_inputs and not is_target:
            continue
        with_column = [sheet for sheet in sheets if sheet.table.column_names.count(name) == 1]
        if with_column and all(is_text(sheet.table[name]) for sheet in with_column):
            _check_categories(with_column, name, is_target, report)


def _check_categories(sheets: Sequence[Sheet], name: str, is_target: bool, report: Report) -> None:
    """Check that a text column can be encoded by category, and report a column of many categories.

    Raises
    ------
    DataError
        If most texts are numbers or dates, or nearly all texts differ, as in ids and free texts.
    """
    import pyarrow as pa

    texts = pa.concat_arrays([as_strings(sheet.table[name]) for sheet in sheets])
    unique = texts.filter(is_present(texts)).unique()
    if is_target:
        what = f"the target {name!r}"
    else:
        what = f"column {name!r}"
    _check_marks(unique, what)
    if len(unique) <= FEW_TEXTS:
        _report_few_texts(unique, what, is_target, report)
        return
    is_value = look_like_dates(unique.to_pylist())
    for mark in DECIMAL_MARKS:
        is_value |= are_numbers(unique, mark).to_numpy(zero_copy_only=False)
    if 0.5 < is_value.mean() < 1:
        odd = unique[int(np.argmin(is_value))].as_py()
        where, row = _find_text(sheets, name, odd)
        raise DataError(
            f"{where}: {what} has the text {shown(odd)} in row {row + 1}, but most of its texts "
            f"are numbers or dates (number of other texts: {int((~is_value).sum())}); "
            "correct the text, or leave the row or the column out"
        )
    if 2 * len(unique) > len(texts):
        examples = " and ".join(shown(text) for text in unique[:2].to_pylist())
        if is_value.all():
            raise DataError(
                f"{what} has {len(unique):,} different texts in {len(texts):,} rows, such as "
                f"{examples}, which are numbers or dates; convert the column to numbers or dates, "
                "or to the categorical type of pandas"
            )
        fix = "choose another target"
        if not is_target:
            fix = (
                f"leave it out by exclude = [{name!r}], or use its words as the only input by "
                f"text = {name!r}"
            )
        raise DataError(
            f"{what} has {len(unique):,} different texts in {len(texts):,} rows, such as "
            f"{examples}, so it is an id, a name or a free text rather than a category; {fix}"
        )
    if len(unique) > MANY_CATEGORIES and not is_target:
        report.add(f"column {name!r} becomes {len(unique):,} columns, one for each text")


def _report_few_texts(unique: Any, what: str, is_target: bool, report: Report) -> None:
    """Report that a column of few different texts, mostly numbers, is encoded by category."""
    if len(unique) < 3 or is_target:
        return
    is_value = np.zeros(len(unique), dtype=bool)
    for mark in DECIMAL_MARKS:
        is_value |= are_numbers(unique, mark).to_numpy(zero_copy_only=False)
    if 0.5 < is_value.mean() < 1:
        odd = unique[int(np.argmin(is_value))].as_py()
        report.add(f"{what} has {shown(odd)} among numbers, so all its values are categories")


def _find_text(sheets: Sequence[Sheet], name: str, text: str) -> tuple[str, int]:
    """Return table and row (from 0) of the first cell of column ``name`` equal to ``text``."""
    pc = arrow_compute()
    for sheet in sheets:
        row = pc.index(as_strings(sheet.table[name]), text).as_py()
        if row >= 0:
            return sheet.where, row
    raise LookupError(text)


def _check_marks(unique: Any, what: str) -> None:
    """Raise a DataError if a column has numbers with decimal points and with decimal commas.

    ``what`` names the column in the message.
    """
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
            f"{what} should have numbers with one decimal mark, got a decimal point and a decimal "
            f"comma, such as in {shown(point)} and {shown(comma)}; write all numbers with the same "
            "decimal mark"
        )


def _report_numbered(sheets: Sequence[Sheet], roles: ColumnRoles, report: Report) -> None:
    """Report input columns that look like row numbers or ids, as models should not use them."""
    if roles.inputs is None:
        names = sheets[0].table.column_names
    else:
        names = roles.inputs
    for name in names:
        if name in (*roles.no_inputs, *roles.categorical):
            continue
        advice = f"but is an input (exclude = [{name!r}] leaves it out)"
        if all(numbers_rows(sheet.table, name) for sheet in sheets):
            report.add(f"column {name!r} numbers the rows, {advice}")
        elif looks_like_id(sheets, name):
            report.add(f"column {name!r} looks like an id, {advice}")


def looks_like_id(sheets: Sequence[Sheet], name: str) -> bool:
    """Return whether a column of whole numbers has the name of an id and mostly distinct values."""
    import pyarrow as pa
    import pyarrow.types as types

    if not is_id_name(name) or any(sheet.table.column_names.count(name) != 1 for sheet in sheets):
        return False
    columns = [sheet.table[name] for sheet in sheets]
    if not all(types.is_integer(column.type) for column in columns):
        return False
    values = pa.chunked_array(
        [chunk.cast(pa.int64(), safe=False) for each in columns for chunk in each.chunks]
    )
    return len(values) > FEW_TEXTS and 2 * len(values.unique()) > len(values)


def is_id_name(name: str) -> bool:
    """Return whether a column has the name of an id, such as ``patient_id`` or ``pid``."""
    return _ID_NAME.search(name) is not None


def numbers_rows(table: Table, name: str) -> bool:
    """Return whether a column of a table numbers the rows consecutively."""
    import pyarrow.types as types

    if table.column_names.count(name) != 1 or table.num_rows <= FEW_TEXTS:
        return False
    column = table[name]
    if not types.is_integer(column.type) or column.null_count:
        return False
    return bool((np.diff(column.to_numpy()) == 1).mean() > MOST_STEPS)
