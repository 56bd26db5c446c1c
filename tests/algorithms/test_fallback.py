"""The root's model goes on beside the clusters', and clients choose together before they choose by themselves."""

from __future__ import annotations

import dataclasses
from functools import cache
from statistics import stdev

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedclade import CFL, FedAvg, LocalTraining, ReplicatedCFL, assign, export_model, simulate
from fedclade.algorithms.fallback import Scores, best_on_validation, choose_together, train_beside
from fedclade.channel import DifferentialPrivacy
from fedclade.core import Group, ParameterTree, RoundPlan, RunError
from fedclade.runs.rounds import check_models
from tests.tiny import (
    Around,
    ScriptedClients,
    federation_of,
    linear,
    perceptron,
    play,
    replicating,
    simulated,
    streamed,
)

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH, SIZES = [0, 1, 2, 3, 0, 1, 2, 3], [20, 26, 31, 24, 40, 22, 28, 35]
PLAIN = CFL(eps1=0.3, eps2=0.6)
"""Splits the clients of TRUTH more than once, at depths 1 and 2, within 8 rounds."""
FALLING_BACK = dataclasses.replace(PLAIN, fallback=True)


def world():
    return federation_of(TRUTH, SIZES, seed=1)


@cache
def played(algorithm, rounds=9, seed=1, **options):
    clients, params = simulated(world(), linear(1))
    return play(algorithm, clients, params, rounds, spec=SPEC, seed=seed, **options)


# The root's model


def test_the_root_goes_on_as_fedavg_does_to_the_last_bit():
    goes_on, fedavg = played(FALLING_BACK), played(FedAvg())
    for state, plain in zip(goes_on.states, fedavg.states, strict=True):
        assert torch.equal(state.tree.nodes[0].model, plain.tree.nodes[0].params)
    first = goes_on.splits()[0][0]
    assert 1 < first < 8, "and it is split on the way"
    assert not torch.equal(
        goes_on.states[-1].tree.nodes[0].params, fedavg.states[-1].tree.nodes[0].params
    )


def test_nothing_else_changes():
    goes_on, plain = played(FALLING_BACK), played(PLAIN)
    assert goes_on.splits() == plain.splits() != []
    for state, expected in zip(goes_on.states, plain.states, strict=True):
        for node, other in zip(state.tree.nodes, expected.tree.nodes, strict=True):
            assert torch.equal(node.params, other.params)
            assert node.members == other.members
            assert node.cached is other.cached is None or torch.equal(node.cached, other.cached)
            assert other.continued is None
            assert (node.continued is not None) == (node.id == 0 and len(state.tree.nodes) > 1)


def test_the_root_of_rcfl_goes_on_after_the_rounds_in_parts_and_nothing_else_changes():
    clients, params = replicating(federation_of([0, 0, 0, 1, 1, 1], [90] * 6), linear())
    plain, ours = (
        play(ReplicatedCFL(fallback=each), clients, params, 9, spec=SPEC).states
        for each in (False, True)
    )
    assert [len(state.tree.nodes) for state in ours] == [1, 1, 1, 3, 3, 3, 3, 3, 3, 3]
    for state, expected in zip(ours, plain, strict=True):
        for node, other in zip(state.tree.nodes, expected.tree.nodes, strict=True):
            assert torch.equal(node.params, other.params)
            assert other.continued is None
    fedavg = FedAvg()
    together = fedavg.init(ours[3].tree.nodes[0].model, clients)
    assert torch.equal(together.tree.nodes[0].params, ours[3].tree.nodes[1].params)
    for number in range(4, 10):
        together, _ = fedavg.step(together, clients.ids, clients, RoundPlan(number, SPEC))
        assert torch.equal(ours[number].tree.nodes[0].model, together.tree.nodes[0].params)
    served = ReplicatedCFL(fallback=True).models_for(ours[-1], clients).nodes
    assert served == best_on_validation(ours[-1].tree, clients)
    assert set(served) == set(range(6))


