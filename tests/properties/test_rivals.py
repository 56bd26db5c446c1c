"""What every algorithm that rivals CFL must keep to: names and order mean nothing, and a state is all there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fedclade import ConfigError, LocalTraining, Run, simulate
from fedclade.algorithms import (
    APFL,
    FLUX,
    IFCA,
    OCFL,
    PACFL,
    Algorithm,
    CLoVE,
    Ditto,
    FedDrift,
    FedSoft,
    FeSEM,
    FineTune,
    Scaffold,
    StoCFL,
)
from fedclade.channel.signature import Signature
from fedclade.core.params import Layout
from fedclade.core.queries import RoundPlan
from fedclade.core.tree import ParameterTree
from fedclade.training import SimulatedClients
from tests.tiny import FEATURES, LABELS, federation_of, linear, play, renamed, simulated, streamed

SPEC = LocalTraining(batch_size=10, lr=0.3)
TRUTH = [0, 1, 2, 0, 1, 2, 0, 1]
SIZES = [20, 26, 32, 24, 40, 3, 28, 200]
"""From 3 examples to 200: a batch and a third of one, to twenty."""

RIVALS: Mapping[str, Algorithm] = {
    "ifca": IFCA(clusters=3, restarts=2, restart_rounds=2),
    "ifca by gradients": IFCA(clusters=3, average="gradients"),
    "clove": CLoVE(clusters=3),
    "ocfl": OCFL(),
    "fesem": FeSEM(clusters=3),
    "fedsoft": FedSoft(clusters=3, lam=0.5),
    "feddrift": FedDrift(
        step_rounds=1, delta=0.0, start="together"
    ),  # alone, models tie, and their order decides
    "pacfl": PACFL(distance="per_label", vectors=2, threshold=50.0),
    "stocfl": StoCFL(tau=0.6, anchor_epochs=3),
    "flux": FLUX(earliest=1, latest=2),
    "ditto": Ditto(lam=0.5),
    "finetune": FineTune(),
    "apfl": APFL(adaptive=True),
    "scaffold": Scaffold(),
}
each_rival = pytest.mark.parametrize("algorithm", RIVALS.values(), ids=RIVALS.keys())


def world(seed=0):
    return federation_of(TRUTH, SIZES, seed=seed)


def normed(seed: int) -> nn.Module:
    """Return a perceptron with BatchNorm, whose buffers are far from its parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, LABELS)
        )
    module[1].running_mean.fill_(50.0)
    return module


def run_of(
    algorithm: Algorithm, federation=None, model: Callable[[int], nn.Module] = linear, **options
) -> Run:
    options = {"local": SPEC, "rounds": 4, "seed": 1, "engine": "loop"} | options
    return simulate(algorithm, model, federation or world(), **options)


@cache
def plain_run(algorithm: Algorithm) -> Run:
    """Return the run that others are compared with."""
    return run_of(algorithm)


def started(algorithm: Algorithm, clients: SimulatedClients) -> Tensor:
    """Return the initial models of an algorithm, ``[S]`` or several."""
    models = torch.stack(
        [clients.layout.flatten(linear(seed)) for seed in range(algorithm.requires.initial_models)]
    )
    return models if algorithm.requires.initial_models > 1 else models[0]


def clusters(tree: ParameterTree) -> set[frozenset[int]]:
    return {frozenset(leaf.members) for leaf in tree.leaves if leaf.members}


def models(tree: ParameterTree) -> dict[int, Tensor]:
    return {client: tree.nodes[leaf].params for client, leaf in tree.leaf_of.items()}


def without_seconds(rows):
    return [
        {name: value for name, value in row.items() if not name.startswith("seconds")}
        for row in rows
    ]


@each_rival
def test_renaming_clients_changes_nothing_but_names(algorithm: Algorithm):
    federation = world()
    new = dict(enumerate([31, 4, 17, 0, 22, 9, 38, 12]))
    run, other = plain_run(algorithm), run_of(algorithm, renamed(federation, new))
    assert clusters(other.tree) == {
        frozenset(new[c] for c in cluster) for cluster in clusters(run.tree)
    }
    theirs = models(other.tree)
    for client, model in models(run.tree).items():
        torch.testing.assert_close(theirs[new[client]], model, rtol=0, atol=1e-5)
    scores = {(row["round"], row["name"]): row["accuracy"] for row in run.client_rows}
    assert {(row["round"], row["name"]): row["accuracy"] for row in other.client_rows} == scores


@each_rival
def test_the_order_of_the_cohort_changes_nothing(algorithm: Algorithm):
    clients, _ = simulated(world(), linear())
    state = shuffled = algorithm.init(started(algorithm, clients), clients)
    for number in range(1, 4):
        this_round = RoundPlan(number, SPEC, 1)
        state, log = algorithm.step(state, range(8), clients, this_round)
        shuffled, other = algorithm.step(shuffled, [5, 2, 7, 0, 1, 4, 6, 3], clients, this_round)
        assert other.losses == log.losses
        for ours, theirs in zip(state.tree.nodes, shuffled.tree.nodes, strict=True):
            assert ours.members == theirs.members
            torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-6)


