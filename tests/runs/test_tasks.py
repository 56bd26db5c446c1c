"""A run of any task names its metrics in its folder, goes on with it, and scores newcomers by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError

from fedclade import (
    CFL,
    ConfigError,
    LocalTraining,
    Run,
    RunError,
    RunInterrupted,
    Task,
    assign,
    export_model,
    simulate,
)
from tests.tiny import FEATURES, renamed, task_federation

TASK = Task("regression", loss="huber", metrics=["rmse", "r2"])


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(FEATURES, 1)


def ran(folder: Path, **settings: Any) -> Run:
    given = {
        "rounds": 4,
        "engine": "loop",
        "local": LocalTraining(batch_size=8, lr=0.1),
        "task": TASK,
        **settings,
    }
    federation = task_federation("regression", [0, 1, 0, 1])
    return simulate(CFL(split_rounds=(2,), eps2=1e-6), network, federation, folder=folder, **given)


def test_a_run_goes_on_with_its_task(tmp_path: Path):
    calls = iter([False, True])
    with pytest.raises(RunInterrupted):
        ran(tmp_path / "run", stop=lambda: next(calls), checkpoint_every=1)
    again, whole = ran(tmp_path / "run", checkpoint_every=1), ran(tmp_path / "whole")
    assert again.client_rows == whole.client_rows
    assert [row["rmse_mean"] for row in again.metric_rows] == [
        row["rmse_mean"] for row in whole.metric_rows
    ]
    kept = Run.load(tmp_path / "run")
    assert [metric["name"] for metric in kept.summary["metrics"]] == ["rmse", "r2"]
    assert kept.config["task"]["loss"] == "huber"
    assert kept.client_rows == whole.client_rows


def test_another_task_is_another_run(tmp_path: Path):
    ran(tmp_path / "run")
    with pytest.raises(RunError, match=r"its task\.loss is 'huber', not None"):
        ran(tmp_path / "run", task=Task("regression"))


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ({"mae": 1}, "unknown metric in [target]: 'mae'"),
        ({"rmse": 1, "r2": 0.5}, "[target] should name only one metric, got rmse, r2"),
    ],
)
def test_a_target_is_a_metric_of_the_task(target: dict[str, float], told: str, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        ran(tmp_path / "run", target=target)
    assert told in str(caught.value)


def test_an_error_is_reached_from_above(tmp_path: Path):
    run = ran(tmp_path / "run", target={"rmse": 1.0}, rounds=8)
    means = [row["rmse_mean"] for row in run.metric_rows]
    first = next((row["round"] for row in run.metric_rows if row["rmse_mean"] <= 1.0), None)
    assert means[0] > 1.0
    assert run.summary["target"]["rounds_to_target"] == first
    share = sum(row["rmse"] <= 1.0 for row in run.client_rows[-4:]) / 4
    assert run.summary["target"]["share_of_clients"] == share


def test_newcomers_are_scored_by_it(tmp_path: Path):
    run = ran(tmp_path / "run")
    newcomers = renamed(
        task_federation("regression", [0, 1, 0, 1], seed=0), {0: 10, 1: 11, 2: 12, 3: 13}
    )
    found = assign(run, newcomers, model=network, engine="loop")
    assert sum(row["right"] for row in found.rows) == 4
    assert all(row["rmse"] > 0 for row in found.rows)


def test_newcomers_to_a_run_whose_task_is_objects_are_given_it(tmp_path: Path):
    def absolute(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.view(targets.shape) - targets).abs()

    task = Task(loss=absolute, metrics=[MeanAbsoluteError()])
    ran(tmp_path / "run", task=task)
    run, newcomers = (
        Run.load(tmp_path / "run"),
        renamed(task_federation("regression", [0, 1]), {0: 10, 1: 11}),
    )
    with pytest.raises(
        ConfigError, match=r"fedclade\.assign needs the argument task=\.\.\., .*: unknown metric"
    ):
        assign(run, newcomers, model=network)
    with pytest.raises(
        ConfigError,
        match=r"with the metrics \['mean_absolute_error'\], got a task with the metrics \['mae'\]",
    ):
        assign(run, newcomers, model=network, task="regression")
    found = assign(run, newcomers, model=network, task=task)
    assert [row["right"] for row in found.rows] == [True, True]
    assert found.metric == "mean_absolute_error"
    by_name = assign(
        ran(tmp_path / "named", task=Task(loss="mae", metrics=["mae"])), newcomers, model=network
    )
    assert [row["mean_absolute_error"] for row in found.rows] == pytest.approx(
        [row["mae"] for row in by_name.rows]
    )


def test_the_card_of_a_model_names_it(tmp_path: Path):
    run = ran(tmp_path / "run")
    export_model(run, tmp_path / "one.safetensors", client=1)
    card = (tmp_path / "one.md").read_text()
    assert "rmse" in card.lower()
    assert "accuracy" not in card
