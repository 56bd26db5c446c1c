"""Every algorithm runs where targets are numbers, or says in a line why it cannot."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedclade import ConfigError, LocalTraining, Run, Task, simulate
from fedclade.algorithms import ALGORITHMS, build_algorithm
from tests.tiny import FEATURES, task_federation

TRUTH = [0, 1, 0, 1, 0, 1]
LOCAL = LocalTraining(epochs=2, batch_size=8, lr=0.1)

OPTIONS: dict[str, dict[str, Any]] = {
    "cfl": {"split_rounds": (2,), "eps2": 1e-6},
    "fl_hc": {"rounds_before": 1, "n_clusters": 2},
    "fedgroup": {"groups": 2, "pretrain_scale": 1},
    "flexcfl": {"groups": 2, "pretrain_scale": 1, "migrate": False},
    "ifca": {"clusters": 2},
    "fedsoft": {"clusters": 2},
    "clove": {"clusters": 2},
    "fesem": {"clusters": 2},
    "pacfl": {"n_clusters": 2},
    "flux": {"per_label": False, "components": 3, "earliest": 1, "latest": 1},
    "stocfl": {"tau": 0.5, "anchor_epochs": 2},
    "pfedme": {"lam": 5.0, "personal_lr": 0.02},
}

CANNOT = {
    "pacfl": (
        {"n_clusters": 2, "distance": "per_label"},
        "since examples do not have exactly one label each; set algorithm.distance = 'paper'",
    ),
    "flux": (
        {"earliest": 1, "latest": 1},
        "cannot describe the data of each label separately .* set algorithm.per_label = false",
    ),
    "fedrc": ({}, "needs a task in which every example has exactly one label; use algorithm fedem"),
    "flexcfl": (
        {"groups": 2},
        "the labels of a regression task cannot be counted, .* set algorithm.migrate = false",
    ),
}
"""What does not fit: options, and a part of the line that says so."""


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.Linear(6, 1))


def ran(name: str, options: dict[str, Any], truth: list[int] = TRUTH, **settings: Any) -> Run:
    federation = task_federation("regression", truth)
    algorithm = build_algorithm(name, options, federation.true_clusters)
    given = {
        "local": LOCAL,
        "rounds": 3,
        "engine": "loop",
        "task": Task(metrics=["mae", "rmse"]),
        **settings,
    }
    return simulate(algorithm, network, federation, **given)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedrc"])
def test_it_runs_on_numbers(name: str):
    run = ran(name, OPTIONS.get(name, {}), local=LocalTraining(batch_size=8, lr=0.1))
    first, last = run.metric_rows[0], run.metric_rows[-1]
    assert math.isfinite(last["mae_mean"])
    assert last["mae_mean"] < first["mae_mean"] or last["train_loss"] < first["train_loss"]
    assert run.summary["metrics"][0] == {"name": "mae", "higher_is_better": False, "share": False}


@pytest.mark.parametrize("name", CANNOT)
def test_it_says_why_it_cannot(name: str):
    options, told = CANNOT[name]
    with pytest.raises(ConfigError, match=told) as caught:
        ran(name, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cfl", "fl_hc", "fedgroup", "ifca", "fesem", "stocfl", "oracle"])
def test_planted_clusters_are_found(name: str):
    assert ran(name, OPTIONS.get(name, {}), rounds=4).metric_rows[-1]["ari"] == 1


def test_rcfl_finds_planted_clusters_without_a_threshold():
    run = ran("rcfl", {}, [0, 1, 2] * 4, rounds=8)
    assert run.metric_rows[-1]["ari"] == 1
    assert run.summary["clusters"]["found"] == 3


def test_the_data_of_yes_and_no_can_be_compared_by_themselves():
    federation = task_federation("binary", TRUTH)
    run = simulate(
        build_algorithm("pacfl", {"n_clusters": 2}), network, federation, rounds=1, engine="loop"
    )
    assert len(run.tree.leaves) == 2
