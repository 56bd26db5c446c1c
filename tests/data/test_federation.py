"""The contracts of a pool and a federation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedclade.data import ClientData, Federation, Pool
from fedclade.errors import DataError

POOL = Pool(
    name="six",
    x=torch.arange(6.0)[:, None],
    y=torch.tensor([0, 1, 2, 0, 1, 2]),
    groups=np.array([0, 1, 2, 0, 1, 2]),
    train=np.arange(4),
    test=np.arange(4, 6),
    outputs=3,
)


def client(number: int, **changes: Any) -> ClientData:
    parts = {"train": np.arange(2), "validation": np.arange(0), "test": np.arange(4, 6)} | changes
    return ClientData(number, f"client-{number}", number, **parts)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"y": torch.zeros(5, dtype=torch.int64)}, "should have one length, got {'x': 6, 'y': 5, 'groups': 6}"),
        ({"natural": np.array(["a"])}, "'groups': 6, 'natural': 1}"),
        ({"train": np.array([0, 6])}, "the train indices of pool 'six' should lie in 0 .. 5, got 0 .. 6"),
        ({"test": np.array([-1, 3])}, "the test indices of pool 'six' should lie in 0 .. 5, got -1 .. 3"),
        ({"outputs": 2}, "pool 'six' has 2 outputs, but a label 2"),
        (
            {"y": torch.tensor([0, -100, -1, 0, -7, 2])},
            "labels of pool 'six' should be 0 or more, or -100 where there is none, got -1",
        ),
    ],
)
def test_a_pool_that_does_not_fit_together_is_refused(changes: dict[str, Any], told: str):
    with pytest.raises(DataError) as caught:
        replace(POOL, **changes)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("clients", "told"),
    [
        ((), "a federation should have at least 1 client, got 0"),
        ((client(1), client(1)), "client ids should be distinct, got these more than once: [1]"),
        ((client(0), client(7, train=np.arange(0))), "client 7 ('client-7') has no training examples"),
        ((client(0), client(7, test=np.arange(0))), "client 7 ('client-7') has no test examples"),
    ],
)
def test_a_federation_needs_clients_with_data(clients: tuple[ClientData, ...], told: str):
    with pytest.raises(DataError) as caught:
        Federation(POOL, clients)
    assert told in str(caught.value)


def test_the_truth_names_every_client():
    with pytest.raises(DataError, match=r"these do not match: \[1, 2\]"):
        Federation(POOL, (client(0), client(1)), true_clusters={0: 0, 2: 1})


def test_clients_see_the_pool_through_their_label_maps():
    swapped = ClientData(0, "a", 0, np.arange(3), np.arange(0), np.arange(4, 6), label_map=torch.tensor([2, 1, 0]))
    inputs, targets = Federation(POOL, (swapped,)).examples(0, "train")
    assert inputs.flatten().tolist() == [0.0, 1.0, 2.0]
    assert targets.tolist() == [2, 1, 0]


def test_targets_that_do_not_count_are_not_mapped():
    """Mapped as an index from the end, or out of range, -100 would become a label or an error."""
    tokens = torch.tensor([[0, 1, -100], [2, -100, -100]])
    swapped = ClientData(0, "a", 0, np.arange(1), np.arange(0), np.arange(1, 2), torch.tensor([2, 1, 0]))
    everyone = np.arange(2)
    pool = Pool("text", tokens.clamp(min=0), tokens, np.zeros(2, dtype=np.int64), everyone, everyone[:0], 3, "language")
    assert swapped.labels(pool.y).tolist() == [[2, 1, -100], [0, -100, -100]]
    long_map = replace(swapped, label_map=torch.arange(199, -1, -1))
    assert long_map.labels(tokens).tolist() == [[199, 198, -100], [197, -100, -100]]


def test_images_reach_the_model_normalised_and_turned():
    x = torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8)
    one = np.arange(1)
    pool = Pool("one", x, torch.tensor([0]), one, one, one, 1, mean=0.5, std=0.2)
    upright = [[-2.5, -1.5], [-0.5, 2.5]]  # (x / 255 - ½) / 0.2
    assert pool.inputs(one).flatten().tolist() == pytest.approx([*upright[0], *upright[1]])
    assert pool.inputs(one, 1).flatten().tolist() == pytest.approx([-1.5, 2.5, -2.5, -0.5])
    assert pool.x.flatten().tolist() == [0, 51, 102, 255]


def test_a_fingerprint_is_that_of_all_that_training_depends_on():
    federation = Federation(POOL, (client(0), client(1)))
    same = Federation(replace(POOL, name="renamed"), (client(0), client(1)), {0: 0, 1: 1}, "described")
    assert same.fingerprint == federation.fingerprint
    others = [
        Federation(replace(POOL, x=POOL.x + 1), federation.clients),
        Federation(replace(POOL, x=POOL.x.double()), federation.clients),
        Federation(replace(POOL, y=POOL.y.flip(0)), federation.clients),
        Federation(POOL, (client(0), client(2))),
        Federation(POOL, (client(0),)),
        Federation(POOL, (client(0), replace(client(1), key=7))),
        Federation(POOL, (client(0), client(1, train=np.arange(1, 3)))),
        Federation(POOL, (client(0), client(1, train=np.arange(1), validation=np.arange(1, 2)))),
        Federation(POOL, (client(0), client(1, test=np.array([5, 4])))),
        Federation(POOL, (client(0), client(1, label_map=torch.tensor([1, 0, 2])))),
        Federation(POOL, (client(0), client(1, quarter_turns=1))),
    ]
    assert len({federation.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


def test_newcomers_have_ids_of_their_own():
    late = Federation(POOL, (client(1), client(2)))
    assert Federation(POOL, (client(0),), newcomers=late).newcomers is late
    with pytest.raises(DataError, match=r"newcomers should have ids of their own, got these of other clients: \[2\]"):
        Federation(POOL, (client(2), client(3)), newcomers=late)
