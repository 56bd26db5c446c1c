"""Flower's scikit-learn quickstart with clusters, over a real SuperLink and real SuperNodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deployment import Deployment
from test_deployment import EXAMPLE, eventually, needs_proc, processes_of

from fedclade import Run

# The quickstarts are also run on nodes in one process, see tests/flower/strategy/test_quickstarts.py.
pytestmark = [pytest.mark.scheduled, pytest.mark.usefixtures("default_signals")]


@needs_proc
def test_the_true_clusters_are_found_over_a_superlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The ClientApp is as Flower publishes it, without anything of fedclade."""
    app = tmp_path / "app"
    shutil.copytree(EXAMPLE / "quickstarts" / "sklearn", app)
    monkeypatch.chdir(tmp_path)  # the ServerApp saves the run in its working folder
    with Deployment(tmp_path / "it", app) as deployment:
        deployment.run({"num-server-rounds": 2})
        partitions = {node: partition for partition, node in deployment.node_ids().items()}
    run = Run.load(tmp_path / "clusters")
    partition_of = {row["client"]: partitions[int(row["name"])] for row in run.client_rows}
    found = [
        {partition_of[client] for client in leaf.members}
        for leaf in run.tree.leaves
        if leaf.members
    ]
    assert sorted(map(sorted, found)) == [[0, 2], [1, 3]]
    eventually(lambda: not processes_of(tmp_path), 30)
