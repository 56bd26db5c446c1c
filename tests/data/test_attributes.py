"""Attributes of clients, from files, data frames and mappings."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tiny import federation_of

from fedclade.core import DataError
from fedclade.data import as_attributes, read_attributes


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_attributes_are_numbers_or_texts_by_the_first_column(tmp_path):
    file = written(tmp_path / "sites.csv", "site,country,beds\na,Bern,100\nb,,250\n3,Oslo,\n")
    assert read_attributes(file) == {
        "a": {"country": "Bern", "beds": 100.0},
        "b": {"country": None, "beds": 250.0},
        "3": {"country": "Oslo", "beds": None},
    }


def test_a_column_named_client_has_the_names_wherever_it_is(tmp_path):
    file = written(tmp_path / "sites.csv", "beds;client\n100;a\n250;b\n")
    assert read_attributes(file) == {"a": {"beds": 100.0}, "b": {"beds": 250.0}}


def test_parquet_frames_and_mappings_have_attributes_too(tmp_path):
    table = pa.table({"client": ["a", "b"], "beds": [100, 250], "urban": [True, False]})
    pq.write_table(table, tmp_path / "sites.parquet")
    expected = {"a": {"beds": 100.0, "urban": "yes"}, "b": {"beds": 250.0, "urban": "no"}}
    assert read_attributes(tmp_path / "sites.parquet") == expected
    assert as_attributes(table) == expected
    assert as_attributes({"a": {"beds": 100, "urban": True}}) == {"a": expected["a"]}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "sites.csv",
            "client,beds\na,1\na,2\n",
            r"one row for each client, got client 'a' again in row 2",
        ),
        ("sites.csv", "client\na\n", r"with their attributes, got the columns \['client'\]"),
        ("sites.csv", "a,b,b\nx,1,2\n", r"columns with different names, got \['a', 'b', 'b'\]"),
        ("sites.txt", "client,beds\na,1\n", r"sites\.txt should end in \.csv, \.tsv or \.parquet"),
    ],
)
def test_a_file_that_is_no_table_of_clients_is_refused(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        read_attributes(written(tmp_path / name, text))


def test_a_missing_file_and_a_damaged_one_are_named(tmp_path):
    with pytest.raises(
        DataError, match=r"cannot read attributes of clients: there is no file .*sites\.csv"
    ):
        read_attributes(tmp_path / "sites.csv")
    damaged = written(tmp_path / "sites.parquet", "no parquet")
    with pytest.raises(DataError, match=r"cannot read .*sites\.parquet"):
        read_attributes(damaged)


def test_a_frame_without_columns_is_refused():
    with pytest.raises(
        DataError, match=r"frame of attributes should have a column .*got the columns \[\]"
    ):
        as_attributes(pa.table({}))


def test_a_mapping_of_something_else_is_refused():
    with pytest.raises(DataError, match=r"got 100 for 'a'"):
        as_attributes({"a": 100})


def test_attributes_of_other_clients_are_refused():
    federation = federation_of([0, 0])
    with pytest.raises(DataError, match=r"named \['x', 'y'\].* such as \['c0', 'c1'\]"):
        federation.with_attributes({"y": {"beds": 1}, "x": {"beds": 2}})


def test_some_clients_may_have_no_attributes():
    federation = federation_of([0, 0]).with_attributes({"c1": {"beds": 1}})
    assert federation.attributes == {"c1": {"beds": 1.0}}
