"""Models of the clients' own beside those of replicated clustering: when they are made, and who is served with them."""

from __future__ import annotations

from io import StringIO
from typing import ClassVar

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from fedclade import DataError, FineTune, LocalTraining, ReplicatedCFL, export_model, simulate
from fedclade.algorithms.fallback import LEAF, ROOT, keep_better
from fedclade.core import OWN, LocalModel, ParameterTree
from fedclade.core.queries import RoundPlan
from fedclade.report.tables import run_table
from fedclade.runs.store.export import model_card
from tests.tiny import ScriptedClients, SpyClients, federation_of, linear, play, replicating

SPEC = LocalTraining(epochs=4, batch_size=8, lr=0.3)
LONG = LocalTraining(epochs=20, batch_size=4, lr=0.5)
OURS = ReplicatedCFL(personalize=True)
DIFFERENT = federation_of([0, 1, 2, 3], [120] * 4, validation=40)
"""Before they go apart these clients, who see labels in four ways, share one model; it fits nobody."""
ALIKE = federation_of([0] * 10, [12] * 10, validation=60)
"""Whoever trains alone learns its few examples by heart."""


def test_who_is_better_off_alone_is_served_with_a_model_of_its_own():
    clients, params = replicating(DIFFERENT, linear())
    run = play(OURS, clients, params, 2, spec=SPEC)
    assert OURS.models_for(run.states[-1], clients).own == (0, 1, 2, 3)
    plain = play(ReplicatedCFL(), replicating(DIFFERENT, linear())[0], params, 2, spec=SPEC)
    assert torch.equal(run.states[-1].tree.nodes[0].params, plain.states[-1].tree.nodes[0].params)


def test_the_models_are_those_of_a_round_of_local_training():
    clients, params = replicating(federation_of([0, 1] * 3, [60] * 6), linear())
    run = play(OURS, clients, params, 4, spec=SPEC)
    tuning, tree = run.clients.asked("train", 4)[-1], run.states[-1].tree
    assert (tuning.own, tuning.round.purpose) == (True, "finetune")
    assert tuning.query.models.sent_before
    assert not tuning.work.sends_update
    assert (tuning.round.local, tuning.ids) == (SPEC, tuple(range(6)))
    assert len(tree.leaves) == 2
    assert all(
        torch.equal(model, tree.model_for(client)) for client, model in tuning.models.items()
    )


def test_where_sharing_is_better_nobody_keeps_a_model():
    clients, params = replicating(ALIKE, linear(), "stacked")
    assert OURS.models_for(play(OURS, clients, params, 6, spec=LONG).states[-1], clients).own == ()


def test_they_are_made_in_evaluated_rounds_only():
    simulation, params = replicating(federation_of([0, 1, 2, 3], [60] * 4), linear())
    clients, state, kept = SpyClients(simulation), OURS.init(params, simulation), []
    for number, evaluated in [(1, False), (2, True), (3, False)]:
        state, _ = OURS.step(state, range(4), clients, RoundPlan(number, SPEC, evaluated=evaluated))
        kept.append(len(OURS.models_for(state, clients).own))
    assert kept == [0, 4, 0]
    assert [[call.own for call in clients.asked("train", number)] for number in (1, 2, 3)] == [
        [False],
        [False, True],
        [False],
    ]


def test_without_validation_data_it_is_said_what_to_set():
    federation = federation_of([0, 1] * 3, validation=0)
    with pytest.raises(
        DataError, match=r"has no validation examples; set data\.validation_fraction above 0"
    ):
        simulate(OURS, linear(), federation, local=SPEC, rounds=3, engine="loop")


@pytest.mark.parametrize("keeps", [True, False])
def test_a_run_has_the_models_of_those_that_are_served_with_theirs_alone(keeps, tmp_path):
    federation = DIFFERENT if keeps else ALIKE
    run = simulate(
        OURS, linear(), federation, local=SPEC if keeps else LONG, rounds=2, engine="stacked"
    )
    assert set(run.kept) == (set(federation.ids) if keeps else set())
    assert run.summary.get("own_models", 0) == len(run.kept)
    shown = StringIO()
    Console(file=shown, width=120).print(run_table(run))
    assert ("evaluated for 4 of 4 clients" in shown.getvalue()) == keeps
    assert (model_card(run, run.tree.nodes[0], run.layout)["accuracy"] is None) == keeps
    export_model(run, tmp_path / "0.safetensors", client=0)
    mine, shared = (
        load_file(tmp_path / "0.safetensors"),
        run.layout.state_dict(run.tree.nodes[0].params),
    )
    assert all(torch.equal(mine[name], shared[name]) for name in shared) != keeps


