"""FLUX: against the authors' order of steps, when and how clients are clustered, who waits, newcomers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import FLUX, Adversary, ConfigError, LocalTraining, RunFacts, simulate
from fedclade.algorithms import DescriptorQuery, without_labels
from fedclade.clustering.descriptors import (
    DescriptorSpace,
    choose_epsilon_by_knee,
    compute_point_distances,
    find_knee,
)
from fedclade.core import RoundPlan, UpdateError
from tests.reference.fedavg import as_numpy
from tests.reference.flux import flux, kneedle, scaled
from tests.tiny import (
    LABELS,
    Around,
    Metered,
    federation_of,
    linear,
    perceptron,
    play,
    simulated,
    task_federation,
)

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
ROUND = RoundPlan(2, SPEC, 1)
TRUTH, SIZES = [0, 1, 2, 0, 1, 2, 0, 1], [60, 66, 81, 74, 90, 72, 78, 85]


def clusters(tree) -> set[tuple[int, ...]]:
    return {leaf.members for leaf in tree.leaves if leaf.members}


class Silent(Around):
    """Clients of whom some send no descriptor."""

    silent: tuple[int, ...] = ()

    def ask(self, query, sink=None):
        found = super().ask(query)
        if type(query).__name__ == "DescriptorQuery":
            found = found.clone()
            found[[client in self.silent for client in query.ids]] = 0.0
        return found


@pytest.mark.parametrize(
    ("seed", "th_round", "latest", "known", "directions"),
    [
        (1, 0.06, 8, None, None),
        (5, -1.0, 4, None, None),
        (1, 0.06, 8, 3, None),
        (1, 0.06, 8, None, 2),
    ],
)
def test_equals_the_authors_steps_round_by_round(seed, th_round, latest, known, directions):
    federation = federation_of(TRUTH, SIZES, seed=seed)
    clients, params = simulated(federation, perceptron(seed))
    algorithm = FLUX(th_round=th_round, latest=latest, clusters=known, directions=directions)
    played = play(algorithm, clients, params, 6, spec=SPEC, seed=seed)
    options = {
        "labels": LABELS,
        "th_round": th_round,
        "latest": latest,
        "seed": seed,
        "rounds": 6,
        "known": known,
    }
    options |= {"directions": directions}
    expected = flux(as_numpy(params), federation, perceptron(), SPEC, **options)
    for state, wanted in zip(played.states[1:], expected, strict=True):
        assert clusters(state.tree) == {tuple(members) for members in wanted.clusters}
        for members, model in zip(wanted.clusters, wanted.models, strict=True):
            ours = state.tree.nodes[state.tree.leaf_of[members[0]]].params
            np.testing.assert_allclose(ours.numpy(), model, atol=1e-5)
    first = next(number for number, each in enumerate(expected, start=1) if len(each.clusters) > 1)
    assert first == (latest + 1 if th_round < 0 else 4)
    assert 1 < len(expected[-1].clusters) < len(TRUTH)


@pytest.mark.parametrize("seed", range(40))
def test_the_knee_is_that_of_kneedle(seed):
    draw = np.random.default_rng(seed)
    values = np.sort(draw.exponential(size=draw.integers(3, 25)) ** draw.integers(1, 4))
    assert find_knee(values) == kneedle(values)


def test_where_the_curve_has_no_knee_nobody_is_alone():
    assert find_knee(np.array([1.0, 1.0, 1.0])) is None
    assert find_knee(np.array([0.0, 1.0])) is None
    line = np.arange(6.0)
    assert find_knee(line) is None
    assert find_knee(np.array([1.0, 1.1, 1.2, 1.3, 5.0, 5.0])) == 3
    # no fall beyond a step, but below the line after the dip
    assert find_knee(np.array([0.0, 2.5, 5.0, 5.0])) == 3
    points = np.array([[0.0], [1.0], [3.0], [4.0]])
    assert choose_epsilon_by_knee(compute_point_distances(points)) == 1.0


def test_blocks_are_scaled_over_all_clients_and_components_together():
    draw = torch.Generator().manual_seed(0)
    rows = torch.rand(5, 2 + 2 + 2 * 3, 3, generator=draw)
    rows[:, 1] = torch.tensor([0.1, 0.2, 0.3])
    rows[2, [5, 8]] = -1.0  # a label that client 2 has none of
    centred = rows.double().clone()
    centred[:, [2, 4, 5, 6]] -= 1.02 * float(rows[:, 0].max()) * rows[:, 1:2].double()
    centred[2, 5] = -1.0
    expected = scaled(centred[:, 2:].flatten(1).numpy(), 3)
    space = DescriptorSpace.of(rows)
    np.testing.assert_allclose(space.points(rows), expected, atol=1e-6)
    np.testing.assert_allclose(space.points(rows[:, :4]), expected[:, :6], atol=1e-6)


def ran(rounds: int, silent: dict[int, tuple[int, ...]], **options):
    clients, params = simulated(federation_of(TRUTH, SIZES, seed=1), perceptron(1))
    algorithm, around = (
        FLUX(**{"earliest": 1, "latest": 1, "clusters": 3, **options}),
        Silent(clients),
    )
    state, logs = algorithm.init(params, around), []
    for number in range(1, rounds + 1):
        around.silent = silent.get(number, ())
        state, log = algorithm.step(state, sorted(clients.ids), around, RoundPlan(number, SPEC, 1))
        logs.append([event.kind for event in log.events])
    return algorithm, around, state, logs


def test_who_sends_no_descriptor_waits_at_the_root_and_joins_when_it_does():
    _, _, whole, _ = ran(2, {})
    _, _, waiting, logs = ran(3, {2: (3, 4), 3: (3,)})
    assert waiting.tree.stragglers == {0: (3,)}
    assert logs == [[], ["joined"] * 3, ["joined"]]
    assert (
        waiting.tree.leaf_of[4]
        == waiting.tree.leaf_of[next(c for c in (1, 7) if whole.tree.leaf_of[c])]
    )
    leaf = waiting.tree.nodes[waiting.tree.leaf_of[4]]
    assert leaf.cached.shape[0] == len(leaf.members)


def test_too_few_descriptors_leave_one_cluster_until_there_are_more():
    _, _, state, logs = ran(3, {2: tuple(range(2, 8))})
    assert logs[1:] == [["postponed"], ["joined"] * 3]
    assert len(state.tree.leaves) == 3


def test_newcomers_are_assigned_without_labels_to_the_nearest_mean():
    algorithm, clients, state, _ = ran(2, {})
    ids = sorted(clients.ids)
    found = algorithm.assign(state.tree, ids, clients, ROUND)
    rows = clients.ask(DescriptorQuery(ids, state.tree.nodes[0].params, 1, LABELS, per_label=False))
    assert rows.shape == (8, 4, LABELS)
    whole = torch.cat([leaf.cached for leaf in state.tree.leaves]).view(8, -1, LABELS)
    space = DescriptorSpace.of(whole)
    points = dict(zip(ids, space.points(rows), strict=True))
    means = {
        leaf.id: np.mean([points[c] for c in leaf.members], axis=0) for leaf in state.tree.leaves
    }
    for each in found:
        apart_from = {
            leaf: np.linalg.norm(points[each.client] - mean) for leaf, mean in means.items()
        }
        assert each.node == min(apart_from, key=apart_from.__getitem__)
        assert each.steps[0].by == "distance"
        assert each.margin == pytest.approx(
            sorted(apart_from.values())[1] - min(apart_from.values()), abs=1e-5
        )
        assert each.fits  # as members do
    clients.silent = (5,)
    with pytest.raises(
        UpdateError,
        match=r"newcomers \[5\] sent no descriptor, so they cannot be assigned to a cluster; remove them",
    ):
        algorithm.assign(state.tree, [4, 5], clients, ROUND)
    assert [
        each.node
        for each in algorithm.assign(
            algorithm.init(state.tree.nodes[0].params, clients).tree, [1], clients, ROUND
        )
    ] == [0]


def test_newcomers_to_a_running_run_join_when_they_are_sampled():
    algorithm, clients, state, _ = ran(2, {})
    few = type(state)(state.tree.without([6]), state.accuracies)
    joined, events = algorithm.join(few, [6], clients, RoundPlan(3, SPEC, 1))
    assert [(event.kind, event.node) for event in events] == [("joined", 0)]
    assert algorithm.models_for(joined, clients).nodes[6] == 0
    after, _ = algorithm.step(joined, sorted(clients.ids), clients, RoundPlan(3, SPEC, 1))
    assert after.tree.leaf_of[6] == state.tree.leaf_of[6]


def test_directions_that_are_given_do_not_depend_on_the_runs_seed():
    """Members and newcomers are described along the directions of this draw, or else of the run's."""
    federation = federation_of(TRUTH, SIZES)
    for directions, draws in ((None, {1, 2}), (7, {7})):
        asked = set[int]()

        class Watched(Around):
            def ask(self, query, asked=asked):
                if type(query).__name__ == "DescriptorQuery":
                    asked.add(query.seed)
                return super().ask(query)

        method = FLUX(earliest=1, latest=1, directions=directions)
        for seed in (1, 2):
            clients, params = simulated(federation, perceptron())
            state = play(method, Watched(clients), params, 2, spec=SPEC, seed=seed).states[-1]
            method.assign(state.tree, [0], Watched(clients), RoundPlan(3, SPEC, seed))
        assert asked == draws