def test_with_some_of_the_clients_the_root_goes_on_with_these():
    run = played(FALLING_BACK, rounds=12, fraction=0.5)
    for number, (before, after) in enumerate(
        zip(run.states, run.states[1:], strict=False), start=1
    ):
        calls = run.clients.asked("train", number)
        if before.tree.nodes[0].continued is not None:
            assert sorted(calls[0].ids) == list(calls[-1].ids)
            assert all(
                torch.equal(model, before.tree.nodes[0].model)
                for model in calls[-1].models.values()
            )
            assert not torch.equal(after.tree.nodes[0].model, before.tree.nodes[0].model)
    assert len(run.states[-1].tree.nodes) > 1


def test_too_few_answers_leave_the_root_as_it_is():
    clients = ScriptedClients({0: [1.0], 1: [3.0]}, {0: 1, 1: 3})
    tree = ParameterTree.star([[0], [1]], torch.zeros(1))
    this_round = RoundPlan(2, SPEC, min_clients=3)
    assert train_beside(tree, [0, 1], clients, this_round).tolist() == [0.0]
    assert train_beside(tree, [1, 0], clients, RoundPlan(2, SPEC, min_clients=2)).tolist() == [
        2.5
    ], "(1 · 1 + 3 · 3) / 4"
    tree = tree.continued(torch.ones(1))
    assert train_beside(tree, [0, 1], clients, RoundPlan(3, SPEC), weighted=False).tolist() == [
        3.0
    ], "1 + (1 + 3) / 2"


@pytest.mark.parametrize(("weighted", "expected"), [(True, 4.0), (False, 2.8)])
def test_a_cohort_counts_with_all_members_of_its_clusters(weighted, expected):
    """Of 1 and of 4 clients one each trains: (1 · 10 + 4 · 1) / 5, or by examples (2 · 10 + 4 · 1) / 6."""
    clients = ScriptedClients(
        {0: [10.0], **{client: [1.0] for client in range(1, 5)}},
        {0: 2, **dict.fromkeys(range(1, 5), 1)},
    )
    tree = ParameterTree.star([[0], [1, 2, 3, 4]], torch.zeros(1))
    assert train_beside(
        tree, [0, 3], clients, RoundPlan(2, SPEC), weighted=weighted
    ).tolist() == pytest.approx([expected])


def test_a_stream_gives_the_same():
    clients, params = simulated(world(), linear(1))
    options = {"spec": SPEC, "seed": 1, "fraction": 0.5}
    streams, plain = (
        play(FALLING_BACK, each, params, 9, **options) for each in (streamed(clients, 3), clients)
    )
    assert len(plain.states[-1].tree.nodes) > 1
    torch.testing.assert_close(
        streams.states[-1].tree.nodes[0].model, plain.states[-1].tree.nodes[0].model
    )


def test_it_stays_when_clients_are_clustered_anew():
    tree = tree_of([0, 1], [2, 3])
    group = Group((0, 2), 0, torch.ones(1), torch.zeros(2, 1))
    tree = tree.regrouped([group], params=torch.full((1,), 7.0), round_number=3, criteria={})
    assert (tree.nodes[0].params.tolist(), tree.nodes[0].model.tolist()) == ([7.0], [0.0])


# What it costs


@cache
def run_of(algorithm, model=None, **options):
    options = {"local": SPEC, "rounds": 9, "seed": 1, "engine": "loop", **options}
    return simulate(algorithm, model or linear(1), world(), **options)


def test_both_trainings_are_counted():
    run, plain = run_of(FALLING_BACK), run_of(PLAIN)
    split = next(event["round"] for event in run.events if event["kind"] == "split")
    assert run.metric_rows
    for row, other in zip(run.metric_rows, plain.metric_rows, strict=True):
        times = 2 if row["round"] > split else 1
        assert (row["bytes_up"], row["bytes_down"]) == (
            times * other["bytes_up"],
            times * other["bytes_down"],
        )


