"""FL+HC as a whole: against the paper's pseudo-code, and under every change that should change nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from fedclade import FLHC, FedAvg, LocalTraining, ParameterTree, Run, simulate
from fedclade.algorithms.fl_hc import FLHCState
from fedclade.core import RoundPlan
from tests.reference import fl_hc as reference
from tests.reference.fedavg import as_numpy
from tests.tiny import (
    Around,
    ScriptedClients,
    details,
    federation_of,
    linear,
    play,
    renamed,
    simulated,
)

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
SIZES = [20, 26, 31, 24, 40, 22, 28, 35, 33, 27, 24, 30]
WARD = FLHC(rounds_before=4, metric="l2", linkage="ward")


def world(seed=1):
    return federation_of(TRUTH, SIZES, seed=seed)


@cache
def ward() -> Run:
    """Return the run that others are compared with."""
    return simulate(WARD, linear(1), world(), local=SPEC, rounds=7, seed=1)


def clusters(tree) -> set[frozenset[int]]:
    return {frozenset(leaf.members) for leaf in tree.leaves}


def models(tree):
    return {client: tree.nodes[leaf].params for client, leaf in tree.leaf_of.items()}


def event_of(log):
    (event,) = (event for event in log.events if event.kind == "clustered")
    return details(event)


# The literal pseudo-code


@pytest.mark.parametrize(
    ("metric", "linkage"),
    [
        ("l1", "complete"),
        ("l1", "single"),
        ("l2", "ward"),
        ("l2", "average"),
        ("cosine", "average"),
        ("cosine", "single"),
    ],
)
@pytest.mark.parametrize(
    ("fraction", "seed", "cohort"),
    [(1.0, 1, "of_all"), (0.34, 2, "of_cluster"), (0.17, 2, "of_all"), (0.34, 2, "of_all")],
)
def test_equals_algorithm_1_round_by_round(metric, linkage, fraction, seed, cohort):
    """Clusters and every client's model after each of 7 rounds, cut at the middle of the largest gap."""
    federation = world(seed)
    clients, params = simulated(federation, linear(seed))
    algorithm = FLHC(rounds_before=3, metric=metric, linkage=linkage, n_clusters=4, cohort=cohort)
    played = play(algorithm, clients, params, 7, spec=SPEC, seed=seed, fraction=fraction)
    expected = reference.fl_hc(
        *(as_numpy(params), federation, linear(), SPEC),
        **{"n": 3, "alpha": fraction, "metric": metric, "linkage": linkage},
        **{
            "T": event_of(played.logs[3])["threshold"],
            "seed": seed,
            "rounds": 7,
            "of_all": cohort == "of_all",
        },
    )
    assert len(expected[-1].clusters) == 4
    for state, wanted in zip(played.states[1:], expected, strict=True):
        assert clusters(state.tree) == wanted.clusters
        for client, model in models(state.tree).items():
            np.testing.assert_allclose(model.numpy(), wanted.w[client], atol=1e-5)


@pytest.mark.parametrize(("metric", "T"), [("l1", 2.85), ("l2", 0.6), ("cosine", 0.28)])
def test_centroid_linkage_equals_section_i_c(metric, T):
    """Clusters by the distances of their averages, merged until the nearest two are further apart than T."""
    federation = world()
    clients, params = simulated(federation, linear(1))
    algorithm = FLHC(rounds_before=1, metric=metric, linkage="centroid", threshold=T)
    played = play(algorithm, clients, params, 3, spec=SPEC, seed=1)
    settings = {
        "n": 1,
        "alpha": 1.0,
        "metric": metric,
        "linkage": "centroid",
        "T": T,
        "seed": 1,
        "rounds": 3,
    }
    expected = reference.fl_hc(as_numpy(params), federation, linear(), SPEC, **settings)
    assert 2 < len(expected[-1].clusters) < 12
    for state, wanted in zip(played.states[1:], expected, strict=True):
        assert clusters(state.tree) == wanted.clusters
        for client, model in models(state.tree).items():
            np.testing.assert_allclose(model.numpy(), wanted.w[client], atol=1e-5)


