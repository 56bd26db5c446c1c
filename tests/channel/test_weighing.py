"""Weights of clients in means of updates: by a literal mean, for every method, engine, stream and network."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedclade import CFL, Aggregation, ConfigError, LocalTraining, Scaffold, simulate
from fedclade.algorithms import ALGORITHMS, build_algorithm
from fedclade.channel import CentralPrivacy
from fedclade.config import check_config
from fedclade.data.federation import Federation
from tests.flower.grids import federated, grid_of, network_of
from tests.properties.test_resume import OPTIONS
from tests.tiny import FEATURES, LABELS, federation_of, perceptron

SIZES = [10, 40, 20, 30]
TRUTH = [0, 0, 0, 0]
LOCAL = LocalTraining(batch_size=10, lr=0.2)
TABLE = {"c1": 3.0, "2": 0.5, "3": 0.0}
"""By the name of client 1 and the ids of clients 2 and 3; client 0 has weight 1."""


def run_of(
    weights: Any = "auto",
    algorithm: Any = "fedavg",
    federation: Federation | None = None,
    **settings: Any,
):
    settings = {"rounds": 1, "engine": "loop", "local": LOCAL} | settings
    federation = federation or federation_of(TRUTH, SIZES)
    model = settings.pop("model", perceptron)
    how = Aggregation(weights=weights)
    return simulate(algorithm, model, federation, aggregate=how, **settings)


def model_of(run: Any) -> torch.Tensor:
    return run.tree.nodes[0].params


@pytest.fixture(scope="module")
def deltas() -> np.ndarray:
    """The update of each client in round 1."""
    initial = model_of(run_of(rounds=0)).numpy()
    alone = [run_of({str(c): float(c == client) for c in range(4)}) for client in range(4)]
    return np.stack([model_of(run).numpy() - initial for run in alone])


@pytest.mark.parametrize(
    ("weights", "literal"),
    [
        ("auto", SIZES),
        ("examples", SIZES),
        ("uniform", [1, 1, 1, 1]),
        (TABLE, [1.0, 3.0, 0.5, 0.0]),
    ],
    ids=["auto", "examples", "uniform", "table"],
)
@pytest.mark.parametrize(
    "way", [{}, {"stream": True}, {"engine": "stacked"}, {"engine": "workers"}]
)
def test_a_model_moves_by_the_weighted_mean(
    weights: Any, literal: list[float], way: dict[str, Any], deltas: np.ndarray
):
    share = np.array(literal) / np.sum(literal)
    expected = model_of(run_of(rounds=0)).numpy() + share @ deltas
    np.testing.assert_allclose(model_of(run_of(weights, **way)), expected, rtol=1e-4, atol=1e-6)


def test_a_network_weighs_alike():
    for weights in ("uniform", TABLE):
        grid = grid_of(federation_of(TRUTH, SIZES))
        how = Aggregation(weights=weights)
        run = federated(grid, "fedavg", local=LOCAL, rounds=1, aggregate=how)
        torch.testing.assert_close(model_of(run), model_of(run_of(weights)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("algorithm", [CFL(weighted=False), Scaffold(weighted=False)])
def test_examples_take_precedence_over_a_method_that_weighs_all_alike(algorithm: Any):
    plain = model_of(run_of("auto", algorithm))
    assert plain.allclose(model_of(run_of("uniform", algorithm)), atol=1e-6)
    weighted = replace(algorithm, weighted=True)
    examples = model_of(run_of("examples", algorithm))
    assert examples.allclose(model_of(run_of("auto", weighted)), atol=1e-6)
    assert not examples.allclose(plain, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"local"}))
def test_with_every_method_uniform_weights_are_those_of_equal_clients(name: str):
    """With clients of one size, no weights differ; a table of equal weights changes nothing either."""
    federation = federation_of([0, 1, 2, 3] * 2)
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), federation.true_clusters)
    normed = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, LABELS))
    settings = {"federation": federation, "rounds": 3}
    settings |= {"model": normed} if name == "fedbn" else {}
    runs = [
        run_of(weights, algorithm, **settings)
        for weights in ("auto", "uniform", dict.fromkeys(map(str, range(8)), 2.0))
    ]
    for run in runs[1:]:
        for ours, theirs in zip(run.tree.nodes, runs[0].tree.nodes, strict=True):
            torch.testing.assert_close(ours.params, theirs.params, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"local", "fedbn", "auto"}))
def test_every_method_heeds_the_weights(name: str):
    federation = federation_of([0, 1] * 4, [12, 40] * 4)
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), federation.true_clusters)
    table = {str(client): 1.0 + 4 * (client % 4 == 0) for client in range(8)}
    plain, weighed = (
        run_of(weights, algorithm, federation=federation, rounds=3) for weights in ("auto", table)
    )
    same = [
        a.model.equal(b.model) for a, b in zip(plain.tree.nodes, weighed.tree.nodes, strict=False)
    ]
    assert not all(same)


def test_steps_are_counted_by_examples_whatever_the_weights():
    plain, uniform = (run_of(weights, rounds=2) for weights in ("auto", "uniform"))
    assert plain.summary["steps"] == uniform.summary["steps"]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_of_weight_0_move_no_model_even_if_no_other_replies(stream: bool):
    table = {"0": 0.0, "1": 0.0, "2": 0.0, "3": 1.0}
    run = run_of(table, client_fraction=0.5, rounds=6, stream=stream)
    trained = run_of({**table, "3": 5.0}, client_fraction=0.5, rounds=6, stream=stream)
    assert bool(model_of(run).isfinite().all())
    assert model_of(run).allclose(model_of(trained))
    moved = [
        not model_of(run_of(table, client_fraction=0.25, stream=stream, seed=seed)).equal(
            model_of(run_of(rounds=0, seed=seed))
        )
        for seed in range(8)
    ]
    assert {False, True} == set(moved), "some cohorts are without client 3"


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (
            "equal",
            "aggregate.weights should be 'auto', 'examples', 'uniform', or a table of weights",
        ),
        ({"c1": -1.0}, "aggregate.weights should be finite numbers of at least 0"),
        ({"c9": 1.0}, "aggregate.weights lists 'c9', which is neither the name nor the id of a"),
        (dict.fromkeys("0123", 0.0), "aggregate.weights gives all clients the weight 0; raise"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        run_of(weights)


def test_they_are_refused_where_they_cannot_hold():
    with pytest.raises(ConfigError, match="'auto' with a robust rule, which weighs all alike"):
        Aggregation(rule="median", weights="uniform")
    with pytest.raises(ConfigError, match="weighs all clients alike, so that the noise suffices"):
        run_of("uniform", privacy=CentralPrivacy(clip_norm=1.0, noise_multiplier=1.0))
    grid = grid_of(federation_of(TRUTH))
    network = network_of(grid, secure_aggregation=True)
    with pytest.raises(ConfigError, match=r"aggregate.weights cannot be set with network.secure"):
        federated(grid, "fedavg", network=network, aggregate=Aggregation(weights="uniform"))


def test_a_config_has_a_table_of_them():
    config = check_config({"aggregate": {"weights": {"hospital-1": 2.0}}})
    assert config.settings.aggregate.weights == {"hospital-1": 2.0}
    assert config.as_dict()["aggregate"]["weights"] == {"hospital-1": 2.0}
    assert (
        check_config({"aggregate": {"weights": "uniform"}}).settings.aggregate.weights == "uniform"
    )
