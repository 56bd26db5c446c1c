"""Damaged files of sites: each ends in a clear error, or in an assumption that is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fedclade import DataError, Federation
from fedclade.data import FilesSettings, OwnSettings

SITES = ("bern", "oslo", "rome")
ROWS = 14


def rows_of(number: int) -> list[dict[str, str]]:
    """Return the rows of a site."""
    return [
        {
            "age": str(30 + (7 * row + number) % 50),
            "dose": f"{row % 9}.5",
            "ward": "ab"[row % 2],
            "back": str(row % 2),
        }
        for row in range(ROWS)
    ]


def write(folder: Path, name: str, rows: list[dict[str, str]]) -> None:
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Return a folder with the files of three sites."""
    for number, name in enumerate(SITES):
        write(tmp_path, name, rows_of(number))
    return tmp_path


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "fedclade")
    return caplog


def read(folder: Path, **settings: object) -> Federation:
    chosen = {"files": str(folder / "*.csv"), "target": "back", **settings}
    unscaled = OwnSettings(standardize="none")
    return FilesSettings(**chosen).federation(unscaled)  # pyright: ignore[reportArgumentType]


def column_names(federation: Federation) -> tuple[str, ...]:
    assert federation.pool.columns is not None
    return federation.pool.columns.inputs


def test_a_site_without_a_column(sites: Path) -> None:
    rows = rows_of(1)
    for row in rows:
        del row["dose"]
    write(sites, "oslo", rows)
    with pytest.raises(DataError) as caught:
        read(sites)
    assert "oslo.csv should have the columns of " in str(caught.value)
    assert "but lacks 'dose'; list the input columns as 'inputs', or leave" in str(caught.value)
    assert column_names(read(sites, exclude=("dose",))) == ("age", "ward=a", "ward=b")


def test_another_order_of_columns(sites: Path) -> None:
    expected = read(sites)
    write(sites, "oslo", [dict(reversed(row.items())) for row in rows_of(1)])
    assert read(sites).fingerprint == expected.fingerprint


def test_a_text_in_a_column_of_numbers_of_one_site(sites: Path) -> None:
    rows = rows_of(1)
    rows[4]["age"] = "old"
    write(sites, "oslo", rows)
    with pytest.raises(DataError) as caught:
        read(sites)
    assert "column 'age' should have values of the same kind in all tables" in str(caught.value)
    assert "such as 'old' in row 5 of" in str(caught.value)


def test_a_text_in_a_column_of_numbers_of_all_sites(sites: Path) -> None:
    for number, name in enumerate(SITES):
        rows = rows_of(number)
        rows[4]["age"] = "old"
        write(sites, name, rows)
    with pytest.raises(DataError) as caught:
        read(sites)
    assert "column 'age' has the text 'old' in row 5, but most of its texts" in str(caught.value)


def test_a_text_among_few_different_numbers(sites: Path, told: pytest.LogCaptureFixture) -> None:
    for number, name in enumerate(SITES):
        rows = [{**row, "stage": str(place % 3)} for place, row in enumerate(rows_of(number))]
        rows[0]["stage"] = "unknown"
        write(sites, name, rows)
    names = [name for name in column_names(read(sites)) if name.startswith("stage")]
    assert names == ["stage=0", "stage=1", "stage=2", "stage=unknown"]
    assert "'stage' has 'unknown' among numbers, so all its values are categories" in told.text


def test_a_question_mark_among_numbers(sites: Path, told: pytest.LogCaptureFixture) -> None:
    rows = rows_of(1)
    rows[4]["age"] = "?"
    write(sites, "oslo", rows)
    assert column_names(read(sites))[0] == "age"
    assert "'?' in column 'age' is an empty cell" in told.text
    assert "1 empty cells are filled by the mean of all clients: 'age' 1" in told.text


def test_a_target_missing_in_some_rows(sites: Path, told: pytest.LogCaptureFixture) -> None:
    rows = rows_of(1)
    rows[0]["back"] = rows[3]["back"] = ""
    write(sites, "oslo", rows)
    assert len(read(sites).pool.x) == 3 * ROWS - 2
    assert f"2 of {3 * ROWS} rows without a target are left out" in told.text


def test_a_target_missing_in_all_rows_of_a_site(
    sites: Path, told: pytest.LogCaptureFixture
) -> None:
    write(sites, "oslo", [{**row, "back": ""} for row in rows_of(1)])
    with pytest.raises(
        DataError, match=r"oslo\.csv has no rows to learn from: all rows lack a target"
    ):
        read(sites)
    assert [client.name for client in read(sites, fewest_rows=2).clients] == ["bern", "rome"]
    assert "clients with fewer than 2 rows are left out: 'oslo' (0)" in told.text


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_file(sites: Path, text: str) -> None:
    (sites / "oslo.csv").write_text(text)
    with pytest.raises(DataError, match=r"oslo\.csv is empty; remove it, or write its header"):
        read(sites)


