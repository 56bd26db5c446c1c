from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade import CFL, ConfigError, LocalTraining, Signature, UpdateError, simulate
from fedclade.channel.middleware import Channel
from fedclade.channel.retry import CORRUPTIONS, FaultInjection, Faults, spoil
from fedclade.core import ClientWork, NoReply, Proximal
from fedclade.core.queries import Round
from fedclade.core.updates import DROPPED_OUT, TOO_LATE
from tests.tiny import (
    Attended,
    Metered,
    ScriptedClients,
    SpyClients,
    federation_of,
    linear,
    simulated,
)

ROUND = Round(3, LocalTraining(), seed=1)
N = 60
KEYS = {client: client for client in range(N)}
HALF = Faults(dropout=0.2, slow=0.1, corrupt=0.2)


def scripted() -> ScriptedClients:
    deltas = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    return ScriptedClients(dict(enumerate(deltas.tolist())))


def left_out(faults=HALF, ids=range(N), this_round=ROUND, keys=KEYS, work=None) -> dict[int, str]:
    faulty = Channel(scripted(), FaultInjection(faults, keys, 4))
    updates = faulty.train(list(ids), torch.zeros(1, 4), [0] * len(ids), this_round, work)
    return dict(updates.left_out)


@pytest.mark.parametrize("name", ["dropout", "slow", "corrupt"])
@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_named(name, share):
    with pytest.raises(ConfigError, match=rf"faults.{name} should be in \[0, 1\], got {share}"):
        Faults(**{name: share})


def test_shares_are_at_most_one_together():
    with pytest.raises(ConfigError, match=r"the sum of faults should be at most 1, got 1\.5"):
        Faults(dropout=0.75, corrupt=0.75)


def test_there_are_no_faults_by_default():
    assert not Faults()
    assert all((Faults(dropout=0.1), Faults(slow=0.1), Faults(corrupt=0.1)))


def test_faults_are_as_frequent_as_they_should_be():
    """10,000 draws: four standard deviations of a share are at most 0.02, and of a quarter of one 0.007."""
    draw = np.random.default_rng(0)
    found = Counter(HALF.drawn(draw) for _ in range(10_000))
    assert found[DROPPED_OUT] / 10_000 == pytest.approx(0.2, abs=0.02)
    assert found[TOO_LATE] / 10_000 == pytest.approx(0.1, abs=0.02)
    assert found[None] / 10_000 == pytest.approx(0.5, abs=0.02)
    for kind in CORRUPTIONS:
        assert found[kind] / 10_000 == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("how", CORRUPTIONS)
def test_a_spoilt_update_is_a_copy_that_cannot_be_used(how):
    update = torch.ones(10)
    spoilt = spoil(update, how, np.random.default_rng(0))
    assert torch.equal(update, torch.ones(10))
    assert spoilt.shape != update.shape or not float(spoilt.double().norm()) <= 1e18


@pytest.mark.parametrize("what", ["train", "gradients"])
def test_faulty_clients_are_left_out_and_the_others_answer_as_ever(what):
    faulty = Channel(scripted(), FaultInjection(HALF, KEYS, 4))
    updates = getattr(faulty, what)(list(range(N)), torch.zeros(1, 4), [0] * N, ROUND)
    assert sorted([*updates.ids, *updates.left_out]) == list(range(N))
    assert updates.deltas.tolist() == [
        pytest.approx(scripted().deltas[client]) for client in updates.ids
    ]
    reasons = Counter(
        why if why in (DROPPED_OUT, TOO_LATE) else why.split()[-1]
        for why in updates.left_out.values()
    )
    assert set(reasons) == {DROPPED_OUT, TOO_LATE, "infinite", "1e+18", "(4,)"}
    assert 0.3 * N < len(updates.left_out) < 0.7 * N


def test_a_fault_belongs_to_the_client_whoever_else_is_asked():
    everybody = left_out()
    for some in (range(N)[::-1], range(0, N, 3), [7]):
        assert left_out(ids=some) == {
            client: why for client, why in everybody.items() if client in some
        }


def test_a_fault_belongs_to_the_key_not_to_the_name():
    moved = {client: (client + 7) % N for client in range(N)}
    absent = Faults(dropout=0.5)
    assert {moved[client] for client in left_out(absent, keys=moved)} == set(left_out(absent))


@pytest.mark.parametrize(
    "change", [{"number": 4}, {"query": 1}, {"purpose": "pretrain"}, {"seed": 2}]
)
def test_each_query_has_faults_of_its_own(change):
    assert left_out(this_round=replace(ROUND, **change)) != left_out()


