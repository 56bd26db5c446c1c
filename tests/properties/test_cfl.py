"""CFL as a whole: against the paper's pseudo-code, and under every change that should change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedclade import CFL, FedAvg, LocalTraining, Run, simulate
from fedclade.channel.middleware import Channel
from fedclade.channel.signature import Permutation, Permuting
from fedclade.clustering import cosine_similarity
from fedclade.clustering.separation import gamma_bound
from fedclade.core.queries import RoundPlan
from fedclade.runs.checkpointer import Checkpointer
from tests.reference.bipartition import alpha_cross_max, bipartition
from tests.reference.cfl import clustered_federated_learning
from tests.reference.fedavg import as_numpy, federated_learning
from tests.tiny import (
    ScriptedClients,
    SpyClients,
    details,
    federation_of,
    linear,
    perceptron,
    play,
    renamed,
    simulated,
)

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH = [0, 1, 2, 3, 0, 1, 2, 3]
SIZES = [20, 26, 31, 24, 40, 22, 28, 35]
NESTED = CFL(eps1=0.3, eps2=0.6)
"""Splits the clients of TRUTH more than once, at depths 1 and 2, within 8 rounds."""
DESCENT = LocalTraining(epochs=1, batch_size=100, lr=2.0)
"""Full-batch gradient descent, which comes near enough to stationary points for eps1 = "auto"."""


def world(seed=0, sizes=SIZES):
    return federation_of(TRUTH, sizes, seed=seed)


@cache
def nested() -> Run:
    """Return the run that others are compared with."""
    return simulate(NESTED, linear(), world(1), local=SPEC, rounds=8, seed=1)


def clusters(tree) -> set[frozenset[int]]:
    return {frozenset(leaf.members) for leaf in tree.leaves}


def models(tree) -> Mapping[int, Tensor]:
    return {client: tree.nodes[leaf].params for client, leaf in tree.leaf_of.items()}


def without_seconds(rows):
    return [
        {name: value for name, value in row.items() if not name.startswith("seconds")}
        for row in rows
    ]


# The literal pseudo-code


@pytest.mark.parametrize(("seed", "sizes"), [(0, SIZES), (1, SIZES), (2, SIZES), (1, [24] * 8)])
def test_equals_algorithm_5_round_by_round(seed, sizes):
    """Clusters and every client's model after each of 9 rounds, with splits of splits."""
    federation = world(seed, sizes)
    clients, params = simulated(federation, linear(seed))
    played = play(NESTED, clients, params, 9, spec=SPEC, seed=seed)
    settings = {
        "eps1": NESTED.eps1,
        "eps2": NESTED.eps2,
        "gamma_max": 0.0,
        "seed": seed,
        "rounds": 9,
    }
    expected = clustered_federated_learning(
        as_numpy(params), federation, linear(), SPEC, **settings
    )
    for state, wanted in zip(played.states[1:], expected, strict=True):
        assert clusters(state.tree) == wanted.clusters
        for client, model in models(state.tree).items():
            np.testing.assert_allclose(model.numpy(), wanted.theta[client], atol=1e-5)
    assert max(len(played.states[-1].tree.path(client)) for client in clients.ids) >= 3, (
        "no split was nested"
    )


@pytest.mark.parametrize("gamma_max", [0.0, 0.702])
def test_equals_algorithm_5_with_automatic_eps1_and_a_noise_bound(gamma_max):
    """eps1 = "auto" in the lineage, and line 18."""
    federation = world(1)
    clients, params = simulated(federation, linear(1))
    algorithm = CFL(eps1="auto", eps2=0.6, gamma_max=gamma_max)
    played = play(algorithm, clients, params, 36, spec=DESCENT, seed=1)
    expected = clustered_federated_learning(
        *(as_numpy(params), federation, linear(), DESCENT),
        **{"eps1": "auto", "eps2": 0.6, "gamma_max": gamma_max, "seed": 1, "rounds": 36},
    )
    assert [clusters(state.tree) for state in played.states[1:]] == [
        wanted.clusters for wanted in expected
    ]
    kinds = {event.kind for log in played.logs for event in log.events}
    assert kinds == ({"split"} if gamma_max == 0 else {"split", "rejected"})


