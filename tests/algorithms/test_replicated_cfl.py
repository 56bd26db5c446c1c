"""Replicated clustering over rounds: when it checks, what it asks, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedAvg, LocalTraining, ReplicatedCFL, simulate
from fedclade.channel import ExamplePrivacy
from fedclade.core import BESIDE, ClientWork, Nothing, Round, SplitPart, Splits
from fedclade.core.queries import RoundPlan
from fedclade.core.updates import Updates
from tests.tiny import (
    ScriptedClients,
    details,
    federation_of,
    linear,
    perceptron,
    play,
    renamed,
    replicating,
    simulated,
    splits_of,
)

SPEC = LocalTraining(epochs=2, batch_size=8, lr=0.3)
EARLY = 3
"""Rounds in parts; clients go apart after the last."""

CHECKS = (6, 9, 12)
"""With ``check_every = 3``: of halves, of the parts of the first round, of halves."""


def clusters_of(state) -> set[frozenset[int]]:
    return {frozenset(leaf.members) for leaf in state.tree.leaves if leaf.members}


def told(played, kind) -> list[tuple[int, dict]]:
    return [
        (number, details(event))
        for number, log in enumerate(played.logs, start=1)
        for event in log.events
        if event.kind == kind
    ]


@dataclass
class Groups(ScriptedClients):
    """Clients that pull towards the corner of their group, with noise that is drawn anew for each half and round."""

    groups: dict[int, tuple[int, ...]] | None = None
    """By the round from which it holds: the group of each client."""
    silent: tuple[int, ...] = ()
    noise: float = 0.4
    today: int = 0
    """The latest round in which clients were asked: data are those of today, whatever round draws are those of."""

    def group(self, client: int) -> int:
        return self.groups[max(start for start in self.groups if start <= self.today)][client]

    def train(self, ids, models, assignment, this_round, work=None, **more):
        self.today = max(self.today, this_round.number)
        count = splits_of(work)
        if count == 1:
            deltas = torch.stack([self.delta(client, this_round.number, -1) for client in ids])
            return Updates.received(
                ids, [1] * len(ids), deltas, 40, torch.zeros(len(ids)), this_round.number
            )
        ids, parts = ([client for client in ids if client not in self.silent], range(count))
        made = [
            torch.stack([self.delta(client, this_round.number, part) for part in parts])
            for client in ids
        ]
        parts = torch.stack(made) if made else torch.zeros(0, 2, 40)
        sizes = [1] * len(ids)
        mean = Updates.received(
            ids, sizes, parts.mean(1), 40, torch.zeros(len(ids)), this_round.number
        )
        return mean.with_columns(parts=parts)

    def delta(self, client: int, number: int, part: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 * number + 10 * client + part + 1)
        return torch.eye(40)[self.group(client)] * 4 + self.noise * torch.randn(40, generator=draw)


def groups(*changes: tuple[int, str], silent=(), examples=9) -> Groups:
    """Return clients by the digits of their groups from each round on."""
    by_round = {start: tuple(map(int, digits)) for start, digits in changes}
    everybody = range(len(changes[0][1]))
    return Groups(
        dict.fromkeys(everybody, [0.0] * 40),
        dict.fromkeys(everybody, examples),
        groups=by_round,
        silent=silent,
    )


def played(clients, rounds, **options):
    return play(ReplicatedCFL(check_every=3), clients, torch.zeros(40), rounds, **options)


TWO = "0000000011111111"


def test_at_first_everybody_trains_in_parts_and_later_on_checks_ask_everybody_besides():
    run = played(groups((1, "0" * 16)), CHECKS[1])
    for number in range(2, CHECKS[1]):
        *besides, training = run.clients.asked("train", number)
        assert len(besides) == (number == CHECKS[0])
        assert (splits_of(training.work) > 1) == (number <= EARLY)
        assert (training.work.compared_splits is not None) == (number in (1, EARLY)), (
            "nothing is found out in the second round"
        )
        assert set(training.ids) == set(range(16))
    in_parts, again = run.clients.asked("train", 1)
    # that of the second check, at the same model and with the same draws
    assert (in_parts.round, in_parts.work.data) == (again.round, again.work.data)
    assert in_parts.work.data == Splits(2, 4)
    (halves, _) = run.clients.asked("train", CHECKS[0])
    assert (halves.work.data, halves.round.purpose) == (Splits(2), "replicate")


def test_with_a_part_of_the_clients_all_are_asked_in_the_first_round_and_then_as_often_as_adds_little():
    run = played(groups((1, TWO)), 30, fraction=0.25)
    (first,) = run.clients.asked("train", 1)[:1]
    assert set(first.ids) == set(range(16))
    assert clusters_of(run.states[1]) == {frozenset(range(8)), frozenset(range(8, 16))}
    checked = [number for number, _ in told(run, "checked")]
    assert checked == [21]  # 12 + 16 clients asked besides are 0.35 of 4 · 20 that trained
    assert run.states[-1].asked == 12 + 16
    assert run.states[-1].trained == 4 * 30


def test_on_one_distribution_it_is_fedavg_after_the_rounds_in_parts():
    clients, params = replicating(federation_of([0] * 6, [30] * 6), perceptron())
    ours = play(ReplicatedCFL(check_every=3), clients, params, 12, spec=SPEC).states
    assert len(ours[-1].tree.nodes) == 1
    fedavg, state = FedAvg(), ours[EARLY]
    for number in range(EARLY + 1, 13):
        state, _ = fedavg.step(state, clients.ids, clients, RoundPlan(number, SPEC))
    assert torch.equal(ours[-1].tree.nodes[0].params, state.tree.nodes[0].params)


def test_the_model_moves_by_the_mean_of_all_parts_alike():
    federation = federation_of([0] * 4, [30, 44, 60, 30])
    clients, params = replicating(federation, linear())
    state = play(ReplicatedCFL(), clients, params, 1, spec=SPEC).states[1]
    assert (state.parts, state.part_size) == (3, 10)
    made = []
    for k in range(3):
        part, local = Splits(3, 10).split(k, SPEC)
        work = ClientWork(data=part, store=Nothing())
        asked = Round(1, local, purpose=f"train {k}")
        made.append(clients.train(range(4), params[None], [0] * 4, asked, work).required_deltas)
    torch.testing.assert_close(state.tree.nodes[0].params, params + torch.stack(made).mean((0, 1)))


def test_clusters_are_found_in_the_first_rounds():
    truth = [0, 1, 2, 3] * 4
    clients, params = replicating(federation_of(truth, [60] * 16), linear(), "stacked")
    run = play(ReplicatedCFL(check_every=3), clients, params, EARLY, spec=SPEC)
    assert clusters_of(run.states[-1]) == {frozenset(range(k, 16, 4)) for k in range(4)}
    ((number, event),) = told(run, "regrouped")
    assert number == EARLY
    assert event["p_value"] <= event["level"] == pytest.approx(0.01 / 2)
    assert event["gain"] > 0 == event["gain_before"]
    assert 0 < event["gamma"] < 2
    assert sorted(map(sorted, event["clusters"])) == [list(range(k, 16, 4)) for k in range(4)]


@pytest.mark.parametrize(
    "truth", [(0, 1), (0, 0, 1, 1), (0, 0, 0, 0, 0, 1), (0, 0, 1, 1, 2, 2, 3, 3)], ids=str
)
def test_few_clients_and_single_clients_are_told_apart(truth):
    clients, params = replicating(federation_of(truth, [90] * len(truth)), linear(), "stacked")
    state = play(ReplicatedCFL(), clients, params, EARLY, spec=SPEC).states[-1]
    assert clusters_of(state) == {
        frozenset(i for i, k in enumerate(truth) if k == label) for label in truth
    }


def test_few_clients_that_went_apart_are_looked_into_once_more():
    run = played(groups((1, "00000011"), (EARLY + 1, "00111122"), examples=40), EARLY + 2)
    assert clusters_of(run.states[EARLY]) == {frozenset(range(6)), frozenset({6, 7})}
    assert clusters_of(run.states[EARLY + 1]) == {
        frozenset({0, 1}),
        frozenset({2, 3, 4, 5}),
        frozenset({6, 7}),
    }
    parted, whole = run.logs[EARLY].events
    assert (parted.kind, parted.node, parted.level) == ("regrouped", 1, pytest.approx(0.01 * 0.01))
    assert sorted(parted.clusters) == [(0, 1), (2, 3, 4, 5)]
    assert (whole.kind, whole.node, whole.clusters) == ("tested", 2, ((6, 7),))
    (training,) = run.clients.asked("train", EARLY + 1)
    assert splits_of(training.work) == 4, "it costs no more training"
    (training,) = run.clients.asked("train", EARLY + 2)
    assert splits_of(training.work) == 1


def test_what_a_second_look_finds_goes_on_from_its_cluster_and_is_known_by_the_updates_of_the_first():
    run = played(groups((1, "00000011"), (EARLY + 1, "00111122"), examples=40), EARLY + 1)
    first, tree = run.states[EARLY].tree, run.states[-1].tree
    root, was = first.nodes[0], {node: first.nodes[node] for node in (1, 2)}
    assert (tree.nodes[0].split_in, tree.nodes[0].params.tolist()) == (EARLY, root.params.tolist())
    deltas = torch.stack(
        [
            torch.stack(
                [run.clients.clients.delta(client, EARLY + 1, part) for part in range(4)]
            ).mean(0)
            for client in range(8)
        ]
    )
    moved = {node: leaf.params + deltas[list(leaf.members)].mean(0) for node, leaf in was.items()}
    joint = (6 * moved[1] + 2 * moved[2]) / 8
    pull = {1: 0.1 * 0.9, 2: 0.1 * 0.9, 3: 0.1}  # new clusters share a tenth of the way
    for leaf in tree.leaves:
        parent = 2 if 6 in leaf.members else 1
        torch.testing.assert_close(
            leaf.params, moved[parent] + pull[leaf.id] * (joint - moved[parent])
        )
        rows = [was[parent].members.index(client) for client in leaf.members]
        assert torch.equal(leaf.cached, was[parent].cached[rows])
    assert [leaf.born for leaf in tree.leaves] == [EARLY - 1, EARLY - 1, EARLY]


@pytest.mark.parametrize(
    ("digits", "options"),
    [("0000000011111111", {}), ("00000000", {}), ("00001111", {"fraction": 0.5}), ("0123", {})],
    ids=["many clients", "one cluster", "a part of the clients", "clusters of one"],
)
def test_nobody_looks_a_second_time(digits, options):
    run = played(groups((1, digits), examples=80), EARLY + 1, **options)
    assert len(clusters_of(run.states[-1])) == len(set(digits))
    assert all(splits_of(call.work) == 1 for call in run.clients.asked("train", EARLY + 1))


def test_a_second_look_leaves_clusters_with_too_few_answers_whole():
    clients = groups((1, "00000011"), (EARLY + 1, "00111122"), examples=40)
    algorithm, first = ReplicatedCFL(check_every=3), played(clients, EARLY)
    state, log = algorithm.step(
        first.states[-1], range(8), clients, RoundPlan(EARLY + 1, SPEC, min_clients=3)
    )
    events = [(event.kind, event.node) for event in log.events]
    assert ("regrouped", 1) in events
    assert ("postponed", 2) in events
    assert clusters_of(state) == {frozenset({0, 1}), frozenset({2, 3, 4, 5}), frozenset({6, 7})}


def test_new_clusters_go_on_from_the_joint_model_and_keep_the_updates_that_they_were_found_by():
    run = played(groups((1, TWO)), EARLY)
    before, tree = run.states[-2].tree.nodes[0].params, run.states[-1].tree
    assert torch.equal(tree.nodes[0].params, before)
    deltas = torch.stack(
        [
            torch.stack([run.clients.clients.delta(client, EARLY, part) for part in (0, 1)]).mean(0)
            for client in range(16)
        ]
    )
    for leaf in tree.leaves:
        torch.testing.assert_close(leaf.params, before + deltas.mean(0))
        torch.testing.assert_close(leaf.cached, deltas[list(leaf.members)])


def test_clusters_stay_as_long_as_nothing_changes():
    run = played(groups((1, TWO)), CHECKS[2])
    assert [number for number, _ in told(run, "regrouped")] == [EARLY]
    assert told(run, "tested") == []
    assert [number for number, _ in told(run, "checked")] == [*CHECKS]
    assert [leaf.id for leaf in run.states[-1].tree.leaves] == [1, 2]


def test_only_tests_take_of_the_level_and_their_shares_add_up_to_it():
    run = played(groups((1, "0" * 16)), CHECKS[2])
    levels = [event["level"] for kind in ("tested", "checked") for _, event in told(run, kind)]
    # Halves take of their quarter in every check; parts that are as they were take nothing of theirs.
    assert levels == pytest.approx([0.01 / 2, 0.01 / 8, 0.01 / 8, 0.01 / 24])
    left = [event.get("level_left") for _, event in told(run, "checked")]
    assert left == [pytest.approx(0.01 / 8), None, pytest.approx(0.01 / 12)]
    run = played(groups((1, TWO), (5, "0011001100110011")), CHECKS[1])
    assert [(state.halves, state.changes) for state in run.states[EARLY::3]] == [
        (0, 0),
        (1, 0),
        (1, 1),
    ]


def test_a_change_of_few_clients_is_found_when_parts_are_asked_for_again():
    """Two and two: shuffling four clients has three outcomes; as often as nothing has changed nothing is tested."""
    few = groups((1, "0011" + "0" * 12), (8, "0101" + "0" * 12))
    clients = Groups(
        dict.fromkeys(range(4), [0.0] * 40), dict.fromkeys(range(4), 90), groups=few.groups
    )
    run = played(clients, CHECKS[1])
    assert clusters_of(run.states[CHECKS[0]]) == {frozenset({0, 1}), frozenset({2, 3})}
    assert clusters_of(run.states[CHECKS[1]]) == {frozenset({0, 2}), frozenset({1, 3})}
    assert [run.states[number].changes for number in (EARLY, CHECKS[0], CHECKS[1])] == [0, 0, 1]
    ((_, quiet),) = [each for each in told(run, "checked") if each[0] == CHECKS[0]]
    assert quiet["p_value"] == 1.0
    assert quiet["gain"] == quiet["gain_before"] > 0


def test_a_level_that_cannot_be_reached_is_said(caplog):
    clients, params = replicating(federation_of([0, 1], [4, 4]), linear())
    ReplicatedCFL().init(params, clients)
    assert (
        "rcfl cannot find clusters at algorithm.level = 0.01 in the first rounds: from 2 splits"
        in caplog.text
    )
    assert "no p-value is below 0.33, but 0.0025 is needed" in caplog.text


def test_a_client_that_changes_moves():
    run = played(groups((1, TWO), (5, "1" + TWO[1:])), CHECKS[0])
    assert clusters_of(run.states[-1]) == {frozenset(range(1, 8)), frozenset({0, *range(8, 16)})}
    assert [leaf.id for leaf in run.states[-1].tree.leaves] == [1, 2]


def test_clusters_that_differ_no_more_become_one_and_share_a_model():
    run = played(groups((1, TWO), (5, "0" * 16)), CHECKS[0])
    assert clusters_of(run.states[-1]) == {frozenset(range(16))}
    before = run.states[-2].tree
    joint = torch.stack([leaf.params for leaf in before.leaves]).mean(0)
    deltas = torch.stack([run.clients.clients.delta(client, CHECKS[0], -1) for client in range(16)])
    (leaf,) = (leaf for leaf in run.states[-1].tree.leaves if leaf.members)
    torch.testing.assert_close(leaf.params, joint + deltas.mean(0))


def test_who_falls_back_goes_on_with_the_model_for_all_when_all_become_one():
    clients = groups((1, TWO), (5, "0" * 16))
    algorithm = ReplicatedCFL(check_every=3, fallback=True)
    run = play(algorithm, clients, torch.zeros(40), CHECKS[0] + 1)
    beside = [
        len([call for call in run.clients.asked("train", n) if call.round.purpose == BESIDE])
        for n in range(3, 8)
    ]
    assert beside == [0, 1, 1, 0, 0]
    for_all = run.states[CHECKS[0] - 1].tree.nodes[0].model
    for number in CHECKS[0], CHECKS[0] + 1:
        tree = run.states[number].tree
        (leaf,) = (leaf for leaf in tree.leaves if leaf.members)
        deltas = torch.stack([clients.delta(client, number, -1) for client in range(16)])
        for_all = for_all + deltas.mean(0)
        torch.testing.assert_close(leaf.params, for_all)
        assert torch.equal(tree.nodes[0].model, leaf.params)


def test_a_cluster_whose_members_come_to_differ_is_split_again():
    run = played(groups((1, TWO), (5, "0000000011112222")), CHECKS[0])
    assert clusters_of(run.states[-1]) == {
        frozenset(range(8)),
        frozenset(range(8, 12)),
        frozenset(range(12, 16)),
    }
    tree = run.states[-1].tree
    assert {node.parent for node in tree.nodes[1:]} == {0}
    assert tree.nodes[-1].born == CHECKS[0] - 1  # it trains in the round of the check


def test_who_does_not_answer_waits_and_joins_with_its_next_update():
    clients = groups((1, TWO), silent=(0, 15))
    run = played(clients, EARLY + 1)
    assert run.states[EARLY].tree.stragglers == {0: (0, 15)}
    assert clusters_of(run.states[-1]) == {frozenset(range(8)), frozenset(range(8, 16))}
    assert sorted(event["clients"] for _, event in told(run, "joined")) == [[0], [15]]


def test_a_client_with_one_example_is_in_no_part_and_joins_later():
    clients, params = replicating(federation_of([0, 1] * 6, [60] * 11 + [1]), linear(), "stacked")
    run = play(ReplicatedCFL(check_every=3), clients, params, EARLY + 1, spec=SPEC)
    in_parts, alone = run.clients.asked("train", 1)
    assert in_parts.ids == tuple(range(11))
    assert (alone.ids, splits_of(alone.work)) == ((11,), 1)
    assert run.states[EARLY].tree.stragglers == {0: (11,)}
    assert {frozenset(range(0, 12, 2)), frozenset(range(1, 11, 2))} == {
        c - {11} for c in clusters_of(run.states[-1])
    }
    assert run.states[-1].tree.stragglers == {}


def test_clients_of_one_example_each_are_left_together(caplog):
    clients, params = replicating(federation_of([0, 1, 0], [1, 1, 1]), linear())
    run = play(ReplicatedCFL(check_every=3), clients, params, CHECKS[0], spec=SPEC)
    assert told(run, "postponed") == [
        (number, {"clients": 0, "needed": 2}) for number in (3, CHECKS[0])
    ]
    assert len(run.states[-1].tree.nodes) == 1
    assert (
        "rcfl cannot split the data of these clients, since fewer than two clients have two training examples"
        in caplog.text
    )


def test_with_too_few_answers_nothing_is_decided():
    clients = groups((1, TWO), silent=tuple(range(15)))
    run = played(clients, CHECKS[0])
    assert told(run, "postponed") == [
        (number, {"clients": 1, "needed": 2}) for number in (EARLY, CHECKS[0])
    ]
    algorithm, state = ReplicatedCFL(check_every=3), run.states[CHECKS[0] - 1]
    clients.silent = tuple(range(10))
    _, log = algorithm.step(state, range(16), clients, RoundPlan(CHECKS[0], SPEC, min_clients=8))
    assert details(log.events[0]) == {"clients": 6, "needed": 8}


@pytest.mark.parametrize("silent", [(0, 1, 2, 3), (2, 3)])
def test_who_could_not_go_apart_after_the_first_rounds_does_at_the_next_check(silent):
    by_round = {1: (0, 0, 1, 1)}
    clients = Groups(
        dict.fromkeys(range(4), [0.0] * 40), dict.fromkeys(range(4), 90), groups=by_round
    )
    algorithm = ReplicatedCFL(check_every=3)
    state = played(clients, EARLY - 1).states[-1]
    clients.silent = silent
    state, _ = algorithm.step(state, range(4), clients, RoundPlan(EARLY, SPEC))
    assert len(state.tree.nodes) == 1
    clients.silent = ()
    for number in (4, 5, CHECKS[0]):
        state, _ = algorithm.step(state, range(4), clients, RoundPlan(number, SPEC))
    assert clusters_of(state) == {frozenset({0, 1}), frozenset({2, 3})}


def test_renaming_clients_changes_nothing_but_names():
    federation = federation_of([0, 1] * 6, [60] * 12)
    new_ids = {i: (5 * i + 3) % 12 + 100 for i in range(12)}
    trees = []
    for each in (federation, renamed(federation, new_ids)):
        clients, params = replicating(each, linear(), "stacked")
        trees.append(
            play(ReplicatedCFL(check_every=3), clients, params, EARLY + 1, spec=SPEC).states[-1]
        )
    assert clusters_of(trees[1]) == {
        frozenset(new_ids[i] for i in cluster) for cluster in clusters_of(trees[0])
    }
    assert len(clusters_of(trees[0])) == 2


def test_a_check_less_than_every_round_is_an_error():
    with pytest.raises(ConfigError, match=r"algorithm\.check_every should be at least 1, got 0"):
        ReplicatedCFL(check_every=0)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1])
def test_a_level_out_of_range_is_an_error(level):
    with pytest.raises(
        ConfigError, match=rf"algorithm.level should be greater than 0 and less than 1, got {level}"
    ):
        ReplicatedCFL(level=level)


def test_halves_are_trained_on_as_clients_with_that_data_would():
    federation = federation_of([0, 1, 0], [21, 30, 8])
    this_round = RoundPlan(4, SPEC, seed=3)
    for half in (0, 1):
        work = ClientWork(data=SplitPart(half, 2), store=Nothing())
        clients, params = simulated(federation, linear())
        mine = clients.train([0, 1, 2], params[None], [0, 0, 0], this_round, work)
        kept = [
            replace(c, train=c.train[work.data.of_client(len(c.train), c.key, 3, 4)])
            for c in federation.clients
        ]
        there, _ = simulated(replace(federation, clients=tuple(kept)), linear())
        expected = there.train([0, 1, 2], params[None], [0, 0, 0], this_round)
        assert torch.equal(mine.required_deltas, expected.required_deltas)
        assert mine.sizes.tolist() == expected.sizes.tolist() == [[11, 15, 4], [10, 15, 4]][half]


def test_parts_are_disjoint_cover_everything_and_are_drawn_anew():
    thirds = [SplitPart(k, 3) for k in range(3)]
    parts = [
        each.of_client(10, key=7, seed=1, number=number).tolist()
        for number in (1, 2)
        for each in thirds
    ]
    assert sorted(i for part in parts[:3] for i in part) == list(range(10))
    assert [len(part) for part in parts[:3]] == [4, 3, 3]
    assert parts[:3] != parts[3:]
    assert parts[0] != thirds[0].of_client(10, key=8, seed=1, number=1).tolist()


def test_clients_that_hold_copies_of_their_examples_are_not_parted_for_that():
    """Of these seeds all were, into five, seven and six clusters, when copies lay in any part."""
    spec = LocalTraining(epochs=1, batch_size=8, lr=0.1)
    for seed in (0, 3, 6):
        federation = federation_of([0] * 8, [80] * 8, seed=seed)
        copied = [replace(client, train=np.tile(client.train, 4)) for client in federation.clients]
        clients, params = replicating(
            replace(federation, clients=tuple(copied)), linear(), "stacked"
        )
        run = play(ReplicatedCFL(), clients, params, EARLY, spec=spec)
        assert clusters_of(run.states[-1]) == {frozenset(range(8))}


def with_examples_repeated(federation, different: int, times):
    """Return clients with their first examples repeated a number of times each, after the others."""
    changed = [
        replace(
            client,
            train=np.concatenate(
                [client.train[:different], np.repeat(client.train[: len(times)], times)]
            ),
        )
        for client in federation.clients
    ]
    return replace(federation, clients=tuple(changed))


def run_in_parts(federation, rounds: int = 1, **options):
    clients, params = replicating(federation, linear(), "stacked")
    spec = LocalTraining(batch_size=8, lr=0.1)
    return play(ReplicatedCFL(**options), clients, params, rounds, spec=spec)


@pytest.mark.parametrize(
    ("times", "different", "is_warned"),
    [
        ([19] * 5, 100, False),  # five examples are oversampled, which is recognized
        ([1, 1, 1, 2, 2, 3, 4, 5, 7, 8] * 3, 100, True),  # and here it is not
        ([19] * 5, 5, False),  # all examples occur often: a distribution of few values
        ([1], 100, False),  # too few equal examples
    ],
)
def test_a_run_warns_of_examples_that_may_be_oversampled(
    times: list[int], different: int, is_warned: bool, caplog: pytest.LogCaptureFixture
):
    """Copies of an example in several parts make the parts of a client similar to each other."""
    run_in_parts(with_examples_repeated(federation_of([0] * 8, [100] * 8), different, times))
    warned = [text for text in caplog.messages if "if the data was oversampled" in text]
    assert len(warned) == is_warned
    if is_warned:
        assert warned[0].startswith(
            "102 of the 202 training examples of client 0 are equal to other examples"
        )
        assert "remove the copies from the data, or name a column" in warned[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_oversampled_examples_separate_no_clients(seed: int):
    """Copies in all parts of a client made every client a cluster by itself."""
    federation = federation_of([0] * 8, [100] * 8, seed=seed)
    oversampled = with_examples_repeated(federation, 100, [19] * 5)
    run = run_in_parts(oversampled, EARLY)
    assert clusters_of(run.states[-1]) == {frozenset(range(8))}


def test_equal_inputs_with_different_targets_give_no_warning(caplog: pytest.LogCaptureFixture):
    federation = federation_of([0] * 8, [200] * 8, test=2)
    pool = federation.pool
    x = pool.x.clone()
    for client in federation.clients:  # 70 rows occur once, and 30 three or more times
        x[client.train[100:]] = x[client.train[np.arange(100) % 30]]
    run_in_parts(replace(federation, pool=replace(pool, x=x)))
    assert not caplog.messages
    y = pool.y.clone()
    for client in federation.clients:
        y[client.train[100:]] = y[client.train[np.arange(100) % 30]]
        x[client.train[195:]] = x[client.train[:1]]
        y[client.train[195:]] = y[client.train[:1]]
        x[client.train[100:110]] = x[client.train[90:100]]
        y[client.train[100:110]] = y[client.train[90:100]]
    run_in_parts(replace(federation, pool=replace(pool, x=x, y=y)))
    assert len(caplog.messages) == 1


def test_oversampled_examples_hide_no_clusters():
    federation = federation_of([0, 1] * 4, [100] * 8)
    run = run_in_parts(with_examples_repeated(federation, 100, [19] * 5), EARLY)
    assert clusters_of(run.states[-1]) == {frozenset(range(0, 8, 2)), frozenset(range(1, 8, 2))}


def visits(seed: int, *, in_order: bool = True, patients: int = 20):
    """Return clients of one distribution with five similar rows of each patient, and their groups."""
    federation = federation_of([0] * 8, [100] * 8, seed=seed, test=1)
    draw = np.random.default_rng(seed)
    x, y = federation.pool.x.clone(), federation.pool.y.clone()
    groups = np.arange(len(x)) + 1000
    for client in federation.clients:
        rows = client.train if in_order else draw.permutation(client.train)
        of_patient = np.arange(100) * patients // 100
        first = rows[np.searchsorted(of_patient, of_patient)]
        noise = torch.from_numpy(draw.normal(scale=0.3, size=(100, x.shape[1])).astype(np.float32))
        x[rows], y[rows] = x[first] + noise, y[first]
        groups[rows] = of_patient
    return replace(federation, pool=replace(federation.pool, x=x, y=y)), groups


ADJACENT = "adjacent training examples of client 0 are more similar than other examples"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_of_a_group_separate_no_clients_if_the_groups_are_known(
    seed: int, caplog: pytest.LogCaptureFixture
):
    federation, groups = visits(seed)
    unknown = run_in_parts(federation, EARLY)
    assert len(clusters_of(unknown.states[-1])) > 1
    warned = [text for text in caplog.messages if text.startswith(ADJACENT)]
    assert len(warned) == 1, "one client is reported"
    assert "as data.groups" in warned[0]
    caplog.clear()
    known = replace(federation, pool=replace(federation.pool, related=groups))
    run = run_in_parts(known, 9, check_every=3)
    assert clusters_of(run.states[-1]) == {frozenset(range(8))}
    assert not caplog.messages


def test_groups_are_not_used_with_differential_privacy_of_examples(
    caplog: pytest.LogCaptureFixture,
):
    federation, groups = visits(0)
    known = replace(federation, pool=replace(federation.pool, related=groups))
    groups[federation.clients[0].train] = 0
    privacy = ExamplePrivacy(clip_norm=1.0, noise_multiplier=1.0)
    settings = {"rounds": 1, "engine": "stacked", "privacy": privacy}
    simulate(ReplicatedCFL(), linear(), known, **settings)
    warned = [text for text in caplog.messages if "do not respect data.groups" in text]
    assert len(warned) == 1
    caplog.clear()
    simulate(ReplicatedCFL(), linear(), federation, **settings)
    assert "data.groups" not in caplog.text


def test_rows_in_a_random_order_give_no_warning(caplog: pytest.LogCaptureFixture):
    for seed in range(5):
        run_in_parts(federation_of([0] * 8, [100] * 8, seed=seed))
    federation, _ = visits(0, in_order=False)
    run_in_parts(federation)
    assert not caplog.messages


def test_clients_with_fewer_than_eight_groups_are_not_tested(caplog: pytest.LogCaptureFixture):
    federation, groups = visits(0)
    few = federation.clients[2].train
    groups[few] = np.arange(100) // 15  # seven groups
    known = replace(federation, pool=replace(federation.pool, related=groups))
    assert known.undivided == {2}
    clients, params = replicating(known, linear(), "stacked")
    spec = LocalTraining(batch_size=8, lr=0.1)
    run = play(ReplicatedCFL(), clients, params, EARLY, spec=spec)
    (training, smallest) = run.clients.asked("train", 1)
    assert (training.ids, smallest.ids) == ((0, 1, 3, 4, 5, 6, 7), (2,))
    for client in federation.clients[1:]:
        groups[client.train] = np.arange(100) // 15
    run_in_parts(replace(federation, pool=replace(federation.pool, related=groups)))
    assert "rcfl cannot split the data of these clients" in caplog.text
    assert "or 8 groups of dependent examples" in caplog.text


def test_a_run_too_short_to_go_apart_is_told_so(caplog):
    simulate(ReplicatedCFL(), linear(), federation_of([0, 1]), rounds=2, engine="loop")
    assert "rcfl separates clients after 3 rounds, but this run has only 2" in caplog.text
