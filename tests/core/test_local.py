from __future__ import annotations

import json
import re
import tomllib
from dataclasses import asdict, replace

import pytest
import tomli_w
import torch

from fedclade import ConfigError, LocalTraining
from fedclade.config import check_config
from fedclade.runs.store.contents import without_unset


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("epochs", 0, "greater than 0"),
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
        ("smallest_batch", 0, "at least 1 and at most local.batch_size, 20"),
        ("smallest_batch", 21, "at least 1 and at most local.batch_size, 20"),
    ],
)
def test_a_value_out_of_range_is_refused(name, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"local.{name} should be {rule}, got {value!r}")
    ):
        LocalTraining(**{name: value})


def test_all_errors_come_at_once():
    with pytest.raises(ConfigError) as caught:
        LocalTraining(epochs=0, lr=-1.0)
    assert str(caught.value) == (
        "local.epochs should be greater than 0, got 0\nlocal.lr should be greater than 0, got -1.0"
    )


@pytest.mark.parametrize(
    "good",
    [
        {"momentum": 0.0},
        {"lr_decay": 1.0},
        {"mu": 0.0},
        {"epochs": 1, "batch_size": 1},
        {"clip_norm": float("inf")},
    ],
)
def test_the_edges_of_the_ranges_are_allowed(good):
    assert LocalTraining(**good)


def test_clip_norm_is_a_number_or_left_out():
    assert check_config({"local": {"clip_norm": 2}}).local.clip_norm == 2.0
    assert check_config({}).local.clip_norm is None
    with pytest.raises(
        ConfigError,
        match=re.escape("clip_norm of [local] should be a number or left out, got 'no'"),
    ):
        check_config({"local": {"clip_norm": "no"}})


@pytest.mark.parametrize("name", ["lr", "weight_decay", "mu"])
def test_a_value_that_float32_does_not_hold_is_refused(name):
    with pytest.raises(
        ConfigError, match=re.escape(f"local.{name} should be at most 3.4e+38, got 1e+39")
    ):
        LocalTraining(**{name: 1e39})


def test_an_optimizer_is_a_class_or_its_name_in_any_case():
    for optimizer in ("adamw", "AdamW", torch.optim.AdamW):
        spec = LocalTraining(optimizer=optimizer, options={"betas": [0.9, 0.99]})
        assert spec.optimizer == "adamw"
        assert spec.options == {"betas": (0.9, 0.99)}


def test_what_is_left_out_is_the_optimizers_own():
    adamw, sgd = LocalTraining(optimizer="adamw"), LocalTraining()
    assert (adamw.lr, adamw.momentum, adamw.weight_decay) == (0.001, 0, 0.01)
    assert (sgd.lr, sgd.momentum, sgd.weight_decay) == (0.1, 0, 0)
    assert LocalTraining(optimizer="adamw", lr=0.5, weight_decay=0.0).weight_decay == 0


class Lion(torch.optim.Adam):
    """A user's own."""