def test_a_file_of_a_header_alone(sites: Path, told: pytest.LogCaptureFixture) -> None:
    (sites / "oslo.csv").write_text("age,dose,ward,back\n")
    with pytest.raises(
        DataError,
        match=r"oslo\.csv should have at least 1 row, got none; remove it, or leave it out",
    ):
        read(sites)
    assert [client.name for client in read(sites, fewest_rows=2).clients] == ["bern", "rome"]
    assert "left out: 'oslo' (0)" in told.text


def test_duplicate_ids(sites: Path, told: pytest.LogCaptureFixture) -> None:
    for number, name in enumerate(SITES):
        ids = [(100 * number + 17 * place) for place in range(ROWS)]
        ids[3] = ids[5]
        rows = rows_of(number)
        write(sites, name, [{"pid": str(i), **row} for i, row in zip(ids, rows, strict=True)])
    assert column_names(read(sites))[0] == "pid"
    assert "column 'pid' looks like an id, but is an input (exclude = ['pid']" in told.text
    assert column_names(read(sites, exclude=("pid",)))[0] == "age"


def test_duplicate_ids_that_are_texts(sites: Path) -> None:
    for number, name in enumerate(SITES):
        rows = [{"pid": f"p{max(1, k)}-{number}", **row} for k, row in enumerate(rows_of(number))]
        write(sites, name, rows)
    with pytest.raises(
        DataError, match=r"it is an id, a name or a free text rather than a category"
    ):
        read(sites)


def test_a_site_of_one_row(sites: Path, told: pytest.LogCaptureFixture) -> None:
    write(sites, "oslo", rows_of(1)[:1])
    with pytest.raises(DataError, match=r"client 'oslo' has 1 example, but needs 2: .*fewest_rows"):
        read(sites)
    assert [client.name for client in read(sites, fewest_rows=2).clients] == ["bern", "rome"]
    assert "clients with fewer than 2 rows are left out: 'oslo' (1)" in told.text


def test_one_class_at_a_site(sites: Path, told: pytest.LogCaptureFixture) -> None:
    write(sites, "oslo", [{**row, "back": "1"} for row in rows_of(1)])
    federation = read(sites)
    assert federation.pool.outputs == 2
    assert "all rows of 1 of 3 clients have the same target: 'oslo'" in told.text


def test_dates(sites: Path, told: pytest.LogCaptureFixture) -> None:
    for number, name in enumerate(SITES):
        days = [{"day": f"{1 + row:02}.03.2024"} for row in range(ROWS)]
        days[1]["day"] = "31.12.2023"
        days[2]["day"] = ""
        rows = rows_of(number)
        write(sites, name, [{**day, **row} for day, row in zip(days, rows, strict=True)])
    federation = read(sites)
    assert column_names(federation)[0] == "day"
    assert float(federation.pool.x[:, 0].min()) > 19_700
    assert "column 'day' in days since 1970-01-01 (day, month, year)" in told.text
    assert "3 empty cells are filled by the mean of all clients: 'day' 3" in told.text


def test_dates_that_may_be_two(sites: Path) -> None:
    rows = [{"day": "01/02/2024", **row} for row in rows_of(0)]
    write(sites, "bern", rows)
    for number in (1, 2):
        write(sites, SITES[number], [{"day": "03/04/2024", **row} for row in rows_of(number)])
    with pytest.raises(DataError, match="which may begin with the day or the month"):
        read(sites)


def test_thousands_separators(sites: Path, told: pytest.LogCaptureFixture) -> None:
    for number, name in enumerate(SITES):
        rows = [{**row, "cost": f"{1000 + k}"} for k, row in enumerate(rows_of(number))]
        if number == 1:
            rows = [{**row, "cost": f'"1,{k:03}"'} for k, row in enumerate(rows)]
            rows[0]["cost"] = '"1,000.5"'
        write(sites, name, rows)
    federation = read(sites)
    assert float(federation.pool.x[:, -1].max()) == 1000 + ROWS - 1
    assert "',' between thousands (in " in told.text


def test_thousands_separators_that_may_be_decimal_marks(sites: Path) -> None:
    for number, name in enumerate(SITES):
        rows = [
            {**row, "dose": "1", "cost": f'"1,{k:03}"'} for k, row in enumerate(rows_of(number))
        ]
        write(sites, name, rows)
    with pytest.raises(DataError, match=r"column 'cost' has '1,000' in row 1, which is 1000 with"):
        read(sites)