@pytest.mark.parametrize("weighted", [True, False])
def test_equals_algorithm_5_with_and_without_the_weights_of_eq_2(weighted):
    """Line 13, with clients of 3 to 200 examples: the models and the norms differ."""
    federation = world(1, [3, 200, 31, 24, 40, 7, 90, 12])
    clients, params = simulated(federation, linear(1))
    played = play(
        dataclasses.replace(NESTED, weighted=weighted), clients, params, 9, spec=SPEC, seed=1
    )
    settings = {"eps1": NESTED.eps1, "eps2": NESTED.eps2, "gamma_max": 0.0, "seed": 1, "rounds": 9}
    expected = clustered_federated_learning(
        as_numpy(params), federation, linear(), SPEC, weighted=weighted, **settings
    )
    other = clustered_federated_learning(
        as_numpy(params), federation, linear(), SPEC, weighted=not weighted, **settings
    )
    for state, log, wanted in zip(played.states[1:], played.logs, expected, strict=True):
        assert clusters(state.tree) == wanted.clusters
        for client, model in models(state.tree).items():
            np.testing.assert_allclose(model.numpy(), wanted.theta[client], atol=1e-5)
        for criteria in log.criteria.values():
            assert criteria.mean_norm == pytest.approx(
                wanted.mean_norms[frozenset(criteria.members)], rel=1e-4
            )
    assert np.abs(other[0].theta[0] - expected[0].theta[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("eps1", "eps2", "gamma_max"), [("auto", 0.6, 0.0), ("auto", 0.6, 0.702), ("auto", 1e9, 0.0)]
)
def test_ends_where_algorithms_2_and_3_do(eps1, eps2, gamma_max):
    """When no cluster moves any more: after splits, after a rejected split, and as plain federated learning."""
    federation = world(1)
    algorithm = CFL(eps1=eps1, eps2=eps2, gamma_max=gamma_max, stop_when_stationary=True)
    run = simulate(algorithm, linear(1), federation, local=DESCENT, rounds=150, seed=1)
    start = as_numpy(simulated(federation, linear(1))[1])
    settings = {
        "eps1": eps1,
        "eps2": eps2,
        "gamma_max": gamma_max,
        "seed": 1,
        "rounds": 150,
        "stop": True,
    }
    expected = clustered_federated_learning(start, federation, linear(), DESCENT, **settings)
    assert len(run.metric_rows) == run.summary["rounds"] == len(expected) < 150
    assert clusters(run.tree) == expected[-1].clusters
    (event,) = [event for event in run.events if event["kind"] == "stationary"]
    assert (event["round"], event["clusters"]) == (len(expected), len(expected[-1].clusters))
    assert run.metric_rows[-1]["accuracy_mean"] is not None
    on = simulate(
        dataclasses.replace(algorithm, stop_when_stationary=False),
        linear(1),
        federation,
        local=DESCENT,
        rounds=len(expected) + 2,
        seed=1,
    )
    assert without_seconds(on.metric_rows)[: len(expected)] == without_seconds(run.metric_rows)


def test_a_run_that_ended_by_itself_is_evaluated_kept_and_not_gone_on_with(tmp_path):
    algorithm = CFL(eps1="auto", eps2=1e9, stop_when_stationary=True)
    settings = {
        "local": DESCENT,
        "rounds": 150,
        "seed": 1,
        "evaluate_every": 150,
        "folder": tmp_path / "run",
    }
    run = simulate(algorithm, linear(1), world(1), **settings)
    assert run.summary["rounds"] < 150
    assert run.metric_rows[-1]["accuracy_mean"] is not None
    again = simulate(algorithm, linear(1), world(1), **settings)
    assert without_seconds(again.metric_rows) == without_seconds(run.metric_rows)


def test_a_run_that_was_killed_at_its_end_ends_there(tmp_path, monkeypatch):
    """Its last checkpoint holds the end: no round more is run."""
    algorithm = CFL(eps1="auto", eps2=1e9, stop_when_stationary=True)
    settings = {
        "local": DESCENT,
        "rounds": 150,
        "seed": 1,
        "folder": tmp_path / "run",
        "checkpoint_every": 1,
    }

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            simulate(algorithm, linear(1), world(1), **settings)
    run = simulate(algorithm, linear(1), world(1), **settings)
    whole = simulate(algorithm, linear(1), world(1), **{**settings, "folder": None})
    assert without_seconds(run.metric_rows) == without_seconds(whole.metric_rows)


def test_a_calendar_is_not_left_before_its_last_date():
    algorithm = CFL(eps1=1e9, eps2=0.1, split_rounds=(3, 6), stop_when_stationary=True)
    run = simulate(algorithm, linear(1), world(1), local=SPEC, rounds=12, seed=1)
    assert run.summary["rounds"] == 7
    assert [event["round"] for event in run.events if event["kind"] == "split"] == [3, 6, 6]


def test_norms_of_eqs_32_and_33_equal_algorithm_5s():
    federation = world()
    clients, params = simulated(federation, linear())
    played = play(NESTED, clients, params, 9, spec=SPEC)
    settings = {"eps1": NESTED.eps1, "eps2": NESTED.eps2, "gamma_max": 0.0, "seed": 0, "rounds": 9}
    expected = clustered_federated_learning(
        as_numpy(params), federation, linear(), SPEC, **settings
    )
    assert played.logs
    for log, wanted in zip(played.logs, expected, strict=True):
        found = {frozenset(g.members): (g.mean_norm, g.max_norm) for g in log.criteria.values()}
        assert found.keys() == wanted.mean_norms.keys()
        for cluster, (mean_norm, max_norm) in found.items():
            assert mean_norm == pytest.approx(wanted.mean_norms[cluster], rel=1e-4)
            assert max_norm == pytest.approx(wanted.max_norms[cluster], rel=1e-4)


def test_fedavg_equals_algorithm_2():
    federation = world()
    clients, params = simulated(federation, perceptron())
    played = play(FedAvg(), clients, params, 5, spec=SPEC, seed=3)
    expected = federated_learning(as_numpy(params), federation, perceptron(), SPEC, 3, 5)
    assert played.states[1:]
    for state, theta in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), theta, atol=1e-5)