def test_an_optimizer_of_ones_own_is_noted_by_its_module():
    assert LocalTraining(optimizer=Lion).optimizer == f"{__name__}:Lion"
    assert LocalTraining(optimizer=f"{__name__}:Lion") == LocalTraining(optimizer=Lion)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adm"}, "unknown optimizer 'adm'; did you mean 'adam'?"),
        (
            {"optimizer": "torch.nn:Linear"},
            "optimizer 'torch.nn:Linear' should name a subclass of torch.optim.Optimizer",
        ),
        ({"optimizer": "no_module:Lion"}, "optimizer 'no_module:Lion' cannot be imported"),
        (
            {"optimizer": type("Own", (torch.optim.SGD,), {"__qualname__": "f.<locals>.Own"})},
            "at the top level of a module",
        ),
        ({"optimizer": 5}, "should be a string or a class, got 5"),
        (
            {"optimizer": "lbfgs"},
            "optimizer 'lbfgs' is not supported, since it needs several gradients for a step; choose",
        ),
        (
            {"optimizer": "sparseadam"},
            "optimizer SparseAdam with local.options {} failed in a trial step: SparseAdam does",
        ),
        ({"optimizer": "adam", "momentum": 0.9}, "local.momentum should be 0 with adam, got 0.9"),
        (
            {"optimizer": "adam", "options": {"beta": 1}},
            "key of the options of Adam: 'beta'; did you mean 'betas'?",
        ),
        (
            {"optimizer": "adam", "options": {"eps": "x"}},
            "eps of the options of Adam should be a number, got 'x'",
        ),
        (
            {"optimizer": "adam", "options": {"betas": [1.5, 0]}},
            "with local.options {'betas': [1.5, 0]} failed in a trial step: Invalid",
        ),
        (
            {"optimizer": "adam", "options": {"lr": 1}},
            "local.options should not contain lr; set local.lr instead",
        ),
        ({"options": [1]}, "options of LocalTraining should be a table, got [1]"),
        ({"precision": "float16"}, "local.precision should be float32 or bfloat16, got 'float16'"),
        ({"epochs": 1, "steps": 2}, "local.steps should be left out if local.epochs is set, got 2"),
        ({"steps": 0}, "local.steps should be at least 1, got 0"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(settings, message):
    for build in (lambda: LocalTraining(**settings), lambda: check_config({"local": settings})):
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            build()
        assert "\n" not in str(caught.value)


def test_it_comes_back_from_a_config_and_from_json():
    spec = LocalTraining(
        steps=7, optimizer="adam", options={"betas": (0.9, 0.99)}, precision="bfloat16"
    )
    as_toml = tomllib.loads(tomli_w.dumps(without_unset({"local": asdict(spec)})))
    assert check_config(as_toml).local == spec
    assert LocalTraining(**json.loads(json.dumps(asdict(spec)))) == spec
    assert len({spec, replace(spec), replace(spec, steps=8)}) == 2


@pytest.mark.parametrize(
    ("examples", "steps", "passed"), [(10, 1, 4), (10, 3, 10), (10, 7, 24), (3, 7, 21), (4, 2, 8)]
)
def test_steps_go_on_through_epochs(examples, steps, passed):
    spec = LocalTraining(steps=steps, batch_size=4)
    assert (spec.epochs, spec.steps_with(examples), spec.passed(examples)) == (None, steps, passed)
    assert spec.in_epochs(2).passed(examples) == 2 * examples
    assert LocalTraining().epochs == 1


@pytest.mark.parametrize(
    ("examples", "smallest", "sizes"),
    [
        (1, None, [1]),
        (10, None, [10]),
        (21, None, [10, 10, 1]),
        (1, 2, [1]),
        (11, 2, [11]),
        (12, 2, [10, 2]),
        (21, 2, [10, 11]),
        (20, 2, [10, 10]),
        (3, 5, [3]),
        (24, 5, [10, 14]),
        (25, 5, [10, 10, 5]),
    ],
)
def test_counts_of_steps_epochs_and_examples_follow_the_batches(examples, smallest, sizes):
    """A last batch of fewer examples than the smallest is joined to the batch before, if there is one."""
    spec = LocalTraining(batch_size=10, epochs=3, smallest_batch=smallest)
    assert spec.batch_sizes(examples) == sizes
    assert spec.batches_per_epoch(examples) == len(sizes)
    assert spec.steps_with(examples) == 3 * len(sizes)
    assert spec.passed(examples) == 3 * examples
    by_steps = LocalTraining(batch_size=10, steps=4, smallest_batch=smallest)
    taken = (sizes * 4)[:4]
    assert by_steps.passed(examples) == sum(taken)
    assert by_steps.epochs_with(examples) == -(-4 // len(sizes))


def test_the_smallest_batch_is_a_key_of_a_config():
    assert check_config({"local": {"smallest_batch": 4}}).local.smallest_batch == 4
    assert check_config({}).local.smallest_batch is None


def test_a_model_may_need_larger_batches_than_are_asked_for():
    spec = LocalTraining(batch_size=10)
    assert spec.with_smallest_batch(1) is spec
    assert spec.with_smallest_batch(2).smallest_batch == 2
    assert LocalTraining(smallest_batch=5).with_smallest_batch(2).smallest_batch == 5
    assert LocalTraining(batch_size=20, smallest_batch=10).on_part(4, 24).smallest_batch == 5
    text = "local.batch_size should be at least 2 for a model that cannot be trained on fewer examples.*got 1"
    with pytest.raises(ConfigError, match=text):
        LocalTraining(batch_size=1).with_smallest_batch(2)


def test_repeated_training_has_as_many_epochs_or_steps():
    assert LocalTraining(epochs=3).repeated(2) == LocalTraining(epochs=6)
    assert LocalTraining(steps=7).repeated(3) == LocalTraining(steps=21)
    assert LocalTraining().repeated(1) == LocalTraining()
