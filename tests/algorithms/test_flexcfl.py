"""FlexCFL: against the authors' steps while data shifts, who migrates, what is FedGroup's."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedGroup, FlexCFL, LocalTraining
from fedclade.algorithms import ShiftQuery
from fedclade.algorithms.cluster_update import ClusterUpdate
from fedclade.core import Clients, ParameterTree, RoundPlan, Updates, inter_group
from tests.reference.fedavg import as_numpy
from tests.reference.flexcfl import flex_cfl
from tests.tiny import LABELS, VIEWS, federation_of, linear, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH, SIZES = [0, 1, 2, 0, 1, 2, 0, 1], [20, 26, 31, 24, 40, 22, 28, 35]
ODD = torch.tensor((0, 0, 0, 3))
"""How clients see labels after a shift that the counts of labels show: three as one."""


def shifting(seed: int, after: int, who: tuple[int, ...], view: torch.Tensor | None = None):
    """Return a federation for each round, in which some clients see labels otherwise from some round on."""
    first = federation_of(TRUTH, SIZES, seed=seed)
    changed = [
        replace(c, label_map=ODD if view is None else view) if c.id in who else c
        for c in first.clients
    ]
    then = replace(first, clients=tuple(changed))
    return lambda number: first if number <= after else then


class Staged(Clients):
    """Clients whose data is another in later rounds; what they keep stays."""

    def __init__(self, federation_in, seed: int) -> None:
        self.first, self.params = simulated(federation_in(1), linear(seed))
        self.federation_in, self.of = federation_in, {id(federation_in(1)): self.first}

    @property
    def ids(self):
        return self.first.ids

    @property
    def sizes(self):
        return self.first.sizes

    def ask(self, query, sink=None):
        number = query.round if isinstance(query, ShiftQuery) else query.round.number
        federation = self.federation_in(number)
        if id(federation) not in self.of:
            self.of[id(federation)], _ = simulated(federation, linear())
            self.of[id(federation)].store = self.first.store
        return self.of[id(federation)].ask(query)


@pytest.mark.parametrize(
    ("seed", "fraction", "eta_g"), [(1, 1.0, 0.0), (2, 0.5, 0.1), (3, 1.0, 0.1)]
)
def test_equals_the_authors_steps_round_by_round(seed, fraction, eta_g):
    federation_in = shifting(seed, 2, (0, 4))
    clients = Staged(federation_in, seed)
    algorithm = FlexCFL(groups=3, pretrain_scale=2, pretrain_steps=12, eta_g=eta_g)
    played = play(algorithm, clients, clients.params, 5, spec=SPEC, seed=seed, fraction=fraction)
    options = {
        "m": 3,
        "alpha": 2,
        "eta_g": eta_g,
        "steps": 12,
        "seed": seed,
        "rounds": 5,
        "labels": LABELS,
    }
    expected = flex_cfl(
        as_numpy(clients.params), federation_in, linear(), SPEC, **options, fraction=fraction
    )
    for state, log, wanted in zip(played.states[1:], played.logs, expected, strict=True):
        ours = {leaf.members: leaf.params for leaf in state.tree.leaves if leaf.members}
        theirs = {
            tuple(sorted(group)): w
            for group, w in zip(wanted.groups, wanted.models, strict=True)
            if group
        }
        assert ours.keys() == theirs.keys()
        for members, model in ours.items():
            np.testing.assert_allclose(model.numpy(), theirs[members], atol=1e-5)
        np.testing.assert_allclose(state.tree.nodes[0].model.numpy(), wanted.w, atol=1e-5)
        assert log.numbers["clients_shifted"] == len(wanted.shifted)
    assert [len(each.shifted) for each in expected] == [0, 0, 2, 0, 0]


def test_labels_that_trade_places_are_seen_by_label_alone():
    was, now = torch.tensor([30, 10, 0, 0]), torch.tensor([0, 10, 30, 0])
    seen = {
        by_label: ShiftQuery([0], 2, 0.2, by_label).have_shifted(was, now)
        for by_label in (False, True)
    }
    assert seen == {False: False, True: True}
    few = torch.tensor([26, 14, 0, 0])  # 8 of 40 are a share of 0.2, which is not above it
    assert not ShiftQuery([0], 2, 0.2, True).have_shifted(was, few)
    assert ShiftQuery([0], 2, 0.19, True).have_shifted(was, few)


def test_clients_whose_labels_permute_migrate_to_the_group_of_their_new_concept():
    """Client 0 sees labels as those of the second true cluster do, from round 3 on."""
    clients = Staged(shifting(0, 2, (0,), torch.tensor(VIEWS[1])), 0)
    algorithm = FlexCFL(groups=3, pretrain_scale=3, by_label=True, shift_share=0.05)
    played = play(algorithm, clients, clients.params, 4, spec=SPEC)
    before, after = (played.states[n].tree.leaf_of for n in (2, 4))
    assert before[0] == before[3] != before[1]
    assert after[0] == after[1] == before[1]
    assert played.logs[2].numbers == {"clients_shifted": 1.0, "clients_migrated": 1.0}
    assert [(event.kind, event.node) for event in played.logs[2].events] == [("joined", after[0])]
    assert played.logs[3].numbers == {"clients_shifted": 0.0, "clients_migrated": 0.0}


def test_clients_that_migrate_are_not_assigned_at_random():
    """As in the authors' code, where RAC is about the others: all go where their update says, with any seed."""
    for seed in range(4):
        clients = Staged(shifting(0, 2, (0,), torch.tensor(VIEWS[1])), 0)
        algorithm = FlexCFL(groups=3, pretrain_scale=3, by_label=True, shift_share=0.05, rac=True)
        played = play(algorithm, clients, clients.params, 3, spec=SPEC, seed=seed)
        before, after = (played.states[n].tree for n in (2, 3))
        updates = clients.train(
            [0],
            clients.params[None],
            [0],
            RoundPlan(3, replace(SPEC, epochs=None, steps=50), seed, "pretrain"),
        ).required_deltas[0]
        likest = max(
            (leaf for leaf in before.leaves if leaf.id),
            key=lambda leaf: float(
                torch.cosine_similarity(leaf.trained_from - clients.params, updates, dim=0)
            ),
        )
        assert after.leaf_of[0] == likest.id