@each_rival
def test_same_seed_same_bits(algorithm: Algorithm):
    first, second, other = (
        run_of(algorithm, seed=seed, client_fraction=0.5, rounds=3) for seed in (1, 1, 2)
    )
    assert without_seconds(first.metric_rows) == without_seconds(second.metric_rows)
    assert (first.client_rows, first.events) == (second.client_rows, second.events)
    assert all(
        torch.equal(a.params, b.params)
        for a, b in zip(first.tree.nodes, second.tree.nodes, strict=True)
    )
    assert without_seconds(first.metric_rows) != without_seconds(other.metric_rows)


@each_rival
def test_a_fraction_of_all_clients_trains_and_everybody_is_served(algorithm: Algorithm):
    """A quarter of 8; of each of PACFL's three clusters, once they are found, at least one."""
    run = run_of(algorithm, client_fraction=0.25, rounds=3)
    first, *others = [row["clients_trained"] for row in run.metric_rows]
    assert first == 2
    assert all(3 <= n <= 4 if isinstance(algorithm, PACFL) else n == 2 for n in others)
    assert len([row for row in run.client_rows if row["round"] == 3]) == len(TRUTH)


@each_rival
def test_a_state_is_a_tree_and_tensors(algorithm: Algorithm):
    """Stopped after any round and put together again from those, it goes on to the same bits."""
    clients, _ = simulated(world(), linear())
    state = kept = algorithm.init(started(algorithm, clients), clients)
    for number in range(1, 5):
        cohort = algorithm.sample_cohort(state, 0.5, RoundPlan(number, SPEC).generator("cohort"))
        state, _ = algorithm.step(state, cohort, clients, RoundPlan(number, SPEC))
        kept = type(kept).from_tensors(
            ParameterTree(kept.tree.nodes),
            {name: value.clone() for name, value in kept.tensors().items()},
        )
        kept, _ = algorithm.step(kept, cohort, clients, RoundPlan(number, SPEC))
    assert state.tree.nodes
    for ours, theirs in zip(state.tree.nodes, kept.tree.nodes, strict=True):
        assert ours.members == theirs.members
        assert torch.equal(ours.params, theirs.params)


@each_rival
def test_models_with_buffers_are_trained_and_compared_by_their_parameters(algorithm: Algorithm):
    run = run_of(algorithm, model=normed)
    assert all(torch.isfinite(node.params).all() for node in run.tree.nodes)
    assert run.summary["accuracy"]["mean"] > 1 / LABELS
    start = Layout.of(normed(0)).n_parameters
    means = {float(model[start : start + 8].mean()) for model in models(run.tree).values()}
    # which leaves buffers as they are
    assert (means == {50.0}) is (algorithm == RIVALS["ifca by gradients"])


@each_rival
def test_permuted_vectors_give_the_same_clusters_and_models(algorithm: Algorithm):
    """Eqs. 45 and 46 of the CFL paper hold for whatever adds, averages and compares."""
    plain, hidden = plain_run(algorithm), run_of(algorithm, permute=True)
    assert plain.tree.nodes
    for ours, theirs in zip(plain.tree.nodes, hidden.tree.nodes, strict=True):
        assert ours.members == theirs.members
        torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name, algorithm in RIVALS.items() if not algorithm.requires.updates]
)
def test_a_run_that_streams_is_the_run_that_does_not_but_for_rounding(name: str):
    clients, _ = simulated(world(), linear())
    start = started(RIVALS[name], clients)
    plain, stream = (
        play(RIVALS[name], each, start, 4, spec=SPEC) for each in (clients, streamed(clients, 3))
    )
    assert plain.states
    for ours, theirs in zip(plain.states, stream.states, strict=True):
        for a, b in zip(ours.tree.nodes, theirs.tree.nodes, strict=True):
            assert b.members == a.members
            torch.testing.assert_close(b.params, a.params, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in RIVALS if name != "stocfl"])
def test_compared_by_sketches_models_are_the_same(name: str):
    """Few rivals compare signatures; what the others compare, parameters or losses or data, stays what it is."""
    algorithm = RIVALS[name]
    plain, sketched = (
        plain_run(algorithm),
        run_of(algorithm, signature=Signature(kind="projected", dim=8)),
    )
    assert plain.tree.nodes
    for ours, theirs in zip(plain.tree.nodes, sketched.tree.nodes, strict=True):
        assert ours.members == theirs.members
        assert torch.equal(ours.params, theirs.params)


@each_rival
def test_one_client_is_enough(algorithm: Algorithm):
    if isinstance(algorithm, IFCA | CLoVE | FeSEM | FedSoft):
        with pytest.raises(
            ConfigError, match="clusters should be at most the number of clients, 1, got 3"
        ):
            run_of(algorithm, federation_of([0]), rounds=3)
        algorithm = replace(algorithm, clusters=1)
    run = run_of(algorithm, federation_of([0]), rounds=3)
    assert len(run.client_rows) == 3