@pytest.mark.parametrize("T", [1.2, 30.0])
def test_updates_of_the_clustering_step_that_are_kept_equal_line_24(T):
    """With several clusters, and with one: each goes on from w plus the mean of its members' updates."""
    federation = world()
    clients, params = simulated(federation, linear(1))
    options = {"rounds_before": 2, "metric": "l2", "linkage": "complete", "threshold": T}
    played = play(FLHC(**options, keep_updates=True), clients, params, 5, spec=SPEC, seed=1)
    settings = {
        "n": 2,
        "alpha": 1.0,
        "metric": "l2",
        "linkage": "complete",
        "T": T,
        "seed": 1,
        "rounds": 5,
    }
    expected, discarded = (
        reference.fl_hc(as_numpy(params), federation, linear(), SPEC, keep=keep, **settings)
        for keep in (True, False)
    )
    assert (len(expected[-1].clusters) == 1) == (T == 30.0)
    for state, wanted in zip(played.states[1:], expected, strict=True):
        assert clusters(state.tree) == wanted.clusters
        for client, model in models(state.tree).items():
            np.testing.assert_allclose(model.numpy(), wanted.w[client], atol=1e-5)
    assert np.abs(expected[-1].w[0] - discarded[-1].w[0]).max() > 1e-3
    trained = played.clients.asked("train", 3)[0]
    own = {
        c: trained.models[c] + delta
        for c, delta in zip(trained.answer.ids, trained.answer.deltas, strict=True)
    }
    apart = sum(
        float((own[c] - model).norm()) for c, model in models(played.states[3].tree).items()
    )
    assert played.logs[2].discrepancy == pytest.approx(apart, rel=1e-5)
    if T != 30.0:
        root = played.states[3].tree.nodes[0].params
        assert torch.equal(root, played.states[2].tree.nodes[0].params), "the node keeps w"


