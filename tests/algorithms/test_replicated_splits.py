"""CFL that splits by the test of replicated clustering: the paper's tree, and no thresholds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclade import CFL, ConfigError, FedAvg, LocalTraining, simulate
from fedclade.algorithms.rcfl.data_splits import DataSplits
from fedclade.algorithms.rcfl.replicate_test import ReplicateTest, join_to_two
from fedclade.algorithms.split_criterion import CFLState
from fedclade.core import MANY_IDS, ClientIds, ParameterTree, RoundPlan
from fedclade.core.client_ids import ArrayMapping, Positions
from tests.tiny import Asked, details, federation_of, linear, perceptron, play, replicating

SPEC = LocalTraining(epochs=2, batch_size=8, lr=0.3)
TESTED = CFL(criterion="replicated")


def played(truth, rounds, *, algorithm=TESTED, size=90, **options):
    clients, params = replicating(federation_of(truth, [size] * len(truth)), linear(), "stacked")
    return play(algorithm, clients, params, rounds, spec=SPEC, **options)


def told(run, *kinds):
    return [
        (n, event)
        for n, log in enumerate(run.logs, start=1)
        for event in log.events
        if event.kind in kinds
    ]


def test_four_clusters_are_parted_two_by_two():
    run = played([0, 1, 2, 3] * 3, 9)
    tree = run.states[-1].tree
    assert {leaf.members for leaf in tree.leaves} == {tuple(range(k, 12, 4)) for k in range(4)}
    assert len(tree.nodes) == 7
    assert [len(tree.children(node.id)) for node in tree.nodes if node.split_in] == [2, 2, 2]
    for number, split in told(run, "split"):
        node, before = tree.nodes[split.node], run.states[number - 1].tree.nodes[split.node]
        assert number - node.born == 3
        assert split.p_value <= 0.005
        assert split.gain > 0
        assert node.criteria == {"p_value": split.p_value, "gain": split.gain}
        assert torch.equal(node.params, before.params), (
            "that at which the updates were made (eq. 47)"
        )
        first, second = tree.children(node.id)
        moved = run.states[number].tree.nodes[first.id].params
        assert torch.equal(moved, run.states[number].tree.nodes[second.id].params)
        assert not torch.equal(moved, node.params), "they go on from θ + Δθ"
        assert [len(child.cached) for child in (first, second)] == [
            len(first.members),
            len(second.members),
        ]


@pytest.mark.parametrize("clients", [7, MANY_IDS + 3])
def test_clients_with_enough_examples_are_the_same_in_a_dict_and_in_arrays(clients):
    examples = np.arange(clients) % 5 + 18
    ids = np.arange(clients) * 2
    in_arrays = ArrayMapping(Positions(ids), examples)
    in_a_dict = dict(zip(ids.tolist(), examples.tolist(), strict=True))
    expected = [client for client, count in in_a_dict.items() if count >= 20]
    splits = DataSplits(2, 10)
    assert splits.select_able(in_arrays, ClientIds(ids)) == expected
    assert splits.select_able(in_a_dict, set(in_a_dict)) == expected
    assert splits.select_able(in_arrays, ids.tolist()[:3]) == [c for c in expected if c < 6]


def count_and_size(call: Asked) -> tuple[int, int]:
    """Return the number of parts of its data on which each client trained separately, and their size."""
    splits = call.work.splits
    return (1, 0) if splits is None else (splits.count, splits.size)


def test_every_cluster_trains_in_parts_at_first_and_is_asked_for_halves_every_seventh_round():
    run = played([0] * 4 + [1] * 4, 17)

    def kinds_asked(number: int) -> set[tuple[bool, bool]]:
        """Return the kinds of queries of a round: do parts have a size, and are there several?"""
        asked = [count_and_size(call) for call in run.clients.asked("train", number)]
        return {(size > 0, count > 1) for count, size in asked}

    in_parts, whole, halves = (True, True), (False, False), (False, True)
    expected = {number: {in_parts} if number < 7 else {whole} for number in range(1, 18)}
    expected |= {10: {whole, halves}, 17: {whole, halves}}
    assert {number: kinds_asked(number) for number in range(1, 18)} == expected
    compared = {
        number
        for number in range(1, 7)
        for call in run.clients.asked("train", number)
        if call.work.compared_splits is not None
    }
    assert compared == {3, 6}
    tests = [(number, event.node, event.level) for number, event in told(run, "tested")]
    by_node = [
        (number, node, share)
        for number, share in ((6, 0.005), (10, 0.0025), (17, 0.005 / 6))
        for node in (1, 2)
    ]
    expected = [(3, 0, 0.005), *by_node]
    assert [test[:2] for test in tests] == [each[:2] for each in expected]
    assert [test[2] for test in tests] == pytest.approx([each[2] for each in expected])


def test_clients_of_one_distribution_stay_together_and_train_as_fedavg_after_the_rounds_in_parts():
    clients, params = replicating(federation_of([0] * 6, [30] * 6), perceptron())
    ours = play(TESTED, clients, params, 9, spec=SPEC).states
    assert len(ours[-1].tree.nodes) == 1
    fedavg = FedAvg()
    state = fedavg.init(ours[3].tree.nodes[0].params, clients)
    for number in range(4, 10):
        state, _ = fedavg.step(state, clients.ids, clients, RoundPlan(number, SPEC))
    assert torch.equal(ours[-1].tree.nodes[0].params, state.tree.nodes[0].params)


def test_with_some_of_the_clients_all_members_are_asked_once_and_halves_as_much_less_often():
    run = played([0] * 4 + [1] * 4, 32, fraction=0.5)
    (first,) = run.clients.asked("train", 1)
    assert list(first.ids) == list(range(8))
    assert [(number, event.node) for number, event in told(run, "split")] == [(1, 0)]
    assert {leaf.members for leaf in run.states[1].tree.leaves} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    tested = sorted({number for number, event in told(run, "tested") if event.node})
    assert tested == [2, 15, 29], (
        "in parts at age 1, then at ages 14 and 28, as half of the members train in a round"
    )


def test_a_split_by_halves_leaves_its_children_to_halves():
    """Their parent has learnt examples by heart, so that parts of one client would be alike for that."""
    clients, params = replicating(federation_of([0] * 8 + [1] * 8, [90] * 16), linear(), "stacked")
    run = play(FedAvg(), clients, params, 5, spec=SPEC)
    state, asked = TESTED.init(run.states[-1].tree.nodes[0].params, clients), list[int]()
    for number in range(6, 11):
        state, log = TESTED.step(state, clients.ids, run.clients, RoundPlan(number, SPEC))
        asked += [count_and_size(call)[1] for call in run.clients.asked("train", number)]
        if number == 7:
            assert [event.kind for event in log.events] == ["tested", "split"]
    assert {leaf.members for leaf in state.tree.leaves} == {tuple(range(8)), tuple(range(8, 16))}
    assert set(asked) == {0}


def test_small_clusters_are_rejected_where_they_are_not_wanted():
    run = played([0] * 7 + [1], 3, algorithm=CFL(criterion="replicated", min_cluster_size=2))
    ((number, rejected),) = told(run, "rejected")
    assert (number, rejected.because) == (3, "fewer than 2 members")
    assert sorted(map(len, rejected.clusters)) == [1, 7]
    assert len(run.states[-1].tree.nodes) == 1


def test_clusters_that_are_most_alike_stay_together():
    labels = np.array([0, 1, 2, 0, 1, 2])
    similarity = np.full((6, 6), 0.1)
    similarity[np.ix_([1, 4], [2, 5])] = similarity[np.ix_([2, 5], [1, 4])] = 0.5
    two = join_to_two(labels, similarity)
    assert two.tolist() == [1, 0, 0, 1, 0, 0], "the larger is the first"


def test_who_cannot_be_tested_stays(caplog):
    """Of two clients with one example each neither parts nor halves can be made."""
    run = played([0, 1], 8, size=1)
    assert "cfl cannot split the data of these clients" in caplog.text
    assert len(run.states[-1].tree.nodes) == 1
    ((number, event),) = told(run, "postponed")
    assert (number, details(event)) == (7, {"clients": 0, "needed": 2})


def test_a_cluster_of_clients_too_small_for_parts_trains_on_all_they_have():
    """Parts are as large as nearly all clients can make them; client 19 has fewer, and a cluster of its own."""
    clients, params = replicating(
        federation_of([0] * 19 + [1], [60] * 19 + [9]), linear(), "stacked"
    )
    criterion = ReplicateTest(level=0.01)
    tree = ParameterTree.star([range(19), (19,)], params)
    state = criterion.init(CFLState(tree, torch.zeros(len(tree.nodes))), clients)
    assert state.parts > 0
    trained = criterion.train(state, range(20), clients, RoundPlan(3, SPEC), weighted=True)
    assert [(cluster.node, len(cluster.updates.ids)) for cluster in trained] == [(1, 19), (2, 1)]
    examined = [
        criterion.examine(cluster, state, clients, RoundPlan(3, SPEC)) for cluster in trained
    ]
    assert [len(cluster.events) for cluster in examined] == [1, 0]
    whole = clients.train([19], params[None], [0], RoundPlan(3, SPEC))
    torch.testing.assert_close(trained[1].updates.deltas, whole.deltas)


def test_few_clients_that_claim_few_examples_do_not_make_the_parts_small():
    honest = dict.fromkeys(range(10), 100)
    assert DataSplits.choose(honest | {0: 2, 1: 2}, 0.01) == DataSplits.choose(
        dict.fromkeys(range(8), 100), 0.01
    )
    assert DataSplits.choose(honest | dict.fromkeys(range(4), 2), 0.01) == DataSplits.choose(
        dict.fromkeys(range(6), 100), 0.01
    )


@pytest.mark.parametrize(
    "setting",
    [
        {"eps1": 0.1},
        {"eps2": 2.0},
        {"gamma_max": 0.1},
        {"split_rounds": (3,)},
        {"similarity": "gradients"},
    ],
    ids=str,
)
def test_thresholds_of_the_other_criterion_are_refused(setting):
    (name,) = setting
    with pytest.raises(
        ConfigError, match=rf"algorithm\.{name} .*left out, since criterion = 'replicated'"
    ):
        CFL(criterion="replicated", **setting)


def test_another_criterion_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.criterion should be 'thresholds' or 'replicated', or .*, got 'norms'",
    ):
        CFL(criterion="norms")


def test_a_run_of_it_falls_back_and_tells_what_it_found():
    federation = federation_of([0, 0, 0, 1, 1, 1], [90] * 6)
    run = simulate(
        CFL(criterion="replicated", fallback=True),
        linear(),
        federation,
        local=SPEC,
        rounds=4,
        engine="loop",
    )
    assert run.tree.nodes[0].continued is not None
    assert [event["kind"] for event in run.events] == ["tested", "split"]
