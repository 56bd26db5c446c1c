"""Conversion of the texts in a table's cells to numbers and dates.

A *notation* is the decimal mark of numbers and the format of dates, which differ between countries.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedclade.core import require

Texts = Any
"""A ``pyarrow.Array`` of strings without nulls: pyarrow is imported where a table is read."""

Check = tuple[str, Any, bool, str]
"""A check of a setting: its name and value, whether the value is valid, and the rule in words."""

DECIMAL_MARKS = (".", ",")

DATE_UNIT = "days since 1970-01-01"
TIME_UNIT = "hours since midnight"
DURATION_UNIT = "days"

EMPTY_CELLS = (
    "",
    "?",
    "#N/A",
    "#N/A N/A",
    "#NA",
    "-1.#IND",
    "-1.#QNAN",
    "-NaN",
    "-nan",
    "1.#IND",
    "1.#QNAN",
    "N/A",
    "NA",
    "NULL",
    "NaN",
    "n/a",
    "nan",
    "null",
)
"""Texts that denote an empty cell in columns of numbers: those of pyarrow's reader, and "?"."""

_THIN_SPACES = "\u00a0\u202f\u2009"

_GROUP_SEPARATORS: Mapping[str, str] = {".": f",'’ {_THIN_SPACES}", ",": f".'’ {_THIN_SPACES}"}
"""Characters that may separate groups of three digits (as in 1,000,000), by the decimal mark."""

_MINUS = "\u2212"

_DATE = re.compile(r"(\d{1,4})([./-])(\d{1,2})\2(\d{1,4})(.*)", re.DOTALL)
_NAMED_MONTH = re.compile(r"\d{1,2}([ -])([A-Za-z]{3,9})\1\d{4}(.*)", re.DOTALL)
_TIME = re.compile(r"([ T])\d{1,2}:\d{2}(:\d{2})?( ?[AaPp][Mm])?")


@dataclass(frozen=True)
class Reading:
    """One interpretation of a column of texts: as numbers with a decimal mark, or as dates.

    Parameters
    ----------
    kind
        ``number`` or ``date``.
    notation
        Notation of the texts, for messages. For numbers: the decimal mark. For dates: the order of
        day, month and year in words, or the format of dates that the user specifies.
    setting
        Value of the user's setting ``decimal`` or ``dates`` that selects this interpretation.
    values
        Values of the column as an Arrow array: numbers, or days since 1970-01-01.
    """

    kind: Literal["number", "date"]
    notation: str
    setting: str
    values: Any


@dataclass(frozen=True, kw_only=True)
class Notation:
    """Notation of numbers and dates in texts.

    Parameters
    ----------
    decimal
        Decimal mark, ``.`` or ``,``; None if it is detected for each column.
    dates
        Format of dates in the codes of Python's ``strptime``; None if it is detected for each
        column.
    """

    decimal: str | None = None
    dates: str | None = None

    def __post_init__(self) -> None:
        require(*self.checks(self.decimal, self.dates))

    @staticmethod
    def checks(decimal: str | None, dates: str | None) -> list[Check]:
        """Return checks of a decimal mark and a date format for :func:`~fedclade.core.require`."""
        is_mark = decimal is None or decimal in DECIMAL_MARKS
        is_format = dates is None or _is_date_format(dates)
        format_rule = (
            "a format with day, month and year in the codes of Python's strptime, such as "
            "'%d.%m.%Y'"
        )
        return [
            ("decimal", decimal, is_mark, "'.' or ','"),
            ("dates", dates, is_format, format_rule),
        ]

    def readings(self, texts: Texts) -> list[Reading]:
        """Return all possible interpretations of a column of texts as numbers or dates.

        The list is empty if the texts are neither numbers nor dates, and has several entries if the
        notation is ambiguous, as for 01/02/2024.
        """
        unique = texts.dictionary_encode()
        found = self._read_unique(unique.dictionary)
        return [replace(reading, values=reading.values.take(unique.indices)) for reading in found]

    def _read_unique(self, unique: Texts) -> list[Reading]:
        marks = DECIMAL_MARKS if self.decimal is None else (self.decimal,)
        numbers = [(mark, read_numbers(unique, mark)) for mark in marks]
        fitting = [
            Reading("number", mark, mark, values) for mark, values in numbers if values is not None
        ]
        return fitting or self._read_dates(unique)

    def _read_dates(self, unique: Texts) -> list[Reading]:
        texts: list[str] = unique.to_pylist()
        if not texts:
            return []
        if self.dates is not None:
            days = _parse_dates(texts, self.dates)
            if days is not None:
                return [Reading("date", self.dates, self.dates, days)]
        days = _parse_iso_dates(unique)
        if days is not None:
            return [Reading("date", "year, month, day", "%Y-%m-%d", days)]
        parsed = [
            (order, form, _parse_dates(texts, form)) for order, form in _list_date_formats(texts)
        ]
        return [
            Reading("date", order, form, days) for order, form, days in parsed if days is not None
        ]


