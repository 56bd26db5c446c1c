"""Flower's quickstarts: what changes to get clusters, and that the true clusters are found."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp

from fedclade import Run
from fedclade.flower import LocalGrid, LocalNode
from tests.flower.strategy.apps import settled

QUICKSTARTS = Path(__file__).parents[3] / "examples" / "flower" / "quickstarts"
NAMES = sorted(path.name for path in QUICKSTARTS.iterdir() if path.is_dir())
CLIENTS = 4


def config_of(name: str) -> dict[str, Any]:
    text = (QUICKSTARTS / name / "pyproject.toml").read_text()
    return tomllib.loads(text)["tool"]["flwr"]["app"]["config"]


def run_server(name: str, server: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run a quickstart's ServerApp over a grid in this process."""
    monkeypatch.syspath_prepend(str(QUICKSTARTS / name))
    monkeypatch.chdir(folder)
    settled(monkeypatch)
    torch.manual_seed(0)
    client = importlib.import_module(f"{name}example.client_app").app
    nodes = {
        10 + k: LocalNode(client, {"partition-id": k, "num-partitions": CLIENTS})
        for k in range(CLIENTS)
    }
    app = importlib.import_module(f"{name}example.{server}").app
    assert isinstance(app, ServerApp)
    config = config_of(name)
    app(LocalGrid(nodes, config), Context(1, 0, {}, RecordDict(), config))


def test_there_are_four():
    assert NAMES == ["huggingface", "jax", "pytorch", "sklearn"]


@pytest.mark.parametrize("name", NAMES)
def test_at_most_three_lines_of_the_server_change_and_none_of_the_client(name: str):
    package = QUICKSTARTS / name / f"{name}example"
    before = (package / "server_app.py").read_text().splitlines()
    after = (package / "clustered_server_app.py").read_text().splitlines()
    difference = list(difflib.ndiff(before, after))
    added = [line for line in difference if line.startswith("+ ")]
    removed = [line for line in difference if line.startswith("- ")]
    assert 2 <= len(added) <= 3
    assert len(removed) <= len(added)
    assert any("ClusteredStrategy(" in line for line in added)
    client_side = (package / "client_app.py").read_text() + (package / "task.py").read_text()
    assert "fedclade" not in client_side


def test_the_page_shows_the_changes_of_the_pytorch_quickstart():
    page = (QUICKSTARTS.parents[2] / "docs" / "from-flower.md").read_text()
    shown = re.findall(r"^[+-].*", page.partition("```diff\n")[2].partition("```")[0], re.MULTILINE)
    package = QUICKSTARTS / "pytorch" / "pytorchexample"
    texts = (
        (package / f"{name}.py").read_text() for name in ("server_app", "clustered_server_app")
    )
    lines = difflib.unified_diff(*(text.splitlines() for text in texts), n=0, lineterm="")
    changes = [line for line in lines if not line.startswith(("+++", "---", "@@"))]
    assert [line for line in changes if line.strip("+-")] == shown


@pytest.mark.parametrize("name", NAMES)
def test_the_true_clusters_are_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    if name == "jax":
        pytest.importorskip("jax")
    run_server(name, "clustered_server_app", monkeypatch, tmp_path)
    run = Run.load(tmp_path / "clusters")
    assert sorted(leaf.members for leaf in run.tree.leaves if leaf.members) == [(0, 2), (1, 3)]
    metric = run.summary["metrics"][0]["name"]
    scores = [row[f"{metric}_mean"] for row in run.metric_rows]
    assert scores[-1] > scores[0] + 0.1


def test_the_quickstart_as_flower_publishes_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    run_server("pytorch", "server_app", monkeypatch, tmp_path)
    assert (tmp_path / "final_model.pt").exists()


WITHOUT_TORCH = """
import json, sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "fedclade"):
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Missing())
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from sklearnexample.client_app import app
from sklearnexample.task import create_model, get_model_params

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
arrays = ArrayRecord(get_model_params(create_model(1.0)))
content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
context = Context(1, 7, {"partition-id": 0, "num-partitions": 4}, RecordDict(), {"penalty-strength": 1.0})
reply = app(Message(content, 7, "train"), context)
modules = [name for name in sys.modules if name.split(".")[0] in ("torch", "fedclade")]
print(json.dumps([dict(reply.content["metrics"]), modules]))
"""


def test_a_client_needs_neither_torch_nor_fedclade():
    """In a process of its own, in which imports of both fail."""
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=QUICKSTARTS / "sklearn",
        capture_output=True,
        text=True,
        check=True,
    )
    metrics, modules = json.loads(found.stdout.splitlines()[-1])
    assert metrics["num-examples"] == 360
    assert modules == []
