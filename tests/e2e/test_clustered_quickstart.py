"""Flower's scikit-learn quickstart with clusters, over a real SuperLink and real SuperNodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deployment import Deployment
from test_deployment import EXAMPLE, eventually, needs_proc, processes_of

from fedclade import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_signals")]


@needs_proc
def test_the_true_clusters_are_found_over_a_superlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing of fedclade is in the ClientApp, which has no torch either."""
    app = tmp_path / "app"
    shutil.copytree(EXAMPLE / "quickstarts" / "sklearn", app)
    monkeypatch.chdir(tmp_path)  # the ServerApp saves the run in its working folder
    with Deployment(tmp_path / "it", app) as deployment:
        deployment.run({"num-server-rounds": 2})
    run = Run.load(tmp_path / "clusters")
    clusters = {leaf.members for leaf in run.tree.leaves if leaf.members}
    nodes = {int(name): client for client, name in _names(run).items()}
    partitions = {nodes[node]: partition for partition, node in deployment.node_ids().items()}
    found = {frozenset(partitions[client] for client in members) for members in clusters}
    assert found == {frozenset({0, 2}), frozenset({1, 3})}
    eventually(lambda: not processes_of(tmp_path), 30)


def _names(run: Run) -> dict[int, str]:
    """Return the name of each client, which is the id of its node."""
    return {row["client"]: row["name"] for row in run.client_rows}