def arrow_compute() -> Any:
    """Return the module ``pyarrow.compute``, typed as ``Any``.

    The module creates its functions when it is imported, so a type checker does not know them.
    """
    import pyarrow.compute

    return pyarrow.compute


def read_numbers(texts: Texts, mark: str) -> Any:
    """Convert texts with a decimal mark to numbers, as an Arrow array of int64 or float64.

    Returns None if a text is not a number.
    """
    import pyarrow as pa

    pc = arrow_compute()
    if not len(texts) or not pc.all(are_numbers(texts, mark)).as_py():
        return None
    plain = pc.replace_substring_regex(
        pc.utf8_trim_whitespace(texts), f"[{_GROUP_SEPARATORS[mark]}+]", ""
    )
    plain = pc.replace_substring(pc.replace_substring(plain, _MINUS, "-"), mark, ".")
    if pc.all(pc.match_substring_regex(plain, r"^-?\d{1,18}$")).as_py():
        return plain.cast(pa.int64())
    return plain.cast(pa.float64())


def are_numbers(texts: Texts, mark: str) -> Any:
    """Return a mask of the texts that are numbers with the decimal mark ``mark``.

    The digits may be in groups of three, as in 1,234.5.
    """
    pc = arrow_compute()
    # A number that begins with 0 has no groups: 0,123 has a decimal comma.
    grouped = "|".join(
        rf"[1-9]\d{{0,2}}(?:{re.escape(each)}\d{{3}})+" for each in _GROUP_SEPARATORS[mark]
    )
    fraction = rf"{re.escape(mark)}\d+"
    pattern = (
        rf"^\s*[-+{_MINUS}]?(?:(?:\d+|{grouped})(?:{fraction})?|{fraction})(?:[eE][-+]?\d+)?\s*$"
    )
    return pc.match_substring_regex(texts, pattern)


def first_other_text(column: Any) -> tuple[int, str] | None:
    """Find the first cell of a column that is neither empty nor a number, for an error message.

    Returns
    -------
    tuple or None
        The row of the cell, from 1, and its text; None if the column has no such cell.
    """
    pc = arrow_compute()
    texts = as_strings(column)
    is_other = is_present(texts)
    for mark in DECIMAL_MARKS:
        is_other = pc.and_(is_other, pc.invert(are_numbers(texts, mark)))
    rows = np.flatnonzero(is_other.to_numpy(zero_copy_only=False))
    if len(rows) == 0:
        return None
    row = int(rows[0])
    return row + 1, texts[row].as_py()


def as_strings(column: Any) -> Texts:
    """Convert an Arrow column to one array of strings, with empty strings in place of nulls."""
    import pyarrow as pa

    pc = arrow_compute()
    texts = column.cast(pa.string())
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    return pc.fill_null(texts, "")


def is_present(texts: Texts) -> Any:
    """Return a mask of the texts that do not denote an empty cell (such as "" or "NA")."""
    import pyarrow as pa

    pc = arrow_compute()
    return pc.invert(pc.is_in(pc.utf8_trim_whitespace(texts), pa.array(EMPTY_CELLS)))


def look_like_dates(texts: Sequence[str]) -> NDArray[np.bool_]:
    """Return a mask of the texts that look like a numeric date, such as 1.2.2024.

    The date need not exist: 31.02.2024 also looks like a date.
    """
    return np.array([_DATE.fullmatch(text.strip()) is not None for text in texts], dtype=bool)


