"""StoCFL: against the authors' order of steps, what is united and what goes on, newcomers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedAvg, LocalTraining, StoCFL
from fedclade.core.queries import RoundPlan
from tests.reference.fedavg import as_numpy
from tests.reference.stocfl import stochastic_cfl
from tests.tiny import Metered, ScriptedClients, federation_of, linear, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH, SIZES = [0, 1, 2, 0, 1, 2, 0, 1], [20, 26, 31, 24, 40, 22, 28, 35]


def clusters(tree) -> set[tuple[int, ...]]:
    return {leaf.members for leaf in tree.leaves if leaf.id and leaf.members}


@pytest.mark.parametrize(("tau", "fraction"), [(0.7, 1.0), (0.5, 0.4), (0.7, 0.4)])
def test_equals_the_authors_steps_round_by_round(tau, fraction):
    federation = federation_of(TRUTH, SIZES, seed=3)
    clients, params = simulated(federation, linear(3))
    algorithm = StoCFL(tau=tau, mu=0.3, anchor_epochs=5)
    played = play(algorithm, clients, params, 6, spec=SPEC, seed=3, fraction=fraction)
    expected = stochastic_cfl(
        as_numpy(params),
        federation,
        linear(),
        SPEC,
        tau=tau,
        mu=0.3,
        anchor_epochs=5,
        seed=3,
        rounds=6,
        fraction=fraction,
    )
    for state, wanted in zip(played.states[1:], expected, strict=True):
        assert clusters(state.tree) == {tuple(members) for members in wanted.clusters}
        np.testing.assert_allclose(state.tree.nodes[0].model.numpy(), wanted.omega, atol=1e-5)
        for members, theta in zip(wanted.clusters, wanted.theta, strict=True):
            model = state.tree.nodes[state.tree.leaf_of[members[0]]].params
            np.testing.assert_allclose(model.numpy(), theta, atol=1e-5)
    assert 1 < len(expected[-1].clusters) < len(TRUTH)


def test_one_cluster_without_a_proximal_term_is_fedavg():
    clients, params = simulated(federation_of(TRUTH, SIZES), linear())
    ours, theirs = (
        play(a, clients, params, 3, spec=SPEC).states[-1]
        for a in (StoCFL(tau=-1.0, mu=0.0), FedAvg())
    )
    assert clusters(ours.tree) == {tuple(range(8))}
    for model in (ours.tree.nodes[0].model, ours.tree.nodes[1].params):
        assert torch.equal(model, theirs.tree.nodes[0].params)


PSI = {0: [1.0, 0.0], 1: [1.0, 0.2], 2: [0.0, 1.0], 3: [0.2, 1.0], 4: [1.0, 0.1]}


def test_clusters_are_united_as_they_are_sampled_and_the_larger_goes_on():
    """Clients 0 and 4 are alike, and 1 besides; nobody compares 0 and 1 until both are sampled."""
    clients, algorithm = Metered(ScriptedClients(PSI)), StoCFL(tau=0.9)
    state = algorithm.init(torch.zeros(2), clients)
    steps = []
    for number, cohort in enumerate([[0, 2, 4], [1], [0, 1, 3]], start=1):
        state, log = algorithm.step(state, cohort, clients, RoundPlan(number, SPEC))
        steps.append((state.tree, [(event.kind, event.node) for event in log.events]))
    first, second, third = (tree for tree, _ in steps)
    assert clusters(first) == {(0, 4), (2,)}
    assert clusters(second) == {(0, 4), (1,), (2,)}
    assert second.stragglers == {0: (3,)}
    assert clusters(third) == {(0, 1, 4), (2,), (3,)}  # client 2 was not sampled with client 3
    assert [events for _, events in steps] == [
        [("joined", 1), ("joined", 2)],
        [("joined", 3)],
        [("joined", 1), ("empty", 3), ("joined", 4)],
    ]
    # the means of 0 and 4, then of 0 and 1
    assert third.nodes[1].params.tolist() == pytest.approx([2.0, 0.05 + 0.1])
    assert third.nodes[1].cached.tolist() == [PSI[0], pytest.approx(PSI[1]), pytest.approx(PSI[4])]
    assert clients.meter.readings()["bytes_up"] == (5 + 2 * 7) * 2 * 4  # Ψ once; θ and ω


def test_a_newcomer_to_a_run_joins_what_is_near_enough_or_gets_the_global_model():
    clients = ScriptedClients(PSI | {7: [1.0, 0.15], 8: [-1.0, 0.0]})
    algorithm = StoCFL(tau=0.9)
    state = algorithm.init(torch.zeros(2), ScriptedClients(PSI))
    assert [
        each.node for each in algorithm.assign(state.tree, [7], clients, RoundPlan(1, SPEC))
    ] == [0]
    state, _ = algorithm.step(state, range(5), ScriptedClients(PSI), RoundPlan(1, SPEC))
    near, far = algorithm.assign(state.tree, [7, 8], clients, RoundPlan(4, SPEC))
    assert (near.node, near.fits, far.node) == (state.tree.leaf_of[0], True, 0)


def test_newcomers_to_a_running_run_are_observed_when_they_are_sampled():
    algorithm = StoCFL(tau=0.9)
    few = ScriptedClients({client: PSI[client] for client in (0, 2)})
    state, _ = algorithm.step(algorithm.init(torch.zeros(2), few), [0, 2], few, RoundPlan(1, SPEC))
    clients = ScriptedClients(PSI)
    state, events = algorithm.join(state, [1, 3, 4], clients, RoundPlan(2, SPEC))
    assert [(event.kind, event.node) for event in events] == [("joined", 0)]
    assert algorithm.models_for(state, clients).nodes[3] == 0
    state, _ = algorithm.step(state, range(5), clients, RoundPlan(2, SPEC))
    assert clusters(state.tree) == {(0, 1, 4), (2, 3)}


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [("tau", 1.5, "in [-1, 1]"), ("mu", -0.1, "at least 0"), ("anchor_epochs", 0, "at least 1")],
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"algorithm.{option} should be {rule}, got {value!r}")
    ):
        StoCFL(**{option: value})
