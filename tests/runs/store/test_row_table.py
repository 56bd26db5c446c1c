"""Rows that are kept as columns read like a list of dicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedclade.runs.store.contents import AT_A_TIME, Row, RowTable, write_rows

ROWS: list[Row] = [
    *(
        {"round": 1, "client": client, "name": f"c{client}", "loss": client / 2, "true": None}
        for client in range(3)
    ),
    *(
        {"round": 2, "client": client, "name": f"c{client}", "loss": float("inf"), "true": 1}
        for client in range(2)
    ),
]


def test_rows_read_as_they_were_given() -> None:
    rows = RowTable.of(ROWS)
    assert rows == ROWS
    assert list(rows) == ROWS
    assert [rows[i] for i in range(-5, 5)] == [ROWS[i] for i in range(-5, 5)]
    assert rows[1:4] == ROWS[1:4]
    assert rows[::-2] == ROWS[::-2]
    assert type(rows[0]["client"]) is int
    assert type(rows[0]["loss"]) is float
    assert repr(RowTable.of(ROWS[:1])) == f"RowTable({ROWS[:1]!r})"
    with pytest.raises(IndexError):
        rows[5]


def test_rows_of_each_round_are_a_block() -> None:
    rows = RowTable.of(ROWS)
    assert [len(block["round"]) for block in rows.blocks] == [3, 2]
    assert rows.last == ROWS[3:]
    assert rows.column("client") == [0, 1, 2, 0, 1]
    assert rows.with_block({"round": np.array([3]), "client": np.array([7])})[-1] == {
        "round": 3,
        "client": 7,
    }
    assert rows == ROWS  # as they were
    assert RowTable.of(rows) is rows


def test_there_may_be_none() -> None:
    assert RowTable() == []
    assert RowTable.of([]).last == []
    assert RowTable([{"round": np.array([], dtype=np.int64)}]).blocks == ()


def test_more_rows_than_are_made_at_a_time() -> None:
    rows = RowTable([{"client": np.arange(AT_A_TIME + 2)}])
    assert [row["client"] for row in rows] == list(range(AT_A_TIME + 2))


def test_numbers_that_may_be_missing_stay_so_in_a_file(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_rows(tmp_path / "rows.parquet", ROWS)
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == ROWS
    write_rows(tmp_path / "none.parquet", [])
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0
