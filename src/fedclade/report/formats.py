"""Formats of numbers in reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

NONE = "–"
"""Text for a missing number."""


def number(value: float | None, digits: int = 2) -> str:
    """Write a number with a fixed number of decimals.

    >>> number(0.125), number(-0.3, 1), number(None), number(math.nan)
    ('0.12', '−0.3', '–', '–')
    """
    # Adding zero turns the −0.0 of a small negative number into 0.0.
    if value is None or math.isnan(value):
        return NONE
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def significant(value: float | None, like: float | None = None) -> str:
    """Write a number with three significant digits; very large or tiny ones as a power of ten.

    If ``like`` is given, the number has as many decimals as ``like`` would have.

    >>> significant(0.03124), significant(-12.345), significant(12345.6)
    ('0.0312', '−12.3', '12346')
    >>> significant(3e-7), significant(None)
    ('3e-07', '–')
    >>> significant(0.5, like=12.3)
    '0.5'
    """
    if value is None or math.isnan(value):
        return NONE
    size = float(f"{abs(value if like is None else like):.3g}")
    if size != 0 and not 1e-4 <= size < 1e7:
        return f"{value:.3g}".replace("-", "−", 1) if value < 0 else f"{value:.3g}"
    return number(value, max(0, 2 - math.floor(math.log10(size))) if size else 2)


def percent(value: float | None, digits: int = 1) -> str:
    """Write a share.

    >>> percent(0.9234), percent(1, 0), percent(None)
    ('92.3 %', '100 %', '–')
    """
    return NONE if value is None or math.isnan(value) else f"{number(100 * value, digits)} %"


def traffic(n_bytes: float | None) -> str:
    """Write a number of bytes in decimal units.

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
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(seconds: float | None) -> str:
    """Write a time.

    >>> duration(3.21), duration(125), duration(3720), duration(None)
    ('3.2 s', '2 min 05 s', '1 h 02 min', '–')
    """
    if seconds is None:
        return NONE
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def count(n: int, noun: str) -> str:
    """Write a number of things, with the plural of the noun if needed.

    >>> count(1, "client"), count(1200, "client"), count(0, "reply")
    ('1 client', '1,200 clients', '0 replies')
    """
    if n == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{n:,} {plural}"


def shortened(words: Sequence[str], limit: int = 8) -> str:
    """List words, and only count the rest beyond a limit.

    >>> shortened(["a", "b", "c"]), shortened(["a", "b", "c", "d"], limit=3)
    ('a, b, c', 'a, b … 2 more')
    """
    if len(words) <= limit:
        return ", ".join(words)
    return f"{', '.join(words[: limit - 1])} … {len(words) - limit + 1:,} more"