# Changes that should change nothing


@pytest.mark.parametrize("names", [(31, 4, 17, 0, 22, 9, 38, 12), (7, 6, 5, 4, 3, 2, 1, 0)])
def test_renaming_clients_changes_nothing_but_names(names):
    """Relabelling: other ids in another order; every client keeps its data and the key of its draws."""
    federation = world(1)
    new = dict(enumerate(names))
    run = nested()
    other = simulate(NESTED, linear(), renamed(federation, new), local=SPEC, rounds=8, seed=1)
    assert clusters(other.tree) == {
        frozenset(new[c] for c in cluster) for cluster in clusters(run.tree)
    }
    assert len(run.tree.leaves) == 4
    theirs = models(other.tree)
    for client, model in models(run.tree).items():
        torch.testing.assert_close(theirs[new[client]], model, rtol=0, atol=1e-5)
    scores = {
        (row["round"], row["name"]): (row["accuracy"], row["true_cluster"])
        for row in run.client_rows
    }
    assert {
        (r["round"], r["name"]): (r["accuracy"], r["true_cluster"]) for r in other.client_rows
    } == scores


def test_cfl_that_never_splits_is_fedavg_bit_for_bit():
    """One cluster is FedAvg."""
    settings = {"local": SPEC, "rounds": 6, "seed": 2, "client_fraction": 0.5}
    cfl = simulate(CFL(eps2=1e9), linear(), world(), **settings)
    fedavg = simulate("fedavg", linear(), world(), **settings)
    assert torch.equal(cfl.tree.nodes[0].params, fedavg.tree.nodes[0].params)
    # FedAvg has no use for similarities
    compared = ("alpha_cross_max", "gamma_bound", "separation_gap")
    assert all(row[column] is None for row in fedavg.metric_rows for column in compared)
    metrics = [row | dict.fromkeys(compared) for row in cfl.metric_rows]
    assert without_seconds(metrics) == without_seconds(fedavg.metric_rows)
    assert without_seconds(cfl.client_rows) == without_seconds(fedavg.client_rows)


def saved_bytes(run, folder):
    run.save(folder)
    return {path.name: path.read_bytes() for path in (folder / "tree").iterdir()}


