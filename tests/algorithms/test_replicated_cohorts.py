"""Replicated clustering on cohorts: who is asked, who is tested, and which cluster a client is in once it trained."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedclade import LocalTraining, ReplicatedCFL, simulate
from fedclade.algorithms.rcfl import ReplicatedState, method
from fedclade.algorithms.rcfl.cohorts import CohortTests, _sum_bounded
from fedclade.algorithms.rcfl.data_splits import DataSplits
from fedclade.core import Node, RunInterrupted
from fedclade.core.queries import Evaluation
from fedclade.core.updates import Updates
from tests.tiny import ScriptedClients, federation_of, linear, play, splits_of

SPEC = LocalTraining(epochs=1, batch_size=8, lr=0.3)
COUNT = 240


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch):
    monkeypatch.setattr(method, "MANY_CLIENTS", 100)


@dataclass
class Cornered(ScriptedClients):
    """Clients that go half the way to the corner of their group, id modulo ``groups``, with noise of each part."""

    groups: int = 2
    shared: float = 0.0
    """Of the noise of a client's parts: a number that says how far all of them are shifted alike, by client."""
    silent: frozenset[int] = frozenset()
    """They tell no losses."""

    def corner(self, client: int) -> torch.Tensor:
        return 4 * torch.eye(12)[client % self.groups]

    def train(self, ids, models, assignment, this_round, work=None, **more):
        count = splits_of(work)
        made = []
        for client, row in zip(ids, assignment, strict=True):
            draw = torch.Generator().manual_seed(1000 * this_round.number + client)
            noise = 0.5 * torch.randn(count, 12, generator=draw)
            own = torch.randn(12, generator=torch.Generator().manual_seed(client))
            made.append((self.corner(client) - models[row]) / 2 + noise + self.shared * own)
        parts = torch.stack(made)
        losses = torch.zeros(len(ids))
        updates = Updates.received(
            ids, [9] * len(ids), parts.mean(1), 12, losses, this_round.number
        )
        return updates if count == 1 else updates.with_columns(parts=parts)

    def evaluate(self, ids, models, assignment, split):
        pairs = [(c, row) for c, row in zip(ids, assignment, strict=True) if c not in self.silent]
        losses = torch.tensor(
            [float((self.corner(c) - models[row]).norm()) for c, row in pairs], dtype=torch.float64
        )
        answered = tuple(client for client, _ in pairs)
        return Evaluation(answered, -losses[:, None], losses, torch.full((len(losses),), 9))


def cornered(count: int = COUNT, **options) -> Cornered:
    return Cornered(
        {client: [0.0] * 12 for client in range(count)}, dict.fromkeys(range(count), 60), **options
    )


def played(clients, rounds, fraction=0.1, **options):
    return play(ReplicatedCFL(**options), clients, torch.zeros(12), rounds, fraction=fraction)


def trained_in(run, number: int) -> set[int]:
    return {client for call in run.clients.asked("train", number) for client in call.ids}


def test_nobody_is_asked_but_the_cohort_and_each_is_assigned_when_it_first_trains():
    run, took = played(cornered(), 9), set[int]()
    for number in range(1, 10):
        cohort = trained_in(run, number)
        assert len(cohort) == pytest.approx(COUNT / 10, abs=2)
        took |= cohort
        tree = run.states[number].tree
        assert {client for leaf in tree.leaves for client in leaf.members} == took
        assert all(tree.leaf_of[client] == 0 for client in set(range(COUNT)) - took)
        for leaf in tree.leaves:
            assert len({client % 2 for client in leaf.members}) == 1
    assert len(took) < COUNT


def test_tested_are_a_sample_of_those_that_never_trained():
    run = played(cornered(groups=1), 3, fraction=0.3, sample=20)
    trained = set[int]()
    for number in (1, 2, 3):
        in_parts = [call for call in run.clients.asked("train", number) if splits_of(call.work) > 1]
        (tested,) = (set(call.ids) for call in in_parts)
        assert len(tested) == 20
        assert not tested & trained
        trained |= trained_in(run, number)
        event = next(event for event in run.logs[number - 1].events if event.kind == "tested")
        assert event.level == pytest.approx(0.01 / (number * (number + 1)))
    assert len(run.states[-1].tree.nodes) == 1
    assert run.states[-1].early == tuple(sorted(trained))


