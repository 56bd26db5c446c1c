"""Clients that lie over a network do so as in a simulation, and what they cannot know is refused."""

from __future__ import annotations

import pytest
import torch

from fedclade import Adversary, Aggregation, ConfigError, load_federation, simulate
from fedclade.algorithms import CFL, FLUX, IFCA, PACFL, FlexCFL, ReplicatedCFL
from fedclade.flower.client_app import LyingHandler
from fedclade.flower.client_handler import ClientHandler
from fedclade.runs.adversaries import Adversaries
from fedclade.tasks import Task
from tests.flower.grids import ALL_ALLOWED, LOCAL, app_of, federated, grid_of, node_of, reasons
from tests.tiny import federation_of, perceptron, task_federation

FEDERATION = federation_of((0, 1, 0, 1, 0, 1))
FREE = Aggregation(largest_weight=1e12, largest_norm=1e9, clip_above=1e9)
SETTINGS = {"rounds": 3, "local": LOCAL, "seed": 1}


def both(adversary, algorithm, federation=FEDERATION, model=perceptron, **settings):
    """Return a simulation, and the same over a grid."""
    settings = {**SETTINGS, "aggregate": FREE, **settings}
    simulated = simulate(
        algorithm, model, federation, engine="loop", adversary=adversary, **settings
    )
    grid = grid_of(federation, model, ALL_ALLOWED)
    for client in simulated.summary["adversary"]["ids"]:
        grid.nodes[node_of(client)].app = app_of(federation, model, adversary=adversary)
    return simulated, federated(grid, algorithm, model, **settings)


SPLITS = CFL(split_rounds=(2,), eps2=1e-6)


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        *(
            (kind, SPLITS)
            for kind in ("label_flip", "sign_flip", "scaled", "gaussian", "false_size", "sybil")
        ),
        ("gaussian", ReplicatedCFL(level=0.5, check_every=3)),
    ],
)
def test_a_lie_is_the_same_as_in_a_simulation(kind, algorithm):
    simulated, run = both(Adversary(kind=kind, share=0.2), algorithm)
    assert [node.members for node in run.tree.nodes] == [
        node.members for node in simulated.tree.nodes
    ]
    for mine, theirs in zip(run.tree.nodes, simulated.tree.nodes, strict=True):
        torch.testing.assert_close(mine.model, theirs.model, rtol=1e-5, atol=1e-6)


STATING = {
    "losses": IFCA(clusters=2),
    "subspaces": PACFL(vectors=1, set_apart=0.2),
    "descriptors": FLUX(th_round=-1.0, earliest=1, latest=1),
    "shifts": FlexCFL(groups=2, migrate=True),
    "signatures": ReplicatedCFL(level=0.5, check_every=3),
}


@pytest.mark.parametrize("lie", STATING)
def test_a_false_statement_is_the_same_as_in_a_simulation(lie):
    adversary = Adversary(lies=lie, kind="sign_flip" if lie == "signatures" else "", share=0.2)
    simulated, run = both(adversary, STATING[lie])
    assert [node.members for node in run.tree.nodes] == [
        node.members for node in simulated.tree.nodes
    ]
    for mine, theirs in zip(run.tree.nodes, simulated.tree.nodes, strict=True):
        torch.testing.assert_close(mine.model, theirs.model, rtol=1e-5, atol=1e-6)
    told = [[event["kind"] for event in found.events] for found in (run, simulated)]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "algorithm", [FLUX(th_round=-1.0, earliest=1, latest=1), FlexCFL(groups=2, by_label=True)]
)
def test_flipped_labels_are_described_and_counted_as_in_a_simulation(algorithm):
    simulated, run = both(Adversary(kind="label_flip", share=0.2), algorithm)
    assert [node.members for node in run.tree.nodes] == [
        node.members for node in simulated.tree.nodes
    ]
    for mine, theirs in zip(run.tree.nodes, simulated.tree.nodes, strict=True):
        torch.testing.assert_close(mine.model, theirs.model, rtol=1e-5, atol=1e-6)


