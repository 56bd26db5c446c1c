"""Runs of models that cannot be trained on one example: nothing ends them, and one line says what is done."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

from fedclade import ConfigError, LocalTraining, Run, simulate
from tests.tiny import FEATURES, LABELS, federation_of, linear

LINE = (
    "the model cannot be trained on a batch of one example: the last example of an epoch is added to the batch "
    "before it at 2 of 4 clients (the first is client 0) with local.batch_size = 20; normalization layers do not "
    "update their statistics at 1 of 4 clients (the first is client 3) with one training example"
)


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, LABELS))


def ran(sizes, model=normed, **settings) -> Run:
    settings = {"rounds": 2, "engine": "stacked", **settings}
    return simulate("fedavg", model(), federation_of([0] * len(sizes), sizes), **settings)


def test_the_clients_that_the_rule_is_for_are_counted_in_one_line(caplog):
    run = ran([21, 40, 41, 1])
    assert caplog.messages == [LINE]
    assert run.metric_rows[-1]["clients_trained"] == 4
    assert "smallest_batch" not in str(
        {key: value for key, value in run.config["local"].items() if value is not None}
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            [20, 41],
            "the last example of an epoch is added to the batch before it at 1 of 2 clients (the first is client",
        ),
        (
            [20, 1],
            "normalization layers do not update their statistics at 1 of 2 clients (the first is client",
        ),
    ],
)
def test_a_line_says_no_more_than_is_the_case(sizes, expected, caplog):
    ran(sizes)
    assert caplog.messages[0].startswith(
        f"the model cannot be trained on a batch of one example: {expected} 1)"
    )
    assert ";" not in caplog.messages[0]


def test_nothing_is_said_where_nothing_changes(caplog):
    caplog.set_level(logging.INFO, logger="fedclade.runs.small_batches")
    ran([20, 22])
    ran([21, 41, 1], linear)
    assert caplog.messages == []


def test_batches_of_one_example_are_refused_before_the_first_round(tmp_path):
    text = "local.batch_size should be at least 2 for a model that cannot be trained on fewer examples.*got 1"
    with pytest.raises(ConfigError, match=text):
        ran([20, 22], local=LocalTraining(batch_size=1), folder=tmp_path / "run")
    assert not list(tmp_path.glob("run/*.parquet"))


def test_federations_of_random_sizes_run():
    draw = np.random.default_rng(0)
    for _ in range(3):
        run = ran(draw.integers(1, 45, 6).tolist(), local=LocalTraining(batch_size=4), rounds=1)
        assert run.metric_rows[-1]["clients_trained"] == 6


def test_a_run_that_is_continued_follows_the_same_rule(tmp_path):
    whole = ran([21, 40, 41, 1], rounds=3)
    ran([21, 40, 41, 1], rounds=2, folder=tmp_path / "run")
    continued = ran([21, 40, 41, 1], rounds=3, folder=tmp_path / "run")
    assert torch.equal(continued.tree.nodes[0].params, whole.tree.nodes[0].params)
