"""pFedMe: against the paper's pseudo-code, and its ends."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedAvg, LocalTraining, PFedMe
from tests.reference.pfedme import pfedme
from tests.tiny import federation_of, own_models, perceptron, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.02, lr_decay=0.9)


def world():
    return federation_of([0, 1, 0, 1], [20, 26, 31, 5], seed=2)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_equals_algorithm_1_round_by_round(beta):
    federation = world()
    clients, params = simulated(federation, perceptron())
    method = PFedMe(lam=8.0, steps=3, personal_lr=0.06, beta=beta)
    played = play(method, clients, params, 3, spec=SPEC, seed=3, fraction=0.5)
    cohorts = [sorted(log.losses) for log in played.logs]
    arguments = {
        "lam": 8.0,
        "K": 3,
        "personal_lr": 0.06,
        "beta": beta,
        "seed": 3,
        "cohorts": cohorts,
    }
    expected = pfedme(params, federation, perceptron(), SPEC, **arguments)
    for state, (w, _) in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), w, atol=1e-5)
    ours, theta = own_models(played), expected[-1][1]
    assert (
        ours.keys() == theta.keys() == set(method.models_for(played.states[-1], played.clients).own)
    )
    for client, model in ours.items():
        np.testing.assert_allclose(model.numpy(), theta[client], atol=1e-5)


def test_clients_are_served_with_w_as_the_released_code_scores_them():
    federation = world()
    clients, params = simulated(federation, perceptron())
    method = PFedMe(lam=8.0, steps=3, personal_lr=0.06, served="w")
    played = play(method, clients, params, 3, spec=SPEC, seed=3, fraction=0.5)
    cohorts = [sorted(log.losses) for log in played.logs]
    arguments = {
        "lam": 8.0,
        "K": 3,
        "personal_lr": 0.06,
        "beta": 1.0,
        "seed": 3,
        "cohorts": cohorts,
    }
    expected = pfedme(params, federation, perceptron(), SPEC, scores_w=True, **arguments)
    of_paper = pfedme(params, federation, perceptron(), SPEC, **arguments)
    np.testing.assert_allclose(
        played.states[-1].tree.nodes[0].params.numpy(), of_paper[-1][0], atol=1e-5
    )
    for client, model in own_models(played).items():
        np.testing.assert_allclose(model.numpy(), expected[-1][1][client], atol=1e-5)
        assert float((model - of_paper[-1][1][client]).abs().max()) > 1e-3, (
            "or the test cannot fail"
        )


def test_the_larger_lambda_the_nearer_personal_models_are_to_the_global_one():
    gaps = []
    for lam in (0.5, 5.0, 50.0):
        method = PFedMe(lam=lam, steps=30, personal_lr=0.02)
        played = play(
            method,
            *simulated(world(), perceptron()),
            1,
            spec=LocalTraining(batch_size=40, lr=0.001),
        )
        w = played.states[0].tree.nodes[0].params
        gaps.append(sum(float((model - w).norm()) for model in own_models(played).values()))
    assert gaps[0] > 1.5 * gaps[1] > 3 * gaps[2]


def test_with_one_step_of_theta_on_one_batch_it_is_fedavg_with_a_step_of_eta_lambda_personal_lr():
    """θ = w − α∇f(w), so that w ← w − ηλ(w − θ) = w − ηλα∇f(w)."""
    clients, params = simulated(world(), perceptron())
    method = PFedMe(lam=4.0, steps=1, personal_lr=0.1)
    ours = play(method, clients, params, 1, spec=LocalTraining(batch_size=40, lr=0.5)).states[-1]
    fedavg = play(
        FedAvg(), clients, params, 1, spec=LocalTraining(batch_size=40, lr=0.5 * 4.0 * 0.1)
    ).states[-1]
    torch.testing.assert_close(
        ours.tree.nodes[0].params, fedavg.tree.nodes[0].params, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("lam", 0.0, "greater than 0"),
        ("steps", 0, "at least 1"),
        ("personal_lr", -1.0, "greater"),
        ("beta", 0.0, "gre"),
        ("served", "v", "'theta' or 'w', got 'v'"),
    ],
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.{option} should be {rule}")):
        PFedMe(**{option: value})