def short_date_format(texts: Sequence[str]) -> str | None:
    """Return a date format with two-digit years that fits all texts; None if no format does.

    Such dates are read only if the user sets ``dates``. The returned format is the value that an
    error message suggests for this setting.
    """
    if texts:
        match = _DATE.fullmatch(texts[0].strip())
    else:
        match = None
    if match is None or max(len(match[1]), len(match[4])) > 2:
        return None
    separator = match[2]
    clock = _detect_clock_format(match[5])
    orders = ("%d{0}%m{0}%y", "%m{0}%d{0}%y", "%y{0}%m{0}%d")
    formats = [order.format(separator) + clock for order in orders if clock is not None]
    return next((each for each in formats if _parse_dates(texts, each) is not None), None)


def _list_date_formats(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the possible formats of the dates in a column, judged by its first text.

    Each entry has the order of day, month and year in words, and the format for ``strptime``.
    """
    first = texts[0].strip()
    named = _NAMED_MONTH.fullmatch(first)
    if named is not None:
        clock = _detect_clock_format(named[3])
        if clock is None:
            return []
        month = "%b" if len(named[2]) == 3 else "%B"
        return [("day, month, year", f"%d{named[1]}{month}{named[1]}%Y{clock}")]
    match = _DATE.fullmatch(first)
    if match is None:
        return []
    separator = match[2]
    clock = _detect_clock_format(match[5])
    if clock is None:
        return []
    orders = {"day, month, year": "%d{0}%m{0}%Y", "year, month, day": "%Y{0}%m{0}%d"}
    # No country writes the month first with dots as separators.
    if separator != ".":
        orders["month, day, year"] = "%m{0}%d{0}%Y"
    return [(order, template.format(separator) + clock) for order, template in orders.items()]


def _detect_clock_format(text: str) -> str | None:
    """Return the ``strptime`` format of the time of day that follows a date.

    The format is empty if there is no time, and None if the time has an unknown format.
    """
    if not text:
        return ""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    seconds = ":%S" if match[2] else ""
    if match[3]:
        space = " " if match[3].startswith(" ") else ""
        return f"{match[1]}%I:%M{seconds}{space}%p"
    return f"{match[1]}%H:%M{seconds}"


def _parse_dates(texts: Sequence[str], date_format: str) -> Any:
    """Convert texts with dates to days since 1970-01-01, as an Arrow array of float64.

    Returns None if a text does not have the given format.
    """
    import pyarrow as pa

    try:
        moments = [datetime.strptime(text.strip(), date_format) for text in texts]
    except ValueError:
        return None
    return pa.array(
        (np.array(moments, dtype="M8[us]") - np.datetime64(0, "us")) / np.timedelta64(1, "D")
    )


def _parse_iso_dates(texts: Texts) -> Any:
    """Convert ISO 8601 dates to days since 1970-01-01, as an Arrow array of float64.

    Returns None if a text is not an ISO 8601 date.
    """
    import pyarrow as pa

    # Arrow parses texts with a UTC offset only to a type with a time zone, and other texts only to
    # a type without.
    for zone in (None, "UTC"):
        try:
            return in_days(texts.cast(pa.timestamp("us", zone)))
        except pa.ArrowInvalid:
            continue
    return None


def in_days(moments: Any) -> Any:
    """Convert an Arrow array of dates, timestamps or durations to days, in float64.

    Dates and timestamps are counted from 1970-01-01.
    """
    import pyarrow as pa

    pc = arrow_compute()
    if pa.types.is_date(moments.type):
        moments = moments.cast(pa.timestamp("s"))
    is_duration = pa.types.is_duration(moments.type)
    if is_duration:
        unit = pa.duration("us")
    else:
        unit = pa.timestamp("us", moments.type.tz)
    microseconds = moments.cast(unit, safe=False).cast(pa.int64())
    return pc.divide(microseconds.cast(pa.float64(), safe=False), 86_400e6)


def in_hours(times: Any) -> Any:
    """Convert an Arrow array of times of the day to hours since midnight, in float64."""
    import pyarrow as pa

    pc = arrow_compute()
    microseconds = times.cast(pa.time64("us"), safe=False).cast(pa.int64())
    return pc.divide(microseconds.cast(pa.float64()), 3_600e6)


def _is_date_format(date_format: str) -> bool:
    """Return whether a format has day, month and year, so that a date can be read from its text."""
    day = datetime(2024, 3, 14)
    try:
        with warnings.catch_warnings():
            # Python 3.13 warns of a format without the year, which is refused here anyway.
            warnings.simplefilter("ignore", DeprecationWarning)
            return datetime.strptime(day.strftime(date_format), date_format) == day
    except ValueError:
        return False
