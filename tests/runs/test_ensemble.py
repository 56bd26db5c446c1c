"""Ensembles along a path: what they predict, and the weights that validation data choose."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedclade import ConfigError, DataError, ModelError, ParameterTree, PathEnsemble, evaluate_paths, path_weights
from fedclade.core.params import Layout
from fedclade.runs.ensemble import GAP, mixture_weights
from fedclade.training import SimulatedClients
from tests.reference.evaluation import evaluate as one_by_one
from tests.tiny import FEATURES, federation_of, linear, perceptron, simulated

X = torch.randn(7, FEATURES, generator=torch.Generator().manual_seed(0))


def vectors(n: int, make=perceptron) -> list[torch.Tensor]:
    return [Layout.of(make(seed)).flatten(make(seed)) for seed in range(n)]


def tree_of(models: list[torch.Tensor]) -> ParameterTree:
    """Root 0: {0..5}; below it 1: {0, 1, 2, 3} and 2: {4, 5}; below 1 are 3: {0, 1} and 4: {2, 3}."""
    tree = ParameterTree.root_only(range(6), models[0])
    for node, parts in ((0, [(0, 1, 2, 3), (4, 5)]), (1, [(0, 1), (2, 3)])):
        cached = [torch.zeros(len(part), 1) for part in parts]
        tree = tree.split(node, parts, params=models[0], cached=cached, round_number=1, criteria={})
    for node, model in enumerate(models):
        tree = tree.with_model(node, model)
    return tree


def world() -> tuple[SimulatedClients, ParameterTree]:
    clients, _ = simulated(federation_of([0, 0, 1, 1, 2, 2]), perceptron())
    return clients, tree_of([3 * vector for vector in vectors(5)])


@pytest.mark.parametrize("weights", [None, (0.2, 0.3, 0.5), (0.0, 1.0, 0.0)])
def test_it_predicts_the_weighted_mean_of_the_probabilities(weights):
    given = None if weights is None else torch.tensor(weights)
    ensemble = PathEnsemble(perceptron(9), vectors(3), given)
    mixed = sum(
        w * functional.softmax(perceptron(seed)(X), -1) for seed, w in enumerate(weights or (1 / 3, 1 / 3, 1 / 3))
    )
    torch.testing.assert_close(ensemble(X).exp(), mixed)
    torch.testing.assert_close(ensemble(X).softmax(-1), mixed)


def test_it_is_a_plain_module_in_evaluation_mode_whose_state_can_be_saved_and_loaded():
    def dropping(seed: int) -> nn.Module:
        return nn.Sequential(perceptron(seed), nn.Dropout(0.5))

    ensemble = PathEnsemble(dropping(0), vectors(2, dropping), torch.tensor([0.25, 0.75]))
    assert torch.equal(ensemble(X), ensemble(X))
    other = PathEnsemble(dropping(0), [torch.zeros_like(v) for v in vectors(2)])
    other.load_state_dict(ensemble.state_dict())
    assert torch.equal(other(X), ensemble(X))


def test_the_module_that_it_is_made_of_is_left_as_it_is():
    module = perceptron(5)
    PathEnsemble(module, vectors(2))
    assert torch.equal(Layout.of(module).flatten(module), vectors(6)[5])


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (
            [0.5, 0.5, 0.0],
            "an ensemble of 2 models should have as many weights, at least 0 and of sum 1, got [0.5, 0.5",
        ),
        ([1.5, -0.5], "got [1.5, -0.5]"),
        ([0.5, 0.25], "got [0.5, 0.25]"),
    ],
)
def test_what_are_no_weights_for_the_models_is_refused(weights, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        PathEnsemble(perceptron(), vectors(2), torch.tensor(weights))


def test_an_ensemble_needs_models_that_fit():
    with pytest.raises(ConfigError, match="an ensemble should have at least 1 model, got 0"):
        PathEnsemble(perceptron(), [])
    with pytest.raises(ModelError, match=r"a vector of 92 entries was expected, got shape \(3,\)"):
        PathEnsemble(perceptron(), [torch.zeros(3)])


def log_likelihood(weights, seen) -> float:
    return float((weights @ seen.clamp(min=1e-30)).log().mean())


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 30))
def test_no_weights_make_the_data_likelier_by_more_than_the_gap(seed, levels, n):
    """Compared with each model alone, equal weights, and random ones."""
    draw = torch.Generator().manual_seed(seed)
    seen = torch.rand(levels, n, generator=draw, dtype=torch.float64) ** 4
    weights = mixture_weights(seen)
    assert float(weights.sum()) == pytest.approx(1)
    assert (weights >= 0).all()
    random = torch.rand(50, levels, generator=draw, dtype=torch.float64)
    others = torch.cat([torch.eye(levels).double(), torch.full((1, levels), 1 / levels).double(), random])
    for other in others / others.sum(1, keepdim=True):
        assert log_likelihood(weights, seen) >= log_likelihood(other, seen) - GAP


def test_the_weights_of_two_models_that_are_sure_of_different_examples_are_their_shares():
    """Likelihood w² (1 − w): best at w = 2/3."""
    weights = mixture_weights(torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    torch.testing.assert_close(weights, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64), rtol=0, atol=1e-3)


def test_a_model_that_has_diverged_gets_no_weight():
    weights = mixture_weights(torch.tensor([[0.3, 0.4], [torch.nan, torch.nan], [0.0, 0.0]]))
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-3)


def test_what_no_model_has_foreseen_leaves_equal_weights():
    assert mixture_weights(torch.zeros(2, 3)).tolist() == [0.5, 0.5]


def test_path_weights_are_those_of_each_clients_own_validation_data():
    clients, tree = world()
    federation = federation_of([0, 0, 1, 1, 2, 2])
    found = path_weights(tree, clients)
    assert [len(found[client]) for client in range(6)] == [3, 3, 3, 3, 2, 2]
    for client, weights in found.items():
        x, y = federation.examples(client, "validation")
        seen = []
        for node in tree.path(client):
            module = perceptron()
            Layout.of(module).load(node.params, module)
            seen.append(module(x).softmax(-1)[torch.arange(len(y)), y].detach())
        torch.testing.assert_close(weights, mixture_weights(torch.stack(seen)), rtol=0, atol=1e-5)
    assert len({tuple(weights.tolist()) for weights in found.values()}) == 6


@pytest.mark.parametrize("chosen", [False, True])
def test_evaluation_along_paths_is_that_of_one_ensemble_after_another(chosen):
    clients, tree = world()
    federation = federation_of([0, 0, 1, 1, 2, 2])
    weights = path_weights(tree, clients) if chosen else None
    got = evaluate_paths(tree, clients, weights)
    assert got.ids == tuple(range(6))
    for place, client in enumerate(got.ids):
        path = [node.params for node in tree.path(client)]
        ensemble = PathEnsemble(perceptron(), path, weights[client] if weights else None)
        vector = Layout.of(ensemble).flatten(ensemble)
        ((accuracy, loss, n),) = one_by_one(federation, ensemble, [client], vector[None], [0], "test")
        assert (float(got.accuracies[place]), int(got.examples[place])) == (accuracy, n)
        assert float(got.losses[place]) == pytest.approx(loss, rel=1e-5)


def test_evaluation_answers_in_the_order_of_the_clients_however_these_share_ensembles():
    clients, tree = world()
    ordered = evaluate_paths(tree, clients)
    federation = federation_of([0, 0, 1, 1, 2, 2])
    mixed_up = replace(federation, clients=tuple(federation.clients[i] for i in (4, 0, 5, 2, 1, 3)))
    got = evaluate_paths(tree, SimulatedClients(mixed_up, perceptron()))
    assert got.ids == (4, 0, 5, 2, 1, 3)
    assert len(set(ordered.losses.tolist())) == 6
    torch.testing.assert_close(got.losses, ordered.losses[list(got.ids)])
    assert torch.equal(got.accuracies, ordered.accuracies[list(got.ids)])


def test_clients_that_are_not_in_the_tree_are_not_asked():
    _, tree = world()
    clients, _ = simulated(federation_of([0, 0, 1, 1, 2, 2, 3]), perceptron())
    assert set(path_weights(tree, clients)) == set(evaluate_paths(tree, clients).ids) == set(range(6))


def test_chosen_weights_fit_the_data_that_they_were_chosen_on_at_least_as_well_as_equal_ones():
    clients, tree = world()
    equal = evaluate_paths(tree, clients, split="validation").losses
    chosen = evaluate_paths(tree, clients, path_weights(tree, clients), split="validation").losses
    assert (chosen <= equal + GAP).all()
    assert (chosen < equal - 0.01).any()


def test_weights_need_validation_data():
    clients, _ = simulated(federation_of([0] * 6, validation=0), linear())
    with pytest.raises(DataError, match=r"client 0 has no validation examples; set data\.validation_fraction above 0"):
        path_weights(tree_of(vectors(5, linear)), clients)
