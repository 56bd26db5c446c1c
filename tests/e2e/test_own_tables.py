"""Hospitals that each have their own file, as processes: a SuperLink, and a SuperNode for each file."""

from __future__ import annotations

from pathlib import Path

import pytest
from deployment import Deployment

from fedclade import Run

pytestmark = pytest.mark.slow

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


def test_two_hospitals_share_one_encoding_by_config_and_in_python(tmp_path: Path):
    apps = {
        "config": write_app(tmp_path / "config", BY_CONFIG),
        "python": write_app(tmp_path / "python", IN_PYTHON),
    }
    folder = tmp_path / "deployment"
    data_dir = f'data-dir="{folder}/node-{{node}}"'
    deployment = Deployment(folder, apps["config"], nodes=2, node_config=data_dir)
    for node, cities in enumerate((("bern", "oslo"), ("oslo", "rome"))):
        rows = [f"{city},{'yes' if city == 'oslo' else 'no'}" for city in cities * 30]
        deployment.node_folder(node).mkdir(parents=True)
        (deployment.node_folder(node) / "patients.csv").write_text(
            "\n".join(["city,back", *rows]) + "\n"
        )
    with deployment:
        for name, app in apps.items():
            deployment.app = app
            deployment.run({"network.out": str(tmp_path / f"run-{name}")})
    for name in apps:
        run = Run.load(tmp_path / f"run-{name}")
        assert run.summary["accuracy"]["mean"] == 1.0, name
        assert run.summary["inputs"]["columns"] == ["city=bern", "city=oslo", "city=rome"], name
        assert run.summary["inputs"]["labels"] == ["no", "yes"], name
        assert len(run.tree.leaves) == 1, name
