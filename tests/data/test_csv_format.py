"""Separators and encodings, detected from bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedclade import DataError
from fedclade.data.csv_format import CsvFile, detect_encoding


def detected(path: Path, data: bytes, **given: str) -> CsvFile:
    path.write_bytes(data)
    return CsvFile.detect(path, **given)


@pytest.mark.parametrize(
    ("name", "text", "separator"),
    [
        ("a.csv", "a,b\n1,2\n", ","),
        ("a.csv", "a;b\n1,5;2,5\n", ";"),
        ("a.csv", "a\tb\n1;2\t3\n", "\t"),
        ("a.csv", "a|b\n1|2\n", "|"),
        ("a.tsv", "a\tb\n1,5\t2,5\n", "\t"),
        ("a.tsv", "a;b\n1;2\n", ";"),
        ("a.csv", "price, EUR;mass, kg\n1,5;2,5\n1,25;3,5\n", ";"),
        ("a.csv", 'a,b\n"x; y",1\n"z; w",2\n', ","),
        ("a.csv", '"a;b",c\n"x;\ny",1\n', ","),
        ("a.csv", "a;b;c\n1;2;3\n4;5;6\n7;8\n", ";"),
        ("a.csv", "sep=:\na:b\n1:2\n", ":"),
        ("a.csv", "a;b;c\n1;2;3;4\n4;5;6;7\n", ";"),
        ("a.csv", "a;b\n1,5;2,5;\n2,5;3,5;\n", ";"),
        ("a.csv", "a,b", ","),
        ("a.csv", "only\n1\n2\n", ","),
        ("a.tsv", "only\n1\n2\n", "\t"),
        ("a.csv", "", ","),
        ("a.csv", '"' + "x" * 200_000 + "\n", ","),
    ],
)
def test_the_separator_gives_all_rows_the_cells_of_the_header(
    tmp_path: Path, name: str, text: str, separator: str
) -> None:
    assert detected(tmp_path / name, text.encode()).format.separator == separator


def test_a_row_that_the_sample_cuts_does_not_count(tmp_path: Path) -> None:
    rows = "".join(f"{k};{'x' * 997}\n" for k in range(40))
    assert detected(tmp_path / "a.csv", f"a;b\n{rows}".encode()).format.separator == ";"


def test_two_separators_that_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with pytest.raises(
        DataError, match="is ambiguous: ',' or ';' fits equally well; set 'separator'"
    ) as caught:
        detected(path, b"a,b;c\nx,y;z\n")
    assert str(path) in str(caught.value)
    assert detected(path, b"a,b;c\nx,y;z\n", separator=";").format.separator == ";"


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"a,b\n", "utf-8"),
        ("ä".encode(), "utf-8"),
        ("ä".encode("latin-1"), "cp1252"),
        (("x" * (1 << 20)).encode() + "€".encode(), "utf-8"),
        (("x" * 5000).encode() + "€".encode("cp1252"), "cp1252"),
        ("ä".encode()[:1], "cp1252"),
        ("ä".encode("utf-8-sig"), "utf-8"),
        ("ä".encode("utf-16"), "utf-16"),
        ("\ufeffä".encode("utf-16-be"), "utf-16"),
        ("a,ä\n1,2\n".encode("utf-16-le"), "utf-16-le"),
        ("a,ä\n1,2\n".encode("utf-16-be"), "utf-16-be"),
        ("ä".encode("utf-32"), "utf-32"),
    ],
)
def test_bytes_tell_their_encoding(tmp_path: Path, data: bytes, encoding: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    assert detect_encoding(tmp_path / "a.csv") == encoding


def test_a_byte_order_mark_goes_before_a_given_encoding(tmp_path: Path) -> None:
    file = detected(
        tmp_path / "a.csv", "\ufeffa,b\n1,2\n".encode("utf-16-le"), encoding="utf-16-le"
    )
    assert file.read().column_names == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "given", "tried"),
    [
        (b"a,b\n\x81,2\n", {}, "UTF-8 or Windows-1252"),
        (b"a,b\n" + b"x,1\n" * 20_000 + b"\x81,2\n", {}, "encoding 'cp1252'"),
        ("ä,b\n".encode("cp1252"), {"encoding": "utf-8"}, "encoding 'utf-8'"),
        (b"a,b\n" + b"x,1\n" * 20_000 + b"\xff,2\n", {"encoding": "utf-8"}, "encoding 'utf-8'"),
        (b"a,b\n" + b"x,1\n" * 20_000 + b"\xff,2\n", {"encoding": "ascii"}, "encoding 'ascii'"),
    ],
)
def test_bytes_of_another_encoding_are_refused(
    tmp_path: Path, data: bytes, given: dict[str, str], tried: str
) -> None:
    path = tmp_path / "a.csv"
    with pytest.raises(DataError) as caught:
        detected(path, data, **given).read()
    assert str(caught.value).startswith(f"{path} cannot be decoded as {tried}; set 'encoding'")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none\.csv: "):
        CsvFile.detect(tmp_path / "none.csv")