def test_descriptors_travel_once():
    clients, params = simulated(federation_of(TRUTH, SIZES, seed=1), perceptron(1))
    metered = Metered(clients)
    played = play(FLUX(earliest=1, latest=1), metered, params, 3, spec=SPEC, seed=1)
    assert len(played.states[-1].tree.leaves) > 1
    model, numbers = params.nbytes, 4 * LABELS * (2 + 2 + 2 * LABELS)
    assert metered.meter.bytes_up == 8 * (3 * model + numbers)
    # to train, and to describe; in a fixed round nothing is scored
    assert metered.meter.bytes_down == 8 * (3 + 1) * model


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("earliest", 0, "at least 1"),
        ("latest", 2, "at least earliest, 3"),
        ("components", 0, "at least 1, or left out"),
        ("eps_scaling", 0.0, "greater than 0"),
        ("clusters", 0, "at least 1, or left out"),
        ("directions", -1, "at least 0, or left out"),
    ],
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"algorithm.{option} should be {rule}, got {value!r}")
    ):
        FLUX(**{option: value})


def test_without_labels_only_members_that_answer_count_and_some_must():
    algorithm, clients, state, _ = ran(2, {})
    ids = sorted(clients.ids)
    found = without_labels(state.tree, ids, clients, clients, 1)
    assert [each.node for each in found] == [
        each.node for each in algorithm.assign(state.tree, ids, clients, ROUND)
    ]
    some = Silent(clients.clients)
    some.silent = state.tree.leaves[0].members
    assert state.tree.leaves[0].id not in {
        each.node for each in without_labels(state.tree, ids, clients, some, 1)
    }
    some.silent = tuple(ids)
    with pytest.raises(
        UpdateError,
        match="no member of the run replied with a descriptor of its data, so newcomers cannot be assigned",
    ):
        without_labels(state.tree, ids, clients, some, 1)
    one = algorithm.init(state.tree.nodes[0].params, clients).tree
    assert [each.path for each in without_labels(one, [3], clients, clients, 1)] == [(0,)]


