"""Per-FedAvg: against the paper's pseudo-code, its ends, and who is served with what."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedAvg, LocalTraining, PerFedAvg, RunFacts
from fedclade.core import RoundPlan
from tests.reference.per_fedavg import per_fedavg
from tests.tiny import federation_of, own_models, perceptron, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2, lr_decay=0.9)


def world():
    return federation_of([0, 1, 0, 1], [20, 26, 31, 5], seed=2)


@pytest.mark.parametrize("variant", ["FO", "HF"])
def test_equals_algorithm_1_round_by_round(variant):
    federation = world()
    clients, params = simulated(federation, perceptron())
    method = PerFedAvg(variant=variant, alpha=0.1, delta=0.1)
    played = play(method, clients, params, 3, spec=SPEC, seed=3, fraction=0.5)
    cohorts = [sorted(log.losses) for log in played.logs]
    arguments = {
        "alpha": 0.1,
        "hessian": variant == "HF",
        "delta": 0.1,
        "seed": 3,
        "cohorts": cohorts,
    }
    expected = per_fedavg(params, federation, perceptron(), SPEC, **arguments)
    for state, (w, _) in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), w, atol=1e-5)
    ours = own_models(played)
    assert (
        ours.keys() == {0, 1, 2, 3} == set(method.models_for(played.states[-1], played.clients).own)
    )
    for client, model in ours.items():
        np.testing.assert_allclose(model.numpy(), expected[-1][1][client], atol=1e-5)


@pytest.mark.parametrize("variant", ["FO", "HF"])
def test_with_alpha_0_it_is_fedavg(variant):
    spec = LocalTraining(epochs=2, batch_size=10, lr=0.1, momentum=0.5)
    clients, params = simulated(world(), perceptron())
    ours, fedavg = (
        play(each, clients, params, 3, spec=spec).states[-1]
        for each in (PerFedAvg(variant=variant, alpha=0.0), FedAvg())
    )
    torch.testing.assert_close(ours.tree.nodes[0].params, fedavg.tree.nodes[0].params)
    assert ours.keepers == ()


def test_only_a_round_that_is_evaluated_makes_models_of_the_clients_own():
    clients, params = simulated(world(), perceptron())
    method = PerFedAvg()
    state, _ = method.step(
        method.init(params, clients), [0, 1], clients, RoundPlan(1, SPEC, evaluated=False)
    )
    assert method.models_for(state, clients).own == ()


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("variant", "MAML", "'FO' or 'HF'"),
        ("alpha", -0.1, "at least 0"),
        ("delta", 0.0, "greater than 0"),
        ("adapt_steps", 0, "at least 1"),
    ],
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(ConfigError, match=re.escape(rule)):
        PerFedAvg(**{option: value})


def test_gradients_that_are_clipped_make_no_product_with_the_hessian():
    spec = LocalTraining(clip_norm=1.0)
    PerFedAvg().check(RunFacts(local=spec))
    with pytest.raises(
        ConfigError,
        match=re.escape("local.clip_norm should be left out with variant = 'HF', got 1.0"),
    ):
        PerFedAvg(variant="HF").check(RunFacts(local=spec))
