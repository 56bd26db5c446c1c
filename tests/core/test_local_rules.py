"""Every local rule against every setting of local training: a setting is refused, or it changes what is learned."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import pytest
import torch

from fedclade import ConfigError, LocalTraining
from fedclade.core import (
    ClientWork,
    ControlVariates,
    Interpolation,
    LocalRule,
    MetaLearning,
    MoreauEnvelope,
    Round,
    local_rule,
)
from fedclade.core.local_rules import RULES
from tests.tiny import federation_of, perceptron, simulated

PLAIN: dict[str, Any] = {"epochs": 2, "batch_size": 10, "lr": 0.1}

SETTINGS: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 3},
    "batch_size": {"batch_size": 5},
    "smallest_batch": {"smallest_batch": 7},
    "lr": {"lr": 0.05},
    "momentum": {"momentum": 0.5},
    "weight_decay": {"weight_decay": 0.5},
    "lr_decay": {"lr_decay": 0.5},
    "lr_schedule": {"lr_schedule": "cosine"},
    "mu": {"mu": 0.5},
    "clip_norm": {"clip_norm": 0.01},
    "steps": {"epochs": None, "steps": 3},
    "optimizer": {"optimizer": "adam"},
    "options": {"options": {"nesterov": True}, "momentum": 0.5},
    "precision": {"precision": "bfloat16"},
    "keep_state": {"keep_state": True, "momentum": 0.5},
    "reshuffle": {"reshuffle": False},
    "trainer": {"trainer": "tests.core.test_local_rules:train_nothing"},
}
"""By each field of LocalTraining: a value that is not plain, and what such a value needs besides."""

REFUSED = {
    "optimizer": "local.optimizer should be 'sgd' with the local rule {name}, which takes steps of SGD, got 'adam'",
    "options": (
        "local.options should be empty with the local rule {name}, which takes steps of SGD, got {{'nesterov': True}}"
    ),
    "keep_state": "local.keep_state should be false with the local rule {name}, which takes steps of SGD, got True",
    "trainer": (
        "local.trainer should be left out with the local rule {name}, which takes steps of SGD, got "
        "'tests.core.test_local_rules:train_nothing'"
    ),
    "mu": "local.mu should be 0 with the local rule {name}, which takes steps of SGD without a proximal term, got 0.5",
}
"""What every rule refuses."""


def train_nothing(model: object, batches: object, context: object) -> float:
    """A training function that leaves the model as it is."""
    return 0.0


@dataclass(frozen=True)
class Case:
    """A rule, and what it refuses besides."""

    rule: LocalRule
    refused: dict[str, str]


CASES = {
    "mixture": Case(Interpolation(alpha=0.5), {}),
    "moreau_envelope": Case(MoreauEnvelope(lam=1.0, steps=2, lr=0.05), {}),
    "meta_learning": Case(MetaLearning(alpha=0.05, hessian=False, delta=0.1), {}),
    "meta_learning with the Hessian": Case(
        MetaLearning(alpha=0.05, hessian=True, delta=0.1),
        {"clip_norm": "local.clip_norm should be left out with variant = 'HF', got 0.01"},
    ),
    "control_variates": Case(
        ControlVariates(),
        {"momentum": "local.momentum should be 0 with the local rule 'control_variates', got 0.5"},
    ),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_the_table_has_every_rule_and_every_setting():
    assert {case.rule.name for case in CASES.values()} == set(RULES)
    assert set(SETTINGS) == {field.name for field in fields(LocalTraining)}


@each_case
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rule_refuses_a_setting_or_heeds_it(case: Case, setting: str):
    spec = LocalTraining(**PLAIN | SETTINGS[setting])
    refused = REFUSED | case.refused
    if setting in refused:
        message = refused[setting].format(name=repr(case.rule.name))
        with pytest.raises(ConfigError, match=re.escape(message)):
            case.rule.check_training(spec)
        return
    if "momentum" in refused:
        spec = LocalTraining(**PLAIN | SETTINGS[setting] | {"momentum": 0.0})
    case.rule.check_training(spec)
    assert not torch.equal(learned(case.rule, spec), learned_plainly(case.rule))


@cache
def learned_plainly(rule: LocalRule) -> torch.Tensor:
    return learned(rule, LocalTraining(**PLAIN))


def learned(rule: LocalRule, spec: LocalTraining) -> torch.Tensor:
    """Return what two clients learn in round 2, for which the decayed step size counts."""
    clients, params = simulated(federation_of([0, 1], [20, 26], seed=2), perceptron())
    work = ClientWork(steps=rule)
    # The anchor of SCAFFOLD's clients is the model that they start from.
    more = {"anchors": [0, 0]} if rule.needs_anchor else {}
    for number in (1, 2):
        this_round = Round(number, spec.in_round(number, 2))
        updates = clients.train([0, 1], params[None], [0, 0], this_round, work, **more)
    assert not updates.left_out
    return updates.required_deltas


@each_case
def test_plain_training_is_fine_with_every_rule(case: Case):
    case.rule.check_training(LocalTraining(**PLAIN))


def test_several_settings_are_refused_in_one_error():
    spec = LocalTraining(**PLAIN | {"optimizer": "adam", "mu": 0.5, "keep_state": True})
    with pytest.raises(ConfigError) as error:
        Interpolation(alpha=0.5).check_training(spec)
    assert [line.split()[0] for line in str(error.value).splitlines()] == [
        "local.optimizer",
        "local.keep_state",
        "local.mu",
    ]


@dataclass(frozen=True)
class Needs:
    """What the engines and the memory's plan read off a rule."""

    batches: int
    gradients: int
    vectors: int
    serves: bool
    needs_anchor: bool


NEEDS = {
    "mixture": Needs(1, 2, 6, serves=True, needs_anchor=False),
    "moreau_envelope": Needs(1, 2, 4, serves=True, needs_anchor=False),
    "meta_learning": Needs(2, 2, 5, serves=False, needs_anchor=False),
    "meta_learning with the Hessian": Needs(3, 4, 5, serves=False, needs_anchor=False),
    "control_variates": Needs(1, 1, 2, serves=False, needs_anchor=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_says_what_it_needs(name: str):
    rule = CASES[name].rule
    needs = Needs(
        rule.batches,
        rule.gradients,
        rule.vectors,
        serves=rule.serves,
        needs_anchor=rule.needs_anchor,
    )
    assert needs == NEEDS[name]


def test_unknown_names_and_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"unknown local rule 'mixtur'; did you mean 'mixture'\?"):
        local_rule({"name": "mixtur"})
    with pytest.raises(ConfigError, match="unknown local rule None"):
        local_rule({"alpha": 0.5})
    with pytest.raises(ConfigError, match=r"local rule 'mixture' lacks a number: .*alpha"):
        local_rule({"name": "mixture"})
    with pytest.raises(ConfigError, match=r"algorithm\.alpha should be in \[0, 1\], got 1\.5"):
        local_rule({"name": "mixture", "alpha": 1.5})
