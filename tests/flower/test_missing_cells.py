"""Clients over a network fill empty cells of their tables by the same agreed values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from flwr.app import Context, RecordDict

from fedclade import DataSchema, LocalTraining, Run, UpdateError, federation_from_frame
from fedclade.config import check_config
from fedclade.config.toml_files import apply_overrides
from fedclade.core.errors import ConfigError
from fedclade.data import ColumnSummary, InputColumn, Proposal
from fedclade.flower import (
    LocalGrid,
    LocalNode,
    client_app,
    client_app_from_config,
    server_app_from_config,
)
from fedclade.flower.node_registry import SCHEMA
from fedclade.flower.policy import Policy
from fedclade.flower.schema_exchange import SchemaSharing, read_proposal, write_proposal
from fedclade.flower.wire import Content, record
from tests.flower.grids import federated, node_of

ROWS = 30
LOCAL = LocalTraining(epochs=2, batch_size=10, lr=0.1)
SETTINGS: dict[str, Any] = {"local": LOCAL, "rounds": 2, "model": "mclr"}


def hospital(number: int) -> dict[str, list[Any]]:
    """Return the columns of a hospital; the second has no dose, and each lacks some ages."""
    ages = [None if row % 5 == number else float(row % 7 + number) for row in range(ROWS)]
    wards = ["" if row % 6 == 0 else "abc"[(row + number) % 3] for row in range(ROWS)]
    doses = [None if number == 1 else float(row % 4) for row in range(ROWS)]
    return {"age": ages, "ward": wards, "dose": doses, "back": [row % 2 for row in range(ROWS)]}


TABLES = [hospital(0), hospital(1)]


def ages_of(tables: Sequence[Mapping[str, list[Any]]]) -> list[dict[str, list[Any]]]:
    """Return tables of ages and targets only."""
    return [{"age": table["age"], "back": table["back"]} for table in tables]


def grid_of(tables: Sequence[Mapping[str, list[Any]]], **options: Any) -> LocalGrid:
    def data(context: Context) -> Any:
        number = int(context.node_config["partition-id"])
        table = pa.table({**tables[number], "id": ["h"] * ROWS})
        return federation_from_frame(table, "id", "back", task="binary", **options)

    app = client_app("mclr", data)
    return LocalGrid({node_of(k): LocalNode(app, {"partition-id": k}) for k in range(len(tables))})


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_module("fedclade.flower.server_log"), "add_figures", lambda *_: None)


def run_config(missing: str, **more: Any) -> dict[str, Any]:
    """Return a config of a network whose nodes have their own files."""
    return {
        "rounds": 1,
        "engine": "loop",
        "model.name": "mclr",
        "algorithm.name": "fedavg",
        "aggregate.clip_above": math.inf,
        "data.files": "*.csv",
        "data.target": "back",
        "data.missing": missing,
        "task.name": "binary",
        **more,
    }


def write_files(folder: Path, tables: Sequence[Mapping[str, list[Any]]]) -> None:
    """Write the file of each hospital to a folder of its own."""
    for number, table in enumerate(tables):
        own = folder / str(number)
        own.mkdir()
        pyarrow.csv.write_csv(pa.table(dict(table)), own / f"h{number}.csv")


def serve(folder: Path, config: dict[str, Any]) -> Run:
    """Run a network of two nodes, each with the file of its own hospital."""
    out = folder / "run"
    config = {**config, "network.clients": 2, "network.wait": 1.0, "network.out": str(out)}
    app = client_app_from_config()
    nodes = {
        node_of(k): LocalNode(app, {"partition-id": k, "data-dir": str(folder / str(k))})
        for k in range(2)
    }
    server_app_from_config()(LocalGrid(nodes, config), Context(1, 0, {}, RecordDict(), config))
    return Run.load(out)


@pytest.mark.parametrize("missing", ["mean", "median", "indicator", "drop"])
def test_a_network_fills_empty_cells_as_a_simulation_does(missing: str, tmp_path: Path):
    tables = TABLES
    if missing == "drop":
        tables = [{**table, "dose": [1.0] * ROWS} for table in TABLES]
    write_files(tmp_path, tables)
    config = run_config(missing)
    run = serve(tmp_path, config)
    others = {key: value for key, value in config.items() if "." in key and key != "data.files"}
    overrides = [f"{key}={value}" for key, value in others.items()]
    raw: dict[str, Any] = {
        "rounds": 1,
        "engine": "loop",
        "data": {"files": str(tmp_path / "*/*.csv")},
    }
    apply_overrides(raw, overrides)
    simulated = check_config(raw)
    here = simulated.run(simulated.federation(), device="cpu")
    assert run.summary["inputs"] == here.summary["inputs"]
    assert ("fill" in run.summary["inputs"]) == (missing != "drop")
    torch.testing.assert_close(
        run.tree.nodes[0].params, here.tree.nodes[0].params, rtol=0, atol=1e-6
    )


def test_the_agreed_schema_has_the_values_and_a_resumed_run_keeps_them(tmp_path: Path):
    grid = grid_of(TABLES)
    first = federated(grid, "fedavg", folder=tmp_path / "run", **{**SETTINGS, "rounds": 1})
    schema = DataSchema.load(tmp_path / "run" / SCHEMA)
    age, ward, dose = schema.inputs
    assert age.fill == first.summary["inputs"]["fill"][0]
    assert (ward.categories, ward.fill) == (("a", "b", "c"), None)
    assert dose.fill is not None
    again = federated(grid, "fedavg", folder=tmp_path / "run", **SETTINGS)
    assert again.summary["inputs"] == first.summary["inputs"]


def test_tables_without_empty_cells_agree_on_a_schema_as_before(tmp_path: Path):
    full = [
        {**table, "age": [1.0] * ROWS, "dose": [2.0] * ROWS, "ward": ["a"] * ROWS}
        for table in TABLES
    ]
    federated(grid_of(full), "fedavg", folder=tmp_path / "run", **{**SETTINGS, "rounds": 1})
    inputs = json.loads((tmp_path / "run" / SCHEMA).read_text())["inputs"]
    assert inputs == {"age": "number", "ward": ["a"], "dose": "number"}


def test_by_config_nodes_leave_out_what_the_run_says(tmp_path: Path):
    write_files(tmp_path, TABLES)
    more = {"data.exclude": "dose", "data.categorical": "ward", "data.fewest_rows": 2}
    run = serve(tmp_path, run_config("median", **more))
    assert run.config["data"]["missing"] == "median"
    assert run.summary["inputs"]["columns"] == ["age", "ward=a", "ward=b", "ward=c"]
    assert run.summary["inputs"]["fill"][1:] == [None] * 3


PROPOSAL = Proposal(
    DataSchema((InputColumn("age"), InputColumn("dose", "empty")), ("back",), "binary", (0.0, 1.0)),
    missing="median",
    summaries={"age": ColumnSummary(20, 3, 4.5), "dose": ColumnSummary(0, 23)},
)


def read(proposal: str) -> Proposal:
    return read_proposal(Content.of(record({"number": 3, "proposal": proposal})))[1]


def test_summaries_survive_a_message():
    assert read(write_proposal(PROPOSAL)) == PROPOSAL


def test_a_proposal_without_summaries_is_one_of_an_earlier_version():
    values = json.loads(write_proposal(PROPOSAL))
    del values["summaries"], values["missing"]
    assert read(json.dumps(values)) == Proposal(PROPOSAL.schema)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"missing": "mode"},
            "the schema that the server proposes is malformed: missing should .*, got 'mode'",
        ),
        (
            {"summaries": [1]},
            r"the schema that the server proposes is malformed: summaries should .*, got \[1\]",
        ),
        (
            {"summaries": {"height": [1, 0, 2.0]}},
            "the schema that the server proposes is malformed: summaries should .*, got {'height'",
        ),
        (
            {"summaries": {"age": 3}},
            "the schema that the server proposes is malformed: the summary of column 'age' should .*, got 3",
        ),
        ({"summaries": {"age": [1, 2]}}, r"column 'age' should .*, got \[1, 2\]"),
        ({"summaries": {"age": [-1, 0, 2.0]}}, r"column 'age' should .*, got \[-1, 0, 2.0\]"),
        ({"summaries": {"age": [1, 0, "x"]}}, r"column 'age' should .*, got \[1, 0, 'x'\]"),
        ({"summaries": {"age": [1, 0, float("inf")]}}, "malformed"),
        ({"summaries": {"age": [True, 0, 1.0]}}, r"column 'age' should .*, got \[True, 0, 1.0\]"),
    ],
)
def test_summaries_that_cannot_be_are_refused(changes: dict[str, Any], why: str):
    values = {**json.loads(write_proposal(PROPOSAL)), **changes}
    with pytest.raises(UpdateError, match=why):
        read(json.dumps(values))


def limited(**policy: Any) -> set[str]:
    settings = {"is_private": False, "by_example": False, **policy}
    private, example = settings.pop("is_private"), settings.pop("by_example")
    sharing = SchemaSharing(Policy(**settings), private, example)
    return {*sharing.limit(PROPOSAL, 23).summaries}


def test_summaries_leave_a_client_only_if_categories_may():
    assert limited() == {"age", "dose"}
    assert limited(share_schema=False) == set()
    assert limited(is_private=True) == set()
    assert limited(is_private=True, share_schema=True) == {"age", "dose"}
    assert limited(is_private=True, share_schema=True, by_example=True) == set()


def test_summaries_of_few_rows_do_not_leave():
    assert limited(min_part=21) == {"dose"}
    assert limited(min_part=24) == set()


def test_a_client_that_tells_nothing_is_filled_by_the_others():
    numbers = ages_of(TABLES)
    grid = grid_of(numbers)
    grid.nodes[node_of(1)].config = {"partition-id": 1, "share-schema": False}
    run = federated(grid, "fedavg", **{**SETTINGS, "rounds": 1})
    (fill,) = run.summary["inputs"]["fill"]
    one = federation_from_frame(
        pa.table({**numbers[0], "id": ["h"] * ROWS}), "id", "back", task="binary"
    )
    assert one.pool.columns is not None
    assert one.pool.columns.fill == (fill,)


def test_where_nobody_tells_a_client_with_empty_cells_is_refused_with_the_fix():
    grid = grid_of(ages_of(TABLES))
    for node in grid.nodes.values():
        node.config = {**node.config, "share-schema": False}
    with pytest.raises((UpdateError, ConfigError)) as caught:
        federated(grid, "fedavg", **{**SETTINGS, "rounds": 1})
    assert "column 'age' has an empty cell, and no client reported a value" in str(caught.value)
