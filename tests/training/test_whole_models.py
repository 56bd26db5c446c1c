"""A client's whole model: put together before it trains, is evaluated or takes a gradient, and taken apart after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade import LocalTraining
from fedclade.core import ClientWork, Nothing, Proximal, Round, SplitPart
from fedclade.training import PERSONAL, SimulatedClients
from tests.tiny import federation_of, perceptron

HEAD = ("3.weight", "3.bias")
SPEC = LocalTraining(batch_size=10, lr=0.2)
FIRST = Round(1, SPEC)
FEDERATION = federation_of([0, 1, 0])
ON_PART = ClientWork(data=SplitPart(0, 2), store=Nothing())


def clients_of(
    *, personal: tuple[str, ...] = HEAD, **settings
) -> tuple[SimulatedClients, torch.Tensor]:
    """Return clients that have trained for a round, and a model of the next."""
    clients = SimulatedClients(
        FEDERATION, perceptron(), engine="loop", personal=personal, **settings
    )
    start = clients.layout.flatten(perceptron())
    deltas = clients.train([0, 1, 2], start[None], [0] * 3, FIRST).required_deltas
    return clients, start + deltas.mean(0)


def whole_of(clients: SimulatedClients, client: int, model: torch.Tensor) -> torch.Tensor:
    return clients.layout.joined(model, clients.store.latest(client)[PERSONAL])


def test_personal_parameters_go_on_from_where_they_were():
    clients, model = clients_of()
    plain = SimulatedClients(FEDERATION, perceptron(), engine="loop")
    wholes = torch.stack([whole_of(clients, client, model) for client in (0, 1, 2)])
    assert not torch.equal(wholes[0], wholes[1])
    expected = plain.train([0, 1, 2], wholes, [0, 1, 2], Round(2, SPEC))
    updates = clients.train([0, 1, 2], model[None], [0] * 3, Round(2, SPEC))
    shared, personal = clients.layout.parted(wholes + expected.required_deltas)
    torch.testing.assert_close(model + updates.required_deltas, shared)
    torch.testing.assert_close(
        torch.stack([clients.store.latest(c)[PERSONAL] for c in (0, 1, 2)]), personal
    )
    assert torch.equal(updates.losses, expected.losses)


def test_the_proximal_term_pulls_them_to_where_they_were_and_the_rest_to_the_anchor():
    clients, model = clients_of()
    plain = SimulatedClients(FEDERATION, perceptron(), engine="loop")
    pulled = ClientWork(steps=Proximal(0.5))
    start, anchor = (whole_of(clients, 1, each) for each in (model, model + 1))
    expected = plain.train(
        [1], torch.stack([start, anchor]), [0], Round(2, SPEC), pulled, anchors=[1]
    ).required_deltas
    updates = clients.train(
        [1], torch.stack([model, model + 1]), [0], Round(2, SPEC), pulled, anchors=[1]
    )
    torch.testing.assert_close(updates.required_deltas, clients.layout.parted(expected)[0])


def test_gradients_are_those_of_the_whole_model_and_change_nothing():
    clients, model = clients_of()
    plain, before = (
        SimulatedClients(FEDERATION, perceptron(), engine="loop"),
        clients.store.latest(1)[PERSONAL],
    )
    expected = plain.gradients(
        [1], whole_of(clients, 1, model)[None], [0], Round(2, SPEC)
    ).required_deltas
    found = clients.gradients([1], model[None], [0], Round(2, SPEC))
    assert torch.equal(found.required_deltas, clients.layout.parted(expected)[0])
    assert clients.store.latest(1)[PERSONAL] is before


@pytest.mark.parametrize("memory", [None, 2_000])
def test_each_client_is_evaluated_with_its_own_part(memory):
    clients, model = clients_of(memory=memory)
    plain = SimulatedClients(FEDERATION, perceptron(), engine="loop")
    models = torch.stack([model, model + 0.1])
    wholes = torch.stack(
        [whole_of(clients, client, models[row]) for client, row in ((0, 0), (1, 1), (0, 1), (2, 0))]
    )
    found = clients.evaluate([0, 1, 0, 2], models, [0, 1, 1, 0], "test")
    expected = plain.evaluate([0, 1, 0, 2], wholes, [0, 1, 2, 3], "test")
    assert found.ids == expected.ids
    torch.testing.assert_close(found.losses, expected.losses)
    torch.testing.assert_close(found.scores, expected.scores)


@pytest.mark.parametrize("work", [ClientWork(store=Nothing()), ON_PART])
def test_training_that_stores_nothing_is_forgotten(work):
    clients, model = clients_of()
    before = clients.store.latest(1)[PERSONAL]
    updates = clients.train([1], model[None], [0], Round(2, SPEC), work)
    assert updates.required_deltas.norm() > 0
    assert clients.store.latest(1)[PERSONAL] is before


def test_what_diverges_is_not_kept():
    clients, model = clients_of()
    before = clients.store.latest(1)[PERSONAL]
    updates = clients.train([0, 1], model[None], [0, 0], Round(2, replace(SPEC, lr=1e30, epochs=5)))
    assert updates.left_out.keys() == {0, 1}
    assert clients.store.latest(1)[PERSONAL] is before
