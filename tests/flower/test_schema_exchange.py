"""Clients over a network agree on one schema before round 1, by which each encodes its own table or texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from fedclade import (
    Aggregation,
    DataSchema,
    LocalTraining,
    Run,
    RunError,
    UpdateError,
    federation,
    federation_from_frame,
    simulate,
)
from fedclade.channel import Budget, DifferentialPrivacy
from fedclade.core.errors import ConfigError
from fedclade.flower import (
    LocalGrid,
    LocalNode,
    client_app,
    client_app_from_config,
    server_app_from_config,
)
from fedclade.flower.node_registry import SCHEMA
from fedclade.flower.schema_exchange import (
    LONGEST_PROPOSAL,
    read_agreed,
    read_proposal,
    write_agreed,
)
from fedclade.flower.wire import Content, record
from tests.flower.grids import (
    federated,
    housed,
    network_of,
    node_of,
    reasons,
    spoil,
    worded,
    words_of,
)

ROWS = 60
LOCAL = LocalTraining(epochs=5, batch_size=10, lr=0.5)
SETTINGS: dict[str, Any] = {"local": LOCAL, "rounds": 4, "model": "mclr"}

NORTH = ("bern", "oslo")
SOUTH = ("oslo", "rome")
"""Two hospitals, each with a city that the other one lacks. Patients from Oslo come back, others do not."""


def patients(
    cities: Sequence[str], back: Mapping[str, Any] | None = None, **more: list[Any]
) -> dict[str, list[Any]]:
    """Return the columns of a hospital; ``back`` says what the target is for patients from Oslo, and for others."""
    back = back or {"oslo": "yes", "": "no"}
    city = [cities[row % len(cities)] for row in range(ROWS)]
    return {"city": city, **more, "back": [back.get(each, back[""]) for each in city]}


def app_of_frames(frames: Sequence[Any], **settings: Any) -> Any:
    """Return an app whose nodes have one data frame each, by their ``partition-id``."""
    tables = [
        pa.table({**each, "id": ["h"] * ROWS}) if isinstance(each, dict) else each
        for each in frames
    ]

    def data(context: Context) -> Any:
        number = int(context.node_config["partition-id"])
        return federation_from_frame(tables[number], "id", "back")

    return client_app("mclr", data, **settings)


def grid_of_frames(*frames: Any, **settings: Any) -> LocalGrid:
    app = app_of_frames(frames, **settings)
    return LocalGrid({node_of(k): LocalNode(app, {"partition-id": k}) for k in range(len(frames))})


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch):
    """A server app draws figures at the end, which these tests do not look at."""
    monkeypatch.setattr(import_module("fedclade.flower.server_log"), "add_figures", lambda *_: None)


def accuracy(run: Run) -> float:
    return float(run.summary["accuracy"]["mean"])


def first_schema(run_folder: Path) -> DataSchema:
    return DataSchema.load(run_folder / SCHEMA)


def refusals(run: Run) -> list[str]:
    return [
        why for event in run.events if event["kind"] == "refused" for why in event["nodes"].values()
    ]


@pytest.mark.parametrize("algorithm", ["fedavg", "rcfl"])
def test_two_hospitals_with_different_cities_share_one_encoding(algorithm: str, tmp_path: Path):
    grid = housed(grid_of_frames(patients(NORTH), patients(SOUTH)), tmp_path)
    run = federated(grid, algorithm, folder=tmp_path / "run", **SETTINGS)
    assert accuracy(run) == 1.0
    assert len(run.tree.leaves) == 1
    assert run.summary["inputs"]["columns"] == ["city=bern", "city=oslo", "city=rome"]
    assert run.summary["inputs"]["labels"] == ["no", "yes"]
    (city,) = first_schema(tmp_path / "run").inputs
    assert city.categories == ("bern", "oslo", "rome")


def test_a_network_encodes_as_a_simulation_does():
    parts = [patients(NORTH), patients(SOUTH)]
    whole = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    whole["id"] = ["h0"] * ROWS + ["h1"] * ROWS
    made = federation_from_frame(pa.table(whole), "id", "back")
    settings = {**SETTINGS, "aggregate": Aggregation(clip_above=math.inf)}
    here = simulate("fedavg", federation=made, engine="loop", device="cpu", **settings)
    app = client_app("mclr", lambda context: made.alone(int(context.node_config["partition-id"])))
    grid = LocalGrid({node_of(k): LocalNode(app, {"partition-id": k}) for k in range(2)})
    shared = federated(grid, "fedavg", **settings)
    torch.testing.assert_close(
        shared.tree.nodes[0].params, here.tree.nodes[0].params, rtol=0, atol=1e-6
    )
    own = federated(grid_of_frames(*parts), "fedavg", **settings)
    assert own.summary["inputs"] == here.summary["inputs"] == shared.summary["inputs"]


def test_numbers_are_scaled_beside_agreed_categories():
    """By sums of all clients, and categories stay 0 and 1."""
    ages = [
        [float(20 + row % 7) for row in range(ROWS)],
        [float(60 + row % 5) for row in range(ROWS)],
    ]
    tables = [patients(cities, age=age) for cities, age in zip((NORTH, SOUTH), ages, strict=True)]
    app = client_app(
        "mclr",
        lambda context: federation_from_frame(
            pa.table({**tables[int(context.node_config["partition-id"])], "id": ["h"] * ROWS}),
            "id",
            "back",
            standardize="federated",
        ),
    )
    grid = LocalGrid({node_of(k): LocalNode(app, {"partition-id": k}) for k in range(2)})
    run = federated(grid, "fedavg", **SETTINGS)
    assert accuracy(run) == 1.0
    inputs = run.summary["inputs"]
    assert inputs["columns"] == ["city=bern", "city=oslo", "city=rome", "age"]
    assert inputs["mean"][:3] == [0, 0, 0]
    assert 40 < inputs["mean"][3] < 45


def test_sums_under_masks_are_of_agreed_tables_too():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH), patients(("rome", "oslo")))
    for node in grid.nodes.values():
        node.config = {**node.config, "min-honest": 2}
    network = network_of(grid, secure_aggregation=True, secure_fewest=3)
    assert accuracy(federated(grid, "fedavg", network=network, **SETTINGS)) == 1.0


def test_label_names_of_all_clients_are_numbered_alike():
    """Alone, one would number yes as 1, and the other one no as 1."""
    north = patients(("bern", "oslo"), {"oslo": "yes", "": "maybe"})
    south = patients(("rome", "oslo"), {"oslo": "yes", "": "no"})
    run = federated(grid_of_frames(north, south), "fedavg", **SETTINGS)
    assert accuracy(run) == 1.0
    assert run.summary["inputs"]["labels"] == ["maybe", "no", "yes"]


def test_numbered_labels_are_as_many_as_the_highest_of_any_client():
    north = patients(NORTH, {"oslo": 1, "": 0})
    south = patients(SOUTH, {"oslo": 1, "": 2})
    assert accuracy(federated(grid_of_frames(north, south), "fedavg", **SETTINGS)) == 1.0


def test_columns_may_come_in_another_order():
    risk = [1.0 if row % 2 else -1.0 for row in range(ROWS)]
    noise = [float(row % 3) for row in range(ROWS)]
    north = {"risk": risk, "noise": noise, "back": ["yes" if each > 0 else "no" for each in risk]}
    south = {"noise": noise, "risk": risk, "back": north["back"]}
    run = federated(grid_of_frames(north, south), "fedavg", **SETTINGS)
    assert accuracy(run) == 1.0
    assert run.summary["inputs"]["columns"] == ["risk", "noise"]


def test_no_cluster_exists_in_the_encoding_alone():
    """Six hospitals see the same, and every other one has its columns in another order."""
    draw = np.random.default_rng(0)
    frames: list[dict[str, list[Any]]] = []
    for number in range(6):
        risk, noise = draw.normal(size=(2, ROWS)).tolist()
        columns = {"risk": risk, "noise": noise}
        names = ["risk", "noise"] if number % 2 else ["noise", "risk"]
        back = ["yes" if each > 0 else "no" for each in risk]
        frames.append({**{name: columns[name] for name in names}, "back": back})
    run = federated(grid_of_frames(*frames), "rcfl", **SETTINGS)
    assert len(run.tree.leaves) == 1
    assert accuracy(run) > 0.9


@pytest.mark.parametrize("declared", [NORTH, ("oslo", "bern"), ("bern", "oslo", "paris")])
def test_categories_that_pandas_declares_count(declared: tuple[str, ...]):
    north = pandas.DataFrame({**patients(NORTH), "id": "h"}).astype(
        {"city": pandas.CategoricalDtype(declared)}
    )
    south = pandas.DataFrame({**patients(SOUTH), "id": "h"}).astype({"city": "category"})
    run = federated(grid_of_frames(north, south), "fedavg", **SETTINGS)
    assert accuracy(run) == 1.0
    assert run.summary["inputs"]["columns"] == [
        f"city={each}" for each in sorted({*declared, *SOUTH})
    ]


def texts(bad: str) -> tuple[list[str], list[int]]:
    """Return reviews of two words, of which the same one is good everywhere, and another one bad."""
    words = ["zebra", bad]
    return [f"{words[row % 2]} stay" for row in range(ROWS)], [row % 2 for row in range(ROWS)]


def bag_of_words(words: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(words, 4), nn.Flatten(), nn.Linear(8, 2))


def grid_of_texts(**options: Any) -> LocalGrid:
    parts = [texts("apple"), texts("zoo")]

    def data(context: Context) -> Any:
        return federation(
            {"me": parts[int(context.node_config["partition-id"])]}, max_words=2, **options
        )

    app = client_app(bag_of_words(options.get("vocabulary_size", 6)), data)
    return LocalGrid({node_of(k): LocalNode(app, {"partition-id": k}) for k in range(2)})


def test_vocabularies_of_all_clients_become_one(tmp_path: Path):
    settings = {**SETTINGS, "model": bag_of_words(6), "folder": tmp_path / "run"}
    run = federated(grid_of_texts(), "fedavg", **settings)
    assert first_schema(tmp_path / "run").words == (
        "<pad>",
        "<unk>",
        "stay",
        "zebra",
        "apple",
        "zoo",
    )
    assert accuracy(run) == 1.0


def test_so_do_those_of_a_column_of_texts(tmp_path: Path):
    def data(context: Context) -> Any:
        notes, back = texts("apple") if context.node_config["partition-id"] == 0 else texts("zoo")
        table = pa.table({"note": notes, "back": back, "id": ["h"] * ROWS})
        return federation_from_frame(table, "id", "back", text="note", max_words=2)

    app = client_app(bag_of_words(6), data)
    grid = LocalGrid({node_of(k): LocalNode(app, {"partition-id": k}) for k in range(2)})
    run = federated(
        grid, "fedavg", **{**SETTINGS, "model": bag_of_words(6), "folder": tmp_path / "run"}
    )
    assert first_schema(tmp_path / "run").words == (
        "<pad>",
        "<unk>",
        "stay",
        "zebra",
        "apple",
        "zoo",
    )
    assert accuracy(run) == 1.0


def test_the_most_frequent_words_of_all_clients_are_kept(tmp_path: Path):
    settings = {**SETTINGS, "model": bag_of_words(5), "rounds": 1, "folder": tmp_path / "run"}
    federated(grid_of_texts(vocabulary_size=5), "fedavg", **settings)
    words = first_schema(tmp_path / "run").words
    assert words[:4] == ("<pad>", "<unk>", "stay", "zebra")
    assert len(words) == 5


def serve(tmp_path: Path, run_config: dict[str, Any], nodes: Sequence[dict[str, Any]]) -> Run:
    """Run an app from a config, whose nodes have the folders ``0``, ``1`` and so on; return the run."""
    out = tmp_path / "run"
    config = {
        "rounds": 3,
        "model.name": "mclr",
        "algorithm.name": "fedavg",
        "local.epochs": 5,
        "local.lr": 0.5,
        "local.batch_size": 10,
        "network.clients": len(nodes),
        "network.wait": 1.0,
        "network.out": str(out),
        "data.target": "back",
        **run_config,
    }
    config = {key: value for key, value in config.items() if value is not None}
    app = client_app_from_config()
    made = {
        node_of(k): LocalNode(app, {"partition-id": k, "data-dir": str(tmp_path / str(k)), **node})
        for k, node in enumerate(nodes)
    }
    server_app_from_config()(LocalGrid(made, config), Context(1, 0, {}, RecordDict(), config))
    return Run.load(out)


def write_files(tmp_path: Path, names: Sequence[str], *tables: Mapping[str, list[Any]]) -> None:
    for number, (name, table) in enumerate(zip(names, tables, strict=True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        pyarrow.csv.write_csv(pa.table(dict(table)), folder / name)


@pytest.mark.parametrize("algorithm", ["fedavg", "rcfl"])
@pytest.mark.parametrize("files", ["*.csv", "patients.csv"])
def test_by_config_a_node_needs_its_own_file_alone(algorithm: str, files: str, tmp_path: Path):
    write_files(tmp_path, ["patients.csv"] * 2, patients(NORTH), patients(SOUTH))
    run = serve(tmp_path, {"data.files": files, "algorithm.name": algorithm}, [{}, {}])
    assert accuracy(run) == 1.0
    assert len(run.tree.leaves) == 1
    assert run.config["data"]["files"] == files
    assert run.summary["data"].endswith(", clients with data of their own")
    assert run.summary["inputs"]["columns"] == ["city=bern", "city=oslo", "city=rome"]


def test_by_config_own_files_give_what_everybodys_files_give(tmp_path: Path):
    """Clients hold back and shuffle the same rows, as partition-id keys their draws."""
    tables = [patients(NORTH), patients(SOUTH)]
    write_files(tmp_path, ["a.csv", "b.csv"], *tables)
    own = serve(tmp_path, {"data.files": "*.csv"}, [{}, {}])
    both = tmp_path / "both"
    for number in range(2):
        folder = both / str(number)
        folder.mkdir(parents=True)
        for name, table in zip(("a.csv", "b.csv"), tables, strict=True):
            pyarrow.csv.write_csv(pa.table(table), folder / name)
    shared = serve(both, {"data.files": "*.csv"}, [{}, {}])
    torch.testing.assert_close(
        own.tree.nodes[0].params, shared.tree.nodes[0].params, rtol=0, atol=1e-6
    )


def test_the_node_config_may_name_its_file(tmp_path: Path):
    write_files(tmp_path, ["north.csv", "south.csv"], patients(NORTH), patients(SOUTH))
    nodes = [{"data-files": "north.csv"}, {"data-files": "south.csv"}]
    assert accuracy(serve(tmp_path, {"data.files": "patients.csv"}, nodes)) == 1.0


def test_a_function_of_the_config_may_return_one_clients_own_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = (
        "import pyarrow.csv as csv, fedclade\n"
        "def own(data_dir):\n"
        "    table = csv.read_csv(f'{data_dir}/p.csv')\n"
        "    return fedclade.federation_from_frame(table.append_column('id', [['h'] * len(table)]), 'id', 'back')\n"
    )
    (tmp_path / "own_hospital.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    write_files(tmp_path, ["p.csv"] * 2, patients(NORTH), patients(SOUTH))
    run_config = {"data.name": "own_hospital:own", "data.target": None}
    nodes = [{"imports": "own_hospital:own"}] * 2
    assert accuracy(serve(tmp_path, run_config, nodes)) == 1.0


def test_a_client_with_one_label_alone_agrees_on_a_binary_target(tmp_path: Path):
    write_files(tmp_path, ["p.csv"] * 2, patients(NORTH), patients(("rome",)))
    assert (
        accuracy(serve(tmp_path, {"data.files": "p.csv", "task.name": "binary"}, [{}, {}])) == 1.0
    )


def test_labels_of_a_binary_target_are_two(tmp_path: Path):
    write_files(tmp_path, ["p.csv"] * 2, patients(("bern",)), patients(("rome",)))
    with pytest.raises(
        Exception,
        match="should have 2 different values, got only 'no' in the data of all 2 clients",
    ):
        serve(tmp_path, {"data.files": "p.csv", "task.name": "binary"}, [{}, {}])


DECLARED = DataSchema.read({"inputs": {"city": ["bern", "oslo", "rome"]}, "labels": ["no", "yes"]})


def requests_to(grid: LocalGrid) -> list[Content]:
    """Return a list that grows by the replies of all nodes."""
    replies: list[Content] = []
    for node in grid.nodes.values():

        def noting(message: Any, context: Any, app: Any = node.app) -> Any:
            reply = app(message, context)
            replies.append(Content.of(reply.content))
            return reply

        node.app = noting
    return replies


def test_a_schema_that_the_server_declares_needs_no_proposals():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH))
    replies = requests_to(grid)
    assert accuracy(federated(grid, "fedavg", schema=DECLARED, **SETTINGS)) == 1.0
    assert not any("proposal" in reply.values for reply in replies)


def test_a_schema_in_the_run_config_is_the_servers(tmp_path: Path):
    """It also says which columns are inputs; the clients do not read the file."""
    write_files(tmp_path, ["p.csv"] * 2, patients(NORTH, ward=[1] * ROWS), patients(SOUTH))
    DECLARED.save(tmp_path / "schema.json")
    run = serve(
        tmp_path, {"data.files": "p.csv", "data.schema": str(tmp_path / "schema.json")}, [{}, {}]
    )
    assert accuracy(run) == 1.0
    assert run.summary["inputs"]["columns"] == ["city=bern", "city=oslo", "city=rome"]


def test_a_schema_may_stand_in_the_run_config_as_text(tmp_path: Path):
    write_files(tmp_path, ["p.csv"] * 2, patients(NORTH), patients(SOUTH))
    declared = '{inputs = {city = ["bern", "oslo", "rome"]}, labels = ["no", "yes"]}'
    nodes = [{"share-schema": False}, {"share-schema": False}]
    assert accuracy(serve(tmp_path, {"data.files": "p.csv", "data.schema": declared}, nodes)) == 1.0


DIFFERENT: dict[str, tuple[dict[str, list[Any]], str]] = {
    "category": (
        patients(("paris", "oslo")),
        "column 'city' has 'paris' in row 1, which is no category of the schema",
    ),
    "label": (
        patients(SOUTH, {"oslo": "yes", "": "died"}),
        "column 'back' has 'died' in row 2, which is no label of",
    ),
    "columns": (
        {"town": ["oslo"] * ROWS, "back": ["no", "yes"] * 30},
        "lacks 'city' and also has 'town'; list the input columns as 'inputs'",
    ),
    "kind": (
        {"city": [1.5] * ROWS, "back": ["no", "yes"] * 30},
        "column 'city' should have texts according to the schema, got numbers",
    ),
    "kind of labels": (
        patients(SOUTH, {"oslo": 1, "": 0}),
        "the labels of the schema are texts, but the target 'back'",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_newcomer_that_does_not_fit_the_agreed_schema_is_refused_with_the_difference(name: str):
    frame, why = DIFFERENT[name]
    grid = grid_of_frames(patients(NORTH), patients(SOUTH), frame)
    grid.nodes[node_of(2)].connected = False
    trained = grid.nodes[node_of(0)].app

    def connecting(message: Any, context: Any) -> Any:
        grid.nodes[node_of(2)].connected = words_of(message.content)["what"] != "hello"
        return trained(message, context)

    grid.nodes[node_of(0)].app = connecting
    run = federated(grid, "fedavg", network=network_of(grid, clients=2), **SETTINGS)
    (refused,) = refusals(run)
    assert why in refused
    assert accuracy(run) == 1.0


def test_a_newcomer_that_fits_encodes_by_the_agreed_schema():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH), patients(("rome", "oslo")))
    grid.nodes[node_of(2)].connected = False
    trained = grid.nodes[node_of(0)].app

    def connecting(message: Any, context: Any) -> Any:
        if words_of(message.content)["what"] == "train":
            grid.nodes[node_of(2)].connected = True
        return trained(message, context)

    grid.nodes[node_of(0)].app = connecting
    run = federated(grid, "fedavg", network=network_of(grid, clients=2), **SETTINGS)
    assert {row["client"] for row in run.client_rows if row["round"] == 4} == {0, 1, 2}
    assert accuracy(run) == 1.0


STRUCTURES: dict[str, tuple[dict[str, list[Any]], str]] = {
    "columns": (
        {"town": ["oslo"] * ROWS, "back": ["no", "yes"] * 30},
        "column 'town' is only in this client's data; column 'ci",
    ),
    "kind": (
        {"city": [1.5] * ROWS, "back": ["no", "yes"] * 30},
        "column 'city' is a number in this client's data and a categor",
    ),
    "task": (
        {"city": ["oslo"] * ROWS, "back": [0.5] * ROWS},
        "the task is regression in this client's data and classification in the other clients' data",
    ),
    "labels": (
        {"city": ["oslo"] * ROWS, "back": [0, 1] * 30},
        "labels are whole numbers from 0 in this client's data and names in the other clients' data",
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_client_that_differs_from_most_is_refused_with_the_difference(name: str):
    frame, why = STRUCTURES[name]
    grid = grid_of_frames(frame, patients(NORTH), patients(SOUTH))
    with pytest.raises(UpdateError, match="2 of 3 clients connected") as caught:
        federated(grid, "fedavg", **SETTINGS)
    assert why in str(caught.value)


def test_one_that_declares_another_schema_is_refused_with_the_difference():
    table = pa.table({**patients(("oslo",)), "id": ["h"] * ROWS})
    other = DataSchema.read({"inputs": {"city": ["oslo", "bern"]}, "labels": ["no", "yes"]})
    grid = grid_of_frames(patients(NORTH), patients(SOUTH), patients(SOUTH))
    app = client_app("mclr", lambda _: federation_from_frame(table, "id", "back", schema=other))
    grid.nodes[node_of(2)] = LocalNode(app, {"partition-id": 2})
    with pytest.raises(UpdateError, match="'rome' is only in the agreed schema") as caught:
        federated(grid, "fedavg", **SETTINGS)
    assert (
        "this client's data is encoded by another schema than the agreed schema: category of column "
        "'city' 'rome' is only in " in (str(caught.value))
    )


def test_where_most_declare_a_schema_the_most_frequent_one_counts():
    table = pa.table({**patients(("oslo",)), "id": ["h"] * ROWS})
    other = replace(DECLARED, labels=("yes", "no"))
    grid = grid_of_frames(patients(NORTH), patients(SOUTH), patients(SOUTH))
    for number, schema in ((0, DECLARED), (1, DECLARED), (2, other)):

        def data(_: Context, schema: DataSchema = schema) -> Any:
            return federation_from_frame(table, "id", "back", schema=schema)

        grid.nodes[node_of(number)] = LocalNode(client_app("mclr", data), {"partition-id": number})
    with pytest.raises(
        UpdateError,
        match=r"2 of 3 clients connected.*label 1 is 'yes' in this client's .* and 'no' in the",
    ):
        federated(grid, "fedavg", **SETTINGS)


def test_data_without_names_does_not_join_tables():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH), patients(SOUTH))
    arrays = torch.eye(3).repeat(20, 1), torch.arange(ROWS) % 2
    grid.nodes[node_of(2)] = LocalNode(
        client_app("mclr", lambda _: federation({"h": arrays})), {"partition-id": 2}
    )
    with pytest.raises(
        UpdateError,
        match="this client's data has no named columns and no texts, but the other clients' data ha",
    ):
        federated(grid, "fedavg", **SETTINGS)


def test_tables_do_not_join_data_without_names():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH), patients(SOUTH))
    arrays = torch.eye(3).repeat(20, 1), torch.arange(ROWS) % 2
    for number in (1, 2):
        app = client_app("mclr", lambda _: federation({"h": arrays}))
        grid.nodes[node_of(number)] = LocalNode(app, {"partition-id": number})
    with pytest.raises(
        UpdateError,
        match="its data has named columns or texts, but most other clients' data has neither",
    ):
        federated(grid, "fedavg", **SETTINGS)


def test_a_run_that_goes_on_keeps_its_schema(tmp_path: Path):
    """One that comes back need not disclose anything again, and one with a new category is refused."""
    folder = tmp_path / "run"
    frames = [patients(NORTH), patients(SOUTH)]
    federated(
        housed(grid_of_frames(*frames), tmp_path),
        "fedavg",
        folder=folder,
        **{**SETTINGS, "rounds": 2},
    )
    before = (folder / SCHEMA).read_text()
    grid = housed(grid_of_frames(*frames, patients(("paris",))), tmp_path)
    replies = requests_to(grid)
    run = federated(grid, "fedavg", folder=folder, network=network_of(grid, clients=2), **SETTINGS)
    assert not any("proposal" in reply.values for reply in replies)
    assert accuracy(run) == 1.0
    assert (folder / SCHEMA).read_text() == before
    assert "column 'city' has 'paris' in row 1" in refusals(run)[0]


def test_a_run_does_not_go_on_with_another_schema_or_a_damaged_one(tmp_path: Path):
    folder = tmp_path / "run"
    settings = {**SETTINGS, "rounds": 1, "folder": folder}
    grid = housed(grid_of_frames(patients(NORTH), patients(SOUTH)), tmp_path)
    federated(grid, "fedavg", **settings)
    with pytest.raises(
        RunError,
        match=(
            r"the declared schema differs from the schema of the run in .*: the "
            "target is 'back' in the run and none in"
        ),
    ):
        federated(grid, "fedavg", schema=DECLARED, **settings)
    (folder / SCHEMA).write_text(DECLARED.to_json())
    with pytest.raises(
        RunError, match=r"clients\.json is damaged .*: schema\.json in the run folder was changed"
    ):
        federated(grid, "fedavg", **settings)


def told_refusal(caught: pytest.ExceptionInfo[UpdateError]) -> str:
    return str(caught.value)


def test_a_policy_may_forbid_to_disclose_values():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH))
    grid.nodes[node_of(1)].config = {"partition-id": 1, "share-schema": False}
    with pytest.raises(
        UpdateError,
        match="the client's policy forbids disclosing the categories, labels and words of its",
    ):
        federated(grid, "fedavg", **SETTINGS)


def private_grid(tmp_path: Path, **node: Any) -> LocalGrid:
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=0.01)
    app = app_of_frames(
        [patients(NORTH), patients(SOUTH)], privacy=privacy, budget=Budget(epsilon=float("inf"))
    )
    grid = LocalGrid({node_of(k): LocalNode(app, {"partition-id": k, **node}) for k in range(2)})
    return housed(grid, tmp_path)


def test_private_clients_disclose_values_only_if_their_policy_says_so(tmp_path: Path):
    settings = {**SETTINGS, "rounds": 1}
    with pytest.raises(
        UpdateError,
        match="words of its data of a client with differential privacy; declare a schema",
    ):
        federated(private_grid(tmp_path / "a"), "fedavg", **settings)
    federated(private_grid(tmp_path / "b", **{"share-schema": True}), "fedavg", **settings)
    federated(private_grid(tmp_path / "c"), "fedavg", schema=DECLARED, **settings)


def test_a_refusal_names_no_value_that_may_not_leave(tmp_path: Path):
    few = replace(DECLARED, inputs=(replace(DECLARED.inputs[0], categories=("bern", "oslo")),))
    with pytest.raises(
        UpdateError, match="column 'city' has a value that is no category of the schema"
    ) as caught:
        federated(private_grid(tmp_path), "fedavg", schema=few, **SETTINGS)
    assert "rome" not in str(caught.value)


def test_numbers_are_no_values_to_hide(tmp_path: Path):
    numbers = {
        "risk": [float(row % 7) for row in range(ROWS)],
        "back": [row % 2 for row in range(ROWS)],
    }
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=0.01)
    grid = grid_of_frames(numbers, numbers, privacy=privacy, budget=Budget(epsilon=float("inf")))
    run = federated(housed(grid, tmp_path), "fedavg", **{**SETTINGS, "rounds": 1})
    assert run.summary["inputs"]["columns"] == ["risk"]


def test_few_rows_disclose_nothing():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH))
    grid.nodes[node_of(1)].config = {"partition-id": 1, "min-part": ROWS + 1}
    with pytest.raises(
        UpdateError,
        match="forbids disclosing the categories, labels and words of 60 examples, since the",
    ):
        federated(grid, "fedavg", **SETTINGS)


PROPOSAL = {
    "schema": {"words": ["<pad>", "<unk>", "a"], "task": "classification"},
    "is_fixed": False,
    "word_counts": [3],
    "vocabulary_size": 9,
}


def read(**changes: Any) -> Any:
    return read_proposal(
        Content.of(record({"number": 3, "proposal": json.dumps({**PROPOSAL, **changes})}))
    )


def test_a_proposal_survives_a_message():
    number, proposal = read()
    assert number == 3
    assert proposal.schema == DataSchema(words=("<pad>", "<unk>", "a"), task="classification")
    assert (proposal.is_fixed, proposal.word_counts, proposal.vocabulary_size) == (False, (3,), 9)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"schema": 3},
            "the schema that the server proposes is malformed: a schema should be a table with keys "
            "such as inputs and labels, got 3",
        ),
        (
            {"schema": {}},
            "the schema that the server proposes is malformed: a schema should have inputs or words, got neither",
        ),
        (
            {"schema": {"words": ["a", "a"]}},
            "words of a schema should be different names, got 'a' more than once",
        ),
        (
            {"is_fixed": 1},
            "the schema that the server proposes is malformed: is_fixed should .*, got 1 and",
        ),
        (
            {"vocabulary_size": -1},
            "the schema that the server proposes is malformed: is_fixed should .*, got False and -1",
        ),
        (
            {"word_counts": [0]},
            r"the schema that the server proposes is malformed: word_counts should .*, got \[0\]",
        ),
        (
            {"word_counts": [2**60]},
            r"the schema that the server proposes is malformed: word_counts should .*, got \[1152921504606846976\]",
        ),
        ({"word_counts": []}, "the proposed schema has 0 word counts, expected 1"),
        (
            {"more": 1},
            "the schema that the server proposes should have the keys schema, is_fixed, word_counts "
            "and vocabulary_size, got",
        ),
    ],
)
def test_proposals_that_cannot_be_used_are_refused(changes: dict[str, Any], why: str):
    with pytest.raises(UpdateError, match=why):
        read(**changes)


def test_a_proposal_has_a_largest_size():
    text = " " * LONGEST_PROPOSAL + "{}"
    with pytest.raises(
        UpdateError,
        match="'proposal' in the message has 900002 characters, expected at most 900000",
    ):
        read_proposal(Content.of(record({"number": 3, "proposal": text})))


def test_a_malformed_proposal_shuts_out_its_client_alone():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH), patients(SOUTH))
    spoil(grid, 2, "hello", worded(proposal="{}"))
    run = federated(grid, "fedavg", network=network_of(grid, clients=2), **SETTINGS)
    assert accuracy(run) == 1.0
    assert (
        "it has not registered: the schema that the server proposes should have the keys"
        in refusals(run)[0]
    )


def test_one_that_says_it_encodes_otherwise_is_refused():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH), patients(SOUTH))
    spoil(
        grid,
        2,
        "hello",
        lambda honest: worded(encoding="ab" * 16)(honest) if "layout" in words_of(honest) else None,
    )
    run = federated(grid, "fedavg", network=network_of(grid, clients=2), **SETTINGS)
    assert (
        "the client's data is not encoded by the schema that the clients of this run agreed on"
        in refusals(run)[0]
    )


def test_the_agreed_schema_is_read_as_it_was_written():
    assert read_agreed(Content.of(record({"agreed": write_agreed(DECLARED)}))) == DECLARED
    assert read_agreed(Content.of(record({}))) is None
    with pytest.raises(
        UpdateError, match="the agreed schema is malformed: unknown key of a schema: 'x'"
    ):
        read_agreed(Content.of(record({"agreed": '{"x": 1}'})))


def test_a_client_answers_nothing_without_the_agreed_schema():
    grid = grid_of_frames(patients(NORTH), patients(SOUTH))
    forgetful = grid.nodes[node_of(1)].app

    def forgetting(message: Any, context: Any) -> Any:
        if words_of(message.content)["what"] == "train":
            message.content = worded(agreed=None)(message.content)
        return forgetful(message, context)

    grid.nodes[node_of(1)].app = forgetting
    run = federated(grid, "fedavg", **SETTINGS)
    assert (
        "the query 'train' does not contain the schema that all clients agree on" in reasons(run)[1]
    )


def test_a_schema_that_cannot_be_read_says_so(tmp_path: Path):
    (tmp_path / "schema.json").write_text('{"inputs": {"city": 3}}')
    grid = grid_of_frames(patients(NORTH), patients(SOUTH))
    with pytest.raises(
        ConfigError,
        match=r"the schema in .*schema\.json is invalid: column 'city' of a schema should be 'number', 'text' or a l",
    ):
        federated(grid, "fedavg", schema=tmp_path / "schema.json", **SETTINGS)


def pictures(scale: float) -> Any:
    """Return a client of a pool whose columns have names, though nothing can encode them again."""
    frame = pa.table(
        {"risk": [scale * row for row in range(ROWS)], "back": [0, 1] * 30, "id": ["h"] * ROWS}
    )
    return replace(federation_from_frame(frame, "id", "back"), encoding=None)


def test_names_that_cannot_be_encoded_again_must_be_the_same():
    """As those of a data folder, or the words of a data set that all nodes load."""
    other = pictures(1.0)
    assert other.pool.columns is not None
    other = replace(
        other, pool=replace(other.pool, columns=replace(other.pool.columns, inputs=("age",)))
    )
    grid = grid_of_frames(*[patients(NORTH)] * 3)
    for number, made in enumerate((pictures(1.0), other, pictures(2.0))):
        grid.nodes[node_of(number)] = LocalNode(
            client_app("mclr", lambda _, made=made: made), {"partition-id": number}
        )
    with pytest.raises(
        UpdateError,
        match="101 was refused: its columns, labels or words are encoded differently than th",
    ):
        federated(grid, "fedavg", **SETTINGS)


def test_a_table_does_not_join_a_run_without_a_schema():
    arrays = torch.eye(3).repeat(20, 1), torch.arange(ROWS) % 2
    grid = grid_of_frames(patients(NORTH), patients(NORTH), patients(SOUTH))
    grid.nodes[node_of(2)].connected = False
    app = client_app("mclr", lambda _: federation({"h": arrays}))

    def connecting(message: Any, context: Any) -> Any:
        if words_of(message.content)["what"] == "train":
            grid.nodes[node_of(2)].connected = True
        return app(message, context)

    for number in range(2):
        grid.nodes[node_of(number)] = LocalNode(connecting, {"partition-id": number})
    run = federated(grid, "fedavg", network=network_of(grid, clients=2), **SETTINGS)
    assert (
        "the clients of this run have no schema for such data, so the client cannot join"
        in refusals(run)[0]
    )


def test_schemas_that_are_too_long_do_not_leave(monkeypatch: pytest.MonkeyPatch):
    module = import_module("fedclade.flower.schema_exchange")
    monkeypatch.setattr(module, "LONGEST_PROPOSAL", 50)
    grid = grid_of_frames(patients(NORTH), patients(SOUTH))
    with pytest.raises(
        UpdateError,
        match=r"the schema of this client's data has \d+ characters, expected at most 50; leave col",
    ):
        federated(grid, "fedavg", **SETTINGS)
    monkeypatch.setattr(module, "LONGEST_SCHEMA", 40)
    with pytest.raises(
        UpdateError, match=r"the agreed schema has \d+ characters, expected at most 40"
    ):
        write_agreed(DECLARED)
