"""Replicated clustering over rounds: when it checks, what it asks, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedclade import ConfigError, FedAvg, LocalTraining, ReplicatedCFL, simulate
from fedclade.core.queries import Round
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
)

SPEC = LocalTraining(epochs=2, batch_size=8, lr=0.3)
CHECKS = (3, 6, 9)


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

    def group(self, client: int, number: int) -> int:
        return self.groups[max(start for start in self.groups if start <= number)][client]

    def train(self, ids, models, assignment, this_round, anchors=None):
        parts = (-1,) if this_round.replicates == 1 else range(this_round.replicates)
        answering = [client for client in ids if len(parts) == 1 or client not in self.silent]
        made = [torch.stack([self.delta(client, this_round.number, part) for client in answering]) for part in parts]
        deltas = torch.cat(made, dim=1)
        sizes = [1] * len(answering)
        return Updates.received(answering, sizes, deltas, 40, torch.zeros(len(answering)), this_round.number)

    def delta(self, client: int, number: int, part: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 * number + 10 * client + part + 1)
        return torch.eye(40)[self.group(client, number)] * 4 + self.noise * torch.randn(40, generator=draw)


def groups(*changes: tuple[int, str], silent=()) -> Groups:
    """Return 16 clients, and the digits of their groups from each round on."""
    by_round = {start: tuple(map(int, digits)) for start, digits in changes}
    everybody = range(16)
    return Groups(dict.fromkeys(everybody, [0.0] * 40), dict.fromkeys(everybody, 9), groups=by_round, silent=silent)


def played(clients, rounds, **options):
    return play(ReplicatedCFL(check_every=3), clients, torch.zeros(40), rounds, **options)


TWO = "0000000011111111"


def test_checks_come_at_their_rounds_and_ask_everybody_once():
    run = played(groups((1, "0" * 16)), CHECKS[1], fraction=0.25)
    asked = [len(run.clients.asked("train", number)) for number in range(1, CHECKS[1] + 1)]
    assert [number for number, calls in enumerate(asked, start=1) if calls == 2] == [*CHECKS[:2]]
    assert all(calls == 1 for number, calls in enumerate(asked, start=1) if number not in CHECKS)
    check, training = run.clients.asked("train", CHECKS[0])
    assert set(check.ids) == set(range(16))
    assert len(training.ids) == 4


def test_on_one_distribution_it_is_fedavg():
    clients, params = replicating(federation_of([0] * 6, [30] * 6), perceptron())
    ours, fedavg = (
        play(each, clients, params, 12, spec=SPEC).states[-1].tree for each in (ReplicatedCFL(check_every=3), FedAvg())
    )
    assert torch.equal(ours.nodes[0].params, fedavg.nodes[0].params)
    assert len(ours.nodes) == 1


def test_clusters_are_found_at_the_first_check():
    truth = [0, 1, 2, 3] * 4
    clients, params = replicating(federation_of(truth, [60] * 16), linear())
    run = play(ReplicatedCFL(check_every=3), clients, params, CHECKS[0], spec=SPEC)
    assert clusters_of(run.states[-1]) == {frozenset(range(k, 16, 4)) for k in range(4)}
    ((number, event),) = told(run, "regrouped")
    assert number == CHECKS[0]
    assert event["p_value"] <= event["level"] == pytest.approx(0.01 / 2)
    assert event["gain"] > 0 == event["gain_before"]
    assert 0 < event["gamma"] < 2
    assert sorted(map(sorted, event["clusters"])) == [list(range(k, 16, 4)) for k in range(4)]


def test_new_clusters_start_from_the_joint_model_at_which_they_were_found():
    run = played(groups((1, TWO)), CHECKS[0])
    before, tree = run.states[-2].tree.nodes[0].params, run.states[-1].tree
    assert torch.equal(tree.nodes[0].params, before)
    for leaf in tree.leaves:
        deltas = torch.stack([run.clients.clients.delta(client, CHECKS[0], -1) for client in leaf.members])
        torch.testing.assert_close(leaf.params, before + deltas.mean(0))
        assert leaf.cached.shape == (8, 40)


def test_clusters_stay_as_long_as_nothing_changes():
    run = played(groups((1, TWO)), CHECKS[2])
    assert [number for number, _ in told(run, "regrouped")] == [CHECKS[0]]
    assert [number for number, _ in told(run, "checked")] == [*CHECKS[1:]]
    assert [leaf.id for leaf in run.states[-1].tree.leaves] == [1, 2]


def test_levels_add_up_to_the_level():
    run = played(groups((1, "0" * 16)), CHECKS[2])
    levels = [event["level"] for _, event in told(run, "checked")]
    assert levels == pytest.approx([0.01 / 2, 0.01 / 6, 0.01 / 12])


def test_a_client_that_changes_moves():
    run = played(groups((1, TWO), (5, "1" + TWO[1:])), CHECKS[1])
    assert clusters_of(run.states[-1]) == {frozenset(range(1, 8)), frozenset({0, *range(8, 16)})}
    assert [leaf.id for leaf in run.states[-1].tree.leaves] == [1, 2]


def test_clusters_that_differ_no_more_become_one_and_share_a_model():
    run = played(groups((1, TWO), (5, "0" * 16)), CHECKS[1])
    assert clusters_of(run.states[-1]) == {frozenset(range(16))}
    before = run.states[-2].tree
    joint = torch.stack([leaf.params for leaf in before.leaves]).mean(0)
    deltas = torch.stack([run.clients.clients.delta(client, CHECKS[1], -1) for client in range(16)])
    (leaf,) = (leaf for leaf in run.states[-1].tree.leaves if leaf.members)
    torch.testing.assert_close(leaf.params, joint + deltas.mean(0))


def test_a_cluster_whose_members_come_to_differ_is_split_again():
    run = played(groups((1, TWO), (5, "0000000011112222")), CHECKS[1])
    assert clusters_of(run.states[-1]) == {frozenset(range(8)), frozenset(range(8, 12)), frozenset(range(12, 16))}
    tree = run.states[-1].tree
    assert {node.parent for node in tree.nodes[1:]} == {0}
    assert tree.nodes[-1].born == CHECKS[1] - 1  # it trains in the round of the check


def test_who_does_not_answer_a_check_waits_and_joins_with_its_next_update():
    clients = groups((1, TWO), silent=(0, 15))
    algorithm = ReplicatedCFL(check_every=3)
    state = played(clients, CHECKS[0] - 1).states[-1]
    state, _ = algorithm.step(state, range(1, 15), clients, Round(CHECKS[0], SPEC))
    assert state.tree.stragglers == {0: (0, 15)}
    state, log = algorithm.step(state, range(16), clients, Round(CHECKS[0] + 1, SPEC))
    assert clusters_of(state) == {frozenset(range(8)), frozenset(range(8, 16))}
    assert [sorted(details(event)["clients"]) for event in log.events] == [[0], [15]]


def test_a_client_with_one_example_is_not_asked_for_halves():
    clients, params = replicating(federation_of([0, 1] * 6, [60] * 11 + [1]), linear())
    run = play(ReplicatedCFL(check_every=3), clients, params, CHECKS[0], spec=SPEC)
    assert run.clients.asked("train", CHECKS[0])[0].ids == tuple(range(11))
    assert {frozenset(range(0, 12, 2)), frozenset(range(1, 11, 2))} == {c - {11} for c in clusters_of(run.states[-1])}
    assert run.states[-1].tree.stragglers == {}


def test_clients_of_one_example_each_are_left_together():
    clients, params = replicating(federation_of([0, 1, 0], [1, 1, 1]), linear())
    run = play(ReplicatedCFL(check_every=3), clients, params, CHECKS[0], spec=SPEC)
    assert told(run, "postponed") == [(CHECKS[0], {"clients": 0, "needed": 2})]
    assert len(run.states[-1].tree.nodes) == 1


def test_with_too_few_answers_a_check_is_left_out():
    clients = groups((1, TWO), silent=tuple(range(15)))
    run = played(clients, CHECKS[0])
    assert told(run, "postponed") == [(CHECKS[0], {"clients": 1, "needed": 2})]
    algorithm, state = ReplicatedCFL(check_every=3), run.states[CHECKS[0] - 1]
    clients.silent = tuple(range(10))
    _, log = algorithm.step(state, range(16), clients, Round(CHECKS[0], SPEC, min_clients=8))
    assert details(log.events[0]) == {"clients": 6, "needed": 8}


def test_renaming_clients_changes_nothing_but_names():
    federation = federation_of([0, 1] * 6, [60] * 12)
    new_ids = {i: (5 * i + 3) % 12 + 100 for i in range(12)}
    trees = []
    for each in (federation, renamed(federation, new_ids)):
        clients, params = replicating(each, linear())
        trees.append(play(ReplicatedCFL(check_every=3), clients, params, CHECKS[0] + 1, spec=SPEC).states[-1])
    assert clusters_of(trees[1]) == {frozenset(new_ids[i] for i in cluster) for cluster in clusters_of(trees[0])}
    assert len(clusters_of(trees[0])) == 2


def test_a_check_less_than_every_round_is_an_error():
    with pytest.raises(ConfigError, match=r"algorithm\.check_every should be at least 1, got 0"):
        ReplicatedCFL(check_every=0)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1])
def test_a_level_out_of_range_is_an_error(level):
    with pytest.raises(ConfigError, match=rf"algorithm.level should be greater than 0 and less than 1, got {level}"):
        ReplicatedCFL(level=level)


def test_halves_are_trained_on_as_clients_with_that_data_would():
    federation = federation_of([0, 1, 0], [21, 30, 8])
    this_round = Round(4, SPEC, seed=3)
    for half in (0, 1):
        asked = replace(this_round, part=(half, 2))
        clients, params = simulated(federation, linear())
        mine = clients.train([0, 1, 2], params[None], [0, 0, 0], asked)
        kept = [replace(c, train=c.train[asked.examples(len(c.train), c.key)]) for c in federation.clients]
        there, _ = simulated(replace(federation, clients=tuple(kept)), linear())
        expected = there.train([0, 1, 2], params[None], [0, 0, 0], this_round)
        assert torch.equal(mine.required_deltas, expected.required_deltas)
        assert mine.sizes.tolist() == expected.sizes.tolist() == [[11, 15, 4], [10, 15, 4]][half]


def test_parts_are_disjoint_cover_everything_and_are_drawn_anew():
    rounds = [Round(number, SPEC, seed=1, part=(k, 3)) for number in (1, 2) for k in range(3)]
    parts = [each.examples(10, key=7).tolist() for each in rounds]
    assert sorted(i for part in parts[:3] for i in part) == list(range(10))
    assert [len(part) for part in parts[:3]] == [4, 3, 3]
    assert parts[:3] != parts[3:]
    assert parts[0] != Round(1, SPEC, seed=1, part=(0, 3)).examples(10, key=8).tolist()


def test_a_run_too_short_for_a_check_is_told_what_to_lower(caplog):
    simulate(ReplicatedCFL(check_every=3), linear(), federation_of([0, 1]), rounds=2, engine="loop")
    assert "ReplicatedCFL needs 3 rounds until it has clustered the clients, and this run has 2" in caplog.text
    assert "set more rounds, or a smaller algorithm.check_every\n" in caplog.text
