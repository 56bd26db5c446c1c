"""CFL's switches between Algorithm 5 and Algorithms 2 and 3, against a literal recursion, on clients in closed form."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedclade import CFL, ConfigError, LocalTraining
from fedclade.algorithms import CFLState
from fedclade.config import check_config
from fedclade.core.queries import RoundPlan
from fedclade.core.updates import Updates
from tests.reference.cfl_recursive import Clustering
from tests.tiny import Fake, play

START = np.array([0.4, -0.3, 0.2, 0.1])
CENTRES = np.array(
    [[3.0, 1.0, 0.0, 0.0], [3.0, -1.0, 0.0, 0.0], [-3.0, 1.0, 0.0, 0.0], [-3.0, -1.0, 0.0, 0.0]]
)
ALL = frozenset(range(8))
EPS = {"eps1": 0.05, "eps2": 0.15}


@dataclass
class Quadratic:
    """A client of risk ½ Σ h_k (θ_k − a_k)², which takes three steps of gradient descent at a step size of 0.1."""

    size: int
    a: np.ndarray
    h: np.ndarray

    def gradient(self, theta):
        return self.h * (theta - self.a)

    def update(self, theta):
        end = theta
        for _ in range(3):
            end = end - 0.1 * self.gradient(end)
        return end - theta


def clients_of(seed: int) -> dict[int, Quadratic]:
    """Return eight clients, two of each of four kinds; two and two kinds are alike."""
    draw = np.random.default_rng(seed)
    kinds = CENTRES[np.arange(8) % 4] + 0.05 * draw.normal(size=(8, 4))
    curvatures = draw.uniform(0.5, 1.5, size=(8, 4))
    sizes = draw.integers(10, 40, size=8).tolist()
    return {i: Quadratic(sizes[i], kinds[i], curvatures[i]) for i in range(8)}


class InClosedForm(Fake):
    """The library's clients of these."""

    def __init__(self, clients: dict[int, Quadratic]) -> None:
        self.of = clients
        self.ids = tuple(clients)
        self.sizes = {i: client.size for i, client in clients.items()}

    def train(self, ids, models, assignment, this_round, work=None, **more):
        return self.replies(
            ids, models, assignment, this_round, lambda client, theta: client.update(theta)
        )

    def gradients(self, ids, models, assignment, this_round, **more):
        return self.replies(
            ids, models, assignment, this_round, lambda client, theta: -client.gradient(theta)
        )

    def replies(self, ids, models, assignment, this_round, reply):
        rows = [
            reply(self.of[i], models[row].numpy()) for i, row in zip(ids, assignment, strict=True)
        ]
        sizes, losses = [self.sizes[i] for i in ids], torch.zeros(len(ids))
        return Updates.received(
            ids, sizes, torch.from_numpy(np.stack(rows)), 4, losses, this_round.number
        )


def played(algorithm: CFL, rounds: int = 60, seed: int = 0):
    return play(algorithm, InClosedForm(clients_of(seed)), torch.from_numpy(START), rounds)


def recursion(seed: int = 0, **settings) -> Clustering:
    found = Clustering(clients_of(seed), **{**EPS, "latest": True, **settings})
    found.run(START, ALL)
    return found


def clusters(tree) -> set[frozenset[int]]:
    return {frozenset(leaf.members) for leaf in tree.leaves}


def assert_equal(run, expected: Clustering) -> None:
    """Clusters, models, what nodes and edges keep, and the rounds of splits and of the last training of each."""
    tree = run.states[-1].tree
    assert len(expected.split_in) >= 3
    assert clusters(tree) == set(expected.done_in)
    for client, leaf in tree.leaf_of.items():
        np.testing.assert_allclose(tree.nodes[leaf].params, expected.theta[client], atol=1e-9)
    assert {
        frozenset().union(*parts): number for number, _, parts in run.splits()
    } == expected.split_in
    for node in tree.nodes:
        if node not in tree.leaves:
            cluster = frozenset(node.members)
            np.testing.assert_allclose(node.params, expected.stationary[cluster], atol=1e-9)
            for child in tree.children(node.id):
                cached = [expected.edges[cluster][i] for i in child.members]
                np.testing.assert_allclose(child.cached, np.stack(cached), atol=1e-9)
    for cluster, last in expected.done_in.items():
        assert last_training(run, min(cluster)) == last


def last_training(run, client: int) -> int:
    return max(
        call.number for call in run.clients.calls if call.what == "train" and client in call.ids
    )


