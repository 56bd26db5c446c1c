"""Empty cells of tables: filled alike at all clients, marked, or left out with their rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fedclade
from fedclade import ConfigError, DataError, Federation, federation_from_frame
from fedclade.channel import DifferentialPrivacy
from fedclade.config import check_config
from fedclade.data import (
    ColumnSummary,
    DataSchema,
    FilesSettings,
    InputColumn,
    OwnSettings,
    Proposal,
    SchemaError,
    agree,
)
from fedclade.data.missing import fill_columns, summarize_column

NAN = float("nan")


def frame(**changes: list[Any]) -> Any:
    """Return a table of two clients with four rows each, and empty cells at the first."""
    columns: dict[str, list[Any]] = {
        "id": ["a"] * 4 + ["b"] * 4,
        "age": [1.0, None, 3.0, 5.0, 10.0, 20.0, 30.0, 40.0],
        "ward": ["x", "y", None, "x", "x", "y", "x", ""],
        "dose": [1, 2, 3, 4, 5, 6, 7, 8],
        "back": [0, 1] * 4,
    }
    return pa.table(columns | changes)


def made(table: Any = None, **options: Any) -> Federation:
    given: dict[str, Any] = {"client": "id", "target": "back", "standardize": "none", **options}
    return federation_from_frame(frame() if table is None else table, **given)


def training_values(federation: Federation, values: list[float], client: int) -> list[float]:
    return [values[row] for row in federation.clients[client].train.tolist()]


AGES = [1.0, NAN, 3.0, 5.0, 10.0, 20.0, 30.0, 40.0]


@pytest.mark.parametrize("missing", ["mean", "indicator"])
def test_numbers_are_filled_by_the_mean_of_all_training_rows_with_a_value(missing: Any) -> None:
    federation = made(missing=missing)
    ages = [age for k in (0, 1) for age in training_values(federation, AGES, k) if age == age]
    expected = sum(ages) / len(ages)
    assert float(federation.pool.x[1, 0]) == pytest.approx(expected)
    assert federation.pool.x[[0, 2, 3], 0].tolist() == [1, 3, 5]
    assert federation.pool.columns is not None
    assert federation.pool.columns.fill[0] == pytest.approx(expected)


def test_numbers_are_filled_by_the_weighted_median_of_the_clients_medians() -> None:
    columns = (InputColumn("age"),)
    told = [
        {"age": ColumnSummary(10, 0, 7.0)},
        {"age": ColumnSummary(4, 2, 1.0)},
        {"age": ColumnSummary(5, 0, 9.0)},
    ]
    assert fill_columns(columns, told, "median")[0].fill == 7.0
    assert fill_columns(columns, told, "mean")[0].fill == pytest.approx((70 + 4 + 45) / 19)
    federation = made(missing="median")
    told = []
    for client in (0, 1):
        values = [age for age in training_values(federation, AGES, client) if age == age]
        told.append({"age": ColumnSummary(len(values), 0, float(np.median(values)))})
    (expected,) = fill_columns(columns, told, "median")
    assert float(federation.pool.x[1, 0]) == expected.fill


def test_a_column_is_summarized_by_training_rows_and_counts_all_empty_cells() -> None:
    values = np.array([1.0, NAN, 5.0, 100.0, NAN])
    is_training = np.array([True, True, True, False, False])
    assert summarize_column(values, is_training, "mean") == ColumnSummary(2, 2, 3.0)
    assert summarize_column(values, is_training, "median") == ColumnSummary(2, 2, 3.0)
    assert summarize_column(values, ~is_training & (values != 100), "mean").count == 0


def test_an_indicator_says_where_cells_were_empty() -> None:
    federation = made(missing="indicator")
    assert federation.pool.columns is not None
    names = ("age", "age is empty", "ward=x", "ward=y", "ward is empty", "dose")
    assert federation.pool.columns.inputs == names
    assert federation.pool.x[:, 1].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert federation.pool.x[:, 4].tolist() == [0, 0, 1, 0, 0, 0, 0, 1]


def test_an_empty_cell_among_categories_is_none_of_them() -> None:
    federation = made()
    assert federation.pool.columns is not None
    assert federation.pool.columns.inputs == ("age", "ward=x", "ward=y", "dose")
    assert federation.pool.x[2, 1:3].tolist() == [0, 0]
    assert federation.pool.x[7, 1:3].tolist() == [0, 0]


def test_rows_with_an_empty_cell_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        federation = made(missing="drop")
    assert federation.pool.x[:, -1].tolist() == [1, 4, 5, 6, 7]
    assert "3 of 8 rows with an empty cell are left out" in caplog.text


@pytest.mark.parametrize("missing", ["mean", "drop"])
def test_rows_without_a_target_are_left_out_with_their_number(
    missing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table = frame(back=[0, None, 1, 0, 1, 0, 1, 0], age=[1.0] * 8, ward=["x"] * 8)
    with caplog.at_level(logging.WARNING, "fedclade"):
        federation = made(table, missing=missing)
    assert len(federation.pool.x) == 7
    assert federation.pool.y.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert "1 of 8 rows without a target are left out" in caplog.text


def test_texts_without_a_target_are_left_out_too() -> None:
    table = frame(back=["no", "", "yes", "no", "yes", "no", None, "no"])
    federation = made(table, text="ward", max_words=2)
    assert len(federation.pool.x) == 6
    assert federation.pool.columns is not None
    assert federation.pool.columns.labels == ("no", "yes")


def test_one_line_says_what_was_filled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        made()
    assert caplog.messages == [
        "how the data is read: columns of 0 and 1 for each category of 'ward' (2); 1 empty cells "
        "are filled by the mean of all clients: 'age' 1; 2 empty cells in columns of categories "
        "are 0 for every category: 'ward' 2"
    ]


def test_a_table_without_empty_cells_is_encoded_as_before() -> None:
    table = frame(age=[1.0] * 8, ward=["x", "y"] * 4)
    found = {mode: made(table, missing=mode) for mode in ("mean", "median", "indicator", "drop")}
    for federation in found.values():
        assert federation.fingerprint == found["drop"].fingerprint
        assert federation.encoding is not None
        assert federation.encoding.schema.as_dict()["inputs"] == {
            "age": "number",
            "ward": ["x", "y"],
            "dose": "number",
        }


def test_rows_of_errors_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,back\n1,0\n2,\n3,1\n-inf,0\n")
    with pytest.raises(DataError, match=r"a\.csv: column 'x' has -inf in row 4"):
        FilesSettings(files=str(tmp_path / "*.csv"), target="back").federation(OwnSettings())


def test_a_column_without_a_value_is_left_out_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = frame(note=[None] * 8)
    with caplog.at_level(logging.WARNING, "fedclade"):
        federation = made(table)
    assert federation.pool.columns is not None
    assert "note" not in federation.pool.columns.inputs
    assert "column 'note' has no value and is left out" in caplog.text


def test_a_client_without_a_value_of_a_column_is_filled_by_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n4,0\n4,1\n4,0\n")
    (tmp_path / "b.csv").write_text("x,y\n,0\n,1\n")
    settings = FilesSettings(files=str(tmp_path / "*.csv"), target="y")
    assert settings.federation(OwnSettings(standardize="none")).pool.x[:, 0].tolist() == [4] * 5


def test_held_back_newcomers_do_not_count_but_are_filled_alike() -> None:
    clients = [name for name in "abcd" for _ in range(4)]
    ages = [1.0, 1.0, 1.0, None] + [2.0] * 4 + [3.0] * 4 + [4.0] * 4
    table = pa.table({"id": clients, "age": ages, "back": [0, 1] * 8})
    federation = made(table, newcomers=1)
    assert federation.newcomers is not None
    (late,) = federation.newcomers.clients
    values = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    del values[late.name]
    assert federation.pool.columns is not None
    assert federation.newcomers.pool is federation.pool
    (fill,) = federation.pool.columns.fill
    counts = {client.name: len(client.train) for client in federation.clients}
    if late.name != "a":
        counts["a"] -= 3 in federation.clients[0].train
    total = sum(values[name] * count for name, count in counts.items())
    assert fill == pytest.approx(total / sum(counts.values()))


@pytest.mark.parametrize("missing", ["mean", "median", "indicator"])
def test_clients_agree_on_the_values_of_all_their_summaries(missing: Any) -> None:
    columns = ("age", "ward", "dose", "back", "id")
    whole = frame()
    parts = [made(whole.select(columns).slice(4 * k, 4), missing=missing) for k in (0, 1)]
    proposals = {k: part.encoding.proposal for k, part in enumerate(parts) if part.encoding}
    summaries = [proposal.summaries for proposal in proposals.values()]
    simulated = made(missing=missing, seed=0)
    agreed = agree(proposals).schema
    assert [column.name for column in agreed.inputs] == ["age", "ward", "dose"]
    (expected,) = fill_columns((InputColumn("age"),), summaries, missing)
    assert expected.fill is not None
    assert agreed.inputs[0].fill == expected.fill
    assert simulated.encoding is not None
    own = simulated.encoding.schema
    assert [column.indicator for column in agreed.inputs] == [
        column.indicator for column in own.inputs
    ]


def test_a_column_without_values_takes_the_kind_that_others_propose() -> None:
    def proposal(*columns: InputColumn) -> Proposal:
        return Proposal(DataSchema(columns, ("y",), "binary", (0.0, 1.0)))

    found = agree(
        {
            0: proposal(InputColumn("x", "empty"), InputColumn("z", "empty")),
            1: proposal(InputColumn("x", "category", ("a",)), InputColumn("z", "empty")),
        }
    )
    assert found.refused == {}
    assert found.schema.inputs == (InputColumn("x", "category", ("a",)),)


def test_clients_with_another_treatment_of_empty_cells_are_refused() -> None:
    schema = DataSchema((InputColumn("x"),), ("y",), "binary", (0.0, 1.0))
    found = agree({k: Proposal(schema, missing=["mean", "mean", "drop"][k]) for k in range(3)})
    assert found.refused == {
        2: "missing is 'drop' for this client's data and 'mean' for the other clients' data"
    }


def test_a_value_that_no_client_told_is_missing_by_name() -> None:
    federation = made(frame().slice(0, 4))
    assert federation.encoding is not None
    source = federation.encoding.source
    assert source is not None
    agreed = DataSchema.read(
        {"inputs": {"age": "number", "ward": ["x", "y"], "dose": "number"}, "labels": 2}
    )
    with pytest.raises(SchemaError) as caught:
        source.encode(agreed)
    assert (
        "column 'age' has an empty cell in row 2, and no client reported a value to fill it with; "
        "declare a value in [data.schema.inputs] ('age' = { kind = \"number\", fill = 0 }), or leave "
        "the column out by exclude = ['age']"
    ) in str(caught.value)
    assert "row" not in caught.value.without_values.split("leave")[0].replace("rows", "")


def test_a_schema_declares_what_fills_empty_cells() -> None:
    declared = DataSchema.read(
        {
            "inputs": {
                "age": {"fill": 50, "indicator": True},
                "ward": {"categories": ["x", "y"], "indicator": True},
                "dose": "number",
            }
        }
    )
    federation = made(schema=declared, missing="indicator")
    assert federation.pool.x[1].tolist() == [50, 1, 0, 1, 0, 2]
    assert federation.encoding is not None
    assert federation.encoding.fills_by is None
    assert DataSchema.read(declared.as_dict()) == declared


@pytest.mark.parametrize(
    ("described", "why"),
    [
        ({"kind": "number", "fil": 1}, "unknown key of column 'a' of a schema: 'fil'"),
        (
            {"categories": ["x"], "fill": 1},
            "fill of column 'a' of a schema should be a finite number",
        ),
        ({"fill": NAN}, "got fill = nan in a column"),
        ({"fill": True}, "got fill = True in a column"),
        ({"indicator": 1}, "indicator of column 'a' of a schema should be true or false"),
        (
            {"categories": ["x"], "kind": "number"},
            "column 'a' of a schema has categories, so its kind should be 'category', got 'number'",
        ),
    ],
)
def test_columns_of_a_schema_that_cannot_be(described: Any, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DataSchema.read({"inputs": {"a": described}})
    assert why in str(caught.value)


def test_what_a_declared_schema_leaves_open_the_data_fills() -> None:
    declared = DataSchema.read({"inputs": {"age": "number", "dose": "number"}})
    federation = made(schema=declared, missing="indicator")
    assert federation.pool.columns is not None
    assert federation.pool.columns.inputs == ("age", "dose")
    assert float(federation.pool.x[1, 0]) > 0
    assert federation.encoding is not None
    assert federation.encoding.fills_by == "indicator"


def test_schemas_differ_in_what_fills_empty_cells() -> None:
    one = DataSchema((InputColumn("a", fill=1.5),))
    other = DataSchema((InputColumn("a", indicator=True),))
    assert one.differences(other) == [
        "empty cells of column 'a' are filled by 1.5 in this client's data and not filled, with an indicator "
        "in the other clients' data"
    ]


def test_private_clients_report_no_values_to_fill_by() -> None:
    with pytest.raises(ConfigError) as caught:
        fedclade.simulate(
            "fedavg", "mclr", made(), rounds=1, privacy=DifferentialPrivacy(clip_norm=1.0)
        )
    assert "do not report the values that fill empty cells (missing = 'mean')" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"missing": "mode"}, "unknown value of missing: 'mode'"),
        ({"fewest_rows": -1}, "fewest_rows should be at least 0, got -1"),
        ({"categorical": ("back",)}, "categorical should name input columns, got 'back'"),
        (
            {"categorical": ("age",), "inputs": ("dose",)},
            "categorical should name input columns, got 'age'",
        ),
        ({"categorical": ("agee",)}, "unknown column in categorical, of the data frame: 'agee'"),
        ({"exclude": ("agee",)}, "unknown column in exclude, of the data frame: 'agee'"),
        (
            {"exclude": ("age",), "drop": ("dose",)},
            "exclude and drop are two names of one setting; list all columns in exclude, got exclude "
            "= ['age'] and drop = ['dose']",
        ),
        ({"fewest_rows": 5}, "fewest_rows = 5 leaves no client, as the largest client has 4 rows"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], why: str) -> None:
    with pytest.raises(fedclade.FedcladeError) as caught:
        made(**options)
    assert why in str(caught.value)


def test_clients_with_few_rows_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    table = pa.table({"id": [*"aaaab"], "x": [1, 2, 3, 4, 5], "y": [0, 1, 0, 1, 0]})
    with caplog.at_level(logging.WARNING, "fedclade"):
        federation = federation_from_frame(table, "id", "y", fewest_rows=2)
    assert [client.name for client in federation.clients] == ["a"]
    assert "clients with fewer than 2 rows are left out: 'b' (1)" in caplog.text


def test_numbers_may_be_categories() -> None:
    table = frame(age=[1.0, 2.0, None, 10.0, 1.0, 2.0, 1.5, 1.0], ward=["x"] * 8)
    federation = made(table, categorical=("age", "dose"))
    assert federation.pool.columns is not None
    names = federation.pool.columns.inputs
    assert names[:4] == ("age=1", "age=1.5", "age=10", "age=2")
    assert names[-8:] == tuple(f"dose={number}" for number in range(1, 9))
    assert federation.pool.x[2, :4].tolist() == [0, 0, 0, 0]


def test_whole_numbers_in_one_file_and_fractions_in_another_are_the_same_categories(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,0\n2,1\n1,0\n")
    (tmp_path / "b.csv").write_text("x,y\n1.0,0\n,1\n2.0,0\n")
    settings = FilesSettings(files=str(tmp_path / "*.csv"), target="y", categorical=("x",))
    federation = settings.federation(OwnSettings())
    assert federation.pool.columns is not None
    assert federation.pool.columns.inputs == ("x=1", "x=2")


def test_exclude_and_drop_mean_the_same() -> None:
    excluded = made(exclude=("ward",))
    assert excluded.fingerprint == made(drop=("ward",)).fingerprint
    assert excluded.pool.columns is not None
    assert excluded.pool.columns.inputs == ("age", "dose")


def test_a_config_keeps_the_keys_of_earlier_versions_unless_others_are_used() -> None:
    data = {"files": "*.csv", "target": "y", "exclude": ["id"]}
    config = check_config({"data": data})
    assert config.data["drop"] == ("id",)
    assert not {"exclude", "missing", "categorical", "fewest_rows"} & config.data.keys()
    used = {"missing": "median", "categorical": ["x"], "fewest_rows": 3}
    again = check_config({"data": {**data, **used}})
    assert check_config(again.as_dict()).data == again.data
    assert again.data["missing"] == "median"
    assert again.data["fewest_rows"] == 3
    with pytest.raises(ConfigError, match="exclude and drop are two names of one setting"):
        check_config({"data": {**data, "drop": ["id"]}})


def test_a_guessed_target_of_whole_numbers_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    table = frame(back=[0, 1, 2, 20] * 2, age=[1.0] * 8, ward=["x"] * 8)
    with caplog.at_level(logging.WARNING, "fedclade"):
        made(table)
        made(table, task="regression")
    first, second = caplog.messages
    assert "target 'back': 21 classes; for numbers set task.name = 'regression'" in first
    assert "target" not in second


@pytest.mark.parametrize("task", [None, "binary"])
def test_a_target_that_is_no_column_is_named(task: Any) -> None:
    with pytest.raises(DataError, match="unknown column of the data frame: 'bak'; did you mean"):
        made(target="bak", task=task)


@pytest.mark.parametrize("values", [[NAN] * 8, [""] * 8])
def test_rows_are_not_dropped_for_a_column_without_a_value(
    values: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    table = frame(age=[1.0] * 8, ward=["x", "y"] * 4, note=values)
    with caplog.at_level(logging.WARNING, "fedclade"):
        federation = made(table, missing="drop")
    assert len(federation.pool.x) == 8
    assert "column 'note' has no value and is left out" in caplog.text


def test_proposals_that_know_what_fills_a_column_are_united_in_any_order() -> None:
    """Such as a proposal of the files of several clients."""
    known = InputColumn("x", fill=3.0, indicator=True)
    proposals = [
        Proposal(DataSchema((column,), ("y",), "binary", (0.0, 1.0)), missing="indicator")
        for column in (InputColumn("x"), known, InputColumn("x"))
    ]
    assert agree(dict(enumerate(proposals))).schema.inputs == (known,)


def test_a_client_that_declares_a_schema_is_not_refused_for_its_treatment() -> None:
    table = frame(age=[1.0] * 8, ward=["x", "y"] * 4).slice(0, 4)
    declared = DataSchema((InputColumn("age"), InputColumn("dose")))
    options: dict[str, Any] = {"missing": "median", "inputs": ("age", "dose"), "target": "back"}
    encodings = [made(table, **options).encoding for _ in range(2)]
    encodings.insert(0, made(table, schema=declared, **options).encoding)
    proposals = {
        key: encoding.proposal for key, encoding in enumerate(encodings) if encoding is not None
    }
    assert [proposal.is_fixed for proposal in proposals.values()] == [True, False, False]
    assert agree(proposals).refused == {}