def test_both_updates_are_releases_with_noise_of_their_own():
    """Clients that learn nothing send noise alone. Were it the same twice, its means over all of them would be."""
    algorithm = CFL(eps2=1e-3, split_rounds=(1,), fallback=True)
    privacy, still = (
        DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0),
        LocalTraining(batch_size=10, lr=1e-9),
    )
    run = run_of(algorithm, rounds=2, local=still, privacy=privacy)
    assert run.summary["privacy"]["releases"] == 3
    shares = torch.tensor(
        [sum(SIZES[client] for client in leaf.members) for leaf in run.tree.leaves]
    ) / sum(SIZES)
    apart = (
        shares @ torch.stack([leaf.params for leaf in run.tree.leaves]) - run.tree.nodes[0].model
    )
    assert apart.std() > 0.3, "each mean has noise of about 1 / √8"


def test_clients_keep_what_they_trained_for_their_cluster():
    algorithm = CFL(eps2=1e-3, split_rounds=(2,))
    kept, expected = (
        run_of(
            dataclasses.replace(algorithm, fallback=fallback),
            perceptron(1),
            personal="head",
            rounds=4,
        ).kept
        for fallback in (True, False)
    )
    assert all(
        torch.equal(kept[client]["personal"], mine["personal"]) for client, mine in expected.items()
    )


# Where it goes


def test_the_model_that_went_on_is_the_roots_wherever_it_is_used(tmp_path):
    run, fedavg = run_of(FALLING_BACK), run_of(FedAvg())
    assert torch.equal(run.tree.model_for(3, level=0), fedavg.tree.nodes[0].params)
    files = [
        export_model(each, tmp_path / f"{k}.safetensors", node=0)
        for k, each in enumerate((run, fedavg))
    ]
    assert len({file.read_bytes()[-100:] for file in files}) == 1, "the same tensors"
    assert '"trained_until": 9' in files[0].with_suffix(".json").read_text()


def test_it_must_stay_finite():
    before = tree_of([0], [1])
    with pytest.raises(
        RunError, match="round 3: the model of cluster 0 has diverged: 1 of its 1 entries are NaN"
    ):
        check_models(3, before, before.continued(torch.tensor([float("nan")])))


def test_newcomers_go_where_they_go_without_it():
    newcomers = federation_of([0, 1, 2, 3], seed=1)
    with_it, without = (
        assign(run_of(algorithm, linear), newcomers, algorithm=algorithm, model=linear(1))
        for algorithm in (FALLING_BACK, PLAIN)
    )
    assert with_it.assignments == without.assignments


# The choice


def tree_of(*clusters):
    """Return a root that went on, whose model begins with 0, and a leaf for each cluster, with its number."""
    tree = ParameterTree.star(clusters, torch.arange(1.0, 1 + len(clusters))[:, None])
    return tree.continued(torch.zeros(1))


def chosen(tree, right, examples=100, silent=0):
    ids = sorted(tree.leaf_of)
    clients = ScriptedClients(
        {client: [0.0] for client in ids}, dict.fromkeys(ids, examples), right=right
    )
    return best_on_validation(tree, Silent(clients, silent))


TWO = tree_of([0, 1, 2], [3, 4, 5])
"""Two clusters of three clients each, with 100 validation examples for each client."""
TO_LEAVES = {0: 1, 1: 1, 2: 1, 3: 2, 4: 2, 5: 2}


@pytest.mark.parametrize("root", [0.1, 0.9])
def test_clients_keep_their_clusters_models_if_the_root_is_not_better(root):
    assert chosen(TWO, lambda client, model: 0.9 if model else root) == TO_LEAVES


def test_a_root_that_is_better_by_one_example_is_not_chosen():
    def right(client, model):
        return 0.91 if model == 0 and client == 0 else 0.9

    assert chosen(TWO, right) == TO_LEAVES