def test_sums_of_a_client_that_poisons_its_data_are_those_of_poisoned_data():
    """What it reports before the first round, by which labels are weighed, was once the truth."""
    federation, task = federation_of((0, 0)), Task(class_weights="balanced")
    adversary = Adversary(kind="label_flip")
    handler = LyingHandler(federation.alone(0), perceptron, adversary=adversary, task=task)
    honest = ClientHandler(federation.alone(0), perceptron, task=task)
    assert handler._sums.labels.tolist() == honest._sums.labels.tolist()[::-1]
    assert handler._sums.labels.tolist() != honest._sums.labels.tolist()
    false = LyingHandler(
        federation.alone(0), perceptron, adversary=Adversary(lies="statistics"), task=task
    )
    assert sorted(false._sums.labels.tolist())[:-1] == [0] * (len(false._sums.labels) - 1)


def test_a_false_size_is_not_told_of_equal_parts_as_the_server_knows_how_large_they_are():
    federation = federation_of((0, 1, 0, 1, 0, 1), sizes=[61] * 6)
    grid = grid_of(federation, perceptron)
    grid.nodes[node_of(2)].app = app_of(
        federation, perceptron, adversary=Adversary(kind="false_size")
    )
    run = federated(grid, ReplicatedCFL(level=0.5, check_every=9), **{**SETTINGS, "rounds": 4})
    assert reasons(run) == {}
    (limited,) = [event for event in run.events if event["kind"] == "limited"]
    assert (limited["round"], list(limited["clients"])) == (4, ["2"])


def test_a_lie_begins_in_its_round():
    adversary = Adversary(kind="sign_flip", share=0.2, from_round=3)
    simulated, run = both(adversary, "fedavg")
    torch.testing.assert_close(run.tree.nodes[0].model, simulated.tree.nodes[0].model)
    honest = federated(grid_of(FEDERATION), "fedavg", **SETTINGS)
    assert not torch.allclose(run.tree.nodes[0].model, honest.tree.nodes[0].model)


def test_a_backdoor_needs_no_others():
    images = load_federation("digits", clients=3, samples_per_client=40)
    adversary = Adversary(kind="backdoor", share=0.3, factor=3.0, poisoned=1.0)
    simulated, run = both(adversary, "fedavg", images, "mclr")
    torch.testing.assert_close(run.tree.nodes[0].model, simulated.tree.nodes[0].model)


def test_flipped_labels_are_trained_on_with_columns_that_all_clients_scaled():
    """Another federation than the one at hand is trained on then, and it is poisoned again."""
    federation = federation_of((0, 0))
    handler = LyingHandler(
        federation.alone(0), perceptron, adversary=Adversary(kind="label_flip", share=1.0)
    )
    held = handler._held(federation.alone(1))
    assert held.in_round(-1).ids == (1,)


@pytest.mark.parametrize(
    ("adversary", "told"),
    [
        (
            Adversary(kind="alie"),
            "adversary.kind should be an attack that needs no other clients, .* got 'alie'",
        ),
        (
            Adversary(),
            "adversary.kind should be an attack that needs no other clients, since "
            "a client in a network knows none, got ''",
        ),
        (
            Adversary(kind="sign_flip", sleeper=True),
            "adversary.sleeper should be false in a network, where a client does "
            "not learn of splits; set adversary.from_round",
        ),
    ],
)
def test_what_a_client_cannot_know_is_refused(adversary, told):
    with pytest.raises(ConfigError, match=told):
        LyingHandler(FEDERATION.alone(0), perceptron, adversary=adversary)


def test_data_that_cannot_be_poisoned_is_named():
    numbers = task_federation("regression", [0]).alone(0)
    with pytest.raises(ConfigError, match=r"adversary\.kind 'label_flip' needs labels"):
        LyingHandler(numbers, "mclr", adversary=Adversary(kind="label_flip"))


def test_the_liars_of_a_simulation_are_known_beforehand():
    task, adversary = Task().of(FEDERATION.pool.schema), Adversary(kind="sign_flip", share=0.2)
    found = simulate(
        "fedavg",
        perceptron,
        FEDERATION,
        engine="loop",
        adversary=adversary,
        **{**SETTINGS, "rounds": 1},
    )
    drawn = Adversaries.drawn(adversary, FEDERATION, task, SETTINGS["seed"])
    assert drawn is not None
    assert found.summary["adversary"]["ids"] == sorted(drawn.lying.liars)