def test_who_is_absent_is_not_asked_and_the_others_have_their_models():
    spy = SpyClients(scripted())
    faulty = Channel(spy, FaultInjection(HALF, KEYS, 4))
    models = torch.arange(float(N))[:, None].expand(N, 4)
    work = ClientWork(steps=Proximal(1.0))
    updates = faulty.train(range(N), models, range(N), ROUND, work, anchors=list(range(N))[::-1])
    absent = {client for client, why in updates.left_out.items() if why in (DROPPED_OUT, TOO_LATE)}
    assert set(spy.calls[0].ids) == set(range(N)) - absent
    assert all(float(model[0]) == client for client, model in spy.calls[0].models.items())
    assert all(float(model[0]) == N - 1 - client for client, model in spy.calls[0].anchors.items())


def test_when_all_are_absent_nobody_is_asked():
    spy = SpyClients(scripted())
    updates = Channel(spy, FaultInjection(Faults(dropout=1.0), KEYS, 3)).train(
        [1, 2], torch.zeros(1, 4), [0, 0], ROUND
    )
    assert spy.calls == []
    assert updates.left_out == {1: DROPPED_OUT, 2: DROPPED_OUT}
    assert (updates.deltas.shape, updates.signatures.shape) == ((0, 4), (0, 3))


def test_what_does_not_travel_does_not_arrive_corrupt():
    at_home = ClientWork(reply=NoReply())
    assert left_out(Faults(corrupt=1.0), work=at_home) == {}
    assert len(left_out(Faults(dropout=1.0), work=at_home)) == N


def test_who_drops_out_has_received_a_model_and_sent_nothing():
    """A model of 4 float32 entries; what is late or corrupt was sent."""
    metered = Metered(Channel(scripted(), FaultInjection(HALF, KEYS, 4)))
    for what, down in (("train", N * 16), ("gradients", 0)):
        before = metered.meter.readings()
        updates = getattr(metered, what)(list(range(N)), torch.zeros(1, 4), [0] * N, ROUND)
        dropped = sum(why == DROPPED_OUT for why in updates.left_out.values())
        used = metered.meter.since(before, 1.0)
        assert (used["bytes_down"], used["bytes_up"]) == (down, (N - dropped) * 16)
        assert 0 < dropped < len(updates.left_out)


TRUTH = [0, 1, 2, 3] * 4


def test_an_answer_to_a_retry_is_the_one_that_would_have_come():
    clients, params = simulated(federation_of(TRUTH), linear(1))
    faulty = Channel(
        clients, FaultInjection(Faults(dropout=0.8), KEYS, clients.layout.n_parameters)
    )
    attended = Attended(faulty, retries=50)
    asked = (range(16), params[None], [0] * 16, ROUND)
    updates = attended.train(*asked, require_all=True)
    assert torch.equal(updates.deltas, clients.train(*asked).deltas)
    assert sum(event.kind == "retried" for event in attended.closed(3)) > 3


def run_of(faults=HALF, **settings):
    federation = federation_of(TRUTH, [20 + 3 * i for i in range(16)], seed=1)
    spec = LocalTraining(epochs=2, batch_size=10, lr=0.2)
    return simulate(
        CFL(eps2=0.3),
        linear(1),
        federation,
        local=spec,
        rounds=6,
        seed=1,
        faults=faults,
        **settings,
    )


def without_seconds(rows):
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def test_a_run_with_faults_does_not_depend_on_the_blocks_in_which_clients_train():
    """With so little memory every client is a block of its own."""
    run, small = run_of(engine="loop"), run_of(engine="loop", memory=1)
    assert without_seconds(run.metric_rows) == without_seconds(small.metric_rows)
    assert run.events == small.events
    assert sum(event["kind"] == "left_out" for event in run.events) == 6
    for ours, theirs in zip(run.tree.nodes, small.tree.nodes, strict=True):
        assert torch.equal(ours.params, theirs.params)


def test_a_run_with_faults_is_the_same_when_it_streams_but_for_rounding():
    sketch = Signature(kind="projected", dim=16)
    run, stream = (
        run_of(engine="loop", signature=sketch, stream=s, memory=4000) for s in (False, True)
    )
    assert run.events[0] == stream.events[0]
    assert [node.members for node in run.tree.nodes] == [node.members for node in stream.tree.nodes]
    for ours, theirs in zip(run.tree.nodes, stream.tree.nodes, strict=True):
        torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-5)


def test_a_run_whose_faults_never_happen_is_the_run_without():
    run, other = run_of(None), run_of(Faults(dropout=1e-12))
    assert without_seconds(run.metric_rows) == without_seconds(other.metric_rows)
    assert run.config["faults"] == {"dropout": 0.0, "slow": 0.0, "corrupt": 0.0}


def test_a_run_in_which_nobody_answers_ends_with_an_error():
    with pytest.raises(
        UpdateError, match="round 1: no client replied to any of 3 queries: client 0: dropped out"
    ):
        run_of(Faults(dropout=1.0))