def test_same_seed_same_bytes(tmp_path):
    settings = {"local": SPEC, "rounds": 8, "client_fraction": 0.8}
    runs = [simulate(NESTED, "mclr", world(1), seed=seed, **settings) for seed in (1, 1, 2)]
    first, second, other = (saved_bytes(run, tmp_path / str(k)) for k, run in enumerate(runs))
    assert len(runs[0].tree.leaves) > 1
    assert first == second
    assert without_seconds(runs[0].metric_rows) == without_seconds(runs[1].metric_rows)
    assert runs[0].client_rows == runs[1].client_rows
    assert runs[0].events == runs[1].events
    assert first["tree.safetensors"] != other["tree.safetensors"]
    assert without_seconds(runs[0].metric_rows) != without_seconds(runs[2].metric_rows)


def test_the_order_of_clients_in_a_call_changes_nothing():
    clients, params = simulated(world(1), linear(1))
    state = NESTED.init(params, clients)
    shuffled = state
    for number in range(1, 8):
        this_round = RoundPlan(number, SPEC, 1)
        state, log = NESTED.step(state, range(8), clients, this_round)
        shuffled, other = NESTED.step(shuffled, [5, 2, 7, 0, 1, 4, 6, 3], clients, this_round)
        assert other.events == log.events
        assert other.losses == log.losses
        assert all(
            torch.equal(a.params, b.params)
            for a, b in zip(state.tree.nodes, shuffled.tree.nodes, strict=True)
        )
    assert len(state.tree.leaves) > 2


# Permutation privacy (eqs. 45, 46)


def test_permuted_vectors_give_the_same_clusters_and_models():
    """Eqs. 45, 46: with and without P, up to rounding."""
    plain, hidden = (
        nested(),
        simulate(NESTED, linear(), world(1), local=SPEC, rounds=8, seed=1, permute=True),
    )
    assert len(plain.tree.leaves) > 2
    assert [node.members for node in hidden.tree.nodes] == [
        node.members for node in plain.tree.nodes
    ]
    for ours, theirs in zip(plain.tree.nodes, hidden.tree.nodes, strict=True):
        torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-5)
        assert (theirs.cached is None) == (ours.cached is None)
        if ours.cached is not None:
            torch.testing.assert_close(theirs.cached, ours.cached, rtol=0, atol=1e-5)
    assert [(e["round"], e["kind"], e["clusters"]) for e in hidden.events] == [
        (e["round"], e["kind"], e["clusters"]) for e in plain.events
    ]
    for ours, theirs in zip(plain.cluster_rows, hidden.cluster_rows, strict=True):
        assert theirs["mean_norm"] == pytest.approx(ours["mean_norm"], rel=1e-4)
        assert theirs["max_norm"] == pytest.approx(ours["max_norm"], rel=1e-4)
    for ours, theirs in zip(plain.similarities, hidden.similarities, strict=True):
        np.testing.assert_allclose(theirs.alpha, ours.alpha, atol=1e-4)


@dataclasses.dataclass(frozen=True)
class Watched(CFL):
    """CFL that notes every vector that reaches the server."""

    seen: list = dataclasses.field(default_factory=list)

    def init(self, params, clients):
        self.seen.append(params.clone())
        return super().init(params, clients)

    def step(self, state, cohort, clients, this_round):
        seen, spy = self.seen, SpyClients(clients)
        state, log = super().step(state, cohort, spy, this_round)
        seen += [row for call in spy.calls for row in call.answer.deltas]
        seen += [row for call in spy.calls for row in call.answer.signatures]
        seen += [node.params for node in state.tree.nodes]
        seen += [row for node in state.tree.nodes if node.cached is not None for row in node.cached]
        return state, log


def test_the_server_sees_no_vector_in_its_own_order():
    """Algorithm 5 lines 7, 8: θ, Δθ_i and Δ_e all reach the server under P."""
    plain, hidden = Watched(eps1=0.3, eps2=0.6), Watched(eps1=0.3, eps2=0.6)
    simulate(plain, linear(1), world(1), local=SPEC, rounds=5, seed=1)
    simulate(hidden, linear(1), world(1), local=SPEC, rounds=5, seed=1, permute=True)
    assert len(plain.seen) == len(hidden.seen)
    assert len(plain.seen) > 5 * 2 * 8 + 5
    for ours, theirs in zip(plain.seen, hidden.seen, strict=True):
        torch.testing.assert_close(theirs.sort().values, ours.sort().values, rtol=0, atol=1e-5)
        assert (theirs - ours).abs().max() > 0.01


