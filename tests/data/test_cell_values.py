"""Texts as numbers and dates."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.data.cell_values import Notation, in_days, in_hours, short_date_format


def readings(*texts: str, **notation: Any) -> dict[str, list[float]]:
    """Return the values of each possible reading, by its notation."""
    found = Notation(**notation).readings(pa.array(texts, pa.string()))
    return {reading.notation: reading.values.to_pylist() for reading in found}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["1,5", "2,25"], {",": [1.5, 2.25]}),
        (["1.5", "2.25"], {".": [1.5, 2.25]}),
        (["1,234", "0,5"], {",": [1.234, 0.5]}),
        (["0,123"], {",": [0.123]}),
        (["1.234,50", "7"], {",": [1234.5, 7]}),
        (["1,234.50", "7"], {".": [1234.5, 7]}),
        (["1,234,567"], {".": [1_234_567]}),
        (["1'234.5", "3"], {".": [1234.5, 3]}),
        (["1 234,5", "-3"], {",": [1234.5, -3]}),
        (["1\u202f234", "\u22125"], {".": [1234, -5], ",": [1234, -5]}),
        (["+5,1", ",5", " 2 "], {",": [5.1, 0.5, 2]}),
        (["1e3", "1,5e-3"], {",": [1000, 0.0015]}),
        (["1,234"], {".": [1234], ",": [1.234]}),
        (["1.234", "12"], {".": [1.234, 12], ",": [1234, 12]}),
        (["1,5", "1.5"], {}),
        (["1,2345", "1.5"], {}),
        (["5", "a"], {}),
        ([], {}),
    ],
)
def test_numbers_are_read_with_each_mark_that_fits(
    texts: list[str], expected: dict[str, list[float]]
) -> None:
    assert readings(*texts) == expected


@settings(max_examples=25)
@given(
    st.lists(st.floats(-1e6, 1e6).map(lambda number: round(number, 2)), min_size=1),
    st.sampled_from([".", ","]),
)
def test_formatted_numbers_are_read_back(numbers: list[float], mark: str) -> None:
    english = [f"{number:,.2f}" for number in numbers]
    texts = (
        english if mark == "." else [text.translate(str.maketrans(",.", ".,")) for text in english]
    )
    assert readings(*texts) == {mark: numbers}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("31.12.1970", {"day, month, year": [364]}),
        ("1.2.1970", {"day, month, year": [31]}),
        ("31/12/1970", {"day, month, year": [364]}),
        ("12/31/1970", {"month, day, year": [364]}),
        ("12-31-1970", {"month, day, year": [364]}),
        ("1970/12/31", {"year, month, day": [364]}),
        ("1970-12-31", {"year, month, day": [364]}),
        ("1970-01-02T12:00:00Z", {"year, month, day": [1.5]}),
        ("31-Dec-1970", {"day, month, year": [364]}),
        ("2 January 1970", {"day, month, year": [1]}),
        ("2.1.1970 18:00", {"day, month, year": [1.75]}),
        ("2.1.1970 18:00:00", {"day, month, year": [1.75]}),
        ("13/1/1970 6:00 PM", {"day, month, year": [12.75]}),
        ("01/02/1970", {"day, month, year": [31], "month, day, year": [1]}),
        ("02/02/1970", {"day, month, year": [32], "month, day, year": [32]}),
        ("31.02.1970", {}),
        ("31.12.70", {}),
        ("31.12.1970 or so", {}),
        ("3 Foo 1970", {}),
    ],
)
def test_dates_are_read_in_each_order_that_fits(
    text: str, expected: dict[str, list[float]]
) -> None:
    assert readings(text) == expected


def test_one_date_tells_the_order_of_all() -> None:
    assert readings("01/02/1970", "31/01/1970") == {"day, month, year": [31, 30]}


def test_a_given_format_is_tried_first() -> None:
    assert readings("01/02/1970", dates="%m/%d/%Y") == {"%m/%d/%Y": [1]}
    assert readings("31.12.70", dates="%d.%m.%y") == {"%d.%m.%y": [364]}
    assert readings("1970-01-02", dates="%d.%m.%y") == {"year, month, day": [1]}


def test_a_given_mark_is_the_only_one() -> None:
    assert readings("1,234", decimal=",") == {",": [1.234]}
    assert readings("1,234", decimal=".") == {".": [1234]}
    assert readings("1.5", decimal=",") == {}


def test_years_of_two_digits_are_known_as_such() -> None:
    assert short_date_format(["31.12.24", "1.2.23"]) == "%d.%m.%y"
    assert short_date_format(["12/31/24 10:00"]) == "%m/%d/%y %H:%M"
    for texts in (["31.12.2024"], ["1.2.3"], ["99.99.99"], ["31.12.24 x"], ["x"], []):
        assert short_date_format(texts) is None


def test_moments_and_spans_are_days_and_times_hours() -> None:
    noon = datetime(1970, 1, 2, 12, tzinfo=UTC)
    assert in_days(pa.array([noon, None])).to_pylist() == [1.5, None]
    assert in_days(pa.array([noon.date()])).to_pylist() == [1]
    assert in_days(pa.array([timedelta(hours=6)])).to_pylist() == [0.25]
    assert in_hours(pa.array([time(6, 30)])).to_pylist() == [6.5]
