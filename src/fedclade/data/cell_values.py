"""Texts of a table's cells as numbers and dates, in the notations of different countries."""

from __future__ import annotations

import re
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
"""Spellings of empty cells in columns of numbers: pyarrow's, so that both readers agree."""

_THIN_SPACES = "\u00a0\u202f\u2009"

_GROUP_SEPARATORS: Mapping[str, str] = {".": f",'’ {_THIN_SPACES}", ",": f".'’ {_THIN_SPACES}"}
"""Characters between groups of three digits, by the decimal mark."""

_MINUS = "\u2212"

_DATE = re.compile(r"(\d{1,4})([./-])(\d{1,2})\2(\d{1,4})(.*)", re.DOTALL)
_NAMED_MONTH = re.compile(r"\d{1,2}([ -])([A-Za-z]{3,9})\1\d{4}(.*)", re.DOTALL)
_TIME = re.compile(r"([ T])\d{1,2}:\d{2}(:\d{2})?( ?[AaPp][Mm])?")


@dataclass(frozen=True)
class Reading:
    """Values of a column, read in one notation."""

    kind: Literal["number", "date"]
    notation: str
    setting: str
    values: Any


@dataclass(frozen=True, kw_only=True)
class Notation:
    """Notation of numbers and dates in texts. A part that is None is detected."""

    decimal: str | None = None
    dates: str | None = None

    def __post_init__(self) -> None:
        require(*self.checks(self.decimal, self.dates))

    @staticmethod
    def checks(decimal: str | None, dates: str | None) -> list[Check]:
        """Return the checks of a notation for :func:`~fedclade.core.require`."""
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
        """Return the possible readings of a column; none for other texts than numbers or dates."""
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
    """Return ``pyarrow.compute``, untyped: it creates its functions when it is imported."""
    import pyarrow.compute

    return pyarrow.compute


def read_numbers(texts: Texts, mark: str) -> Any:
    """Convert texts to numbers, as an Arrow array of int64 or float64.

    None if a text is not a number.
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
    """Return a mask of the numbers among texts, with a decimal mark and perhaps grouped digits."""
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
    """Return row (from 1) and text of the first cell that is neither empty nor a number."""
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
    """Return a column as one array of strings, with empty ones in place of nulls."""
    import pyarrow as pa

    pc = arrow_compute()
    texts = column.cast(pa.string())
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    return pc.fill_null(texts, "")


def is_present(texts: Texts) -> Any:
    """Return a mask of texts that are not a spelling of an empty cell."""
    import pyarrow as pa

    pc = arrow_compute()
    return pc.invert(pc.is_in(pc.utf8_trim_whitespace(texts), pa.array(EMPTY_CELLS)))


def look_like_dates(texts: Sequence[str]) -> NDArray[np.bool_]:
    """Return a mask of texts that look like a numeric date, even if the day does not exist."""
    return np.array([_DATE.fullmatch(text.strip()) is not None for text in texts], dtype=bool)


def short_date_format(texts: Sequence[str]) -> str | None:
    """Return the format of dates with years of two digits; None if not all texts have one."""
    match = _DATE.fullmatch(texts[0].strip()) if texts else None
    if match is None or max(len(match[1]), len(match[4])) > 2:
        return None
    separator = match[2]
    clock = _detect_clock_format(match[5])
    orders = ("%d{0}%m{0}%y", "%m{0}%d{0}%y", "%y{0}%m{0}%d")
    formats = [order.format(separator) + clock for order in orders if clock is not None]
    return next((each for each in formats if _parse_dates(texts, each) is not None), None)


def _list_date_formats(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return possible formats of the dates of a column by its first text, after their order."""
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
    """Return the format of the time after a date; empty without a time, None if it is unknown."""
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
    """Convert dates to days since 1970-01-01 (float64); None if a date has another format."""
    import pyarrow as pa

    try:
        moments = [datetime.strptime(text.strip(), date_format) for text in texts]
    except ValueError:
        return None
    return pa.array(
        (np.array(moments, dtype="M8[us]") - np.datetime64(0, "us")) / np.timedelta64(1, "D")
    )


def _parse_iso_dates(texts: Texts) -> Any:
    """Convert ISO 8601 dates to days since 1970-01-01; None if a date has another format."""
    import pyarrow as pa

    for zone in (None, "UTC"):
        try:
            return in_days(texts.cast(pa.timestamp("us", zone)))
        except pa.ArrowInvalid:
            continue
    return None


def in_days(moments: Any) -> Any:
    """Return an Arrow array of dates, timestamps or durations as days, in float64."""
    import pyarrow as pa

    pc = arrow_compute()
    if pa.types.is_date(moments.type):
        moments = moments.cast(pa.timestamp("s"))
    is_duration = pa.types.is_duration(moments.type)
    unit = pa.duration("us") if is_duration else pa.timestamp("us", moments.type.tz)
    microseconds = moments.cast(unit, safe=False).cast(pa.int64())
    return pc.divide(microseconds.cast(pa.float64(), safe=False), 86_400e6)


def in_hours(times: Any) -> Any:
    """Return an Arrow array of times of the day as hours since midnight, in float64."""
    import pyarrow as pa

    pc = arrow_compute()
    microseconds = times.cast(pa.time64("us"), safe=False).cast(pa.int64())
    return pc.divide(microseconds.cast(pa.float64()), 3_600e6)


def _is_date_format(date_format: str) -> bool:
    """Return whether a format contains a day and reproduces it."""
    day = datetime(2024, 3, 14)
    try:
        return datetime.strptime(day.strftime(date_format), date_format) == day
    except ValueError:
        return False
