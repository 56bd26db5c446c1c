"""Columns of texts as numbers and dates, by evidence; columns that are of no use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fedclade import DataError, Federation, federation_from_frame
from fedclade.data import ColumnRoles, Notation, Rows, prepare_sheets, read_sheet

ROLES = ColumnRoles(targets=("y",))


def prepared(
    folder: Path, *files: str, roles: ColumnRoles = ROLES, notation: Notation | None = None
) -> list[dict[str, list[Any]]]:
    """Write CSV files, and return their prepared columns."""
    sheets = []
    for number, text in enumerate(files):
        (folder / f"{number}.csv").write_text(text)
        sheets.append(read_sheet(folder / f"{number}.csv"))
    return [
        sheet.table.to_pydict() for sheet in prepare_sheets(sheets, roles, notation or Notation())
    ]


def lines(header: str, rows: Sequence[str]) -> str:
    return "\n".join([header, *rows]) + "\n"


def framed(columns: dict[str, Sequence[Any]], **given: Any) -> Federation:
    """Return the federation of a data frame of two clients."""
    n = len(next(iter(columns.values())))
    frame = pa.table(
        {**columns, "who": [f"c{k % 2}" for k in range(n)], "y": [k // 2 % 2 for k in range(n)]}
    )
    return federation_from_frame(frame, "who", "y", **given)


def test_another_column_of_the_file_decides_what_a_mark_is(tmp_path: Path) -> None:
    [comma] = prepared(tmp_path, "a;b;y\n1.234;0,5;1\n2.345;1,5;0\n")
    assert comma == {"a": [1234, 2345], "b": [0.5, 1.5], "y": [1, 0]}
    [point] = prepared(tmp_path, 'a,b,y\n"1,234",0.5,1\n"2,345",1.5,0\n')
    assert point == {"a": [1234, 2345], "b": [0.5, 1.5], "y": [1, 0]}


def test_another_file_with_the_same_separator_decides_what_a_mark_is(tmp_path: Path) -> None:
    first, second = prepared(tmp_path, "a;y\n1,234;1\n2;0\n", "a;y\n1,5;1\n2,5;0\n")
    assert first["a"] == [1.234, 2]
    assert second["a"] == [1.5, 2.5]
    tabs, _ = prepared(tmp_path, "a\ty\n1.234\t1\n", "a\ty\n1,5\t1\n")
    assert tabs["a"] == [1234]


def test_numbers_that_are_the_same_by_both_marks_decide_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"column 'a' has '1,234' in row 1, which is 1234 with decimal = '\.' and"
    ):
        prepared(tmp_path, "b;a;y\n1 234;1,234;1\n")
    with pytest.raises(
        DataError, match="column 'a' has '01/02/1970' in row 1, which may begin with the day or"
    ):
        prepared(tmp_path, "b,a,y\n02/02/1970,01/02/1970,1\n")
    [found] = prepared(tmp_path, "a,b,y\n1 234,2.345,1\n")
    assert (found["a"], found["b"]) == ([1234], [2.345])


def test_a_point_in_a_file_with_commas_between_cells_is_decimal_whatever_other_files_have(
    tmp_path: Path,
) -> None:
    first, second = prepared(tmp_path, "a,y\n1.234,1\n", 'a,y\n"1,5",1\n')
    assert (first["a"], second["a"]) == ([1.234], [1.5])


def test_a_file_with_another_separator_keeps_its_decimal_point(tmp_path: Path) -> None:
    first, second = prepared(tmp_path, "a,y\n1.234,1\n2.345,0\n", "a;y\n1,5;1\n2,5;0\n")
    assert first["a"] == [1.234, 2.345]
    assert second["a"] == [1.5, 2.5]


@pytest.mark.parametrize(
    ("files", "text", "values"),
    [
        (
            ['a,y\n"1,234",1\n"2,345",0\n'],
            "1,234",
            "1234 with decimal = '.' and 1.234 with decimal = ','",
        ),
        (
            ["a;y\n1,234;1\n2,345;0\n"],
            "1,234",
            "1234 with decimal = '.' and 1.234 with decimal = ','",
        ),
        (
            ["a;y\n1.234;1\n2.345;0\n"],
            "1.234",
            "1.234 with decimal = '.' and 1234 with decimal = ','",
        ),
        (
            ["a;b;c;y\n1,234;0,5;0.5;1\n"],
            "1,234",
            "1234 with decimal = '.' and 1.234 with decimal = ','",
        ),
    ],
)
def test_a_mark_that_nothing_decides_is_refused(
    tmp_path: Path, files: list[str], text: str, values: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, *files)
    assert str(caught.value) == (
        f"{tmp_path / '0.csv'}: column 'a' has {text!r} in row 1, which is {values}, and no other "
        "number shows the decimal mark; set 'decimal'"
    )
    for mark in ".,":
        [found] = prepared(
            tmp_path, *files[:1], roles=ColumnRoles(("y",), ("a",)), notation=Notation(decimal=mark)
        )
        assert found["a"][0] == (1.234 if mark == text[1] else 1234)


def test_thousands_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        prepared(tmp_path, 'a,b,y\n"1,234",0.5,1\n"2,345",1.5,0\n')
    assert caplog.messages == ["how the data is read: ',' between thousands"]


@pytest.mark.parametrize(
    ("cells", "messages"),
    [
        (('"1,234,567"', '"2,345,678"'), ["how the data is read: ',' between thousands"]),
        (("1 234", "2 345"), []),  # spaces cannot be decimal marks
        (("+1", "\u22122"), []),
    ],
)
def test_only_commas_between_thousands_are_reported(
    cells: tuple[str, str], messages: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        prepared(tmp_path, f"a,y\n{cells[0]},1\n{cells[1]},0\n")
    assert caplog.messages == messages


@pytest.mark.parametrize("text", ["a,y\n1.5,1\n", 'a,y\n"1.5",1\n', "a;y\n1.5;1\n"])
def test_a_number_with_the_other_mark_than_the_given_one_is_refused(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, text, notation=Notation(decimal=","))
    assert str(caught.value) == (
        f"{tmp_path / '0.csv'}: column 'a' has '1.5' in row 1, which is not a number with decimal = "
        "','; leave out 'decimal', or use the same decimal mark in all files"
    )


def test_empty_cells_among_numbers_with_commas_stay_empty_cells(tmp_path: Path) -> None:
    sheets = []
    (tmp_path / "0.csv").write_text('a,y\n"1,5",1\n"",0\nNA,1\n')
    sheets.append(read_sheet(tmp_path / "0.csv"))
    rows = Rows(prepare_sheets(sheets, ROLES, Notation()))
    with pytest.raises(
        DataError, match=r"column 'a' has an empty cell in row 2 \(and 1 more\); correct the cell"
    ):
        rows.numbers("a")


def test_other_dates_decide_the_order_of_day_and_month(tmp_path: Path) -> None:
    first, second = prepared(
        tmp_path, "a,b,y\n01/02/1970,31/01/1970,1\n", "a,b,y\n12/31/1970,01/02/1970,1\n"
    )
    assert (first["a"], first["b"]) == ([31], [30])
    assert (second["a"], second["b"]) == ([364], [1])


def test_what_was_assumed_is_told_before_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"), pytest.raises(DataError):
        prepared(tmp_path, "a;y\n01/02/1970;1\n")
    assert caplog.messages == ["how the data is read: separator ';'"]


def test_dates_in_two_orders_are_refused_with_the_setting(tmp_path: Path) -> None:
    text = "a,y\n01/02/1970,1\n"
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, text)
    assert str(caught.value) == (
        f"{tmp_path / '0.csv'}: column 'a' has '01/02/1970' in row 1, which may begin with the day "
        "or the month, and no other date shows the order; set dates = '%d/%m/%Y' or dates = "
        "'%m/%d/%Y'"
    )
    [found] = prepared(tmp_path, text, notation=Notation(dates="%m/%d/%Y"))
    assert found["a"] == [1]


def test_years_of_two_digits_are_refused_with_the_setting(tmp_path: Path) -> None:
    text = "a,y\n31.12.70,1\n"
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, text)
    assert str(caught.value).endswith(
        "column 'a' has '31.12.70' in row 1, which looks like a date with a year of two digits; "
        "set the format of dates, such as dates = '%d.%m.%y'"
    )
    [found] = prepared(tmp_path, text, notation=Notation(dates="%d.%m.%y"))
    assert found["a"] == [364]


def test_typed_dates_and_times_are_numbers(caplog: pytest.LogCaptureFixture) -> None:
    columns = {
        "day": [date(1970, 1, 2)] * 4,
        "moment": [datetime(1970, 1, 2, 12)] * 4,
        "clock": [time(6, 30)] * 4,
    }
    with caplog.at_level(logging.WARNING, "fedclade"):
        made = framed(columns, standardize="none")
    assert made.pool.x[0].tolist() == [1, 1.5, 6.5]
    assert caplog.messages == [
        "how the data is read: column 'day' in days since 1970-01-01; column 'moment' in days "
        "since 1970-01-01; column 'clock' in hours since midnight"
    ]


def test_dates_of_pandas_are_numbers_and_categories_stay() -> None:
    import pandas

    moments = pandas.to_datetime(["1970-01-02 06:00", "1970-01-03 00:00"] * 2)
    frame = pandas.DataFrame({
        "who": ["a", "b"] * 2,
        "moment": moments,
        "local": moments.tz_localize("UTC"),
        "visit": pandas.Categorical(moments),
        "span": pandas.to_timedelta([36, 48] * 2, unit="h"),
        "code": pandas.Categorical(["1,5", "2,5"] * 2),
        "y": [0, 1] * 2,
    })  # fmt: skip
    pool = federation_from_frame(frame, "who", "y", standardize="none").pool
    assert pool.columns is not None
    assert pool.columns.inputs == ("moment", "local", "visit", "span", "code=1,5", "code=2,5")
    assert pool.x[0].tolist() == [1.25, 1.25, 1.25, 1.5, 1, 0]


def test_a_date_can_be_the_target() -> None:
    frame = pa.table({"who": ["a", "b"] * 2, "x": [1, 2, 3, 4], "y": [date(1970, 1, 2)] * 4})
    pool = federation_from_frame(frame, "who", "y").pool
    assert (pool.task, pool.y.tolist()) == ("regression", [1.0] * 4)


def test_a_target_with_decimal_commas_is_a_regression() -> None:
    frame = pa.table({"who": ["a", "b"] * 8, "x": range(16), "y": [f"{k},25" for k in range(16)]})
    pool = federation_from_frame(frame, "who", "y").pool
    assert (pool.task, pool.y[:2].tolist()) == ("regression", [0.25, 1.25])


def test_names_of_clients_and_texts_to_learn_from_are_no_numbers() -> None:
    frame = pa.table(
        {"who": ["1,5", "2,5"] * 8, "x": [f"{k},5" for k in range(16)], "y": [0, 1] * 8}
    )
    made = federation_from_frame(frame, "who", "y", text="x")
    assert [client.name for client in made.clients] == ["1,5", "2,5"]
    assert {"3", ",", "5"} <= set(made.pool.vocabulary)


IDS = [f"P-{k:04}" for k in range(205)]


def test_a_column_of_ids_is_refused_with_examples_and_the_fix() -> None:
    with pytest.raises(DataError) as caught:
        framed({"patient": IDS, "age": range(205)})
    assert str(caught.value) == (
        "column 'patient' has 205 different texts in 205 rows, such as 'P-0000' and 'P-0001', so "
        "it is an id, a name or a free text rather than a category; leave it out by exclude = ['patient'], "
        "or use its words as the only input by text = 'patient'"
    )
    assert framed({"patient": IDS, "age": range(205)}, drop=("patient",)).pool.x.shape == (205, 1)
    assert framed({"patient": IDS, "age": range(205)}, inputs=("age",)).pool.x.shape == (205, 1)


def test_a_target_of_ids_is_refused() -> None:
    frame = pa.table({"who": ["a", "b"] * 20, "x": range(40), "y": IDS[:40]})
    with pytest.raises(
        DataError,
        match=r"the target 'y' has 40 different texts in 40 rows.*; choose another target",
    ):
        federation_from_frame(frame, "who", "y")


def test_few_texts_and_categories_of_pandas_are_categories() -> None:
    import pandas

    few, many = [f"w{k}" for k in range(10)], [f"w{k}" for k in range(20)]
    assert framed({"ward": few}).pool.x.shape == (10, 10)
    assert framed({"ward": many * 2}).pool.x.shape == (40, 20)
    frame = pandas.DataFrame(
        {"who": ["a", "b"] * 10, "ward": pandas.Categorical(many), "y": [0, 1] * 10}
    )
    assert federation_from_frame(frame, "who", "y").pool.x.shape == (20, 20)


def test_a_column_that_becomes_many_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        framed({"place": [f"place {k}" for k in range(51)] * 2})
    assert caplog.messages == [
        "how the data is read: column 'place' becomes 51 columns, one for each text"
    ]


def test_other_texts_among_numbers_are_refused_with_their_row(tmp_path: Path) -> None:
    rows = [f"{k},5;1" for k in range(40)]
    rows[6] = "k.A.;1"
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, lines("a;y", rows))
    assert str(caught.value) == (
        f"{tmp_path / '0.csv'}: column 'a' has the text 'k.A.' in row 7, but most of its texts "
        "are numbers or dates (number of other texts: 1); correct the text, or leave the row or the column out"
    )
    dates = [f"{k + 1}.1.2024;1" for k in range(30)] + ["unknown;1"]
    with pytest.raises(
        DataError, match="column 'a' has the text 'unknown' in row 31, but most of its"
    ):
        prepared(tmp_path, lines("a;y", dates))


def test_numbers_with_both_marks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, "a;y\n1;0\n1.5;1\n2,5;0\n")
    assert str(caught.value) == (
        "column 'a' should have numbers with one decimal mark, got a decimal point and a "
        "decimal comma, such as in '1.5' and "
        "'2,5'; write all numbers with the same decimal mark"
    )


def test_many_whole_numbers_that_are_texts_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        framed({"age": [str(k % 35) for k in range(40)]})
    assert str(caught.value) == (
        "column 'age' has 35 different texts in 40 rows, such as '0' and '1', which are numbers "
        "or dates; convert the column to numbers or dates, or to the categorical type of pandas"
    )
    assert framed({"age": [str(k % 15) for k in range(40)]}).pool.x.shape == (40, 15)


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
@pytest.mark.parametrize(
    "values", [[0, 1, 2, 3], [3, 7, 1, 9], ["ann", "bob", "cy", "dee"], ["", "", "", ""]]
)
def test_an_unnamed_column_that_tells_rows_apart_is_left_out(
    tmp_path: Path, name: str, values: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        [found] = prepared(tmp_path, lines(f"{name},a,y", [f"{value},1,0" for value in values]))
    assert list(found) == ["a", "y"]
    assert "left out" in caplog.text


def test_an_unnamed_column_of_other_values_is_refused(tmp_path: Path) -> None:
    text = lines("a,,y", [f"1,{k % 2},0" for k in range(4)])
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, text)
    assert str(caught.value) == (
        f"{tmp_path / '0.csv'}: column 2 has values, such as 0 in row 1, but no name; add a name to "
        "the header, or leave the column out by exclude = ['']"
    )
    [found] = prepared(tmp_path, text, roles=ColumnRoles(("y",), drop=("",)))
    assert list(found) == ["a", "y"]


def test_an_unnamed_column_is_no_matter_where_the_inputs_are_named(tmp_path: Path) -> None:
    [found] = prepared(
        tmp_path, lines("a,,y", ["1,1,0", "2,1,1"]), roles=ColumnRoles(("y",), ("a",))
    )
    assert list(found) == ["a", "", "y"]


def test_an_input_that_numbers_the_rows_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        framed({"record": range(100, 120), "a": [1, 2] * 10})
    assert caplog.messages == [
        "how the data is read: column 'record' numbers the rows, but is an input (exclude = ['record'] leaves it out)"
    ]
