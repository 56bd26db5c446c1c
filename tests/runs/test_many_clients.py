"""A run of many clients gives the results of one of few, reads what it trains, stores who trained."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedclade import CFL, FedAvg, LocalTraining, ParameterTree, Run, RunInterrupted, simulate
from fedclade.algorithms import IFCA
from fedclade.core import ClientIds, EvaluationQuery, client_ids, tree
from fedclade.data import PlantedSettings, open_folder, write_planted
from fedclade.runs.store import checkpoint, tree_files
from fedclade.training import SimulatedClients
from tests.tiny import federation_of, linear

LOCAL = LocalTraining(epochs=1, batch_size=10, lr=0.2)
MANY = 20_000
METHODS = {
    "fedavg": "fedavg",
    "cfl": CFL(eps1=10.0, eps2=0.0001),
    "ifca": IFCA(clusters=2),
    "rcfl": "rcfl",
    "scaffold": "scaffold",
    "ditto": "ditto",
}


def store_in_arrays(patch: pytest.MonkeyPatch) -> None:
    """Store also a single id in an array, as is done for many clients."""
    for module in (client_ids, tree, checkpoint, tree_files):
        patch.setattr(module, "MANY_IDS", 1)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the data of many clients."""
    folder = tmp_path_factory.mktemp("planted") / "data"
    write_planted(folder, PlantedSettings(clients=MANY, least=3, most=6, test=2))
    return folder


def run_of(method: str, folder: Path, stops_in: int = 0) -> Run:
    def stop_in_round() -> bool:
        nonlocal stops_in
        stops_in -= 1
        return stops_in == 0

    model = "mclr" if method == "ifca" else linear()
    return simulate(
        METHODS[method],
        model,
        federation_of([0, 1, 0, 1, 1, 0]),
        rounds=3,
        client_fraction=0.5,
        evaluate_clients=4,
        local=LOCAL,
        folder=folder,
        stop=stop_in_round,
    )


def results(run: Run) -> object:
    rows = [
        {name: value for name, value in row.items() if not name.startswith("seconds")}
        for row in run.metric_rows
    ]
    nodes = [([*node.members], node.params.tolist()) for node in run.tree.nodes]
    return rows, [*run.client_rows], run.events, nodes


@pytest.mark.parametrize("method", METHODS)
def test_results_do_not_depend_on_how_members_are_stored(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    few = run_of(method, tmp_path / "few")
    store_in_arrays(monkeypatch)
    many = run_of(method, tmp_path / "many")
    assert isinstance(many.tree.nodes[0].members, ClientIds)
    assert results(many) == results(few)
    loaded = Run.load(tmp_path / "many")
    assert [node.members for node in loaded.tree.nodes] == [
        node.members for node in many.tree.nodes
    ]
    with pytest.raises(RunInterrupted):
        run_of(method, tmp_path / "again", stops_in=2)
    assert results(run_of(method, tmp_path / "again")) == results(few)


def train(data: Path, method: str, folder: Path | None = None) -> Run:
    return simulate(
        METHODS[method],
        "mclr",
        open_folder(data),
        rounds=3,
        client_fraction=20 / MANY,
        evaluate_every=3,
        evaluate_clients=30,
        local=LOCAL,
        folder=folder,
        checkpoint_every=1,
    )


def test_only_clients_that_trained_store_anything(planted: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[SimulatedClients] = []
    handle = SimulatedClients.handle_updates

    def handle_updates(self, *arguments):
        made[:] = [self]
        return handle(self, *arguments)

    monkeypatch.setattr(SimulatedClients, "handle_updates", handle_updates)
    run = train(planted, "scaffold")
    trained = sum(row["clients_trained"] for row in run.metric_rows)
    stored = {name.split("/")[0] for name in made[0].store.tensors()}
    assert trained == 60
    assert 55 < len(stored) <= 60, "few clients were sampled twice"


def test_only_evaluated_clients_choose_a_model(planted: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    handle = SimulatedClients.handle_evaluation

    def handle_evaluation(self, query: EvaluationQuery):
        asked.append(len(set(query.ids)))
        return handle(self, query)

    monkeypatch.setattr(SimulatedClients, "handle_evaluation", handle_evaluation)
    train(planted, "ifca")
    assert max(asked) == 30


def test_checkpoints_and_trees_list_no_consecutive_clients(planted: Path, tmp_path: Path):
    run = train(planted, "fedavg", tmp_path / "run")
    for file in (tmp_path / "run").rglob("tree.json"):
        (node,) = json.loads(file.read_text())["nodes"]
        assert node["members"] == {"first": 0, "last": MANY - 1}
    sizes = [file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert max(sizes) < MANY, "no file has a byte for each client"
    assert Run.load(tmp_path / "run").tree.nodes[0].members == run.tree.nodes[0].members


@pytest.mark.parametrize(
    "members", [{"first": 0}, {"first": 3, "last": 1}, {"first": "0", "last": 9}], ids=str
)
def test_a_damaged_range_of_members_is_refused(tmp_path: Path, members: object):
    many = ParameterTree.root_only(range(MANY), torch.zeros(2))
    tree_files.write_tree(many, tmp_path / "tree")
    path = tmp_path / "tree" / "tree.json"
    content = json.loads(path.read_text())
    content["nodes"][0]["members"] = members
    path.write_text(json.dumps(content))
    with pytest.raises(tree_files.RunError, match="members"):
        tree_files.read_tree(tmp_path / "tree")


def test_data_of_clients_that_take_no_part_are_not_read(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    used: set[int] = {0}  # opening a folder reads the first example
    for name in ("handle_updates", "handle_evaluation"):
        monkeypatch.setattr(SimulatedClients, name, noting(getattr(SimulatedClients, name), used))
    run = train(planted, "fedavg")
    spoiled = tmp_path / "spoiled"
    shutil.copytree(planted, spoiled)
    federation = open_folder(planted)
    rows = np.ones(len(federation.pool.y), dtype=bool)
    for client in used:
        data = federation.by_id[client]
        rows[np.concatenate([data.train, data.test])] = False
    assert rows.mean() > 0.99
    content = bytearray((spoiled / "examples.arrow").read_bytes())
    for values, wrong in ((federation.pool.x, np.nan), (federation.pool.y, -5)):
        array = values.numpy()
        start = content.index(array.tobytes())
        inside = np.frombuffer(content, array.dtype, array.size, start).reshape(array.shape)
        inside[rows] = wrong
    (spoiled / "examples.arrow").write_bytes(content)
    assert results(train(spoiled, "fedavg")) == results(run)


def noting(handle: Callable[..., Any], used: set[int]) -> Callable[..., Any]:
    """Wrap a function that handles queries, so that it notes the clients that are queried."""

    def noted(self: SimulatedClients, query: Any, *arguments: Any) -> Any:
        used.update(query.ids)
        return handle(self, query, *arguments)

    return noted


def test_a_round_allocates_nothing_for_clients_that_do_not_train(planted: Path):
    peaks: list[int] = []

    def note_peak(row: object, of_tree: object) -> None:
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()

    federation = open_folder(planted)
    tracemalloc.start()
    try:
        simulate(
            FedAvg(),
            "mclr",
            federation,
            rounds=4,
            client_fraction=20 / MANY,
            evaluate_every=4,
            evaluate_clients=20,
            local=LOCAL,
            on_round=note_peak,
        )
        now = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # A Python object for each client would take at least 28 bytes. Arrays take 8 for a while.
    assert peaks[2] - now < 20 * MANY
