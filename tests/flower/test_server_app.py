"""A ServerApp in a few lines: what it tells of a run, and where the run is."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedclade.algorithms import CFL
from fedclade.core import ConfigError
from fedclade.core.tree import ParameterTree
from fedclade.flower import server_app
from fedclade.flower.server_log import print_round
from fedclade.runs.store import Run
from tests.flower.grids import FOUR, LOCAL, grid_of, network_of
from tests.tiny import federation_of, linear, perceptron

CONTEXT = Context(1, 0, {}, RecordDict(), {})


def test_a_server_app_runs_and_shows_what_came_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    app = server_app(
        CFL(split_rounds=(2,), eps2=1e-6),
        perceptron,
        rounds=3,
        local=LOCAL,
        network=network_of(grid),
        folder=folder,
    )
    app(grid, CONTEXT)
    told = capsys.readouterr().out
    assert [line.split(",")[0] for line in told.splitlines()[:3]] == [
        "round 1",
        "round 2",
        "round 3",
    ]
    assert "2 clusters" in told.splitlines()[2]
    assert "ARI 1.00" in told.splitlines()[2]
    assert f"run folder: {folder}" in told
    assert Run.load(folder).summary["clusters"]["found"] == 2
    assert list((folder / "figures").iterdir())
    app(grid, CONTEXT)  # it is finished, and shown again
    assert "round 1," not in capsys.readouterr().out


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    grid = grid_of(federation_of(FOUR))
    server_app("fedavg", perceptron, rounds=1, local=LOCAL, network=network_of(grid))(grid, CONTEXT)
    assert "run folder" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_round_that_was_not_evaluated_is_told_of_without_scores(
    capsys: pytest.CaptureFixture[str],
):
    row = {
        "round": 2,
        "clients_trained": 3,
        "clusters": 1,
        "accuracy_mean": None,
        "ari": None,
        "seconds": 1.25,
    }
    print_round(row, ParameterTree.root_only(range(3), linear(0)[1].weight.detach().flatten()))
    assert capsys.readouterr().out == "round 2, 3 clients trained, 1 cluster, 1.2 s\n"


@pytest.mark.parametrize(
    ("algorithm", "model", "told"),
    [("fedagv", linear(), "did you mean 'fedavg'"), ("fedavg", "mpl", "did you mean 'mlp'")],
)
def test_names_that_there_are_not_are_refused_when_the_app_is_made(algorithm, model, told):
    with pytest.raises(ConfigError, match=told):
        server_app(algorithm, model)