SWITCHES = {
    "Algorithm 5": ({}, {}),
    "at the stationary point": ({"compared_at": "stationary"}, {"latest": False}),
    "gradients": ({"similarity": "gradients"}, {"updates": False}),
    "gradients at the stationary point": (
        {"similarity": "gradients", "compared_at": "stationary"},
        {"updates": False, "latest": False},
    ),
    "gradients, and updates by eps2": (
        {"similarity": "gradients", "compared_at": "stationary", "eps2_of": "updates"},
        {"updates": False, "latest": False, "eps2_of_updates": True},
    ),
    "children by their own mean": ({"children_start": "own_mean"}, {"own_mean": True}),
    "children by their own mean from the stationary point": (
        {"children_start": "own_mean", "compared_at": "stationary"},
        {"own_mean": True, "latest": False},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SWITCHES)
def test_equals_algorithm_3_with_clusters_that_stop(name, seed):
    ours, literal = SWITCHES[name]
    run = played(CFL(**EPS, **ours, stop_done_clusters=True), seed=seed)
    assert_equal(run, recursion(seed, **literal))


def test_a_bound_on_noise_ends_a_cluster_as_line_6_does():
    run = played(CFL(**EPS, gamma_max=0.99, stop_done_clusters=True))
    expected = recursion(gamma_max=0.99)
    assert set(expected.done_in) != set(recursion().done_in)
    assert clusters(run.states[-1].tree) == set(expected.done_in)
    assert {last_training(run, min(c)) for c in expected.done_in} == set(expected.done_in.values())


def test_gradients_decide_by_their_own_norm_by_default():
    """Eq. 34: an ε₂ between the norms of updates and of gradients splits by these, and not by those."""
    clients, theta = clients_of(0), recursion(updates=False).stationary[ALL]
    update, gradient = (
        max(np.linalg.norm(getattr(client, name)(theta)) for client in clients.values())
        for name in ("update", "gradient")
    )
    assert gradient > 1.5 * update
    settings = {"eps1": 0.05, "eps2": (update + gradient) / 2, "similarity": "gradients"}
    by_gradients, by_updates = (
        played(CFL(**settings, eps2_of=of), 30) for of in ("compared", "updates")
    )
    (split,) = by_gradients.splits()[:1]
    assert split[0] == recursion(updates=False).split_in[ALL]
    assert by_updates.splits() == []
    (event,) = (event for event in by_gradients.logs[split[0] - 1].events if event.kind == "split")
    assert event.max_norm == pytest.approx(gradient)
    assert by_gradients.logs[split[0] - 1].criteria[0].max_norm == pytest.approx(update)


def test_members_outside_of_the_cohort_are_asked_at_the_stationary_point_too():
    algorithm, clients = CFL(**EPS, compared_at="stationary"), InClosedForm(clients_of(0))
    run = play(algorithm, clients, torch.from_numpy(START), 60, fraction=0.5)
    number, node, _ = run.splits()[0]
    cohort, absent, again = run.clients.asked("train", number)
    assert set(cohort.ids) | set(absent.ids) == set(again.ids) == set(ALL)
    assert torch.equal(again.models[0], run.states[number].tree.nodes[node].params)
    assert again.round.purpose == "stationary"


def test_a_done_cluster_trains_no_more_and_the_run_ends_with_the_last():
    algorithm = CFL(**EPS, stop_done_clusters=True)
    run = played(algorithm)
    last = max(recursion().done_in.values())
    assert [algorithm.finished(state) for state in run.states].index(True) == last
    assert run.logs[last - 1].events[-1].kind == "stationary"
    assert [len(log.criteria) for log in run.logs[last:]] == [0] * (60 - last)
    still = played(CFL(**EPS), last)
    assert clusters(still.states[-1].tree) == clusters(run.states[-1].tree)
    assert last_training(still, 0) == last


class OneReplies(InClosedForm):
    """Clients of which number 0 alone replies."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        if 0 not in ids:
            return Updates.of_nobody(dict.fromkeys(ids, "silent"), models, 4)
        row = assignment[list(ids).index(0)]
        return super().train([0], models, [row], this_round)


@pytest.mark.parametrize("compared_at", ["round_start", "stationary"])
@pytest.mark.parametrize("end", ["stop_done_clusters", "stop_when_stationary"])
def test_a_cluster_above_eps2_is_not_done_because_nothing_could_be_compared(compared_at, end):
    """One client replies, near a stationary point of its own; eq. 34 does not hold, and there is none to compare."""
    algorithm = CFL(eps1=0.5, eps2=0.001, compared_at=compared_at, **{end: True})
    run = play(algorithm, OneReplies(clients_of(0)), torch.from_numpy(START), 30)
    last = run.logs[-1].criteria[0]
    assert 0.001 < last.max_norm < 0.5
    assert not any(algorithm.finished(state) for state in run.states)
    assert run.states[-1].done is None


def test_a_child_of_too_few_clients_starts_from_the_clusters_mean():
    algorithm = CFL(**EPS, children_start="own_mean")
    run = played(algorithm, 60)
    number, node, parts = run.splits()[0]
    state = run.states[number - 1]
    assert {len(part) for part in parts} == {4}
    for least, own in ((4, True), (5, False)):
        this_round = RoundPlan(number, LocalTraining(), min_clients=least)
        after, _ = algorithm.step(state, state.tree.nodes[node].members, run.clients, this_round)
        first, second = (child.params for child in after.tree.children(node))
        assert torch.equal(first, second) != own


def test_a_done_cluster_that_a_client_joins_trains_again():
    algorithm = CFL(**EPS, stop_done_clusters=True)
    run = played(algorithm)
    state = next(
        state for state in run.states if state.done and len(state.done) < len(state.tree.leaves)
    )
    at = state.done[0]
    member = state.tree.nodes[at].members[0]
    rest = replace(state, tree=state.tree.without([member]))
    joined, _ = algorithm.join(rest, [member], run.clients, RoundPlan(61, LocalTraining()))
    assert joined.tree.leaf_of[member] == at
    assert at not in (joined.done or ())
    assert set(joined.done or ()) == set(state.done) - {at}
    assert set(joined.tree.nodes[at].members) <= set(
        algorithm.sample_cohort(joined, 1.0, np.random.default_rng(0))
    )


def test_a_done_cluster_that_a_waiting_client_is_placed_in_trains_again():
    algorithm = CFL(**EPS, stop_done_clusters=True)
    run = played(algorithm)
    state = next(
        state for state in run.states if state.done and len(state.done) < len(state.tree.leaves)
    )
    at = state.done[0]
    member = state.tree.nodes[at].members[0]
    state = replace(state, tree=state.tree.without([member]).with_newcomers([member]))
    while state.tree.leaf_of[member] != at:
        assert at in state.done
        state, _ = algorithm.step(state, (member,), run.clients, RoundPlan(61, LocalTraining()))
    assert at not in (state.done or ())


def test_a_state_with_done_clusters_outlasts_a_checkpoint():
    run = played(CFL(**EPS, stop_done_clusters=True))
    states = [
        state for state in run.states if state.done and len(state.done) < len(state.tree.leaves)
    ]
    assert states, "no round has some clusters that are done and others that are not"
    again = CFLState.from_tensors(states[0].tree, states[0].tensors())
    assert again.done == states[0].done
    assert "done" not in played(CFL(**EPS), 2).states[-1].tensors()


def test_a_round_in_which_all_present_clients_are_done_changes_nothing():
    algorithm = CFL(**EPS, stop_done_clusters=True)
    run = played(algorithm)
    state, log = algorithm.step(run.states[-1], (), run.clients, RoundPlan(61, LocalTraining()))
    assert state is run.states[-1]
    assert log.criteria == {}


def test_the_root_that_trains_beside_is_not_a_child_by_its_own_mean():
    """With fallback the root goes on from the cluster's model, whatever its children start from."""
    run = played(CFL(**EPS, children_start="own_mean", fallback=True), 30)
    number = run.splits()[0][0]
    before, after = (run.states[at].tree.nodes[0] for at in (number - 1, number))
    answer = run.clients.asked("train", number)[0].answer
    step = (answer.sizes / answer.sizes.sum()) @ answer.deltas
    torch.testing.assert_close(after.continued, before.params + step)


def test_federated_learning_alone_ends_as_algorithm_2_does():
    """The recipe of docs/methods/cfl.md: no norm is above an infinite ε₂."""
    options = {"eps1": 0.05, "eps2": float("inf"), "stop_when_stationary": True}
    algorithm = CFL(**options)
    run = played(algorithm)
    expected = Clustering(clients_of(0), **{**EPS, "eps2": np.inf}).federated_learning(
        START, ALL, 1
    )
    last = [algorithm.finished(state) for state in run.states].index(True)
    assert last == expected.next_round - 1
    np.testing.assert_allclose(run.states[last].tree.nodes[0].params, expected.theta, atol=1e-9)
    assert check_config({"algorithm": {"name": "cfl", **options}}).settings


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eps2_of": "norms"}, "algorithm.eps2_of should be 'compared' or 'updates', got 'norms'"),
        (
            {"compared_at": "end"},
            "algorithm.compared_at should be 'round_start' or 'stationary', got 'end'",
        ),
        (
            {"children_start": "mean"},
            "algorithm.children_start should be 'cluster_mean' or 'own_mean', got 'mean'",
        ),
        (
            {"stop_done_clusters": True, "fallback": True},
            "algorithm.stop_done_clusters should be false with fallback = true, "
            "where all clients keep training the root's model, "
            "got True",
        ),
        (
            {"criterion": "replicated", "compared_at": "stationary"},
            "algorithm.compared_at should be left out, since criterion = 'replicated' does not use it, "
            "got 'stationary'",
        ),
    ],
)
def test_a_switch_that_cannot_be_is_refused(options, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        CFL(**options)


def test_children_by_their_own_mean_need_single_updates():
    assert CFL(children_start="own_mean").requires.updates
    assert not replace(
        CFL(children_start="own_mean"), children_start="cluster_mean"
    ).requires.updates