def test_every_client_undoes_the_permutation_before_it_works():
    """Algorithm 5 line 7: what a client trains on and evaluates is P⁻¹ of what it receives."""
    clients, params = simulated(world(), linear())
    inside = SpyClients(clients)
    permutation = Permutation(5, len(params), clients.layout.n_parameters)
    outside = Channel(inside, Permuting(permutation))
    received = permutation.apply(params)
    outside.train([0, 1], received[None], [0, 0], RoundPlan(1, SPEC))
    outside.gradients([1], received[None], [0], RoundPlan(1, SPEC))
    evaluation = outside.evaluate([2], received[None], [0], "test")
    assert [call.what for call in inside.calls] == ["train", "gradients", "evaluate"]
    assert all(
        torch.equal(model, params) for call in inside.calls for model in call.models.values()
    )
    assert torch.equal(
        evaluation.scores[:, 0], clients.evaluate([2], params[None], [0], "test").scores[:, 0]
    )
    assert outside.ids == clients.ids
    assert outside.sizes == clients.sizes


# Partial participation


@pytest.mark.parametrize("fraction", [0.5, 0.1])
def test_a_split_rests_on_all_members_at_one_model_and_asks_the_absent_once(fraction):
    """No similarity is made up: all members' updates were made at the node's own model, each asked for once."""
    clients, params = simulated(world(1), linear(1))
    algorithm = CFL(eps2=0.3, split_rounds=(3, 6))
    played = play(algorithm, clients, params, 7, spec=SPEC, seed=1, fraction=fraction)
    assert {number for number, _, _ in played.splits()} == {3, 6}
    for number, node_id, parts in played.splits():
        before = played.states[number - 1].tree.nodes[node_id]
        asked = [client for call in played.clients.asked("train", number) for client in call.ids]
        assert sorted(asked) == sorted(set(asked)), "a client was asked twice"
        assert frozenset(asked) >= frozenset(before.members)
        assert parts[0] | parts[1] == frozenset(before.members)
        for call in played.clients.asked("train", number):
            for client in set(call.ids) & set(before.members):
                assert torch.equal(call.models[client], before.params)
        assert played.logs[number - 1].criteria[node_id].members == before.members


def test_without_a_split_only_the_cohort_is_asked():
    clients, params = simulated(world(1), linear(1))
    played = play(
        CFL(eps2=0.6, split_rounds=(5,)), clients, params, 5, spec=SPEC, seed=1, fraction=0.5
    )
    assert [len(played.clients.asked("train", number)) for number in range(1, 6)] == [1, 1, 1, 1, 2]
    assert all(len(played.clients.asked("train", number)[0].ids) == 4 for number in range(1, 6))
    assert played.logs[0].losses.keys() == set(played.clients.asked("train", 1)[0].ids)


def test_a_cohort_that_calls_for_a_split_in_vain_still_moves_the_model_by_all():
    """Clients 0 and 1 alone look stationary; with 2 and 3 the mean is far from zero, and nothing is split."""
    clients = ScriptedClients({0: [1, 0], 1: [-1, 0], 2: [0, 1], 3: [0, 1]})
    algorithm = CFL(eps1=0.4, eps2=0.5)
    state, log = algorithm.step(
        algorithm.init(torch.zeros(2), clients), [0, 1], clients, RoundPlan(1, SPEC)
    )
    assert log.events == ()
    assert log.criteria[0].members == (0, 1, 2, 3)
    assert state.tree.nodes[0].params.tolist() == [0.0, 2 / 4]


def test_absent_members_train_as_they_would_have_in_the_cohort():
    """Completed by the absent, a round equals one in which all took part from the start."""
    clients, params = simulated(world(1), linear(1))
    algorithm = CFL(eps2=0.6, split_rounds=(1,))
    start = algorithm.init(params, clients)
    some, _ = algorithm.step(start, [1, 4, 6], clients, RoundPlan(1, SPEC, 1))
    everyone, _ = algorithm.step(start, range(8), clients, RoundPlan(1, SPEC, 1))
    assert len(some.tree.leaves) == 2
    for ours, theirs in zip(some.tree.nodes, everyone.tree.nodes, strict=True):
        assert torch.equal(ours.params, theirs.params)


