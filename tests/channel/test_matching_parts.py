"""Updates that should be the means of those of their parts: honest ones pass, others are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade import (
    Adversary,
    DifferentialPrivacy,
    ExamplePrivacy,
    LocalTraining,
    ReplicatedCFL,
    simulate,
)
from fedclade.algorithms.rcfl.data_splits import HALVES, DataSplits
from fedclade.channel import (
    Budget,
    Channel,
    CountSketch,
    Lying,
    MatchingParts,
    Middleware,
    Permutation,
)
from fedclade.channel.compose import client_side
from fedclade.channel.matching_parts import shares_of
from fedclade.core import ClientWork, Models, Round, SplitPart, Splits, TrainQuery
from tests.flower.grids import app_of, federated, grid_of, housed, node_of, reasons
from tests.tiny import federation_of, perceptron, simulated

N = 6
FEDERATION = federation_of([0] * N, sizes=[24, 25, 26, 27, 28, 29])
ROUND = Round(2, LocalTraining(batch_size=8, lr=0.1), seed=1)
PARTS = Splits(2)
CLIENTS, MODEL = simulated(FEDERATION, perceptron())
D = len(MODEL)
FALSE_MEAN = Adversary(kind="scaled", factor=-3.0, lies="signatures", share=0.1)


class Changing(Middleware):
    """Middleware that changes what arrives."""

    queries = (TrainQuery,)

    def __init__(self, spoil) -> None:
        self.spoil = spoil

    def after(self, query, reply):
        return reply.with_columns(deltas=self.spoil(reply.deltas.clone()))


def sent(splits=PARTS, adversary=None, *, dim: int = 32, permutation=None, spoil=None):
    """Return what arrives of clients that train on parts, of which client 2 may be an adversary."""
    sketch = CountSketch(0, D, dim)
    lying = None if adversary is None else Lying(adversary, [2], FEDERATION.keys)
    middleware = client_side(permutation=permutation, sketch=sketch, lying=lying)
    work = ClientWork() if splits is None else ClientWork(data=splits)
    query = TrainQuery(list(range(N)), Models(MODEL[None], [0] * N), ROUND, work)
    changing = [] if spoil is None else [Changing(spoil)]
    return Channel(CLIENTS, *middleware, *changing, MatchingParts(sketch)).ask(query)


@pytest.mark.parametrize("replicates", [2, 3, 4])
@pytest.mark.parametrize("part_size", [0, 6])
@pytest.mark.parametrize("dim", [4, 32, 10_000])
def test_honest_updates_match_their_parts(replicates, part_size, dim):
    """Parts of an odd number of examples are not of one size, so they do not weigh the same."""
    found = sent(Splits(replicates, part_size), dim=dim)
    assert not found.left_out
    assert found.ids == tuple(range(N))


def test_honest_updates_match_under_a_permutation():
    assert not sent(permutation=Permutation(7, D, D)).left_out


def test_what_travels_in_float32_matches_in_a_model_of_float64():
    assert not sent(spoil=lambda deltas: deltas.float().double()).left_out
    assert sent(spoil=lambda deltas: deltas.double(), adversary=FALSE_MEAN).left_out.keys() == {2}


def test_a_false_mean_is_left_out():
    found = sent(adversary=FALSE_MEAN)
    assert found.left_out.keys() == {2}
    assert (
        "the update is not the mean of the updates from the client's parts of its data: their signatures differ by"
        in found.left_out[2]
    )
    honest = sent()
    others = [client for client in range(N) if client != 2]
    assert torch.equal(found.deltas, honest.deltas[others])


def test_huge_parts_that_cancel_hide_a_false_mean_no_better():
    """The bound goes by the length of the parts, so it is one of rounding, and not of a share of them."""

    def spoil(deltas):
        deltas[2, :D] *= -3
        deltas[2, D : D + 32] += 100
        deltas[2, D + 32 :] -= 100
        return deltas

    assert sent(spoil=spoil).left_out.keys() == {2}


def test_a_signature_that_is_not_a_number_is_left_out():
    def spoil(deltas):
        deltas[2, -1] = torch.nan
        return deltas

    assert sent(spoil=spoil).left_out.keys() == {2}


def test_where_parts_are_not_compared_nothing_is_checked():
    assert not sent(None, FALSE_MEAN).left_out
    assert not sent(Splits(2, compared=False), FALSE_MEAN).left_out


def test_shares_are_those_of_the_parts():
    assert shares_of(Splits(2), 5) == [3 / 5, 2 / 5]
    assert shares_of(Splits(4, 3), 13) == [1 / 4] * 4
    assert len(SplitPart(0, 2).of_client(5, 0, seed=1, number=2)) == 3


SETTINGS = {"rounds": 4, "local": LocalTraining(batch_size=8, lr=0.5), "seed": 1}
TWO = federation_of((0, 1, 0, 1, 0, 1), sizes=[60] * 6)


def left_out(run) -> set[int]:
    return {
        int(client)
        for event in run.events
        if event["kind"] == "left_out"
        for client in event["clients"]
    }


def test_rcfl_leaves_out_a_false_mean_in_each_check():
    run = simulate(ReplicatedCFL(), perceptron, TWO, adversary=FALSE_MEAN, **SETTINGS)
    assert left_out(run) == set(run.summary["adversary"]["ids"])
    honest = simulate(
        ReplicatedCFL(), perceptron, TWO, adversary=replace(FALSE_MEAN, from_round=9), **SETTINGS
    )
    assert not left_out(honest)


def test_rcfl_leaves_it_out_over_a_network_and_no_honest_client():
    grid = grid_of(TWO)
    assert not reasons(federated(grid, ReplicatedCFL(), **SETTINGS))
    grid = grid_of(TWO)
    grid.nodes[node_of(4)].app = app_of(TWO, adversary=replace(FALSE_MEAN, share=0.0))
    found = reasons(federated(grid, ReplicatedCFL(), **SETTINGS))
    assert list(found) == [4]
    assert "the update is not the mean of the updates from the client's parts" in found[4]


@pytest.mark.parametrize("level", ["client", "example"])
def test_rcfl_leaves_out_no_private_client_of_an_odd_number_of_examples_over_a_network(
    level, tmp_path, monkeypatch
):
    """Halves of 33 examples are of 17 and 16; the client reports 32, and both sides weigh the halves alike."""
    monkeypatch.setattr(DataSplits, "_choose", classmethod(lambda cls, *of: HALVES))
    mechanism = DifferentialPrivacy if level == "client" else ExamplePrivacy
    privacy = mechanism(clip_norm=1.0, noise_multiplier=0.1)
    federation = federation_of((0, 1), sizes=[33, 34])
    budget = Budget(epsilon=float("inf"), level=level)
    grid = housed(grid_of(federation, privacy=privacy, budget=budget), tmp_path)
    run = federated(grid, ReplicatedCFL(), privacy=privacy, **{**SETTINGS, "rounds": 1})
    assert not reasons(run, of_training=True)