@pytest.mark.parametrize(
    ("differences", "leaves"),
    [
        ([1, 1, 1, 1, 1, 1], False),  # 6 examples, with a standard error of 2.4
        ([3, -1, 3, -1, 3, -1], False),  # 6 examples, with a standard error of 5.5
        ([3, -2, 3, -2, 3, -2], True),  # 3 examples, with a standard error of 6.2
        ([-1, -1, -1, -1, -1, -1], True),
    ],
)
def test_clients_go_to_the_root_together_for_one_paired_standard_error(differences, leaves):
    """The differences are the root's correct examples minus the leaves', of each client's 100 examples.

    They are too small for a cluster, or a client by itself, to change its model.
    """

    def right(client, model):
        return 0.9 if model else 0.9 + differences[client] / 100

    assert chosen(TWO, right) == (TO_LEAVES if leaves else dict.fromkeys(range(6), 0))


@pytest.mark.parametrize(("special", "chosen_model"), [(0.91, 1), (0.94, 2)])
def test_to_models_that_are_no_more_general_clients_go_for_a_bound_of_the_error(
    special, chosen_model
):
    """Right about 90 of 100: the bound for 91 is √(0.1 + 0.09) / √600 = 1.8 points, for 94 it is 1.6."""
    merits = {(c, 1): 0.9 for c in range(6)} | {(c, 2): special for c in range(6)}
    scores = Scores(merits, dict.fromkeys(range(6), 100), are_shares=True)
    first, other = dict.fromkeys(range(6), 1), dict.fromkeys(range(6), 2)
    assert choose_together(first, [other], scores) == dict.fromkeys(range(6), chosen_model)


def test_one_example_is_not_more_than_an_error_if_all_other_examples_are_right():
    """The bound of the error is then one example, too; 59/60 as a float is a bit less than it should be."""
    scores = Scores(
        {(0, 2): 1.0, (0, 1): 59 / 60 - 1e-8, (1, 2): 1.0, (1, 1): 1.0},
        {0: 60, 1: 60},
        are_shares=True,
    )
    leaves = {0: 1, 1: 1}
    assert choose_together(leaves, [{0: 2, 1: 2}], scores) == leaves


def test_of_several_choices_that_are_better_by_the_margin_all_clients_take_the_best():
    """As errors, model 0 has the best total, by one client alone; 2 and 3 are a bit better for every client."""
    merits = {(c, 1): -5.0 for c in range(4)}
    merits |= {(c, 0): -1.0 if c == 0 else -5.0 for c in range(4)}
    merits |= {(c, 2): -4.9 for c in range(4)} | {(c, 3): -4.8 for c in range(4)}
    scores = Scores(merits, dict.fromkeys(range(4), 100), are_shares=False)
    ways = [dict.fromkeys(range(4), model) for model in range(4)]
    assert choose_together(ways[1], [ways[0], ways[2], ways[3]], scores) == ways[3]
    assert choose_together(ways[1], [ways[0]], scores) == ways[1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=8))
def test_of_errors_one_standard_error_is_the_samples_standard_error_of_the_sum(differences):
    """n differences with the standard deviation s have a sum with the standard error √n·s."""
    ids = range(len(differences))
    merits = {(c, 0): float(d) for c, d in enumerate(differences)} | {(c, 1): 0.0 for c in ids}
    scores = Scores(merits, dict.fromkeys(ids, 1.0), are_shares=False)
    error = len(differences) ** 0.5 * stdev(differences)
    assume(abs(sum(differences) - error) > 0.01)
    first, other = dict.fromkeys(ids, 1), dict.fromkeys(ids, 0)
    found = choose_together(first, [other], scores)
    assert found == (other if sum(differences) > error else first)


@pytest.mark.parametrize(("root", "served"), [(0.88, 1), (0.95, 0)])
def test_one_client_goes_up_for_one_standard_error(root, served):
    """Its leaf is right about 85 of 100: the error for 88 is √(0.15 + 0.12) / 10 = 5.2 points, for 95 it is 4.5."""
    found = chosen(
        tree_of([0, 1, 2], [3, 4, 5]),
        lambda c, model: (0.85 if model else root) if c == 0 else 0.9 if model else 0.1,
    )
    assert found == {0: served, 1: 1, 2: 1, 3: 2, 4: 2, 5: 2}


