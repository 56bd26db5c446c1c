from __future__ import annotations

import re

import pytest

from fedclade import ConfigError, LocalTraining
from fedclade.config import check_config


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("epochs", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("lr", 0.0, "greater than 0"),
        ("lr", float("nan"), "greater than 0"),
        ("momentum", 1.0, "in [0, 1)"),
        ("momentum", -0.1, "in [0, 1)"),
        ("weight_decay", -0.5, "at least 0"),
        ("lr_decay", 0.0, "in (0, 1]"),
        ("lr_decay", 1.5, "in (0, 1]"),
        ("mu", -1.0, "at least 0"),
        ("clip_norm", 0.0, "greater than 0"),
        ("clip_norm", float("nan"), "greater than 0"),
    ],
)
def test_a_value_out_of_range_is_refused(name, value, rule):
    with pytest.raises(ConfigError, match=re.escape(f"local.{name} should be {rule}, got {value!r}")):
        LocalTraining(**{name: value})


def test_all_errors_come_at_once():
    with pytest.raises(ConfigError) as caught:
        LocalTraining(epochs=0, lr=-1.0)
    assert str(caught.value) == (
        "local.epochs should be at least 1, got 0\nlocal.lr should be greater than 0, got -1.0"
    )


@pytest.mark.parametrize(
    "good",
    [{"momentum": 0.0}, {"lr_decay": 1.0}, {"mu": 0.0}, {"epochs": 1, "batch_size": 1}, {"clip_norm": float("inf")}],
)
def test_the_edges_of_the_ranges_are_allowed(good):
    assert LocalTraining(**good)


def test_clip_norm_is_a_number_or_left_out():
    assert check_config({"local": {"clip_norm": 2}}).local.clip_norm == 2.0
    assert check_config({}).local.clip_norm is None
    with pytest.raises(ConfigError, match=re.escape("clip_norm of [local] should be a number or left out, got 'no'")):
        check_config({"local": {"clip_norm": "no"}})


@pytest.mark.parametrize("name", ["lr", "weight_decay", "mu"])
def test_a_value_that_float32_does_not_hold_is_refused(name):
    with pytest.raises(ConfigError, match=re.escape(f"local.{name} should be at most 3.4e+38, got 1e+39")):
        LocalTraining(**{name: 1e39})