def test_data_without_labels_is_refused_before_the_first_round():
    rounds = []
    with pytest.raises(ConfigError, match=r"algorithm\.per_label = false"):
        simulate(
            FLUX(),
            linear(),
            task_federation("regression", [0, 1]),
            on_round=lambda *_: rounds.append(1),
        )
    assert not rounds


def test_only_a_run_that_ends_before_clients_can_be_clustered_is_told_so():
    assert "FLUX needs 4 rounds until it has clustered" in FLUX().check(RunFacts(rounds=3))[0]
    assert FLUX().check(RunFacts(rounds=4)) == ()


HUGE = Adversary(lies="descriptors", share=0.1)
FLUX_RUN = {"rounds": 4, "local": SPEC, "seed": 2, "engine": "loop", "evaluate_every": 4}


def test_a_huge_descriptor_does_not_join_the_others():
    """It stretches the space of all descriptors, so that the others lie together, unless it is left out."""
    federation = federation_of(TRUTH, SIZES)
    algorithm = FLUX(th_round=-1.0, earliest=2, latest=2)
    honest = simulate(algorithm, perceptron, federation, **FLUX_RUN)
    attacked = simulate(algorithm, perceptron, federation, adversary=HUGE, **FLUX_RUN)
    (adversary,) = attacked.summary["adversary"]["ids"]
    without = {tuple(c for c in members if c != adversary) for members in clusters(honest.tree)} - {
        ()
    }
    assert len(without) > 1
    assert clusters(attacked.tree) == without
    assert attacked.tree.leaf_of[adversary] == 0
    event, *again = [event for event in attacked.events if event["kind"] == "left_out"]
    assert again, "it is requested again while it waits"
    assert event["query"] == "descriptors"
    assert "more than 10 times the median client's" in event["clients"][str(adversary)]


@pytest.mark.parametrize(
    ("factor", "is_out"), [(1e30, True), (10.5, True), (10.0, False), (0.0, False)]
)
def test_a_descriptor_is_compared_with_those_of_members_or_of_all(factor, is_out):
    rows = torch.ones(4, 4, 3)
    ids, kept, events = FLUX()._remove_outliers([7], factor * rows[:1], rows)
    assert (ids, len(kept), len(events)) == (([], 0, 1) if is_out else ([7], 1, 0))
    assert not FLUX()._remove_outliers([6, 7], factor * rows[:2], rows[:2])[2], (
        "of two, either may be the wrong one"
    )