def test_labels_that_differ_within_clusters_are_served_as_well_as_by_fine_tuning():
    settings = {"local": SPEC, "rounds": 2, "engine": "loop"}
    ours, tuned = (
        simulate(each, linear(), DIFFERENT, **settings) for each in (OURS, FineTune(epochs=4))
    )
    assert ours.summary["accuracy"]["mean"] > 0.7
    assert ours.summary["accuracy"]["mean"] >= tuned.summary["accuracy"]["mean"] - 0.1


class Tuning(ScriptedClients):
    """Clients whose fine-tuned copies count as model 2, and all other models as model 1."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        assert isinstance(work.store, LocalModel)
        return super().train(ids, models, assignment, this_round)

    def evaluate(self, ids, models, assignment, split):
        mine = [row == OWN for row in assignment]
        scored = torch.stack([torch.full((1,), 2.0 if each else 1.0) for each in mine])
        return super().evaluate(ids, scored, range(len(ids)), split)


def kept_by(right):
    """Return which of six clients with 100 validation examples each keep their copies."""
    everybody = range(6)
    clients = Tuning(
        {client: [0.0] for client in everybody}, dict.fromkeys(everybody, 100), right=right
    )
    tree = ParameterTree.root_only(everybody, torch.zeros(1))
    return keep_better(tree, (LEAF,), clients, RoundPlan(3, SPEC))


@pytest.mark.parametrize(("alone", "kept"), [(0.93, ()), (0.97, (0,))])
def test_a_client_departs_from_what_all_have_for_two_standard_errors(alone, kept):
    """Right about 85 of 100 with the cluster's model: two errors for 93 are 9.4 points, for 97 they are 8.5."""

    def right(client, model):
        return (alone if client == 0 else 0.5) if model == 2 else 0.85

    assert kept_by(right) == kept


@pytest.mark.parametrize(
    ("better_for", "copies", "kept"), [(1, 0.86, ()), (6, 0.86, ()), (6, 0.88, tuple(range(6)))]
)
def test_copies_are_kept_together_if_they_are_better_by_more_than_a_standard_error(
    better_for, copies, kept
):
    """The cluster's model is right about 85 of 100: the error is about √(0.15 + 0.12) / √600 = 2.1 points.

    For a client by itself, two errors are 10 points.
    """

    def right(client, model):
        return copies if model == 2 and client < better_for else 0.85

    assert kept_by(right) == kept


def test_with_a_fallback_the_model_for_all_is_tuned_as_well():
    """The root's model is 10, the leaves' are 1 and 2; tuning adds 100. Client 0 is best off from its leaf's."""
    right = {10.0: 0.5, 1.0: 0.5, 2.0: 0.5, 110.0: 0.9, 101.0: 0.2, 102.0: 0.2}

    class Tuning(ScriptedClients):
        own: ClassVar[dict[int, float]] = {}

        def train(self, ids, models, assignment, this_round, work=None, **more):
            self.own |= {
                client: float(models[row]) + 100
                for client, row in zip(ids, assignment, strict=True)
            }
            return super().train(ids, models, assignment, this_round)

        def evaluate(self, ids, models, assignment, split):
            of = [
                self.own[c] if row == OWN else float(models[row])
                for c, row in zip(ids, assignment, strict=True)
            ]
            return super().evaluate(ids, torch.tensor(of)[:, None], range(len(ids)), split)

    everybody = range(6)
    clients = Tuning(
        {client: [0.0] for client in everybody},
        dict.fromkeys(everybody, 100),
        right=lambda client, model: (
            (0.99 if model == 101 else 0.5) if client == 0 else right[model]
        ),
    )
    tree = ParameterTree.star([[0, 1, 2], [3, 4, 5]], torch.tensor([[1.0], [2.0]])).continued(
        torch.tensor([10.0])
    )
    assert keep_better(tree, (ROOT, LEAF), clients, RoundPlan(3, SPEC)) == tuple(everybody)
    assert clients.own == {0: 101.0, **dict.fromkeys(range(1, 6), 110.0)}
