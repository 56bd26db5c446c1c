"""Formats of numbers, shares, byte counts, durations and lists in reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

NONE = "–"
"""Text for a missing number."""


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as text with a fixed number of decimals; a dash for None and NaN.

    >>> number(0.125), number(-0.3, 1), number(None), number(math.nan)
    ('0.12', '−0.3', '–', '–')
    """
    # Adding zero turns the −0.0 of a small negative number into 0.0.
    if value is None or math.isnan(value):
        return NONE
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def significant(value: float | None, like: float | None = None) -> str:
    """Return a number as text with three significant digits; a dash for None and NaN.

    Very large and very small numbers are written as powers of ten. If ``like`` is given, the text
    has as many decimals as the number ``like`` would have.

    >>> significant(0.03124), significant(-12.345), significant(12345.6)
    ('0.0312', '−12.3', '12346')
    >>> significant(3e-7), significant(None)
    ('3e-07', '–')
    >>> significant(0.5, like=12.3)
    '0.5'
    """
    if value is None or math.isnan(value):
        return NONE
    if like is None:
        like = value
    size = float(f"{abs(like):.3g}")
    if size != 0 and not 1e-4 <= size < 1e7:
        if value < 0:
            return f"{value:.3g}".replace("-", "−", 1)
        return f"{value:.3g}"
    if size == 0:
        return number(value, 2)
    return number(value, max(0, 2 - math.floor(math.log10(size))))


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share between 0 and 1 as text in per cent; a dash for None and NaN.

    >>> percent(0.9234), percent(1, 0), percent(None)
    ('92.3 %', '100 %', '–')
    """
    if value is None or math.isnan(value):
        return NONE
    return f"{number(100 * value, digits)} %"


def traffic(n_bytes: float | None) -> str:
    """Return a number of bytes as text in decimal units; a dash for None.

    >>> traffic(999), traffic(43_400_000), traffic(2_000_000_000), traffic(None)
    ('999 B', '43.4 MB', '2.0 GB', '–')
    """
    if n_bytes is None:
        return NONE
    value = float(n_bytes)
    units = ["B", "kB", "MB", "GB", "TB"]
    # 999.95 would be rounded up to 1000.0 of the smaller unit.
    while value >= 999.95 and len(units) > 1:
        value = value / 1000
        units = units[1:]
    if units[0] == "B":
        return f"{value:.0f} B"
    return f"{value:.1f} {units[0]}"


def duration(seconds: float | None) -> str:
    """Return a time in seconds as text; a dash for None.

    >>> duration(3.21), duration(125), duration(3720), duration(None)
    ('3.2 s', '2 min 05 s', '1 h 02 min', '–')
    """
    if seconds is None:
        return NONE
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s"


def count(n: int, noun: str) -> str:
    """Return a number and a noun as text, with the plural of the noun if needed.

    >>> count(1, "client"), count(1200, "client"), count(0, "reply")
    ('1 client', '1,200 clients', '0 replies')
    """
    if n == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        plural = f"{noun[:-1]}ies"
    else:
        plural = f"{noun}s"
    return f"{n:,} {plural}"


def shortened(words: Sequence[str], limit: int = 8) -> str:
    """Join words with commas; if there are more than ``limit``, only count the remaining words.

    >>> shortened(["a", "b", "c"]), shortened(["a", "b", "c", "d"], limit=3)
    ('a, b, c', 'a, b … 2 more')
    """
    if len(words) <= limit:
        return ", ".join(words)
    return f"{', '.join(words[: limit - 1])} … {len(words) - limit + 1:,} more"