def test_without_shifts_groups_are_those_of_fedgroup_with_as_much_pretraining():
    clients, params = simulated(federation_of(TRUTH, SIZES), linear())
    options = {"groups": 3, "pretrain_scale": 3, "pretrain_steps": 12, "eta_g": 0.0}
    ours, theirs = (
        play(a, clients, params, 2, spec=SPEC).states[-1].tree
        for a in (FlexCFL(**options), FedGroup(**options))
    )
    assert ours.leaf_of == theirs.leaf_of
    assert all(
        torch.equal(a.params, b.params) for a, b in zip(ours.leaves, theirs.leaves, strict=True)
    )


def test_a_step_between_groups_is_an_average_and_leaves_buffers():
    models = torch.tensor([[3.0, 4.0, 7.0], [0.0, 10.0, 8.0]])
    moved = inter_group(models, 0.5, 2, averages=True)
    weights = 0.5 / 10, 0.5 / 5
    expected = [
        (models[0] + weights[0] * models[1]) / (1 + weights[0]),
        (models[1] + weights[1] * models[0]) / (1 + weights[1]),
    ]
    torch.testing.assert_close(moved[:, :2], torch.stack(expected)[:, :2])
    assert moved[:, 2].tolist() == [7.0, 8.0]


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("shift_share", 2.5, "in [0, 2]"),
        ("direction", "update", "'first' or 'position'"),
        ("pretrain_steps", 0, "at least 1, or left out"),
    ],
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"algorithm.{option} should be {rule}, got {value!r}")
    ):
        FlexCFL(**{option: value})


def test_a_group_that_everybody_has_left_pulls_no_other():
    models = {1: torch.tensor([3.0, 0.0]), 2: torch.tensor([0.0, 4.0]), 3: torch.tensor([1e6, 1e6])}
    tree = ParameterTree.star([(0,), (1,), (2,)], torch.zeros(2)).reassigned({2: 1})
    for leaf, model in models.items():
        tree = tree.with_model(leaf, model)
    updates = Updates.received([0], [10], torch.zeros(1, 2), 2, torch.zeros(1), 1)
    moved = FlexCFL(groups=3, eta_g=0.1)._move_groups(
        tree, [ClusterUpdate.of(1, updates, RoundPlan(1, LocalTraining()))]
    )
    assert torch.equal(moved.nodes[3].params, models[3])
    assert max(float(moved.nodes[node].params.max()) for node in (0, 1, 2)) < 5


def test_clients_that_are_redrawn_do_not_migrate():
    text = (
        r"algorithm\.rac_redraws should be false with migrate = true, "
        r".* cannot stay in the group to which it migrated, got True"
    )
    with pytest.raises(ConfigError, match=text):
        FlexCFL(rac=True, rac_redraws=True)
    assert FlexCFL(rac=True, rac_redraws=True, migrate=False).rac_redraws