# What similarities are made of


def gradient_by_hand(federation, client: int, module, params: Tensor) -> np.ndarray:
    x, y = federation.examples(client, "train")
    weight, bias = (t.clone().requires_grad_() for t in params.split([4 * 6, 4]))
    loss = functional.cross_entropy(x @ weight.view(4, 6).T + bias, y)
    return (
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, (weight, bias))]).double().numpy()
    )


def test_similarity_of_gradients_is_eq_50():
    """α between full-batch gradients at the cluster's model, by autograd; splits follow it."""
    federation = world(1)
    clients, params = simulated(federation, linear(1))
    played = play(
        CFL(eps2=0.1, split_rounds=(2,), similarity="gradients"),
        clients,
        params,
        2,
        spec=SPEC,
        seed=1,
    )
    theta = played.states[1].tree.nodes[0].params
    gradients = np.array(
        [gradient_by_hand(federation, client, linear(), theta) for client in range(8)]
    )
    unit = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
    criteria = played.logs[1].criteria[0]
    np.testing.assert_allclose(criteria.similarity, unit @ unit.T, atol=1e-5)
    assert clusters(played.states[2].tree) == set(bipartition(unit @ unit.T))
    assert not np.allclose(
        criteria.similarity,
        cosine_similarity(played.clients.asked("train", 2)[0].answer.signatures),
    )


def test_gradients_are_asked_for_only_when_a_split_is_near():
    clients, params = simulated(world(1), linear(1))
    algorithm = CFL(eps2=0.1, split_rounds=(2,), similarity="gradients")
    played = play(algorithm, clients, params, 3, spec=SPEC, seed=1, fraction=0.5)
    assert [len(played.clients.asked("gradients", number)) for number in (1, 2, 3)] == [0, 1, 0]
    assert played.clients.asked("gradients", 2)[0].ids == tuple(range(8))


def test_similarity_of_updates_is_eq_51():
    clients, params = simulated(world(1), linear(1))
    played = play(CFL(eps2=0.1, split_rounds=(1,)), clients, params, 1, spec=SPEC, seed=1)
    deltas = played.clients.asked("train", 1)[0].answer.deltas.double().numpy()
    unit = deltas / np.linalg.norm(deltas, axis=1, keepdims=True)
    np.testing.assert_allclose(played.logs[0].criteria[0].similarity, unit @ unit.T, atol=1e-6)
    event = played.logs[0].events[0]
    cross = alpha_cross_max(unit @ unit.T, *bipartition(unit @ unit.T))
    assert details(event)["alpha_cross_max"] == pytest.approx(cross, abs=1e-6)
    assert details(event)["gamma_bound"] == pytest.approx(gamma_bound(cross), abs=1e-6)


# The criteria


def one_step(algorithm: CFL, deltas, sizes=None, number=1):
    clients = ScriptedClients(dict(enumerate(deltas)), dict(enumerate(sizes)) if sizes else {})
    start = algorithm.init(torch.zeros(len(deltas[0])), clients)
    return algorithm.step(start, clients.ids, clients, RoundPlan(number, SPEC))


def test_stationarity_is_the_norm_of_the_mean_not_the_mean_of_norms():
    """Eq. 32: ‖(v − v)/2‖ = 0, where the mean of the norms is 1."""
    state, log = one_step(CFL(eps1=0.5, eps2=0.9), [[1, 0], [-1, 0]])
    assert log.criteria[0].mean_norm == 0.0
    assert log.phase == "split"
    assert clusters(state.tree) == {frozenset([0]), frozenset([1])}


@pytest.mark.parametrize(("sizes", "splits"), [([1, 1], True), ([3, 1], False)])
def test_stationarity_weights_the_mean_by_examples(sizes, splits):
    """Eqs. 2, 32: with 3 and 1 examples the mean of v and −v is v/2."""
    state, log = one_step(CFL(eps1=0.4, eps2=0.9), [[1, 0], [-1, 0]], sizes)
    assert log.criteria[0].mean_norm == (sizes[0] - sizes[1]) / sum(sizes)
    assert (len(state.tree.leaves) == 2) == splits


