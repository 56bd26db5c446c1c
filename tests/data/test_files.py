"""Files as offices write them, read into federations."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedclade import ConfigError, DataError, FedcladeError, Federation
from fedclade.data import FilesSettings, OwnSettings

ROWS = 12


def plain_lines(
    separator: str = ",", point: str = ".", header: str = "age,dose,ward,back"
) -> list[str]:
    """Return the lines of a table; the dose has a decimal mark."""
    lines = [header.split(",")]
    lines += [
        [str(40 + 7 * k % 12), f"{k}{point}{5 * k:02}", "ab"[k % 2], str(k % 2)]
        for k in range(ROWS)
    ]
    return [separator.join(line) for line in lines]


def read(folder: Path, pattern: str = "*.csv", **settings: Any) -> Federation:
    """Read the files of a folder."""
    chosen: dict[str, Any] = {"files": str(folder / pattern), "target": "back"} | settings
    return FilesSettings(**chosen).federation(OwnSettings(standardize="none"))


def write(path: Path, lines: list[str], encoding: str = "utf-8", end: str = "\n") -> Path:
    path.write_bytes((end.join(lines) + end).encode(encoding))
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Federation:
    """Return the federation of a plain file, which all other spellings of it should give."""
    folder = tmp_path / "plain"
    folder.mkdir()
    write(folder / "h.csv", plain_lines())
    return read(folder)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
@pytest.mark.parametrize("point", [".", ","])
def test_any_separator_and_decimal_mark_gives_the_federation_of_the_plain_file(
    tmp_path: Path, plain: Federation, separator: str, point: str
) -> None:
    write(tmp_path / "h.csv", plain_lines(separator, point))
    assert read(tmp_path).fingerprint == plain.fingerprint


def test_decimal_commas_in_quotes_between_commas_are_numbers(
    tmp_path: Path, plain: Federation
) -> None:
    lines = [line.replace(";", '","') for line in plain_lines(";", ",")]
    write(tmp_path / "h.csv", [f'"{line}"' for line in lines], end="\r\n")
    assert read(tmp_path).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    "encoding", ["cp1252", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_any_encoding_is_read(tmp_path: Path, encoding: str, end: str) -> None:
    lines = plain_lines(";", ",", "Größe,Dosis in µg,Abteilung,back")
    write(tmp_path / "h.csv", [line.replace(";a;", ";Säuglinge;") for line in lines], encoding, end)
    columns = read(tmp_path).pool.columns
    assert columns is not None
    assert columns.inputs == ("Größe", "Dosis in µg", "Abteilung=Säuglinge", "Abteilung=b")


def test_files_of_different_offices_make_one_federation(
    tmp_path: Path, plain: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.csv", plain_lines())
    write(tmp_path / "b.csv", plain_lines(";", ","), "utf-16")
    write(tmp_path / "c.csv", plain_lines("\t"), "utf-8-sig")
    with caplog.at_level(logging.WARNING, "fedclade"):
        made = read(tmp_path)
    for part in made.pool.x.chunk(3):
        assert part.tolist() == plain.pool.x.tolist()
    a, b, c = (str(tmp_path / f"{name}.csv") for name in "abc")
    assert caplog.messages == [
        f"how the data is read: separator ';' (in {b}); encoding utf-16 (in {b}); separator '\\t' "
        f"(in {c}); decimal mark ',' (in {b}); columns of 0 and 1 for each category of 'ward' (2)"
    ]
    assert a not in caplog.text


def test_one_line_tells_what_was_assumed_of_all_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = plain_lines(";", ",", "größe,dose,ward,back")
    for name in "ab":
        write(tmp_path / f"{name}.csv", lines, "cp1252")
    with caplog.at_level(logging.WARNING, "fedclade"):
        read(tmp_path)
    assert caplog.messages == [
        "how the data is read: separator ';'; encoding cp1252; decimal mark ','; columns of 0 and 1 "
        "for each category of 'ward' (2)"
    ]


def test_of_plain_files_and_of_what_the_settings_say_only_categories_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "h.csv", plain_lines())
    with caplog.at_level(logging.WARNING, "fedclade"):
        read(tmp_path)
        write(tmp_path / "h.csv", plain_lines(";", ",", "größe,dose,ward,back"), "cp1252")
        read(tmp_path, separator=";", decimal=",", encoding="cp1252")
    told = "how the data is read: columns of 0 and 1 for each category of 'ward' (2)"
    assert caplog.messages == [told, told]


def test_columns_are_dropped_and_an_unnamed_index_is(tmp_path: Path, plain: Federation) -> None:
    header, *rest = plain_lines()
    lines = [f",{header},note,", *(f"{k},{line},free text {k}," for k, line in enumerate(rest))]
    write(tmp_path / "h.csv", lines)
    assert read(tmp_path, drop=("note",)).fingerprint == plain.fingerprint


def test_dates_are_days(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    header, *rest = plain_lines(";")
    write(
        tmp_path / "h.csv",
        [f"{header};seen", *(f"{line};{k + 2}.01.1970" for k, line in enumerate(rest))],
    )
    with caplog.at_level(logging.WARNING, "fedclade"):
        made = read(tmp_path, inputs=("seen",))
    assert made.pool.x[:, 0].tolist() == [float(k + 1) for k in range(ROWS)]
    assert "column 'seen' in days since 1970-01-01 (day, month, year)" in caplog.text


def test_the_first_line_of_a_spreadsheet_may_announce_the_separator(
    tmp_path: Path, plain: Federation
) -> None:
    write(tmp_path / "h.csv", ["sep=|", *plain_lines("|")])
    assert read(tmp_path).fingerprint == plain.fingerprint


def test_texts_of_a_parquet_file_are_numbers_and_dates_as_those_of_a_csv_file(
    tmp_path: Path,
) -> None:
    columns = {
        "dose": [f"{k},5" for k in range(ROWS)],
        "seen": [f"{k + 2}.01.1970" for k in range(ROWS)],
        "code": ["1", "2"] * (ROWS // 2),
        "back": [0, 1] * (ROWS // 2),
    }
    pq.write_table(pa.table(columns), tmp_path / "h.parquet")
    made = read(tmp_path, "*.parquet").pool
    assert made.columns is not None
    assert made.columns.inputs == ("dose", "seen", "code=1", "code=2")
    assert made.x[:2].tolist() == [[0.5, 1, 1, 0], [1.5, 2, 0, 1]]


def test_a_table_of_pandas_in_parquet_loses_its_index(tmp_path: Path) -> None:
    import pandas

    frame = pandas.DataFrame(
        {"age": range(ROWS), "back": [0, 1] * (ROWS // 2)}, index=range(3, 3 + ROWS)
    )
    frame[frame.age != 1].to_parquet(tmp_path / "h.parquet")
    columns = read(tmp_path, "*.parquet").pool.columns
    assert columns is not None
    assert columns.inputs == ("age",)


SEPARATOR = "separator should be a character such as ';' or '\\t', and not the decimal mark, got"
ENCODING = "encoding should be an encoding that Python knows, such as 'cp1252' or 'utf-16', got"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"separator": "ab"}, f"{SEPARATOR} 'ab'"),
        ({"separator": "."}, f"{SEPARATOR} '.'"),
        ({"separator": ",", "decimal": ","}, f"{SEPARATOR} ','"),
        ({"decimal": "x"}, "decimal should be '.' or ',', got 'x'"),
        ({"encoding": "utf8000"}, f"{ENCODING} 'utf8000'"),
        ({"encoding": "base64"}, f"{ENCODING} 'base64'"),
        ({"dates": "%d.%m"}, "codes of Python's strptime, such as '%d.%m.%Y', got '%d.%m'"),
        (
            {"drop": ("back",)},
            "exclude (or drop) should name columns that have no other role, got 'back'",
        ),
        (
            {"drop": ("age",), "inputs": ("age",)},
            "exclude (or drop) should name columns that have no other role, got 'age'",
        ),
        ({"drop": ("agee",)}, "unknown column in exclude, of {}: 'agee'; did you mean 'age'?"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: Any, message: str) -> None:
    path = write(tmp_path / "h.csv", plain_lines())
    with pytest.raises(FedcladeError) as caught:
        read(tmp_path, **settings)
    assert message.format(path) in str(caught.value)
    assert isinstance(caught.value, ConfigError) or "unknown column" in message


def test_the_settings_of_the_config_are_those_of_python(tmp_path: Path) -> None:
    write(tmp_path / "h.csv", plain_lines(";", ","), "utf-16")
    settings = FilesSettings(
        files=str(tmp_path / "*.csv"),
        target="back",
        drop=("ward",),
        separator=";",
        decimal=",",
        encoding="utf-16",
        dates="%d.%m.%Y",
    )
    assert settings.federation(OwnSettings()).pool.x.shape == (ROWS, 2)


def test_a_row_of_another_length_is_refused_with_the_separator(tmp_path: Path) -> None:
    path = write(tmp_path / "h.csv", [*plain_lines(";"), "1;2"])
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert f"cannot read {path}: " in str(caught.value)
    assert (
        "Expected 4 columns, got 2: 1;2; cells are taken to be separated by ';'; set 'separator'"
        in str(caught.value)
    )


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "h.xlsx", plain_lines())
    with pytest.raises(
        DataError, match=r"h\.xlsx should end in \.csv, \.tsv or \.parquet"
    ) as caught:
        read(tmp_path, "*.xlsx")
    assert str(path) in str(caught.value)


def test_a_parquet_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "h.parquet", plain_lines())
    with pytest.raises(DataError) as caught:
        read(tmp_path, "*.parquet")
    assert str(caught.value).startswith(f"cannot read {path}, which should be a Parquet file: ")


def test_decimal_numbers_in_one_file_and_texts_in_another_are_one_error(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", plain_lines(";", ","))
    path = write(
        tmp_path / "b.csv", [line.replace("3,15", "k.A.") for line in plain_lines(";", ",")]
    )
    with pytest.raises(DataError) as caught:
        read(tmp_path, inputs=("dose",))
    assert str(caught.value) == (
        "column 'dose' should have values of the same kind in all tables, got numbers in "
        f"{tmp_path / 'a.csv'} and texts in {path}, such as 'k.A.' in row 4 of {path}"
    )
