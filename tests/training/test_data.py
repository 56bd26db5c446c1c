"""The data of clients lie on the device once, as far as they fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade.data.federation import Federation, Pool
from fedclade.training.data import ClientsData, SplitInputs
from tests.tiny import FEATURES, federation_of

CPU = torch.device("cpu")
INPUT = FEATURES * 4
EACH = INPUT + 8
"""Bytes of an example: float32 features and an int64 label."""


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note which examples are fetched from the pool."""
    asked: list[int] = []
    inputs = Pool.inputs
    monkeypatch.setattr(
        Pool,
        "inputs",
        lambda self, which, turns=0: asked.extend(which.tolist()) or inputs(self, which, turns),
    )
    return asked


def sees_its_own(data: ClientsData, federation: Federation) -> None:
    for client in reversed(federation.ids):
        for ours, theirs in zip(data.of(client), federation.examples(client, "train"), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fits", [True, False])
def test_every_client_sees_its_own_examples(fits):
    federation = federation_of([0, 1, 2], [5, 3, 4], test=1000)
    data = ClientsData(federation, CPU, 12 * EACH - (not fits))
    assert data.bytes_kept == (12 * EACH if fits else 0)
    assert data.bytes_each == EACH
    sees_its_own(data, federation)


def test_clients_may_train_on_the_same_examples():
    """Which are there once; the labels are each client's own."""
    federation = federation_of([0, 1, 2], [5, 3, 4])
    first, second, third = federation.clients
    overlapping = np.concatenate([first.train[3:], third.train, third.train[:1]])
    clients = first, replace(second, train=first.train), replace(third, train=overlapping)
    federation = replace(federation, clients=clients)
    data = ClientsData(federation, CPU, 10**6)
    assert len(data.splits["train"]) == 5 + 4
    sees_its_own(data, federation)


def test_what_fits_is_fetched_once_and_lies_in_one_piece(fetched):
    federation = federation_of([0, 1, 2], [5, 3, 4])
    data = ClientsData(federation, CPU, 10**6)
    fetched.clear()
    first, second = data.of(0), data.of(1)
    assert fetched == [i for client in federation.clients for i in client.train]
    for one, other in zip(first, second, strict=True):
        assert other.data_ptr() == one.data_ptr() + one.nbytes


def test_what_does_not_fit_is_fetched_again(fetched):
    federation = federation_of([0, 1], [5, 3])
    data = ClientsData(federation, CPU, 8 * EACH - 1)
    fetched.clear()
    data.of(1), data.of(1)
    assert fetched == [*federation.clients[1].train] * 2


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (8 * EACH, ["train"]),
        (8 * EACH + 40 * INPUT, ["train", "test"]),
        (10**6, ["train", "test", "validation"]),
    ],
)
def test_training_data_come_first_then_test_data(budget, kept):
    """Of two clients, with 20 test and 10 validation examples each, whose inputs alone are kept."""
    data = ClientsData(federation_of([0, 1], [5, 3]), CPU, budget)
    assert [split for split, held in data.splits.items() if held.keeps] == kept
    assert data.bytes_kept == 8 * EACH + INPUT * {1: 0, 2: 40, 3: 60}[len(kept)]


def turned(*turns: int) -> Federation:
    """Return two clients with the same six images and others that share two of them, by their quarter turns."""
    y = torch.arange(16) % 2
    pool = Pool(
        "turned", torch.arange(64.0).view(16, 1, 2, 2), y, y.numpy(), np.arange(16), np.arange(0), 2
    )
    template = replace(federation_of([0]).clients[0], train=np.arange(2), validation=np.arange(0))
    shared = np.array([5, 3, 0, 4, 2, 1])
    tests = [shared if k < 2 else np.array([3, 6 + k, 5]) for k in range(len(turns))]
    clients = tuple(
        replace(template, id=k, name=f"c{k}", key=k, test=test, quarter_turns=turn)
        for k, (test, turn) in enumerate(zip(tests, turns, strict=True))
    )
    return Federation(pool, clients)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("turns", [(0, 0, 0), (0, 1, 0), (1, 1, 5), (3, 2, -1, 0)])
def test_places_lead_to_what_clients_hold(turns, keeps):
    """One by one, all of a client, and those of all clients, which are turned in different ways."""
    federation = turned(*turns)
    held = SplitInputs(federation, "test", CPU)
    held.keeps = keeps
    seen = [federation.examples(client, "test")[0] for client in federation.ids]
    places = [held.places_of(number) for number in held.set_of]
    for mine, x in zip(places, seen, strict=True):
        assert torch.equal(held.inputs(mine), x)
        assert torch.equal(held.inputs(mine[1:2]), x[1:2])
    assert torch.equal(held.inputs(np.concatenate(places)), torch.cat(seen))
    targets = torch.cat([federation.examples(client, "test")[1] for client in federation.ids])
    assert torch.equal(held.targets(np.concatenate(places)), targets)


def test_inputs_are_numbered_as_clients_hold_them():
    """Those whom nobody held before in a row, whatever their order in the pool; those with other turns are others."""
    held = SplitInputs(turned(0, 0, 0, 4, 1), "test", CPU)
    assert held.set_of.tolist() == [0, 0, 1, 2, 3]
    assert [held.places_of(number).tolist() for number in range(4)] == [
        *([0, 1, 2, 3, 4, 5], [1, 6, 0], [1, 7, 0], [8, 9, 10])
    ]
    assert len(held) == 11


def test_a_split_may_be_empty():
    held = SplitInputs(federation_of([0, 1], validation=0), "validation", CPU)
    assert (len(held), held.sizes.tolist()) == (0, [0, 0])


def test_what_is_gathered_without_gradients_can_be_trained_on():
    held = SplitInputs(federation_of([0]), "train", CPU)
    held.keeps = True
    with torch.inference_mode():
        inputs = held.inputs(np.arange(3))
    assert not inputs.is_inference()
