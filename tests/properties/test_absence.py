"""Any subset of clients may answer any query: no algorithm may lose a client or a model over it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedclade import (
    APFL,
    CFL,
    FLHC,
    IFCA,
    OCFL,
    PACFL,
    CLoVE,
    Ditto,
    FedAvg,
    FedDrift,
    FedGroup,
    FedRC,
    FedSoft,
    FeSEM,
    FineTune,
    FlexCFL,
    Local,
    LocalTraining,
    Oracle,
    ReplicatedCFL,
    Scaffold,
    StoCFL,
)
from fedclade.algorithms import FLUX, DescriptorQuery, State, SubspaceQuery
from fedclade.core.queries import RoundPlan
from fedclade.core.updates import DROPPED_OUT, Updates
from tests.tiny import Around, Attended, federation_of, linear, replicating

TRUTH = [0, 1, 2, 3] * 3
N, ROUNDS = len(TRUTH), 6
SPEC = LocalTraining(batch_size=10, lr=0.3)

ALGORITHMS = [
    FedAvg(),
    Local(),
    Oracle(dict(enumerate(TRUTH))),
    CFL(eps2=0.3, split_rounds=(2, 4)),
    CFL(criterion="replicated"),
    ReplicatedCFL(check_every=3),
    CFL(eps2=0.3, split_rounds=(2, 4), similarity="gradients"),
    CFL(eps2=0.3, split_rounds=(2, 4), compared_at="stationary", children_start="own_mean"),
    CFL(eps1=0.5, eps2=0.3, stop_done_clusters=True),
    FLHC(rounds_before=2, metric="l2", linkage="ward", n_clusters=4),
    FedGroup(groups=3, pretrain_scale=2),
    FLHC(rounds_before=2, metric="l2", linkage="centroid", n_clusters=4, keep_updates=True),
    FedGroup(groups=3, pretrain_scale=2, rac=True),
    FedGroup(groups=3, pretrain_scale=2, rac=True, rac_redraws=True),
    FedGroup(groups=3, pretrain_scale=2, newcomer_training="remaining_epochs"),
    FlexCFL(groups=3, pretrain_scale=2, pretrain_steps=2, eta_g=0.1),
    IFCA(clusters=3),
    IFCA(clusters=2, average="gradients", restarts=2),
    PACFL(distance="per_label", n_clusters=4),
    CLoVE(clusters=3, stable_rounds=2),
    OCFL(),
    FeSEM(clusters=3),
    FedSoft(clusters=3, selection=4),
    StoCFL(tau=0.5, anchor_epochs=1),
    FLUX(earliest=1, latest=2),
    FLUX(earliest=1, latest=2, clusters=3),
    FedDrift(step_rounds=1, delta=0.1),
    FedDrift(step_rounds=1, start="together", eager=True, delta=0.02, models=3),
    FedRC(clusters=3),
    Ditto(),
    APFL(),
    Scaffold(),
    FineTune(),
]


class Flaky(Around):
    """Clients of whom in each query another subset answers: each client with a probability of its own."""

    def __init__(self, clients, present: list[float], seed: int) -> None:
        super().__init__(clients)
        self.present, self.draw = np.array(present), np.random.default_rng(seed)

    def train(self, ids, models, assignment, this_round, work=None, *, anchors=None, **more):
        ask = partial(self.clients.train, work=work, **more)
        return self.some(ask, ids, models, assignment, this_round, anchors)

    def gradients(self, ids, models, assignment, this_round, **more):
        ask = partial(self.clients.gradients, **more)
        return self.some(ask, ids, models, assignment, this_round)

    def evaluate(self, ids, models, assignment, split, **more):
        return self.clients.evaluate(ids, models, assignment, split, **more)

    def data(self, query):
        rows = super().data(query)
        if not isinstance(query, SubspaceQuery | DescriptorQuery):
            return rows
        answers = torch.from_numpy(self.draw.random(len(query.ids)) < self.present[list(query.ids)])
        return rows * answers.view(-1, *(1,) * (rows.dim() - 1))

    def some(self, ask, ids, models, assignment, this_round, anchors=None) -> Updates:
        answers = self.draw.random(len(ids)) < self.present[list(ids)]
        there = np.flatnonzero(answers)
        left_out = {
            client: DROPPED_OUT for client, answers in zip(ids, answers, strict=True) if not answers
        }
        if not len(there):
            return Updates.of_nobody(left_out, models, models.shape[1])
        some, rows = [ids[i] for i in there], [assignment[i] for i in there]
        pulled_to = {} if anchors is None else {"anchors": [anchors[i] for i in there]}
        return replace(ask(some, models, rows, this_round, **pulled_to), left_out=left_out)


def check(state: State) -> None:
    """Every client is in one leaf or waits at one node, children share out their parent's, and models are finite."""
    tree = state.tree
    held = [client for leaf in tree.leaves for client in leaf.members]
    waiting = [client for clients in tree.stragglers.values() for client in clients]
    assert sorted(held + waiting) == list(range(N))
    assert tree.nodes[0].members == tuple(range(N))
    for node in tree.nodes:
        assert torch.isfinite(node.params).all()
        children = [client for child in tree.children(node.id) for client in child.members]
        assert len(children) == len(set(children))
        assert set(children) <= set(node.members)
        if node.cached is not None:
            assert len(node.cached) == len(node.members)
            assert torch.isfinite(node.cached).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@example([0.0] * N, 0, 1.0, 1, False)
@settings(max_examples=4, deadline=None)
@given(
    present=st.one_of(
        st.lists(st.sampled_from([0.0, 0.3, 0.9, 1.0]), min_size=N, max_size=N),
        st.sampled_from([[0.0] * N, [0.5] * N, [0.1] * N]),
    ),
    seed=st.integers(0, 1000),
    fraction=st.sampled_from([1.0, 0.5]),
    min_clients=st.sampled_from([1, 1, 3]),
    attended=st.booleans(),
)
def test_whoever_answers_no_client_is_lost_and_no_model(
    algorithm, present, seed, fraction, min_clients, attended
):
    clients, params = replicating(federation_of(TRUTH, seed=1), linear(1), "stacked")
    flaky = Flaky(clients, present, seed)
    world = Attended(flaky) if attended else flaky
    if algorithm.requires.initial_models > 1:
        params = torch.stack([params + 0.1 * i for i in range(algorithm.requires.initial_models)])
    state = algorithm.init(params, world)
    for number in range(1, ROUNDS + 1):
        this_round = RoundPlan(number, SPEC, seed, min_clients=min_clients)
        cohort = algorithm.sample_cohort(state, fraction, this_round.generator("cohort"))
        before = state
        state, log = algorithm.step(state, cohort, world, this_round)
        check(state)
        assert set(algorithm.models_for(state, world).nodes) == set(range(N))
        assert all(np.isfinite(loss) for loss in log.losses.values())
        # IFCA may take up another set of models
        if not any(present) and getattr(algorithm, "restarts", 1) == 1:
            assert not log.losses
            for ours, theirs in zip(before.tree.nodes, state.tree.nodes, strict=False):
                torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-6)
