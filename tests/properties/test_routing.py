"""Newcomers: against the paper's pseudo-code, and under every change that should change nothing."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade import CFL, FLHC, IFCA, FedGroup, LocalTraining, Signature, simulate
from fedclade.algorithms import CFLState
from fedclade.core.queries import RoundPlan
from fedclade.data.federation import Federation
from fedclade.runs.backend import Backend
from tests.reference.newcomers import assign_new_client
from tests.tiny import details, federation_of, linear, renamed

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2, lr_decay=0.9)
TRUTH = [0, 1, 2, 3] * 4
MEMBERS = 12
NESTED = CFL(eps1=0.3, eps2=0.4)
"""Splits twelve clients more than once, at depths 1 and 2."""
METHODS = [
    NESTED,
    FLHC(rounds_before=3, metric="l2", linkage="ward", n_clusters=4),
    FedGroup(groups=4),
    IFCA(clusters=4),
]
ROUNDS = 8


def parted(seed=0) -> tuple[Federation, Federation]:
    """Return members, and four newcomers, one of each true cluster."""
    everybody = federation_of(TRUTH, [40] * len(TRUTH), seed=seed)

    def of(clients) -> Federation:
        return dataclasses.replace(
            everybody,
            clients=tuple(clients),
            true_clusters={c.id: everybody.true_clusters[c.id] for c in clients},
        )

    return of(everybody.clients[:MEMBERS]), of(everybody.clients[MEMBERS:])


def assignments(run, algorithm, newcomers, seed=0, **settings):
    world = Backend.simulated_by(newcomers, linear, algorithm, seed=seed, engine="loop", **settings)
    this_round = RoundPlan(run.summary["rounds"], SPEC, seed)
    return algorithm.assign(world.closed(run.tree), newcomers.ids, world.clients, this_round)


@cache
def run_of(algorithm, seed=0, permute=False, signature=None):
    settings = {
        "local": SPEC,
        "rounds": ROUNDS,
        "seed": seed,
        "permute": permute,
        "signature": signature,
    }
    return simulate(
        algorithm, linear, parted(seed)[0], engine="loop", evaluate_every=ROUNDS, **settings
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_algorithm_4_choice_by_choice(seed):
    members, newcomers = parted(seed)
    run = run_of(NESTED, seed)
    assert max(len(run.tree.path(client)) for client in members.ids) > 2, "splits of splits"
    for client, found in zip(
        newcomers.clients, assignments(run, NESTED, newcomers, seed), strict=True
    ):
        expected = assign_new_client(client, run.tree, newcomers, linear(), SPEC, seed)
        assert [step.taken for step in found.steps] == [node for _, _, node in expected]
        for step, (alpha_0, alpha_1, _) in zip(found.steps, expected, strict=True):
            assert list(step.scores.values()) == pytest.approx([alpha_0, alpha_1], abs=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_who_joins_a_run_walks_down_to_the_leaf_of_algorithm_4(seed):
    """In the round that it joins, past every split there has been; its updates are cached on its way."""
    members, newcomers = parted(seed)
    run, together = run_of(NESTED, seed), members.join(newcomers)
    world = Backend.simulated_by(together, linear, NESTED, seed=seed, engine="loop")
    before = CFLState(run.tree, torch.zeros(len(run.tree.nodes), dtype=torch.float64))
    after, events = NESTED.join(
        before, newcomers.ids, world.clients, RoundPlan(ROUNDS + 1, SPEC, seed)
    )
    assert not after.tree.stragglers
    told = {client: [0] for client in newcomers.ids}
    for event in events[1:]:
        for client in details(event)["clients"]:
            told[client].append(event.node)
    for client in newcomers.clients:
        expected = assign_new_client(client, run.tree, newcomers, linear(), SPEC, seed)
        assert [node.id for node in after.tree.path(client.id)] == [
            0,
            *(node for _, _, node in expected),
        ]
        assert told[client.id] == [0, *(node for _, _, node in expected)]
    for node in after.tree.nodes[1:]:
        assert len(node.cached) == len(node.members)


def test_who_does_not_answer_when_it_joins_waits_where_it_stands():
    members, newcomers = parted()
    run, silent = run_of(NESTED), newcomers.ids[0]

    class Deaf:
        def __init__(self, clients):
            self._clients = clients

        def train(self, ids, models, assignment, this_round, work=None, **more):
            heard = [(c, row) for c, row in zip(ids, assignment, strict=True) if c != silent]
            return self._clients.train(
                [c for c, _ in heard], models, [row for _, row in heard], this_round
            )

    world = Backend.simulated_by(members.join(newcomers), linear, NESTED, engine="loop")
    before = CFLState(run.tree, torch.zeros(len(run.tree.nodes), dtype=torch.float64))
    after, _ = NESTED.join(
        before, newcomers.ids, Deaf(world.clients), RoundPlan(ROUNDS + 1, SPEC, 0)
    )
    assert after.tree.stragglers == {0: (silent,)}


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("signature", [Signature(), Signature(kind="projected", dim=16)])
@pytest.mark.parametrize("algorithm", METHODS[:2])
def test_a_member_goes_to_its_own_leaf_by_its_cached_update(algorithm, signature, permute):
    """It repeats the update that is cached: with its own draws, as the server receives it, and as that projects it."""
    members, _ = parted()
    run = run_of(algorithm, 0, permute, signature)
    assert len(run.tree.leaves) > 2
    for found in assignments(run, algorithm, members, permute=permute, signature=signature):
        assert found.node == run.tree.leaf_of[found.client]
        assert [step.score for step in found.steps] == pytest.approx(
            [1.0] * len(found.steps), abs=1e-5
        )
        assert found.fits


@pytest.mark.parametrize("algorithm", METHODS)
def test_permutation_changes_nothing(algorithm):
    _, newcomers = parted()
    plain, permuted = (
        assignments(run_of(algorithm, 0, permute), algorithm, newcomers, permute=permute)
        for permute in (False, True)
    )
    assert [found.path for found in plain] == [found.path for found in permuted]
    for one, other in zip(plain, permuted, strict=True):
        assert [s.score for s in one.steps] == pytest.approx(
            [s.score for s in other.steps], abs=1e-3
        )


@given(st.permutations(range(40)))
@settings(max_examples=3, deadline=None)
@pytest.mark.parametrize("algorithm", METHODS)
def test_renaming_newcomers_changes_nothing_but_names(algorithm, names):
    _, newcomers = parted()
    run = run_of(algorithm)
    new = dict(zip(newcomers.ids, names, strict=False))
    expected = {new[found.client]: found.path for found in assignments(run, algorithm, newcomers)}
    assert {
        found.client: found.path for found in assignments(run, algorithm, renamed(newcomers, new))
    } == expected


@pytest.mark.parametrize("algorithm", METHODS)
def test_company_changes_nothing(algorithm):
    """A newcomer goes where it goes, whoever comes with it."""
    _, newcomers = parted()
    run = run_of(algorithm)
    together = assignments(run, algorithm, newcomers)
    assert newcomers.clients
    for i, client in enumerate(newcomers.clients):
        alone = dataclasses.replace(newcomers, clients=(client,), true_clusters=None)
        (found,) = assignments(run, algorithm, alone)
        assert found.path == together[i].path
