"""Clusters of very many clients: their similarities are not kept, or not even computed; reports do without."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedclade import CFL, FLHC, FedGroup, LocalTraining, simulate
from fedclade.algorithms import Algorithm
from fedclade.algorithms.cluster_update import LARGEST_COMPARED
from fedclade.cli import app
from fedclade.clustering import separation
from fedclade.report.tables import event_table
from tests.tiny import federation_of, linear

CLIENTS = LARGEST_COMPARED + 10


@pytest.mark.parametrize(
    "algorithm",
    [
        FLHC(rounds_before=1, n_clusters=4, metric="l2", linkage="ward"),
        FedGroup(groups=3, pretrain_scale=400),
    ],
    ids=["fl_hc", "fedgroup"],
)
def test_a_run_is_reported(algorithm: Algorithm, tmp_path: Path):
    federation = federation_of([client % 4 for client in range(CLIENTS)], [4] * CLIENTS, seed=1)
    run = simulate(
        algorithm, linear(1), federation, local=LocalTraining(lr=0.1), rounds=3, engine="stacked"
    )
    assert run.summary["clusters"]["found"] > 1
    assert run.cluster_rows[0]["alpha_cross_max"] is None
    table = event_table(run)
    if isinstance(algorithm, FLHC):
        cells = {str(column.header): list(column.cells) for column in table.columns}
        assert cells["α cross max"] == ["–"]
        assert cells["mean norm"] != ["–"]
    folder = run.save(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert (folder / "report.html").stat().st_size > 10_000


def test_a_run_of_cfl_whose_clients_are_compared_without_a_matrix_is_reported(
    tmp_path: Path, monkeypatch
):
    """It splits as it does with one; the separation gap alone is missing."""
    federation = federation_of([client % 2 for client in range(20)], [20] * 20, seed=1)
    algorithm = CFL(split_rounds=(2,), eps2=1e-3)
    settings = {"local": LocalTraining(lr=0.1), "rounds": 3, "engine": "stacked"}
    paired = simulate(algorithm, linear(1), federation, **settings)
    monkeypatch.setattr(separation, "MOST_PAIRED", 5)
    run = simulate(algorithm, linear(1), federation, **settings)
    assert [leaf.members for leaf in run.tree.leaves] == [
        leaf.members for leaf in paired.tree.leaves
    ]
    assert len(run.tree.leaves) == 2
    assert run.cluster_rows[0]["alpha_cross_max"] == pytest.approx(
        paired.cluster_rows[0]["alpha_cross_max"], abs=1e-6
    )
    assert run.cluster_rows[0]["separation_gap"] is None
    assert not run.similarities
    folder = run.save(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