def test_disagreement_is_the_largest_norm_not_the_mean_of_norms():
    """Eq. 33: one client of norm 3 among two of norm 0.1."""
    deltas = [[3, 0], [-0.1, 0], [-0.1, 0]]
    _, log = one_step(CFL(eps1=10.0, eps2=2.9), deltas)
    assert log.criteria[0].max_norm == 3.0
    assert log.phase == "split"
    assert one_step(CFL(eps1=10.0, eps2=3.0), deltas)[1].phase == "train"


@pytest.mark.parametrize(("eps1", "splits"), [(0.5, False), (0.51, True)])
def test_eps1_is_a_strict_bound(eps1, splits):
    _, log = one_step(CFL(eps1=eps1, eps2=0.1), [[1, 0], [0, 0]])
    assert (log.phase == "split") == splits


def test_split_rounds_replace_stationarity_but_not_disagreement():
    """Figure 8: eq. 32 does not hold here, and splits happen in round 2 alone; eq. 33 still decides."""
    deltas = [[1, 0], [1, 1]]
    assert (
        one_step(CFL(eps1=1e-6, eps2=0.1, split_rounds=(2, 4)), deltas, number=1)[1].phase
        == "train"
    )
    assert (
        one_step(CFL(eps1=1e-6, eps2=0.1, split_rounds=(2, 4)), deltas, number=2)[1].phase
        == "split"
    )
    assert (
        one_step(CFL(eps1=1e6, eps2=0.1, split_rounds=(2, 4)), deltas, number=3)[1].phase == "train"
    )
    assert (
        one_step(CFL(eps1=1e6, eps2=10.0, split_rounds=(2, 4)), deltas, number=2)[1].phase
        == "train"
    )


def test_all_clusters_split_in_the_same_round():
    """Algorithm 5 line 12 runs over all clusters."""
    clients, params = simulated(world(1), linear(1))
    played = play(CFL(eps2=0.4, split_rounds=(3, 6)), clients, params, 6, spec=SPEC, seed=1)
    assert [(number, node) for number, node, _ in played.splits()] == [(3, 0), (6, 1), (6, 2)]
    assert clusters(played.states[-1].tree) == {frozenset([k, k + 4]) for k in range(4)}


def test_a_bipartition_within_the_noise_is_rejected():
    """Eq. 39: √((1 − α)/2) of orthogonal updates is √½, and the bound is strict."""
    bound = np.sqrt(1 / 2)
    state, log = one_step(CFL(eps1=1.0, eps2=0.1, gamma_max=float(bound)), [[1, 0], [0, 1]])
    (event,) = log.events
    assert (event.kind, event.node, log.phase) == ("rejected", 0, "train")
    assert details(event)["because"] == f"gamma_bound <= {bound}"
    assert details(event)["gamma_bound"] == pytest.approx(bound)
    assert details(event)["clusters"] == [[0], [1]]
    assert len(state.tree.leaves) == 1
    assert one_step(CFL(eps1=1.0, eps2=0.1, gamma_max=0.7), [[1, 0], [0, 1]])[1].phase == "split"


@pytest.mark.parametrize(("smallest", "splits"), [(2, True), (3, False)])
def test_a_split_that_leaves_too_small_a_cluster_is_rejected(smallest, splits):
    deltas = [[1, 0], [1, 0.1], [1, 0], [-1, 0], [-1, 0.1]]
    state, log = one_step(CFL(eps1=1.0, eps2=0.1, min_cluster_size=smallest), deltas)
    (event,) = log.events
    assert (event.kind == "split") == splits
    assert details(event)["clusters"] == [[0, 1, 2], [3, 4]]
    assert (len(state.tree.leaves) == 2) == splits
    if not splits:
        assert details(event)["because"] == "fewer than 3 members"


def test_a_cluster_of_one_is_never_split():
    state, log = one_step(CFL(eps1=9.0, eps2=0.1, split_rounds=(1,)), [[1, 0]])
    assert log.events == ()
    assert len(state.tree.nodes) == 1


