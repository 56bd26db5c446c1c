"""Guesses about tables: clients, target, task, categories and columns that are no inputs; and problems."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest

from fedclade import ConfigError, DataError
from fedclade.data import Inspection, TextFormat, inspect_files

ROWS = 40


def columns(number: int = 0, **more: Any) -> dict[str, list[Any]]:
    """Return the columns of a site; values that are None leave a column out."""
    made: dict[str, Any] = {
        "pid": [f"p{number}-{row}" for row in range(ROWS)],
        "age": [30 + (7 * row + number) % 23 for row in range(ROWS)],
        "dose": [(row % 9) / 2 for row in range(ROWS)],
        "stage": [row % 3 for row in range(ROWS)],
        "ward": ["ab"[row // 2 % 2] for row in range(ROWS)],
        "back": [row % 2 for row in range(ROWS)],
        **more,
    }
    return {name: values for name, values in made.items() if values is not None}


def write(folder: Path, *tables: dict[str, list[Any]]) -> list[Path]:
    paths = [folder / f"site{number}.csv" for number in range(len(tables))]
    for path, table in zip(paths, tables, strict=True):
        pyarrow.csv.write_csv(pa.table(table), path)
    return paths


def look(folder: Path, *tables: dict[str, list[Any]], **given: Any) -> Inspection:
    return inspect_files(write(folder, *tables), **given)


def roles(inspection: Inspection, role: str) -> list[str]:
    return [column.name for column in inspection.columns_with(role)]


def test_each_of_several_files_is_a_client(tmp_path: Path) -> None:
    found = look(tmp_path, columns(), columns(1))
    assert found.client is None
    assert [client.name for client in found.clients] == ["site0", "site1"]
    assert (found.rows, found.target, found.task) == (2 * ROWS, "back", "binary")
    assert found.labels == ("0", "1")
    assert found.clients[0].shares == {"0": 0.5, "1": 0.5}
    assert roles(found, "excluded") == ["pid"]
    assert roles(found, "category") == ["stage"]
    assert roles(found, "input") == ["age", "dose", "ward"]
    assert found.problems == ()


@pytest.mark.parametrize("name", ["hospital_id", "subject#", "hospitalId", "School"])
def test_a_column_of_one_file_names_the_client(name: str, tmp_path: Path) -> None:
    found = look(tmp_path, columns(**{name: [row % 4 for row in range(ROWS)]}))
    assert found.client == name
    assert [client.name for client in found.clients] == ["0", "1", "2", "3"]
    assert "its name has the word" in found.reasons["client"]


def test_a_file_without_a_column_for_the_client_needs_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no column of .* seems to state the client that owns a row; name"
    ):
        look(tmp_path, columns())
    assert look(tmp_path, columns(), client="ward").client == "ward"


@pytest.mark.parametrize(
    ("more", "target", "task"),
    [
        ({}, "back", "binary"),
        ({"label": ["xyz"[row % 3] for row in range(ROWS)]}, "label", "classification"),
        ({"normexam": [row / 7 for row in range(ROWS)]}, "normexam", "regression"),
        ({"risk_score": [row / 3 for row in range(ROWS)]}, "risk_score", "regression"),
        ({"E": [float(row % 2) for row in range(ROWS)], "T": [9.5] * 39 + [1.5]}, "E", "binary"),
        ({"outcome": [row % 5 for row in range(ROWS)]}, "outcome", "classification"),
        ({"outcome": [(7 * row) % 30 for row in range(ROWS)]}, "outcome", "regression"),
    ],
)
def test_names_and_values_say_what_to_predict(
    more: dict[str, list[Any]], target: str, task: str, tmp_path: Path
) -> None:
    found = look(tmp_path, columns(**more), columns(1, **more))
    assert (found.target, found.task) == (target, task)
    assert ("T" in roles(found, "excluded")) == (target == "E")


@pytest.mark.parametrize(
    ("more", "name", "why"),
    [
        ({"row": list(range(ROWS))}, "row", "it numbers the rows"),
        ({"nr": [(37 * row) % 101 for row in range(ROWS)]}, "nr", "it has the name of an id"),
        ({"card_id": [row % 9 for row in range(ROWS)]}, "card_id", "it has the name of an id"),
        (
            {"student": [(37 * row) % 101 for row in range(ROWS)]},
            "student",
            "its values differ in nearly all rows of each client",
        ),
        ({"unit": ["mg"] * ROWS}, "unit", "it has only one value, 'mg'"),
        ({"later": [None] * ROWS}, "later", "it has no value"),
        (
            {"fold": [row % 5 for row in range(ROWS)]},
            "fold",
            "rows are for training and which for testing",
        ),
    ],
)
def test_columns_that_are_no_inputs(
    more: dict[str, list[Any]], name: str, why: str, tmp_path: Path
) -> None:
    found = look(tmp_path, columns(**more), columns(1, **more))
    reasons = {column.name: column.why for column in found.columns_with("excluded")}
    assert why in reasons[name]


def test_columns_that_files_lack_or_have_otherwise_are_excluded(tmp_path: Path) -> None:
    texts = ["old" if row == 2 else str(row) for row in range(ROWS)]
    found = look(tmp_path, columns(), columns(1, dose=None, age=texts))
    reasons = {column.name: column.why for column in found.columns_with("excluded")}
    assert reasons["dose"] == "1 files lack it, such as site1.csv"
    assert reasons["age"] == (
        "it has numbers in one file and texts in another, such as 'old' in row 3"
    )


def test_problems_are_listed(tmp_path: Path) -> None:
    many_empty = [1.5 if row % 4 == 0 else None for row in range(ROWS)]
    first = columns(dose=many_empty, cost=[5000 + row // 2 for row in range(ROWS)])
    second = columns(1, dose=[None] * ROWS, back=[1] * ROWS, cost=[7] * ROWS)
    few = {name: values[:4] for name, values in columns(2, cost=[9.0] * ROWS).items()}
    few = {**few, "back": [None, 1, 0, 0]}
    paths = write(tmp_path, first, second, few)
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text("pid,age\n")
    found = inspect_files([*paths, tmp_path / "empty.csv", tmp_path / "header.csv"], target="back")
    text = "\n".join(found.problems)
    assert "empty.csv is empty" in text
    assert "header.csv has no rows" in text
    assert "column 'dose' has no value at site1" in text
    assert "column 'dose' is empty in" in text
    assert "scales differ much: up to 5.02e+03 in 'cost', and up to 1.5 in 'dose'" in text
    assert "fewer than 10 rows at site2" in text
    assert "1 of 84 rows have no target" in text
    assert "only one label at site1" in text
    assert found.has_empty_inputs


def test_rows_that_are_repeated_are_counted(tmp_path: Path) -> None:
    table = columns()
    twice = {name: [*values, *values[:3]] for name, values in table.items()}
    found = look(tmp_path, twice, columns(1))
    assert "3 of 83 rows repeat an earlier row" in found.problems


def test_files_that_may_be_read_in_two_ways_are_a_problem(tmp_path: Path) -> None:
    dated = [f"0{1 + row % 9}/01/2024" for row in range(ROWS)]
    found = look(tmp_path, columns(seen=dated), columns(1, seen=dated))
    assert any("which may begin with the day or the month" in each for each in found.problems)
    found = look(
        tmp_path,
        columns(seen=dated),
        columns(1, seen=dated),
        text_format=TextFormat(dates="%d/%m/%Y"),
    )
    assert found.problems == ()


def test_names_that_are_no_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"unknown target column of .*: 'bak'; did you mean 'back'"):
        look(tmp_path, columns(), columns(1), target="bak")
    with pytest.raises(DataError, match=r"unknown client column of .*: 'wards'"):
        look(tmp_path, columns(), columns(1), client="wards")


UNIT = ["mg"] * ROWS
BACK = [row % 2 for row in range(ROWS)]


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            {"unit": UNIT, "back": BACK},
            "got only 'back' for these two roles, as these columns are excluded: 'unit' (it has "
            "only one value, 'mg'); name another column as the target by --target, or add columns",
        ),
        (
            {"unit": UNIT},
            "got no column for these two roles, as these columns are excluded: 'unit' (it has "
            "only one value, 'mg'); add columns",
        ),
        ({"back": BACK}, "got only 'back' for these two roles; name another column"),
    ],
)
def test_tables_without_anything_to_predict_from_are_refused(
    table: dict[str, list[Any]], told: str, tmp_path: Path
) -> None:
    told = f"should have a target column and an input column, {told}"
    with pytest.raises(ConfigError, match=re.escape(told)):
        look(tmp_path, table, table)


def test_no_table_that_can_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(DataError, match=r"a\.csv is empty"):
        inspect_files([tmp_path / "a.csv"])


@pytest.mark.parametrize("role", ["client", "target"])
def test_a_file_without_the_named_column_is_refused(role: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"site1\.csv should have exactly 1 column 'ward', got none"
    ):
        look(tmp_path, columns(), columns(1, ward=None), **{role: "ward"})


def test_files_are_no_clients_if_a_column_names_them(tmp_path: Path) -> None:
    sites = ["north", "south"] * (ROWS // 2)
    empty = columns(1, site=sites, dose=[None] * ROWS)
    found = look(tmp_path, columns(site=sites), empty, client="site")
    assert [client.name for client in found.clients] == ["north", "south"]
    assert not any("no value at site1" in problem for problem in found.problems)
