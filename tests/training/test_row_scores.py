"""Several models on the same rows of a client: scores, gains and the kind of their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedclade.core import DataSpec
from fedclade.tasks import Interval, build_task
from fedclade.training import ClientRows

REGRESSION = DataSpec("tiny", (3,), outputs=1, task="regression")
BINARY = DataSpec("tiny", (3,), outputs=1, task="binary")


def rows_of(task, targets, **outputs) -> ClientRows:
    return ClientRows(task, targets, outputs, np.random.default_rng(0))


def test_accuracy_gains_are_paired_shares_of_rows():
    task = build_task("classification").of(DataSpec("tiny", (3,), outputs=2))
    targets = torch.tensor([0, 1, 1, 0])
    right = torch.eye(2)[targets]
    wrong_twice = torch.eye(2)[torch.tensor([0, 1, 0, 1])]
    rows = rows_of(task, targets, run=right, alone=wrong_twice)
    assert rows.kind == "shares"
    assert rows.score("run").value == 1.0
    assert rows.score("alone").value == 0.5
    gain = rows.gain("run", over="alone")
    assert gain.value == 0.5
    assert gain.low < 0.5 < gain.high
    assert rows.gain("alone", over="run").value == -0.5


def test_equal_predictions_gain_exactly_nothing():
    task = build_task("binary").of(BINARY)
    outputs = torch.randn(9, 1, generator=torch.Generator().manual_seed(0))
    rows = rows_of(task, torch.ones(9), run=outputs, alone=outputs.clone())
    assert rows.gain("run", over="alone") == Interval(0.0, 0.0, 0.0)


def test_a_lower_error_is_a_gain_in_the_unit_of_the_target():
    task = build_task("regression").of(REGRESSION)
    targets = torch.tensor([1.0, 2.0, 3.0, 4.0])
    near = targets[:, None] + torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    far = targets[:, None] + torch.tensor([[3.0], [-2.0], [3.0], [-4.0]])
    rows = rows_of(task, targets, run=near, alone=far)
    assert rows.kind == "means"
    assert rows.score("run").value == 1.0
    gain = rows.gain("run", over="alone")
    assert gain.value == pytest.approx(2.0)
    assert 0 < gain.low < 2 < gain.high


def test_a_root_of_a_mean_and_scores_of_all_rows_have_jackknife_intervals():
    targets = torch.arange(40.0)
    noise = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    root = build_task("regression", metrics=("rmse",)).of(REGRESSION)
    rows = rows_of(root, targets, run=targets[:, None] + noise[:, :1])
    assert rows.kind == "jackknife"
    found = rows.score("run")
    assert found.value == pytest.approx(float(noise[:, 0].square().mean().sqrt()), rel=1e-5)
    assert found.low < found.value < found.high

    ranks = build_task("binary", metrics=("auroc",)).of(BINARY)
    labels = (torch.arange(40) % 2).float()
    outputs = labels[:, None] + noise[:, 1:]
    rows = rows_of(ranks, labels, run=outputs, alone=noise[:, :1])
    assert 0 <= rows.score("run").low < rows.score("run").high <= 1
    assert rows.gain("run", over="alone").value > 0


def test_a_score_that_is_undefined_for_the_rows_is_nan_and_has_no_interval():
    task = build_task("binary", metrics=("auroc",)).of(BINARY)
    rows = rows_of(task, torch.ones(5), run=torch.randn(5, 1), alone=torch.randn(5, 1))
    assert math.isnan(rows.score("run").value)
    gain = rows.gain("run", over="alone")
    assert math.isnan(gain.value)
    assert gain.low is None


def test_a_model_that_diverged_has_the_worst_score():
    task = build_task("binary", metrics=("auroc",)).of(BINARY)
    targets = torch.tensor([0.0, 1.0, 1.0])
    rows = rows_of(task, targets, run=torch.full((3, 1), math.nan))
    assert rows.score("run").value == 0.0