class SilentInRoundTwo(Around):
    """Clients of which number 3 does not reply in round 2."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        updates = self.clients.train(ids, models, assignment, this_round)
        return (
            updates
            if this_round.number != 2
            else updates.select([client for client in ids if client != 3])
        )


def test_kept_updates_of_clients_that_did_not_reply_are_not_missed():
    """Client 3 is silent in the clustering step: the clusters move by the mean of the others."""
    clients, params = simulated(world(), linear(1))
    silent = SilentInRoundTwo(clients)
    options = {
        "rounds_before": 1,
        "metric": "l2",
        "linkage": "ward",
        "n_clusters": 2,
        "keep_updates": True,
    }
    state = play(FLHC(**options), silent, params, 2, spec=SPEC, seed=1).states[-1]
    assert state.tree.stragglers == {0: (3,)}
    assert len(state.tree.leaves) == 2


def test_updates_of_a_cluster_of_too_few_clients_are_not_kept():
    """Each cluster of fewer than ``min_clients`` clients starts from w, as every cluster does without the switch."""
    clients, params = simulated(world(), linear(1))
    algorithm = FLHC(rounds_before=0, metric="l2", linkage="ward", n_clusters=3, keep_updates=True)
    state = algorithm.init(params, clients)
    sizes = set()
    for least in (1, 4):
        this_round = RoundPlan(1, SPEC, seed=1, min_clients=least)
        after, log = algorithm.step(state, clients.ids, clients, this_round)
        assert log.discrepancy is not None
        for leaf in after.tree.leaves:
            sizes.add(len(leaf.members))
            assert torch.equal(leaf.params, params) == (len(leaf.members) < least)
    assert min(sizes) < 4 <= max(sizes)


@pytest.mark.parametrize(
    ("metric", "linkage"), [("cosine", "complete"), ("l2", "average"), ("l1", "complete")]
)
def test_parameters_in_place_of_updates_equal_algorithm_1s(metric, linkage):
    """Section I-C: other distances for cosine, and so other merges; for l1 and l2 the joint model cancels out."""
    federation = world()
    clients, params = simulated(federation, linear(1))
    options = {"rounds_before": 2, "metric": metric, "linkage": linkage, "n_clusters": 4}
    by_updates, by_parameters = (
        play(FLHC(**options, compare=compare), clients, params, 4, spec=SPEC, seed=1)
        for compare in ("updates", "parameters")
    )
    merges = [
        [height for *_, height in event_of(run.logs[2])["merges"]]
        for run in (by_updates, by_parameters)
    ]
    assert (merges[0] == pytest.approx(merges[1], rel=1e-4)) == (metric != "cosine")
    expected = reference.fl_hc(
        *(as_numpy(params), federation, linear(), SPEC),
        **{"n": 2, "alpha": 1.0, "metric": metric, "linkage": linkage, "parameters": True},
        **{"T": event_of(by_parameters.logs[2])["threshold"], "seed": 1, "rounds": 4},
    )
    assert clusters(by_parameters.states[-1].tree) == expected[-1].clusters
    cached, signatures = (
        by_parameters.states[-1].tree.nodes[1].cached,
        by_updates.states[-1].tree.nodes[1].cached,
    )
    assert cached.abs().max() < 2 * signatures.abs().max(), (
        "edges keep updates, not models (CFL eq. 47)"
    )


def test_merges_up_to_a_threshold_equal_algorithm_1s():
    """Line 10 with a number for T: as many clusters as it makes, from everybody alone to all in one."""
    federation = world()
    clients, params = simulated(federation, linear(1))
    heights = [0.01, 0.9, 1.2, 1.6, 2.2, 30.0]
    found = []
    for T in heights:
        algorithm = FLHC(rounds_before=1, metric="l2", linkage="complete", threshold=T)
        tree = play(algorithm, clients, params, 2, spec=SPEC, seed=1).states[-1].tree
        settings = {
            "n": 1,
            "alpha": 1.0,
            "metric": "l2",
            "linkage": "complete",
            "T": T,
            "seed": 1,
            "rounds": 2,
        }
        expected = reference.fl_hc(as_numpy(params), federation, linear(), SPEC, **settings)
        assert clusters(tree) == expected[-1].clusters
        found.append(len(tree.leaves))
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (12, 1)
    assert len(set(found)) > 3


# Changes that should change nothing


@pytest.mark.parametrize(
    "names", [(31, 4, 17, 0, 22, 9, 38, 12, 25, 3, 39, 16), tuple(reversed(range(12)))]
)
def test_renaming_clients_changes_nothing_but_names(names):
    """Relabelling: other ids in another order; every client keeps its data and the key of its draws."""
    federation = world()
    new = dict(enumerate(names))
    run = ward()
    other = simulate(WARD, linear(1), renamed(federation, new), local=SPEC, rounds=7, seed=1)
    assert clusters(other.tree) == {
        frozenset(new[c] for c in cluster) for cluster in clusters(run.tree)
    }
    assert len(run.tree.leaves) == 4
    theirs = models(other.tree)
    for client, model in models(run.tree).items():
        torch.testing.assert_close(theirs[new[client]], model, rtol=0, atol=1e-5)


def test_permuted_vectors_give_the_same_clusters_and_models():
    plain, hidden = (
        ward(),
        simulate(WARD, linear(1), world(), local=SPEC, rounds=7, seed=1, permute=True),
    )
    assert len(plain.tree.leaves) == 4
    for ours, theirs in zip(plain.tree.nodes, hidden.tree.nodes, strict=True):
        assert theirs.members == ours.members
        torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-5)
        if ours.cached is not None:
            torch.testing.assert_close(theirs.cached, ours.cached, rtol=0, atol=1e-5)


def test_one_cluster_is_fedavg_that_pauses_for_a_round():
    """Lines 7 to 12 with C = 1: rounds 1 to n, and then n + 2 with the draws of that round."""
    algorithm = FLHC(rounds_before=2, n_clusters=1)
    clients, params = simulated(world(), linear(1))
    played = play(algorithm, clients, params, 3, spec=SPEC, seed=1, fraction=0.5)
    fedavg = play(FedAvg(), clients, params, 2, spec=SPEC, seed=1, fraction=0.5)
    trees = [state.tree for state in played.states]
    assert all(len(tree.nodes) == 1 for tree in trees)
    assert torch.equal(trees[2].nodes[0].params, fedavg.states[2].tree.nodes[0].params)
    assert torch.equal(trees[3].nodes[0].params, trees[2].nodes[0].params)


# The clustering step


def test_everybody_is_asked_once_whatever_the_client_fraction():
    clients, params = simulated(world(), linear(1))
    played = play(WARD, clients, params, 6, spec=SPEC, seed=1, fraction=0.5)
    asked = [
        sorted(client for call in played.clients.asked("train", number) for client in call.ids)
        for number in range(1, 7)
    ]
    assert [len(ids) for ids in asked] == [6, 6, 6, 6, 12, 12], (
        "clusters of 3 have fewer than 6 clients"
    )
    assert asked[4] == list(range(12))
    (call,) = played.clients.asked("train", 5)
    assert all(
        torch.equal(model, played.states[4].tree.nodes[0].params) for model in call.models.values()
    )
    assert [log.phase for log in played.logs] == ["train"] * 4 + ["cluster", "train"]


@pytest.mark.parametrize(
    ("cohort", "fraction", "trained"),
    [
        ("of_cluster", 0.34, 4),
        ("of_all", 0.17, 8),
        ("of_all", 0.34, 12),
        ("of_cluster", 1.0, 12),
        ("of_all", 1.0, 12),
    ],
)
def test_a_round_trains_a_share_of_each_cluster_or_of_all_clients_in_each(
    cohort, fraction, trained
):
    """Line 19 with four clusters of 3 of 12 clients: α·K is 1 of 3, or 2 or 4 of 12, of which a cluster has 3."""
    clients, params = simulated(world(), linear(1))
    algorithm = replace(WARD, rounds_before=2, n_clusters=4, cohort=cohort)
    played = play(algorithm, clients, params, 4, spec=SPEC, seed=1, fraction=fraction)
    assert len(played.states[-1].tree.leaves) == 4
    assert sum(len(call.ids) for call in played.clients.asked("train", 4)) == trained


def test_the_cohort_counts_the_clients_that_are_there():
    """Of 12 clients in 3 clusters 4 are there in the round: α = 0.5 is 2 of each cluster, where it has so many."""
    tree = ParameterTree.star([(0, 1, 2), (3,), ()], torch.zeros(1))
    cohort = FLHC(rounds_before=0).sample_cohort(
        FLHCState(tree, clustered=True), 0.5, np.random.default_rng(0)
    )
    assert len(cohort) == 3
    assert 3 in cohort


def test_the_tree_keeps_the_joint_model_and_the_updates():
    """Line 12: every cluster starts from w; each node keeps its members' updates at w."""
    clients, params = simulated(world(), linear(1))
    played = play(WARD, clients, params, 5, spec=SPEC, seed=1)
    before, tree = played.states[4].tree.nodes[0], played.states[5].tree
    (call,) = played.clients.asked("train", 5)
    assert tree.nodes[0].split_in == 5
    assert tree.nodes[0].criteria == {"threshold": event_of(played.logs[4])["threshold"]}
    assert len(tree.leaves) == 4
    for node in tree.nodes:
        assert torch.equal(node.params, before.params)
    for leaf in tree.leaves:
        assert leaf.born == 5
        assert torch.equal(leaf.cached, call.answer.select(leaf.members).signatures)


