"""Federations of tables."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch

from fedclade import FedcladeError, federation_from_frame
from fedclade.data.columns import Sheet
from fedclade.data.files import ColumnChoice, federation_from_sheets
from fedclade.data.user_data import OwnSettings

COLUMNS: dict[str, list[Any]] = {
    "hospital": ["south", "north"] * 4,
    "age": [30, 41, 52, 63, 30, 41, 52, 63],
    "ward": ["b", "a", "c", "a", "b", "a", "c", "a"],
    "smokes": [True, False] * 4,
    "days": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5],
    "back": ["no", "yes"] * 4,
}
TABLE = pa.table(COLUMNS)


def features(*without: str) -> list[str]:
    return [name for name in COLUMNS if name not in ("hospital", *without)]


def test_numbers_stay_and_texts_are_encoded_by_category() -> None:
    made = federation_from_frame(TABLE, "hospital", "back", standardize="none")
    assert [client.name for client in made.clients] == ["south", "north"]
    columns = made.pool.columns
    assert columns is not None
    assert columns.inputs == (
        "age",
        "ward=a",
        "ward=b",
        "ward=c",
        "smokes=false",
        "smokes=true",
        "days",
    )
    assert columns.labels == ("no", "yes")
    assert made.pool.x[:2].tolist() == [[30, 0, 1, 0, 0, 1, 0.5], [41, 1, 0, 0, 1, 0, 1.5]]
    assert made.pool.y.tolist() == [0, 1] * 4
    south = sorted([*made.clients[0].train, *made.clients[0].test])
    assert south == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("target", "task", "y", "kind"),
    [
        ("back", None, [0, 1], "classification"),
        ("smokes", None, [1, 0], "classification"),
        ("age", None, [30, 41], "classification"),
        ("days", None, [0.5, 1.5], "regression"),
        ("age", "regression", [30.0, 41.0], "regression"),
        ("back", "binary", [0.0, 1.0], "binary"),
        ("smokes", "binary", [1.0, 0.0], "binary"),
        (("age", "days"), None, [[30, 0.5], [41, 1.5]], "regression"),
        (("smokes",), "multilabel", [[1.0], [0.0]], "multilabel"),
    ],
)
def test_the_target_or_the_user_says_the_task(
    target: Any, task: Any, y: list[Any], kind: str
) -> None:
    pool = federation_from_frame(TABLE, "hospital", target, inputs=("ward",), task=task).pool
    assert (pool.task, pool.y[:2].tolist()) == (kind, y)


def test_frames_of_pandas_are_read_as_arrows_are() -> None:
    import pandas

    frame = pandas.DataFrame(COLUMNS).astype({"ward": "category"})
    assert federation_from_frame(frame, "hospital", "back").fingerprint == (
        federation_from_frame(TABLE, "hospital", "back").fingerprint
    )


def test_frames_that_give_arrow_data_are_read_as_polars_are() -> None:
    class Frame:
        def to_arrow(self) -> pa.Table:
            return TABLE.cast(
                pa.schema(
                    [
                        (f.name, pa.large_string() if f.type == pa.string() else f.type)
                        for f in TABLE.schema
                    ]
                )
            )

    assert federation_from_frame(Frame(), "hospital", "back").fingerprint == (
        federation_from_frame(TABLE, "hospital", "back").fingerprint
    )


def test_a_column_of_texts_can_be_the_input() -> None:
    made = federation_from_frame(TABLE, "hospital", "back", text="ward", max_words=2)
    assert made.pool.x.dtype == torch.int64
    assert made.pool.x.shape == (8, 2)
    assert set(made.pool.vocabulary) <= {"<pad>", "<unk>", "a", "b", "c"}


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, {"target": []}, "target should name at least 1 column, got ()"),
        ({}, {"target": "bck"}, "unknown column of the data frame: 'bck'; did you mean 'back'?"),
        (
            {},
            {"client": "hospitl"},
            "unknown column of the data frame: 'hospitl'; did you mean 'hospital'?",
        ),
        (
            {},
            {"inputs": ("agee",)},
            "unknown column of the data frame: 'agee'; did you mean 'age'?",
        ),
        (
            {},
            {"inputs": ("age", "back")},
            "inputs should name other columns than target and client, got 'back'",
        ),
        ({"hospital": ["a"] * 7 + [None]}, {}, "column 'hospital' has an empty cell in row 8"),
        ({"days": [float("inf")] * 8}, {}, "column 'days' has inf in row 1 (and 7 more)"),
        (
            {"age": [[1]] * 8},
            {},
            "column 'age' should have numbers or texts, got list<item: int64>",
        ),
        ({"hospital": ["a"] * 7 + ["b"]}, {}, "client 'b' has 1 example, but needs 2"),
        (
            {"back": [0, 1, 2, -1] * 2},
            {},
            "column 'back' has -1.0 in row 4 (and 1 more); labels should be whole numbers",
        ),
        (
            {"back": [0, 99_000] * 4},
            {},
            "the target 'back' has whole numbers up to 99,000, which may be labels or numbers; set",
        ),
        (
            {"back": ["a", "b", "c", "d"] * 2},
            {"task": "binary"},
            "should have 2 different values, got 4: a, b, c, d",
        ),
        (
            {},
            {"task": "regression"},
            "the target 'back' of a regression should be numbers, got texts",
        ),
        (
            {},
            {"target": ("age", "ward")},
            "the task of several target columns (age, ward) should be 'multilabel' or 'regression', got no task",
        ),
        (
            {},
            {"target": ("age", "days"), "task": "multilabel"},
            "the target 'age' of a multilabel task should be 0 or 1",
        ),
        (
            {"age": [0, 1, 1, 0, 0.5, 1, 1, 0], "days": [0, 1] * 4},
            {"target": ("days", "age"), "task": "multilabel"},
            "the target 'age' of a multilabel task should be 0 or 1, got 0.5",
        ),
        (
            {},
            {"task": "language"},
            "the task of a table should be classification, binary, multilabel or regression",
        ),
        (
            {},
            {"text": "ward", "inputs": ("age",)},
            "text should be the only input, got text = 'ward' and inputs = ['age']",
        ),
        (
            {"ward": [str(k) for k in range(8)]},
            {},
            "column 'ward' has 8 different texts, too many to encode by",
        ),
    ],
)
def test_tables_that_cannot_be_used(
    changes: Any, given: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedclade.data.columns.MOST_CATEGORIES", 7)
    with pytest.raises(FedcladeError) as caught:
        federation_from_frame(
            pa.table(COLUMNS | changes), **{"client": "hospital", "target": "back"} | given
        )
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_are_scaled_before_they_lose_digits() -> None:
    seconds = pa.table(COLUMNS | {"days": [1.7e9 + day for day in range(8)]})
    made = federation_from_frame(
        seconds, "hospital", "back", inputs=("days",), standardize="federated"
    )
    steps = made.pool.x[1:] - made.pool.x[:-1]
    assert steps.min() > 0
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))


def test_something_that_is_no_frame_is_refused() -> None:
    with pytest.raises(
        FedcladeError, match="the data frame should be a pandas, polars or Arrow table, got 7"
    ):
        federation_from_frame(7, "hospital", "back")


def test_a_column_of_several_types_is_refused_by_its_name() -> None:
    import pandas

    frame = pandas.DataFrame({"hospital": ["a", "b"], "age": [1, "x"], "back": [0, 1]})
    with pytest.raises(FedcladeError) as caught:
        federation_from_frame(frame, "hospital", "back")
    assert str(caught.value).startswith(
        "the data frame should have values of one type in each column: Could not"
    )
    assert "Conversion failed for column age with type object" in str(caught.value)


def test_bytes_are_refused() -> None:
    with pytest.raises(
        FedcladeError,
        match="the data frame: column 'ward' should have numbers or texts, got bytes; leave it out:",
    ):
        federation_from_frame(pa.table(COLUMNS | {"ward": [b"a"] * 8}), "hospital", "back")


def of_sheets(*columns: dict[str, list[Any]]) -> Any:
    sheets = [
        Sheet(pa.table(each), f"{name}.csv", name)
        for name, each in zip("abc", columns, strict=False)
    ]
    return federation_from_sheets(sheets, ColumnChoice(("y",)), "files", OwnSettings())


def test_categories_are_those_of_all_clients() -> None:
    made = of_sheets(
        {"x": ["u", "w"], "y": [0, 1]},
        {"x": ["v", "u"], "y": [0, 1]},
        {"x": ["u", "u"], "y": [0, 0]},
    )
    assert made.pool.x.tolist() == [
        [1, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
        [1, 0, 0],
        [1, 0, 0],
        [1, 0, 0],
    ]


def test_whole_numbers_in_one_file_are_numbers_as_in_the_others() -> None:
    assert of_sheets(
        {"x": [1, 2], "y": [0.5, 1]}, {"x": [1.5, 2], "y": [3, 4]}
    ).pool.y.tolist() == [0.5, 1, 3, 4]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"x": [1, 2], "z": [1, 2], "y": [0, 1]},
            {"x": [1, 2], "w": [1, 2], "y": [0, 1]},
            "b.csv should have the columns of a.csv, but lacks 'z' and also has 'w'; list the input columns",
        ),
        (
            {"x": [1, 2], "y": [0, 1]},
            {"x": ["1", "?"], "y": [0, 1]},
            "column 'x' should have values of the same kind in all tables, got whole numbers in "
            "a.csv and texts in b.csv",
        ),
        (
            {"x": [1, 2], "y": [0, 1]},
            {"x": [], "y": []},
            "b.csv should have at least 1 row, got none",
        ),
        (
            {"y": [0, 1]},
            {"y": [0, 1]},
            "a.csv should have at least 1 input column, got only columns with another role: 'y'",
        ),
    ],
)
def test_files_that_do_not_fit_together(first: Any, second: Any, message: str) -> None:
    with pytest.raises(FedcladeError) as caught:
        of_sheets(first, second)
    assert message in str(caught.value)
