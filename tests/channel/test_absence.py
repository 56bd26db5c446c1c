from __future__ import annotations

import torch

from fedclade import LocalTraining
from fedclade.algorithms import DescriptorQuery, ShiftQuery, SubspaceQuery
from fedclade.channel import AWAY, Absence, Retrying
from fedclade.channel.middleware import Channel
from fedclade.core.queries import Round
from tests.tiny import SpyClients, federation_of, linear, simulated

ROUND = Round(1, LocalTraining())


def spied(away: set[int]) -> tuple[SpyClients, Channel, Retrying]:
    federation = federation_of([0, 0, 1, 1])
    workers, _ = simulated(federation, linear())
    spy = SpyClients(workers)
    absence = Absence(28, federation.pool.schema)
    absence.away = frozenset(away)
    return spy, Channel(spy, absence, retrying := Retrying()), retrying


def test_clients_that_are_away_are_sent_nothing_and_left_out_with_the_reason():
    spy, clients, retrying = spied({1, 3})
    updates = clients.train([0, 1, 2, 3], torch.zeros(1, 28), [0] * 4, ROUND, require_all=True)
    assert (updates.ids, updates.left_out) == ((0, 2), {1: AWAY, 3: AWAY})
    assert [asked.ids for asked in spy.calls] == [(0, 2)], "nobody is asked again in the same round"
    (event,) = retrying.closed(1)
    assert event.clients == {1: AWAY, 3: AWAY}


def test_nobody_there_is_an_answer_of_nobody():
    spy, clients, _ = spied({0, 1})
    found = clients.gradients([0, 1], torch.zeros(1, 28), [0, 0], ROUND, require_all=True)
    assert found.ids == ()
    assert clients.evaluate([0, 1], torch.zeros(1, 28), [0, 0], "train").ids == ()
    assert not clients.ask(SubspaceQuery([0, 1], 2, per_label=False)).any()
    assert clients.ask(ShiftQuery([0, 1], 1, 0.2, by_label=False)).tolist() == [False, False]
    assert not clients.ask(DescriptorQuery([0, 1], torch.zeros(28), 1)).any()
    assert not spy.calls


def test_test_data_are_evaluated_for_all_and_training_data_for_those_that_are_there():
    _, clients, _ = spied({1})
    assert clients.evaluate([0, 1, 2], torch.zeros(1, 28), [0] * 3, "test").ids == (0, 1, 2)
    found = clients.evaluate([0, 0, 1, 1, 2, 2], torch.zeros(2, 28), [0, 1] * 3, "train")
    assert (found.ids, found.left_out) == ((0, 0, 2, 2), {1: AWAY})


def test_subspaces_of_those_that_are_away_are_zeros():
    _, clients, _ = spied({0})
    whole = spied(set())[1].ask(SubspaceQuery([0, 1], 2, per_label=False))
    found = clients.ask(SubspaceQuery([0, 1], 2, per_label=False))
    assert not found[0].any()
    assert torch.equal(found[1], whole[1])


def test_descriptors_of_those_that_are_away_are_zeros():
    _, clients, _ = spied({0})
    whole = spied(set())[1].ask(DescriptorQuery([0, 1], torch.zeros(28), 1))
    found = clients.ask(DescriptorQuery([0, 1], torch.zeros(28), 1))
    assert not found[0].any()
    assert torch.equal(found[1], whole[1])