def test_the_event_tells_what_a_dendrogram_needs(tmp_path):
    """Also after it has been written and read."""
    run = simulate(WARD, linear(1), world(), local=SPEC, rounds=5, seed=1)
    run.save(tmp_path / "run")
    (clustered, split) = Run.load(tmp_path / "run").events
    assert json.loads(json.dumps(run.events)) == [clustered, split]
    assert (clustered["kind"], clustered["round"], clustered["node"]) == ("clustered", 5, 0)
    assert (clustered["metric"], clustered["linkage"], clustered["sizes"]) == (
        "l2",
        "ward",
        [3, 3, 3, 3],
    )
    assert clustered["clients"] == list(range(12))
    assert len(clustered["merges"]) == 11
    heights = [height for _, _, height in clustered["merges"]]
    assert heights[7] < clustered["threshold"] < heights[8]
    assert (split["kind"], split["children"]) == ("split", [1, 2, 3, 4])
    assert split["clusters"] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_of_one_cluster_the_event_says_so():
    clients, params = simulated(federation_of([0] * 12, SIZES, seed=1), linear(1))
    played = play(WARD, clients, params, 6, spec=SPEC, seed=1)
    (event,) = played.logs[4].events
    assert (event.kind, details(event)["sizes"], details(event)["threshold"]) == (
        "clustered",
        [12],
        None,
    )
    assert len(details(event)["merges"]) == 11
    assert len(played.states[-1].tree.nodes) == 1


def test_larger_clusters_come_first():
    clients = ScriptedClients({5: [0, 1], 1: [1, 0], 2: [1, 0.1], 3: [0, 1.1], 8: [0, 1]})
    played = play(FLHC(rounds_before=0, n_clusters=2), clients, torch.zeros(2), 1)
    assert [leaf.members for leaf in played.states[-1].tree.leaves] == [(3, 5, 8), (1, 2)]


def test_clusters_without_rounds_before_start_from_the_initial_model():
    clients = ScriptedClients({0: [1, 0], 1: [1, 0], 2: [-1, 0], 3: [-1, 0]})
    played = play(FLHC(rounds_before=0), clients, torch.zeros(2), 2)
    root, first, second = played.states[-1].tree.nodes
    assert root.params.tolist() == [0, 0]
    assert (first.members, first.params.tolist()) == ((0, 1), [1, 0])
    assert (second.members, second.params.tolist()) == ((2, 3), [-1, 0])


class Normalised(nn.Module):
    """Logistic regression behind a BatchNorm, whose buffers differ between clients with the scale of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x):
        return self.linear(self.norm(x))


@pytest.mark.parametrize("permute", [False, True])
def test_buffers_are_neither_compared_nor_cached(permute):
    """The norm's running mean and variance of 6 inputs, and its count of batches, are 13 entries."""
    whole = LocalTraining(epochs=10, batch_size=50, lr=0.4)
    run = simulate(WARD, Normalised(), world(), local=whole, rounds=6, seed=1, permute=permute)
    parameters = sum(p.numel() for p in Normalised().parameters())
    assert run.tree.nodes[0].params.shape == (parameters + 13,)
    assert len(run.tree.leaves) == 4
    assert all(leaf.cached.shape == (3, parameters) for leaf in run.tree.leaves)


def test_two_clients_and_one_are_one_cluster():
    for n in (1, 2):
        clients = ScriptedClients({i: [float(i), 1.0] for i in range(n)})
        played = play(FLHC(rounds_before=0), clients, torch.zeros(2), 2)
        assert len(played.states[-1].tree.nodes) == 1
