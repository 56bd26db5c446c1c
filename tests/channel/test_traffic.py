from __future__ import annotations

import pytest
import torch

from fedclade import LocalTraining
from fedclade.algorithms import SubspaceQuery
from fedclade.core import ClientWork, Delta, NoReply, Proximal
from fedclade.core.queries import Round
from tests.tiny import Metered, ScriptedClients


def test_the_meter_counts_models_down_and_updates_up():
    """Two clients train a model of 3 float32 entries, then one of them sends a gradient."""
    metered = Metered(ScriptedClients({0: [1, 2, 3], 1: [1, 2, 3]}))
    this_round = Round(1, LocalTraining())
    before = metered.meter.readings()
    metered.train([0, 1], torch.zeros(1, 3), [0, 0], this_round)
    assert (metered.meter.readings()["bytes_down"], metered.meter.readings()["bytes_up"]) == (
        2 * 3 * 4,
        2 * 3 * 4,
    )
    metered.gradients([1], torch.zeros(1, 3), [0], this_round)
    metered.evaluate([0, 1], torch.zeros(1, 3), [0, 0], "test")
    used = metered.meter.since(before, seconds=5.0)
    assert (used["bytes_down"], used["bytes_up"]) == (2 * 3 * 4, 2 * 3 * 4 + 3 * 4)
    assert used["seconds"] == 5.0
    assert used["seconds_server"] == 5.0 - used["seconds_train"] - used["seconds_evaluate"]
    assert used["seconds_train"] > 0
    assert used["seconds_evaluate"] > 0


def test_a_second_model_travels_where_the_proximal_term_pulls_to_another_one():
    """Of two clients, one is pulled to the model that it starts from, and one to another of 3 float32 entries."""
    metered = Metered(ScriptedClients({0: [1, 2, 3], 1: [1, 2, 3]}))
    for mu, models_down in ((0.5, 3), (0.0, 2)):
        before = metered.meter.readings()
        work = ClientWork(steps=Proximal(mu))
        this_round = Round(1, LocalTraining())
        metered.train([0, 1], torch.zeros(2, 3), [0, 1], this_round, work, anchors=[0, 0])
        assert metered.meter.since(before, seconds=1.0)["bytes_down"] == models_down * 3 * 4


@pytest.mark.parametrize(
    ("sent_before", "reply", "down", "up"),
    [
        (False, Delta(), 24, 24),
        (True, Delta(), 0, 24),
        (False, NoReply(), 24, 0),
        (True, NoReply(), 0, 0),
    ],
)
def test_the_meter_counts_what_a_query_says_that_travels(sent_before, reply, down, up):
    """Two clients, 3 float32 entries."""
    metered = Metered(ScriptedClients({0: [1, 2, 3], 1: [1, 2, 3]}))
    work = ClientWork(steps=Proximal(1.0), reply=reply)
    metered.train(
        [0, 1],
        torch.zeros(2, 3),
        [0, 1],
        Round(1, LocalTraining()),
        work,
        anchors=[0, 1],
        sent_before=sent_before,
    )
    assert (metered.meter.readings()["bytes_down"], metered.meter.readings()["bytes_up"]) == (
        down,
        up,
    )


def test_models_that_clients_choose_from_by_their_training_data_are_sent_to_them():
    """Two clients, two models of 3 float32 entries each; a model that is only tried out on other data is there."""
    metered = Metered(ScriptedClients({0: [1, 2, 3], 1: [1, 2, 3]}))
    metered.evaluate([0, 0, 1, 1], torch.zeros(2, 3), [0, 1, 0, 1], "train")
    for split in ("validation", "test"):
        metered.evaluate([0, 1], torch.zeros(2, 3), [0, 1], split)
    assert (metered.meter.readings()["bytes_down"], metered.meter.readings()["bytes_up"]) == (
        2 * 2 * 3 * 4,
        0,
    )


def test_the_meter_passes_ids_and_sizes_on():
    metered = Metered(ScriptedClients({3: [1], 1: [2]}, {3: 5, 1: 6}))
    assert metered.ids == (3, 1)
    assert metered.sizes == {3: 5, 1: 6}


def test_subspaces_are_counted_of_those_who_sent_them():
    """Of three clients two send 2 vectors of 5 float32 entries each."""
    clients = ScriptedClients({0: [1], 1: [1], 2: [1]})
    vectors = torch.zeros(3, 1, 5, 2)
    vectors[:2, :, 0] = 1
    clients.data = lambda query: vectors
    metered = Metered(clients)
    assert metered.ask(SubspaceQuery([0, 1, 2], 2, False)) is vectors
    assert metered.meter.readings()["bytes_up"] == 2 * 5 * 2 * 4