def test_a_cluster_goes_down_for_two_and_its_examples_count_together():
    """Six points are less than two errors of one client, 9, and more than those of four, 4.5."""

    def right(client, model):
        return {0: 0.87, 1: 0.93, 2: 0.7}[int(model)]

    apart, others = tree_of([0], [*range(4, 12)]), tree_of([0, 1, 2, 3], [*range(4, 12)])
    assert chosen(apart, right) == dict.fromkeys([0, *range(4, 12)], 0)
    assert chosen(others, right) == {**dict.fromkeys(range(4), 1), **dict.fromkeys(range(4, 12), 0)}


def test_a_node_between_root_and_leaf_can_be_the_best():
    tree = tree_of([0, 1, 2, 3], [4, 5])
    cached = [torch.zeros(2, 1)] * 2
    tree = tree.split(
        1, [[0, 1], [2, 3]], params=torch.ones(1), cached=cached, round_number=3, criteria={}
    )
    tree = tree.with_model(3, torch.tensor([3.0])).with_model(4, torch.tensor([4.0]))
    right = {0.0: 0.3, 1.0: 0.9, 2.0: 0.8, 3.0: 0.7, 4.0: 0.7}
    assert chosen(tree, lambda client, model: right[model]) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}


class Silent(Around):
    """Clients of whom the first so many do not answer."""

    def __init__(self, clients, silent):
        super().__init__(clients)
        self.silent = silent

    def evaluate(self, ids, models, assignment, split):
        there = [
            (client, row)
            for client, row in zip(ids, assignment, strict=True)
            if client >= self.silent
        ]
        return self.clients.evaluate(
            [client for client, _ in there], models, [row for _, row in there], split
        )


def test_who_does_not_answer_goes_with_the_others():
    tree, right = (
        tree_of([0, 1, 2], [3, 4]),
        lambda client, model: 0.5 if model == 1 else 0.9 if model else 0.8,
    )
    assert chosen(tree, right, silent=1) == {0: 0, 1: 0, 2: 0, 3: 2, 4: 2}
    assert chosen(tree, lambda c, m: float("nan") if c == 0 else right(c, m)) == {
        0: 0,
        1: 0,
        2: 0,
        3: 2,
        4: 2,
    }
    assert chosen(tree, right, silent=5) == tree.leaf_of


def test_of_errors_that_are_no_shares_one_client_alone_is_no_measure():
    tree = tree_of([0, 1, 2], [3])
    errors = {0: -3.0, 1: -2.0, 2: -9.0}  # as accuracies below 0 would be
    assert chosen(tree, lambda client, model: errors[int(model)]) == {0: 1, 1: 1, 2: 1, 3: 2}
    tree = tree_of([0, 1, 2], [3, 4])
    assert chosen(tree, lambda client, model: errors[int(model)]) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0}
    tree = tree_of([0, 1, 2, 5, 6, 7, 8], [3, 4])
    assert chosen(tree, lambda client, model: errors[int(model)]) == {
        **dict.fromkeys([0, 1, 2, 5, 6, 7, 8], 1),
        **dict.fromkeys([3, 4], 0),
    }


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=16, max_size=16),
    st.lists(st.integers(1, 50), min_size=4, max_size=4),
)
def test_it_is_as_good_as_the_leaves_and_within_an_error_of_the_root_on_all_validation_examples(
    right, examples
):
    tree = tree_of([0, 1], [2, 3])
    clients = ScriptedClients(
        {client: [0.0] for client in range(4)},
        dict(enumerate(examples)),
        right=lambda c, model: right[4 * c + int(model)],
    )

    def total(served):
        return sum(examples[c] * right[4 * c + node] for c, node in served.items())

    found = total(best_on_validation(tree, clients))
    differences = [
        examples[c] * (right[4 * c] - right[4 * c + leaf]) for c, leaf in tree.leaf_of.items()
    ]
    error = sum(each**2 for each in differences) ** 0.5
    assert found >= total(tree.leaf_of) - 1e-4
    assert found >= total(dict.fromkeys(range(4), 0)) - 1.0001 * error - 1e-4
