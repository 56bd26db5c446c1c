from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedclade import DataError
from fedclade.algorithms import SubspaceQuery
from fedclade.channel.middleware import Channel
from fedclade.channel.signature import Permutation, Permuting
from fedclade.data.federation import ClientData, Federation, Pool
from fedclade.training import SimulatedClients
from tests.tiny import SpyClients, federation_of, linear, simulated

IMAGES = torch.from_numpy(
    np.random.default_rng(0).integers(0, 256, size=(20, 1, 3, 3), dtype=np.uint8)
)


def of_images(clients: list[ClientData]) -> SimulatedClients:
    """Return clients over 20 grey images of 3×3, labelled 0 and 1 in turn; there is a label 2."""
    y = torch.arange(20) % 2
    pool = Pool("images", IMAGES, y, y.numpy(), np.arange(20), np.arange(0), 3, mean=0.3, std=0.2)
    module = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    return SimulatedClients(Federation(pool, tuple(clients)), module)


def client(number: int, indices: range, **view) -> ClientData:
    part = np.array(indices)
    return ClientData(number, f"c{number}", number, part, part[:0], part[:1], **view)


def by_hand(rows: torch.Tensor, p: int) -> torch.Tensor:
    U = np.linalg.svd(rows.flatten(1).double().numpy().T, full_matrices=False)[0][:, :p]
    return torch.from_numpy(U).float()


def assert_same_up_to_signs(found: torch.Tensor, expected: torch.Tensor):
    torch.testing.assert_close(
        (found * expected).sum(0).abs(), torch.ones(found.shape[1]), rtol=0, atol=1e-5
    )


def test_they_are_the_leading_left_singular_vectors_of_the_inputs_as_they_are_stored():
    clients = of_images([client(0, range(20)), client(1, range(12))])
    found = clients.ask(SubspaceQuery([1, 0], 4, per_label=False))
    assert found.shape == (2, 1, 9, 4)
    for vectors, size in zip(found, (12, 20), strict=True):
        assert_same_up_to_signs(vectors[0], by_hand(IMAGES[:size], 4))


def test_each_label_by_itself_as_the_client_sees_it():
    """Client 1 sees 0 for 1 and 2 for 0; label 1 it has none of."""
    clients = of_images(
        [client(0, range(20)), client(1, range(20), label_map=torch.tensor([2, 0, 1]))]
    )
    plain, mapped = clients.ask(SubspaceQuery([0, 1], 2, per_label=True))
    even, odd = IMAGES[0::2], IMAGES[1::2]
    for found, rows in ((plain[0], even), (plain[1], odd), (mapped[2], even), (mapped[0], odd)):
        assert_same_up_to_signs(found, by_hand(rows, 2))
    assert not plain[2].any()
    assert not mapped[1].any()


def test_turned_images_are_turned():
    clients = of_images([client(0, range(20)), client(1, range(20), quarter_turns=1)])
    found = clients.ask(SubspaceQuery([1], 2, per_label=False))[0, 0]
    assert_same_up_to_signs(found, by_hand(torch.rot90(IMAGES, 1, (-2, -1)), 2))


def test_vectors_beyond_the_examples_are_zeros():
    clients = of_images([client(0, range(3))])
    found = clients.ask(SubspaceQuery([0], 5, per_label=False))[0, 0]
    torch.testing.assert_close(found.norm(dim=0), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    per_label = clients.ask(SubspaceQuery([0], 5, per_label=True))[0]
    assert per_label.norm(dim=1).round().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]


def test_text_spans_no_subspaces():
    tokens = torch.randint(0, 5, (6, 4))
    pool = Pool(
        "tweets", tokens, torch.arange(6) % 2, np.arange(6) % 2, np.arange(6), np.arange(0), 2
    )
    module = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 2))
    clients = SimulatedClients(Federation(pool, (client(0, range(6)),)), module)
    with pytest.raises(
        DataError,
        match="subspaces that their inputs span, but the inputs of tweets are tokens of text; use images",
    ):
        clients.ask(SubspaceQuery([0], 2, per_label=False))


def test_a_permutation_of_models_does_not_touch_them():
    clients, params = simulated(federation_of([0, 1]), linear())
    inside = SpyClients(clients)
    outside = Channel(inside, Permuting(Permutation(3, len(params), len(params))))
    assert torch.equal(
        outside.ask(SubspaceQuery([1, 0], 2, True)), clients.ask(SubspaceQuery([1, 0], 2, True))
    )
    assert [call.what for call in inside.calls] == ["subspaces"]
