"""Hospitals that each have their own file, on the nodes of a network."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from flwr.app import Context, RecordDict

from fedclade import Run
from fedclade.flower import LocalGrid, LocalNode, client_app_from_config, server_app_from_config

# Found when the module is read: each test runs without the variable.
REAL_DATA = Path(
    os.environ.get("FEDCLADE_DATA_DIR") or Path(__file__).parents[3] / "shared" / "data"
)

PROJECT = """
[project]
name = "hospitals"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "hospitals:server"
clientapp = "hospitals:client"

[tool.flwr.app.config]
rounds = 2
evaluate_every = 2
data.files = "patients.csv"
data.target = "back"
model.name = "mclr"
algorithm.name = "rcfl"
local.epochs = 15
local.batch_size = 10
local.lr = 0.5
network.clients = 2
network.out = ""
"""

BY_CONFIG = """
from fedclade.flower import client_app_from_config, server_app_from_config

server = server_app_from_config()
client = client_app_from_config()
"""

IN_PYTHON = """
from pathlib import Path

from flwr.serverapp import ServerApp
from pyarrow.csv import read_csv

import fedclade
from fedclade.flower import Network, client_app, federate

server = ServerApp()


@server.main()
def main(grid, context):
    local = fedclade.LocalTraining(epochs=15, batch_size=10, lr=0.5)
    settings = {"rounds": 1, "local": local, "network": Network(clients=2)}
    federate(grid, "fedavg", "mclr", folder=context.run_config["network.out"], **settings)


def patients(context):
    table = read_csv(Path(context.node_config["data-dir"]) / "patients.csv")
    table = table.append_column("hospital", [["mine"] * len(table)])
    return fedclade.federation_from_frame(table, client="hospital", target="back")


client = client_app("mclr", patients)
"""


def write_app(folder: Path, code: str) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "hospitals.py").write_text(code)
    return folder


def write_patients(folders: Sequence[Path]) -> None:
    """Write the file of each of two hospitals; only Oslo's patients come back, and each hospital lacks a city."""
    for folder, cities in zip(folders, (("bern", "oslo"), ("oslo", "rome")), strict=True):
        rows = [f"{city},{'yes' if city == 'oslo' else 'no'}" for city in cities * 30]
        folder.mkdir(parents=True)
        (folder / "patients.csv").write_text("\n".join(["city,back", *rows]) + "\n")


def check_patients(run: Run) -> None:
    assert run.summary["accuracy"]["mean"] == 1.0
    assert run.summary["inputs"]["columns"] == ["city=bern", "city=oslo", "city=rome"]
    assert run.summary["inputs"]["labels"] == ["no", "yes"]
    assert len(run.tree.leaves) == 1


@pytest.mark.scheduled  # the next test has such hospitals on nodes in one process
def test_two_hospitals_share_one_encoding_by_config(tmp_path: Path):
    app = write_app(tmp_path / "app", BY_CONFIG)
    folder = tmp_path / "deployment"
    data_dir = f'data-dir="{folder}/node-{{node}}"'
    deployment = Deployment(folder, app, nodes=2, node_config=data_dir)
    write_patients([deployment.node_folder(node) for node in range(2)])
    with deployment:
        deployment.run({"network.out": str(tmp_path / "run")})
    check_patients(Run.load(tmp_path / "run"))


def test_two_hospitals_share_one_encoding_in_python(tmp_path: Path):
    """With the nodes in this process."""
    app: dict[str, Any] = {}
    exec(IN_PYTHON, app)
    folders = [tmp_path / f"node-{node}" for node in range(2)]
    write_patients(folders)
    nodes = {
        100 + node: LocalNode(app["client"], {"partition-id": node, "data-dir": str(folder)})
        for node, folder in enumerate(folders)
    }
    config = {"network.out": str(tmp_path / "run")}
    app["server"](LocalGrid(nodes, config), Context(1, 0, {}, RecordDict(), dict(config)))
    check_patients(Run.load(tmp_path / "run"))


HEART = REAL_DATA / "natural" / "heart"
SITES = ("cleveland", "hungarian", "switzerland", "va")


@pytest.mark.skipif(not HEART.is_dir(), reason="the heart data is not there")
def test_four_hospitals_with_missing_values_each_have_their_own_file(tmp_path: Path):
    """Raw files of four hospitals, in which two thirds of a column are empty; the nodes are in this process."""
    nodes: dict[int, LocalNode] = {}
    for node, site in enumerate(SITES):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        (folder / "heart.csv").write_bytes((HEART / f"{site}.csv").read_bytes())
        own = {"partition-id": node, "folder": str(folder), "data-dir": str(folder)}
        nodes[100 + node] = LocalNode(client_app_from_config(), own)
    settings = {"rounds": 2, "evaluate_every": 2, "model.name": "mclr", "algorithm.name": "rcfl"}
    settings |= {"data.files": "heart.csv", "data.target": "target", "network.clients": 4}
    config: dict[str, Any] = {**settings, "network.out": str(tmp_path / "run")}
    server_app_from_config()(LocalGrid(nodes, config), Context(1, 0, {}, RecordDict(), config))
    run = Run.load(tmp_path / "run")
    assert len(run.client_rows) == 4
    assert run.summary["accuracy"]["mean"] > 0.3
    inputs = run.summary["inputs"]
    assert len(inputs["fill"]) == len(inputs["columns"])
    ca = inputs["columns"].index("ca")
    assert 0 < inputs["fill"][ca] < 3  # the mean number of vessels of all hospitals
    assert not any(math.isnan(client["accuracy"]) for client in run.client_rows)
    assert run.gains is not None
    rows = {len((HEART / f"{site}.csv").read_text().splitlines()) - 1 for site in SITES}
    tested = {client.n_test + client.n_train for client in run.gains.clients}
    assert tested == rows
    for client in run.gains.clients:
        gain = client.gains["trivial"]
        assert gain.low is not None
        assert gain.low <= gain.value <= gain.high