@pytest.mark.parametrize("parent", [None, 0])
def test_the_tests_of_a_cluster_have_all_of_the_level_and_no_more(parent):
    tests = CohortTests(DataSplits(2, 10), 32, 0.01, 7)
    leaf = Node(1, parent, (), torch.zeros(1), born=0 if parent is None else 4)
    due = [tests.get_due_test(leaf, number) for number in range(leaf.born + 1, leaf.born + 30)]
    assert [test for test in due if test] == list(range(1, len([test for test in due if test]) + 1))
    assert [age for age, test in enumerate(due, start=1) if test][-4:] == [7, 14, 21, 28]


def test_clusters_of_no_use_to_new_clients_become_one_again():
    # every client differs, so that tests find more than two clusters
    clients = cornered(groups=2, shared=1.5)
    run = played(clients, 5, fraction=0.3, sample=40)
    first = [event for event in run.logs[0].events if event.kind == "split"]
    assert len(first[0].clusters) > 2
    members = sorted(
        (leaf.members for leaf in run.states[-1].tree.leaves if leaf.members), key=len, reverse=True
    )
    assert len(members) < len(first[0].clusters)
    assert sum(map(len, members[:2])) > 0.95 * sum(map(len, members))
    for large in members[:2]:  # but for some of those that were assigned by the first updates
        groups = [sum(client % 2 == group for client in large) for group in (0, 1)]
        assert max(groups) > 0.9 * len(large)


def test_who_tells_no_losses_and_is_in_no_cluster_does_not_train():
    silent = frozenset(range(0, COUNT, 3))
    run = played(cornered(silent=silent), 4)
    known = trained_in(run, 1)
    for number in (2, 3, 4):
        assert not trained_in(run, number) & (silent - known)
    assert all(run.states[-1].tree.leaf_of[client] == 0 for client in silent - known)


def test_the_root_serves_the_mean_of_the_clusters_by_members():
    tree = played(cornered(), 3).states[-1].tree
    leaves = [leaf for leaf in tree.leaves if leaf.members]
    weights = torch.tensor([float(len(leaf.members)) for leaf in leaves])
    expected = (weights[:, None] * torch.stack([leaf.params for leaf in leaves])).sum(
        0
    ) / weights.sum()
    torch.testing.assert_close(tree.nodes[0].model, expected)


def test_up_to_so_many_clients_everybody_is_asked_as_ever(monkeypatch):
    monkeypatch.setattr(method, "MANY_CLIENTS", 20)
    assert trained_in(played(cornered(20), 1), 1) == set(range(20))


def test_the_state_survives_a_checkpoint():
    state = played(cornered(groups=1), 2).states[-1]
    again = ReplicatedState.from_tensors(state.tree, state.tensors())
    assert again.on_cohorts
    assert (again.early, again.parts, again.part_size) == (
        state.early,
        state.parts,
        state.part_size,
    )


def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path):
    federation = federation_of([client % 2 for client in range(120)], [40] * 120)

    def run(folder, stop_after=0):
        rounds = iter(range(1, 100))
        options = {
            "rounds": 5,
            "client_fraction": 0.2,
            "evaluate_every": 5,
            "local": SPEC,
            "engine": "stacked",
        }
        return simulate(
            ReplicatedCFL(),
            linear(),
            federation,
            folder=folder,
            stop=lambda: next(rounds) == stop_after,
            **options,
        )

    whole = run(tmp_path / "whole")
    with pytest.raises(RunInterrupted):
        run(tmp_path / "parts", stop_after=2)
    resumed = run(tmp_path / "parts")
    assert len(whole.tree.nodes) > 1
    assert resumed.tree.leaf_of == whole.tree.leaf_of
    for one, other in zip(resumed.tree.nodes, whole.tree.nodes, strict=True):
        torch.testing.assert_close(one.model, other.model, rtol=0, atol=0)
    assert whole.metric_rows[-1]["ari_assigned"] > whole.metric_rows[-1]["ari"]


def test_parts_are_those_of_the_half_of_the_clients_that_has_more():
    sizes = dict(enumerate([10] * 49 + [45] * 51))
    splits = DataSplits.choose_for_cohorts(sizes, 0.01, 32)
    assert splits.min_examples <= 45 < 2 * splits.min_examples
    assert DataSplits.choose_for_cohorts(dict.fromkeys(range(50), 1), 0.01, 32) is None


def test_what_one_client_says_of_its_losses_does_not_merge_clusters_or_keep_them_apart():
    honest = [-0.2, -0.3, -0.1, -0.25]
    assert _sum_bounded(honest) == pytest.approx(-0.85)
    assert _sum_bounded([*honest, 1e18]) < 0
    assert _sum_bounded([0.2, 0.3, 0.1, 0.25, -torch.inf]) > 0
    assert _sum_bounded([]) == 0
