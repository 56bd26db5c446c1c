"""Any task over a network: clients and server agree on it, and results are those of a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedclade import ConfigError, Federation, Task, simulate
from fedclade.core import UpdateError
from fedclade.core.errors import DataError
from fedclade.flower import LocalGrid
from fedclade.flower.client_handler import ClientHandler
from tests.flower.grids import (
    CFL_OF_TWO,
    FOUR,
    LOCAL,
    federated,
    grid_of,
    network_of,
    node_of,
    reasons,
    spoil,
    worded,
)
from tests.tiny import FEATURES, task_federation

HUBER = Task(loss="huber", metrics=["mae", "r2"])


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


def grid(federation: Federation, task: Task | str | None, **settings: Any) -> LocalGrid:
    return grid_of(federation, network, task=task, **settings)


@pytest.mark.parametrize(
    ("kind", "task", "names"),
    [
        ("regression", HUBER, ["mae", "r2"]),
        ("binary", Task(metrics=["auroc", "f1"], class_weights=[1, 2]), ["auroc", "f1"]),
    ],
)
def test_a_network_runs_a_task_as_a_simulation_does(
    kind: Any, task: Task, names: list[str], tmp_path: Path
):
    federation = task_federation(kind, FOUR)
    there = federated(
        grid(federation, task), CFL_OF_TWO, network, task=task, folder=tmp_path / "run"
    )
    here = simulate(
        CFL_OF_TWO, network, federation, local=LOCAL, rounds=4, engine="loop", task=task
    )
    assert [metric["name"] for metric in there.summary["metrics"]] == names
    for name in names:
        assert [row[name] for row in there.client_rows] == pytest.approx(
            [row[name] for row in here.client_rows], rel=1e-4
        )
    assert there.summary["metrics"] == here.summary["metrics"]
    assert there.config["task"] == here.config["task"]
    assert {leaf.members for leaf in there.tree.leaves} == {
        leaf.members for leaf in here.tree.leaves
    }


def test_the_server_must_have_the_task_of_the_clients():
    federation = task_federation("regression", FOUR)
    with pytest.raises(ConfigError) as caught:
        federated(grid(federation, HUBER), "fedavg", network, task=Task(loss="mse"))
    assert str(caught.value) == (
        "the server's task is 'regression: mse; mae', but the clients' task is "
        "'regression: huber; mae, r2'; pass the same "
        "task to federate and client_app"
    )


def test_a_client_of_another_task_is_refused():
    federation = task_federation("regression", FOUR)
    one = grid(federation, HUBER)
    one.nodes[node_of(2)] = grid(federation, None).nodes[node_of(2)]
    run = federated(
        one, "fedavg", network, task=HUBER, network=network_of(one, clients=3), rounds=1
    )
    refused = [event for event in run.events if "refused" in event["kind"]]
    assert (
        "its task is 'regression: mse; mae', but the task of the other clients is 'regression: huber; mae, r2'"
        in str(refused)
    )
    assert sorted(row["client"] for row in run.client_rows) == [0, 1, 3]


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        ([float("nan"), 0.5], "the score by mae is nan, expected a number of at most 1e+308"),
        ([0.5, float("-inf")], "the score by r2 is -inf, expected a number of at most 1e+308"),
        ([0.5], "should have three lists for 1 models, scores of 2 numbers, losses of 1 numbers"),
    ],
)
def test_scores_are_checked_for_each_metric(scores: list[float], told: str):
    one = grid(task_federation("regression", FOUR), HUBER)
    spoil(one, 2, "evaluate", worded(scores=scores))
    run = federated(one, "fedavg", network, task=HUBER, rounds=1)
    assert told in reasons(run)[2]
    assert sorted(row["client"] for row in run.client_rows) == [0, 1, 3]


def test_scores_of_numbers_may_be_negative():
    one = grid(task_federation("regression", FOUR), HUBER)
    spoil(one, 2, "evaluate", worded(scores=[3.5, -80.0]))
    run = federated(one, "fedavg", network, task=HUBER, rounds=1)
    assert [row["r2"] for row in run.client_rows if row["client"] == 2] == [-80.0]


def test_a_client_with_one_class_has_no_score_over_a_network_either(tmp_path: Path):
    federation = task_federation("binary", FOUR)
    federation.pool.y[federation.by_id[2].test] = 1.0
    task = Task(metrics=["auroc"])
    there = federated(
        grid(federation, task), "fedavg", network, task=task, rounds=1, folder=tmp_path / "run"
    )
    here = simulate("fedavg", network, federation, local=LOCAL, rounds=1, engine="loop", task=task)
    assert reasons(there) == {}
    assert there.summary["auroc"] == pytest.approx(here.summary["auroc"], rel=1e-4)
    assert there.summary["auroc"]["without_score"] == 1


def broadcasting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs().mean(-1)


def test_a_loss_of_ones_own_gets_outputs_in_the_shape_of_targets_over_a_network_too():
    federation = task_federation("regression", FOUR)
    tasks = Task(loss=broadcasting), Task(loss="mae")
    own, named = (
        federated(grid(federation, each), "fedavg", network, task=each, rounds=2) for each in tasks
    )
    assert own.summary["mae"] == pytest.approx(named.summary["mae"], rel=1e-4)


def test_a_loss_over_the_batch_is_part_of_the_task_that_clients_and_server_agree_on():
    federation = task_federation("regression", FOUR)
    clients = grid(federation, Task(loss=broadcasting, loss_over="batch"))
    with pytest.raises(
        ConfigError,
        match=r"broadcasting over the batch; mae'; pass the same task to federate and client_app",
    ):
        federated(clients, "fedavg", network, task=Task(loss=broadcasting))


def test_errors_of_the_task_are_the_clients_own():
    federation = task_federation("regression", FOUR)
    with pytest.raises(
        (ConfigError, DataError, UpdateError), match="'auroc' does not fit a regression task"
    ):
        ClientHandler(federation.alone(0), network, task=Task(metrics=["auroc"]))