def test_automatic_eps1_is_a_tenth_of_the_lineages_largest_mean_norm():
    """The journal version's rule of thumb; children inherit their ancestors' largest norm."""
    clients, params = simulated(world(1), linear(1))
    played = play(CFL(eps1="auto", eps2=0.6), clients, params, 36, spec=DESCENT, seed=1)
    peaks: dict[int, float] = {}
    for state, log in zip(played.states[1:], played.logs, strict=True):
        split = {event.node for event in log.events}
        for node, criteria in log.criteria.items():
            parent = state.tree.nodes[node].parent
            peaks[node] = max(peaks.get(node, peaks.get(parent, 0.0)), criteria.mean_norm)
            called = (
                criteria.mean_norm < peaks[node] / 10
                and criteria.max_norm > 0.6
                and len(criteria.members) > 1
            )
            assert (node in split) == called
        for node in state.tree.nodes[len(peaks) :]:
            assert float(state.peaks[node.id]) == peaks[node.parent]
    assert [number for number, _, _ in played.splits()] == [12, 33, 34]


# The parameter tree


def test_cached_updates_were_made_at_the_inner_nodes_own_model():
    """Eq. 47: Δ_e = SGD_n(θ*_parent, D_i) − θ*_parent for the child's members, to the last bit."""
    clients, params = simulated(world(1), linear(1))
    played = play(NESTED, clients, params, 8, spec=SPEC, seed=1)
    tree = played.states[-1].tree
    children = [node for node in tree.nodes if node.parent is not None]
    assert len(children) >= 4
    for child in children:
        parent = tree.nodes[child.parent]
        again = clients.train(
            child.members,
            parent.params[None],
            [0] * len(child.members),
            RoundPlan(child.born, SPEC, 1),
        )
        assert torch.equal(child.cached, again.deltas)
        assert parent.split_in == child.born


def test_children_go_on_from_the_model_that_the_split_round_led_to():
    """Algorithm 2 line 7 before Algorithm 3 lines 7, 8: θ + Δθ_c for both children."""
    state, _ = one_step(CFL(eps1=1.0, eps2=0.1), [[1, 0.5], [-1, 0.5]])
    root, first, second = state.tree.nodes
    assert root.params.tolist() == [0, 0]
    assert first.params.tolist() == second.params.tolist() == [0, 0.5]


# Fall-back


def test_fallback_goes_by_validation_data_only():
    clients, params = simulated(world(1), linear(1))
    algorithm = dataclasses.replace(NESTED, fallback=True)
    played = play(algorithm, clients, params, 7, spec=SPEC, seed=1)
    before = len(played.clients.calls)
    served = algorithm.models_for(played.states[-1], played.clients).nodes
    (call,) = played.clients.calls[before:]
    assert (call.what, call.split) == ("evaluate", "validation")
    for client, node in served.items():
        assert client in played.states[-1].tree.nodes[node].members


def test_without_fallback_clients_are_served_by_their_leaf_unasked():
    clients, params = simulated(world(1), linear(1))
    played = play(NESTED, clients, params, 7, spec=SPEC, seed=1)
    assert (
        NESTED.models_for(played.states[-1], played.clients).nodes == played.states[-1].tree.leaf_of
    )
    assert all(call.what != "evaluate" for call in played.clients.calls)


def test_fallback_is_never_worse_than_plain_federated_learning_on_validation_data():
    """Nor than the leaves: over all clients, who have equally many examples."""
    clients, params = simulated(world(1), linear(1))
    algorithm = dataclasses.replace(NESTED, fallback=True)
    state = play(algorithm, clients, params, 9, spec=SPEC, seed=1).states[-1]
    plain = play(FedAvg(), clients, params, 9, spec=SPEC, seed=1).states[-1]
    served = algorithm.models_for(state, clients).nodes

    def score(of, served):
        return float(clients.evaluate(*evaluation_of(of, served), "validation").scores.mean())

    assert score(state, served) >= score(plain, dict.fromkeys(served, 0))
    assert score(state, served) >= score(state, state.tree.leaf_of)


def evaluation_of(state, served):
    vectors, rows = state.tree.models([served[client] for client in range(8)], served=True)
    return range(8), vectors, rows
