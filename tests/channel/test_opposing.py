"""Updates that oppose the cluster that their client has chosen: which are left out, and which are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade import (
    IFCA,
    Adversary,
    Aggregation,
    ConfigError,
    FedAvg,
    LocalTraining,
    RunSettings,
    Signature,
    load_federation,
    simulate,
)
from fedclade.channel import Channel, OpposingUpdates, Streaming
from fedclade.channel.opposing import COMPARED_WITH
from fedclade.core import Round
from fedclade.flower.secure.terms import check_sums
from tests.flower.grids import app_of, federated, grid_of, network_of, node_of, reasons
from tests.tiny import ScriptedClients, federation_of, perceptron

D = 30
ROUND = Round(2, LocalTraining(), seed=1)


def around(direction: torch.Tensor, n: int, noise: float = 0.5, seed: int = 0) -> torch.Tensor:
    """Return n updates ``[n, D]`` that are a direction of length 1 and noise of that length."""
    drawn = torch.randn(n, D, generator=torch.Generator().manual_seed(seed))
    return direction / direction.norm() + noise * drawn / drawn.norm(dim=1, keepdim=True)


ONE, OTHER = torch.eye(D)[0], torch.eye(D)[1]


def asked(updates: torch.Tensor, rows: list[int], *, models: int = 2, streams: bool = False):
    """Return what a server gets of clients that have taken models by rows."""
    middleware = OpposingUpdates(0.2), *([Streaming()] if streams else [])
    clients = Channel(ScriptedClients(dict(enumerate(updates.tolist()))), *middleware)
    return clients.train(list(range(len(updates))), torch.zeros(models, D), rows, ROUND)


def test_an_update_against_the_others_of_its_model_is_left_out():
    updates = torch.cat([around(ONE, 4), -3 * around(ONE, 1, seed=1), around(OTHER, 3, seed=2)])
    reply = asked(updates, [0] * 5 + [1] * 3)
    assert reply.ids == (0, 1, 2, 3, 5, 6, 7)
    assert reply.left_out.keys() == {4}
    assert (
        "the update opposes the cluster that the client chose: 4 of its 5 members, which have a mean cosine of 0.8"
        in reply.left_out[4]
    )


def test_honest_updates_arrive_bit_for_bit():
    updates = torch.cat([around(ONE, 5), around(OTHER, 4, seed=1)])
    reply = asked(updates, [0] * 5 + [1] * 4)
    assert torch.equal(reply.deltas, updates)
    assert not reply.left_out


def test_of_three_the_two_that_agree_are_believed_and_of_two_both():
    updates = torch.cat([around(ONE, 2), -around(ONE, 1, seed=1)])
    assert asked(torch.cat([updates, around(OTHER, 1)]), [0, 0, 0, 1]).left_out.keys() == {2}
    assert not asked(updates[1:], [0, 0]).left_out


@pytest.mark.parametrize(
    ("updates", "why"),
    [
        (
            torch.cat([around(ONE, 2), -around(ONE, 2, seed=1)]),
            "half of the members, of which neither is a majority",
        ),
        (
            torch.cat([around(ONE, 7), -around(ONE, 2, seed=1)]),
            "two of nine: a distribution with no other model",
        ),
        (
            torch.cat([around(ONE, 4, noise=9.0), -around(ONE, 1, seed=1)]),
            "others that do not agree: they are noise",
        ),
        (torch.cat([around(ONE, 4), around(OTHER, 1)]), "a right angle to the others"),
    ],
)
def test_what_cannot_be_told_is_let_through(updates, why):
    assert not asked(torch.cat([updates, around(OTHER, 1)]), [0] * len(updates) + [1]).left_out, why


def test_a_fifth_of_a_cluster_may_be_left_out():
    updates = torch.cat([around(ONE, 8), -around(ONE, 2, seed=1), around(OTHER, 1)])
    assert asked(updates, [0] * 10 + [1]).left_out.keys() == {8, 9}


def test_without_a_choice_or_an_update_nothing_is_checked():
    updates = torch.cat([around(ONE, 4), -around(ONE, 1, seed=1)])
    assert not asked(updates, [0] * 5, models=1).left_out
    assert not asked(torch.zeros(5, D), [0, 0, 0, 0, 1]).left_out
    assert not asked(updates, [0, 0, 0, 0, 1]).left_out


def test_large_clusters_are_compared_with_some_of_their_members():
    n = COMPARED_WITH + 20
    updates = torch.cat([around(ONE, n), -around(ONE, 1, seed=1), around(OTHER, 1)])
    assert asked(updates, [0] * (n + 1) + [1]).left_out.keys() == {n}


DIGITS = load_federation(
    "digits", clients=12, samples_per_client=60, shift="label_swap", clusters=2
)
LOCAL = LocalTraining(epochs=3, batch_size=10, lr=0.1)
ATTACK = Adversary(kind="scaled", factor=-3.0, lies="losses", share=0.08)


def run(seed: int = 3, adversary: Adversary | None = None, on: bool | str = "auto", **settings):
    settings = {
        "rounds": 5,
        "local": LOCAL,
        "aggregate": Aggregation(leave_out_opposed=on),
        **settings,
    }
    return simulate(
        IFCA(clusters=2),
        "mclr",
        DIGITS,
        seed=seed,
        adversary=adversary,
        evaluate_every=5,
        **settings,
    )


def honest_accuracy(found) -> float:
    return found.summary["adversary"]["scores"]["accuracy"]["honest"]


def test_ifca_withstands_a_client_that_claims_the_wrong_model_and_flips_its_update():
    """It ruins a model that few have taken, so that no client ever takes it; without the check that costs 20 points."""
    open_to_it, defended = run(adversary=ATTACK, on=False), run(adversary=ATTACK)
    assert honest_accuracy(open_to_it) < 0.85
    assert honest_accuracy(defended) > 0.9
    (adversary,) = defended.summary["adversary"]["ids"]
    named = [event["clients"] for event in defended.events if event["kind"] == "left_out"]
    assert named
    assert all(
        list(clients) == [adversary] or list(clients) == [str(adversary)] for clients in named
    )


def test_a_run_of_honest_clients_is_the_same_with_the_check():
    off, on = run(on=False), run(on=True)
    assert not [event for event in on.events if event["kind"] == "left_out"]
    for one, other in zip(off.tree.nodes, on.tree.nodes, strict=True):
        assert one.members == other.members
        assert torch.equal(one.model, other.model)


def test_over_a_network_it_acts_by_default():
    grid = grid_of(DIGITS, "mclr")
    (adversary,) = run(adversary=ATTACK, rounds=1).summary["adversary"]["ids"]
    grid.nodes[node_of(adversary)].app = app_of(
        DIGITS, "mclr", adversary=replace(ATTACK, share=0.0)
    )
    settings = {"rounds": 1, "local": LOCAL, "seed": 3, "network": network_of(grid, deadline=30.0)}
    found = federated(grid, IFCA(clusters=2), "mclr", **settings)
    assert list(reasons(found)) == [adversary]
    assert "the update opposes the cluster that the client chose" in reasons(found)[adversary]
    off = federated(
        grid, IFCA(clusters=2), "mclr", aggregate=Aggregation(leave_out_opposed=False), **settings
    )
    assert not reasons(off)


@pytest.mark.parametrize(
    ("algorithm", "settings", "told"),
    [
        (
            "cfl",
            {},
            "aggregate.leave_out_opposed = true needs an algorithm whose clients choose their cluster, and clients of "
            "CFL do not; leave out the setting",
        ),
        (
            "ifca",
            {"stream": True, "signature": Signature(kind="projected")},
            "stream = true: aggregate.leave_out_opposed = true needs the updates of single clients; set stream = false",
        ),
    ],
)
def test_where_it_cannot_be_checked_it_is_refused(algorithm, settings, told):
    with pytest.raises(ConfigError, match=told):
        simulate(
            algorithm,
            perceptron,
            federation_of([0, 0]),
            aggregate=Aggregation(leave_out_opposed=True),
            **settings,
        )


def test_where_the_server_has_sums_alone_it_is_refused():
    settings = RunSettings(aggregate=Aggregation(leave_out_opposed=True))
    with pytest.raises(
        ConfigError,
        match="leave_out_opposed = true needs the updates of single clients; leave it out",
    ):
        check_sums(settings, FedAvg())
    check_sums(RunSettings(), FedAvg())


def test_another_value_is_refused():
    with pytest.raises(ConfigError, match=r"aggregate\.leave_out_opposed"):
        Aggregation(leave_out_opposed="never")


def test_a_run_that_streams_by_itself_does_not_look():
    settings = {"stream": True, "signature": Signature(kind="projected", dim=16)}
    found = run(adversary=replace(ATTACK, lies=("losses",)), rounds=2, **settings)
    assert not [event for event in found.events if event["kind"] == "left_out"]
