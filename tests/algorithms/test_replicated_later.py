"""Replicated clustering in long runs: tests by e-values, at doubling intervals, and what a checkpoint keeps of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade import CFL, ReplicatedCFL
from fedclade.algorithms.rcfl import ReplicatedState, replicate_test
from fedclade.algorithms.rcfl.replicate_test import (
    _choose_by_splits,
    cluster_again_by_splits,
    cluster_by_halves,
    cluster_by_splits,
)
from fedclade.clustering import PartFinding, RepeatedTest, compute_part_similarity
from fedclade.core import Updates
from fedclade.core.queries import RoundPlan
from tests.algorithms.test_replicated_cfl import EARLY, SPEC, TWO, clusters_of, groups, played, told
from tests.tiny import SpyClients, play, splits_of

LATE = 200
"""A number of tests after which a p-value would need millions of shuffles."""

ALL_IN_ONE = {frozenset(range(16))}
HALF_AND_HALF = {frozenset(range(8)), frozenset(range(8, 16))}


def updates_of(truth, splits: int, noise: float, seed: int) -> Updates:
    """Return updates from splits: of unit means at right angles, and noise of this length."""
    draw = np.random.default_rng(seed)
    shape = (len(truth), splits, 30)
    rows = np.eye(30)[list(truth)][:, None] + noise * draw.normal(size=shape) / 30**0.5
    ones = torch.ones(len(truth))
    return Updates.of(
        ids=tuple(range(len(truth))),
        sizes=ones,
        losses=ones,
        norms=ones,
        n_parameters=30,
        parts=torch.from_numpy(rows),
    )


def by_halves(truth, splits, noise, seed, *, present=None, tests=LATE, total=0.0, level=0.0025):
    updates = updates_of(truth, splits, noise, seed)
    repeated = RepeatedTest(level, tests=tests, total=total)
    now = np.zeros(len(truth), dtype=np.int64) if present is None else np.array(present)
    return cluster_by_halves(updates, now, repeated, np.random.default_rng(seed))


def by_splits(truth, splits, noise, seed, *, present=None, tests=LATE, total=0.0, fresh=False):
    parts = updates_of(truth, splits, noise, seed).parts
    cosines = torch.from_numpy(compute_part_similarity(parts))
    repeated = RepeatedTest(0.0025, tests=tests, total=total, views=2)
    now = np.zeros(len(truth), dtype=np.int64) if present is None else np.array(present)
    draw = np.random.default_rng(seed)
    return cluster_again_by_splits(
        cosines, splits, now, repeated, draw, level_inside=0.01, fresh=fresh
    )


# Verdicts


def test_a_late_check_at_a_trained_model_finds_clusters_by_its_e_value():
    truth = [0, 1, 2, 3] * 5
    verdict = by_halves(truth, 4, 0.6, 0)
    assert [set(np.flatnonzero(verdict.labels == k)) for k in range(4)] == [
        set(range(k, 20, 4)) for k in range(4)
    ]
    assert verdict.e_value is not None
    assert verdict.e_value > 1e6
    assert verdict.p_value <= verdict.level == pytest.approx(0.0025 / 4)
    # evidence begins again with other clusters, and the count goes on
    assert verdict.repeated == RepeatedTest(0.0025, tests=LATE + 1)


def test_a_late_check_of_changed_splits_finds_clusters_by_its_e_value():
    verdict = by_splits([0, 1, 2, 3] * 5, 4, 0.6, 0)
    assert verdict.labels.max() == 3
    assert verdict.e_value is not None
    assert verdict.p_value <= verdict.level == pytest.approx(0.0025 / 3)


@pytest.mark.parametrize("check", [by_halves, by_splits])
def test_without_groups_a_late_check_finds_nothing_and_the_sum_goes_on(check):
    for seed in range(10):
        verdict = check([0] * 12, 4, 2.0, seed)
        assert not verdict.labels.any()
        assert verdict.e_value is not None
        assert verdict.repeated.total == pytest.approx(
            replace(verdict.repeated, total=0.0, tests=LATE).add(verdict.e_value).total
        )


def test_weak_evidence_adds_up_over_checks_to_what_one_check_does_not_show():
    truth, found_at = [0, 1] * 8, []
    test = RepeatedTest(0.0025, tests=20)
    for seed in range(12):
        updates = updates_of(truth, 4, 2.0, seed)
        now = np.zeros(16, dtype=np.int64)
        verdict = cluster_by_halves(updates, now, test, np.random.default_rng(seed))
        if verdict.labels.any():
            found_at.append(seed)
            break
        test = verdict.repeated
        assert test.tests == 21 + seed
    assert found_at


def test_a_large_sum_does_not_split_in_a_check_that_shows_nothing():
    split = [by_halves([0] * 12, 4, 2.0, seed, total=1e9).labels.any() for seed in range(30)]
    assert sum(split) <= 3  # an e-value of 1 or more has a chance of about a twentieth


def test_where_no_decision_depends_on_it_nothing_is_shuffled_but_the_test_counts():
    truth = [0, 1] * 8
    for check, splits in ((by_halves, 4), (by_splits, 4)):
        verdict = check(truth, splits, 0.5, 1, present=truth)
        assert verdict.labels.tolist() == truth
        assert verdict.e_value is None
        assert verdict.repeated.tests == LATE + 1
        assert verdict.repeated.total == 0.0


def test_fresh_data_multiplies_the_sum():
    fresh = by_splits([0] * 12, 4, 2.0, 3, total=2.0, fresh=True)
    added = by_splits([0] * 12, 4, 2.0, 3, total=2.0)
    start = RepeatedTest(0.0025, tests=LATE, total=2.0, views=2)
    assert fresh.repeated == start.add(fresh.e_value, fresh=True)
    assert added.repeated == start.add(added.e_value)
    assert fresh.repeated != added.repeated


def test_checks_draw_ten_thousand_shuffles_at_most(monkeypatch):
    class Counting(np.random.Generator):
        drawn = 0

        def random(self, size=None, *more, **options):
            self.drawn += size[0] if isinstance(size, tuple) else 0
            return super().random(size, *more, **options)

    truth, one = [0, 1] * 8, np.zeros(16, dtype=np.int64)
    for tests in (0, 1, 2, 3, 40):
        draw = Counting(np.random.PCG64(0))
        splits = 2 if tests < 3 else 4
        repeated = RepeatedTest(0.0025, tests=tests)
        cluster_by_halves(updates_of(truth, splits, 0.5, 0), one, repeated, draw)
        assert 9000 < draw.drawn <= 10_000
        draw = Counting(np.random.PCG64(0))
        cosines = torch.from_numpy(compute_part_similarity(updates_of(truth, 3, 0.5, 0).parts))
        repeated = RepeatedTest(0.0025, tests=tests, views=2)
        cluster_again_by_splits(cosines, 3, one, repeated, draw, level_inside=0.01)
        inside = 2 * 2 * 400  # in both views each of two clusters is tested by itself
        assert 9000 < draw.drawn <= 10_000 + inside


def test_of_the_present_clusters_a_few_hundred_shuffles_suffice(monkeypatch):
    draw = np.random.default_rng(0)
    calls: list[int] = []
    find = replicate_test.find_by_parts

    def look(*arguments, **options):
        found = find(*arguments, **options)
        calls.append(round(2 / found.p_value))
        return found

    monkeypatch.setattr(replicate_test, "find_by_parts", look)
    truth = [0, 1] * 8
    cosines = torch.from_numpy(compute_part_similarity(updates_of(truth, 3, 0.5, 0).parts))
    repeated = RepeatedTest(0.0025, views=2)
    for present in (truth, [0] * 16):
        now = np.array(present)
        cluster_again_by_splits(cosines, 3, now, repeated, draw, level_inside=0.01)
    assert calls == [401, 5001]


def test_a_check_states_the_smallest_group_that_it_could_find():
    truth = [0, 1] * 10
    first = by_halves(truth, 2, 0.5, 0, tests=0)
    assert first.smallest_group == 3
    assert by_halves(truth, 2, 0.5, 0, tests=10).smallest_group == 0
    assert by_halves(truth, 4, 0.5, 0, tests=10).smallest_group == 3
    # p-values of halves shuffle up to 500 clients: of 200, a pair is as rare as 1 in 19,900 orders.
    assert by_halves([0, 1] * 100, 2, 0.5, 0, tests=0).smallest_group == 2
    assert by_splits(truth, 3, 0.5, 0, tests=0).smallest_group == 1
    cosines = torch.from_numpy(compute_part_similarity(updates_of(truth, 3, 0.5, 0).parts))
    once = cluster_by_splits(cosines, 3, 0.005, np.random.default_rng(0), level_inside=0.01)
    assert (once.smallest_group, once.repeated) == (1, None)


def test_clusters_that_gain_nothing_are_merged_unless_a_test_still_shows_them(monkeypatch):
    present = [0, 1] * 8
    merged = by_halves([0] * 16, 4, 1.0, 0, present=present)
    assert not merged.labels.any()
    assert merged.gain_before <= 0
    # Noise makes each cluster cost more than it removes, but shuffled clients gain far less.
    monkeypatch.setattr(
        replicate_test,
        "compute_gain",
        lambda s, labels, *_: -0.1 - abs(float(np.mean(np.array(labels) != np.array(present)))),
    )
    stays = by_halves([0] * 16, 4, 1.0, 0, present=present)
    assert stays.labels.tolist() == present


def test_changed_splits_are_merged_unless_a_test_still_shows_the_clusters(monkeypatch):
    present = np.array([0, 1] * 8)
    merged = by_splits([0] * 16, 4, 1.0, 0, present=present)
    assert not merged.labels.any()

    def compute_gains(self, labels):
        gain = -0.1 - float(np.mean(labels != present)) if labels.any() else 0.0
        return [gain, gain]

    monkeypatch.setattr(PartFinding, "compute_gains", compute_gains)
    stays = by_splits([0] * 16, 4, 1.0, 0, present=present)
    assert stays.labels.tolist() == present.tolist()


# Runs


def late(state, **more):
    return replace(state, halves=LATE, changes=LATE, **more)


def continued(algorithm, clients, state, first: int, last: int):
    """Continue with a state from a round to another; return states and logs by round."""
    states, logs = {}, {}
    for number in range(first, last + 1):
        clients.today = number
        plan = RoundPlan(number, SPEC)
        state, logs[number] = algorithm.step(state, range(16), clients, plan)
        states[number] = state
    return states, logs


def test_groups_that_appear_late_are_found_by_the_next_check():
    clients = groups((1, "0" * 16), (EARLY + 2, TWO), examples=160)
    algorithm = ReplicatedCFL(check_every=3)
    state = late(played(clients, EARLY).states[-1])
    states, logs = continued(algorithm, clients, state, EARLY + 1, 6)
    assert clusters_of(states[5]) == ALL_IN_ONE
    assert clusters_of(states[6]) == HALF_AND_HALF
    (event,) = logs[6].events
    assert (event.kind, event.tests) == ("regrouped", LATE + 1)
    assert event.e_value > 1e5
    assert 0 < event.level_left < 0.01 / 16
    assert states[6].halves_evidence == 0.0
    # clients have enough examples for four splits
    checks = [call for call in clients_asked(clients, algorithm, state) if splits_of(call.work) > 1]
    assert [splits_of(call.work) for call in checks] == [4]


def clients_asked(clients, algorithm, state):
    """Return the queries of the check in round 6."""
    spy = SpyClients(clients)
    algorithm.step(state, range(16), spy, RoundPlan(6, SPEC))
    return spy.asked("train", 6)


def test_a_resumed_run_has_the_same_sums_to_the_last_bit():
    clients = groups((1, "0" * 16), examples=160)
    algorithm = ReplicatedCFL(check_every=3)
    state = late(played(clients, EARLY).states[-1], halves_evidence=1 / 3)
    states, _ = continued(algorithm, clients, state, EARLY + 1, 12)
    assert states[6].halves_evidence != states[12].halves_evidence
    for cut in (5, 6, 9):
        before = states[cut]
        restored = ReplicatedState.from_tensors(before.tree, before.tensors())
        again, _ = continued(algorithm, clients, restored, cut + 1, 12)
        one, other = states[12].tensors(), again[12].tensors()
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_as_long_as_nothing_changes_checks_are_at_doubling_intervals_and_query_nobody():
    clients = groups((1, "0" * 16), (80, "0" * 15 + "1"), examples=160)
    run = play(ReplicatedCFL(check_every=1), clients, torch.zeros(40), 86)
    tested = [
        number
        for number in range(EARLY + 1, 87)
        if any(call.round.purpose == "replicate" for call in run.clients.asked("train", number))
    ]
    occasions = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    quiet = [EARLY - 1 + 2 * occasion for occasion in occasions]  # every other check
    assert [number for number in tested if number < 80] == quiet
    # after data changed, the next occasion is used
    changed = [number for number, event in told(run, "regrouped") if number > EARLY]
    assert changed[0] - 80 <= 1
    assert min(number for number in tested if number > changed[0]) <= changed[0] + 2


def test_clients_that_left_start_no_test_and_arrivals_do():
    clients = groups((1, "0" * 16), examples=160)
    algorithm = ReplicatedCFL(check_every=3)
    state = played(clients, EARLY + 3).states[-1]
    clients.silent = (15,)
    states, logs = continued(algorithm, clients, state, 7, 9)
    assert states[9].changes == 0
    assert logs[9].events[0].tests is None
    clients.silent = ()
    forgotten = replace(
        states[9], tested=states[9].tested[:-1], sketches=states[9].sketches[:-1], checks=1
    )
    states, logs = continued(algorithm, clients, forgotten, 10, 12)
    assert states[12].changes == 1
    assert states[12].tested == tuple(range(16))
    assert logs[12].events[0].tests == 1


def test_updates_that_move_by_rounding_start_no_test_and_are_compared_with_the_first():
    clients = groups((1, "0" * 16), examples=160)
    exact = clients.delta

    def rounded(client, number, part):
        seed = 7 * clients.today + client
        noise = torch.randn(40, generator=torch.Generator().manual_seed(seed))
        return exact(client, number, part) + 0.02 * clients.today / 12 * noise

    clients.delta = rounded
    run = play(ReplicatedCFL(check_every=3), clients, torch.zeros(40), 12)
    assert [state.changes for state in run.states] == [0] * 13
    assert torch.equal(run.states[-1].sketches, run.states[EARLY].sketches)


def test_halves_that_can_show_nothing_any_more_are_not_asked_for():
    """Nine examples allow two splits only; after a few tests no e-value would be large enough."""
    clients = groups((1, "0" * 16))
    algorithm = ReplicatedCFL(check_every=3)
    for tests, queried in ((2, True), (LATE, False)):
        state = replace(played(clients, EARLY).states[-1], halves=tests)
        assert (
            bool([c for c in clients_asked(clients, algorithm, state) if splits_of(c.work) > 1])
            == queried
        )
        after, _ = algorithm.step(state, range(16), clients, RoundPlan(6, SPEC))
        assert after.halves == tests + queried


def test_cfl_splits_late_groups_by_e_values_and_keeps_the_tests_of_each_cluster():
    clients = groups((1, "0" * 16), (20, TWO), examples=160)
    algorithm = CFL(criterion="replicated")
    run = play(algorithm, clients, torch.zeros(40), 21)
    before = run.states[-2]
    assert before.tests.tolist() == [2]
    events = told(run, "tested")
    assert [event.get("tests") for _, event in events] == [None, 1, 2, 3]
    tree = run.states[-1].tree
    assert {frozenset(leaf.members) for leaf in tree.leaves} == HALF_AND_HALF
    assert run.states[-1].tests.tolist() == [3, 0, 0]
    # much later
    state = replace(
        before, tests=torch.tensor([LATE]), evidence=torch.zeros(1, dtype=torch.float64)
    )
    clients.today = 21
    after, log = algorithm.step(state, range(16), clients, RoundPlan(21, SPEC))
    assert {frozenset(leaf.members) for leaf in after.tree.leaves} == HALF_AND_HALF
    tested = next(event for event in log.events if event.kind == "tested")
    assert (tested.tests, tested.e_value > 1e5) == (LATE + 1, True)
    restored = type(after).from_tensors(after.tree, after.tensors())
    assert torch.equal(restored.tests, after.tests)
    assert torch.equal(restored.evidence, after.evidence)


class OneClusterFound:
    """A finding of one cluster, for clients whose present clusters gain in the second view alone."""

    view = 0
    labels = np.zeros(4, dtype=np.int64)

    def compute_gains(self, labels: np.ndarray) -> list[float]:
        return [-0.1, 0.1] if labels.any() else [0.0, 0.0]


def test_clusters_that_gain_in_one_view_stay():
    present = np.array([0, 0, 1, 1])
    labels, gain, gain_before = _choose_by_splits(
        OneClusterFound(), present, np.random.default_rng(0)
    )
    assert labels.tolist() == present.tolist()
    assert (gain, gain_before) == (0.0, -0.1)
