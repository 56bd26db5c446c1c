"""The contract of a federation and its clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedclade.core.errors import ConfigError, DataError
from fedclade.data import ClientData, Federation, Pool

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
    ("clients", "told"),
    [
        ((), "a federation should have at least 1 client, got 0"),
        ((client(1), client(1)), "client ids should be distinct, got these more than once: [1]"),
        (
            (client(0), client(7, train=np.arange(0))),
            "client 7 ('client-7') has no training examples",
        ),
        ((client(0), client(7, test=np.arange(0))), "client 7 ('client-7') has no test examples"),
    ],
)
def test_a_federation_needs_clients_with_data(clients: tuple[ClientData, ...], told: str):
    with pytest.raises(DataError) as caught:
        Federation(POOL, clients)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "y",
    [
        POOL.y.float(),
        POOL.y.double().numpy(),
        POOL.y.to(torch.uint8),
        POOL.y.to(torch.int32),
        POOL.y.tolist(),
    ],
)
def test_targets_that_are_whole_numbers_of_any_type_are_labels(y: Any):
    """As indices of any type are indices: what is trained on does not depend on it."""
    parts: dict[str, Any] = {
        "train": [0, 1, 2, 3],
        "test": np.array([4, 5], np.int16),
        "groups": POOL.y,
    }
    pool = replace(POOL, y=y, **parts)
    assert (pool.y.dtype, pool.y.tolist()) == (torch.int64, POOL.y.tolist())
    federation = Federation(
        pool, (client(0, train=[0, 1], validation=[], test=torch.tensor([4, 5])),)
    )
    assert federation.fingerprint == Federation(POOL, (client(0),)).fingerprint


def test_indices_that_are_right_already_are_not_copied():
    """Clients that share an array of indices share a set of inputs in memory."""
    shared = np.arange(4, 6)
    assert client(0, test=shared).test is client(1, test=shared).test is shared


@pytest.mark.parametrize(
    ("value", "where", "told"),
    [
        (
            float("nan"),
            (1, 0),
            "client 7 ('client-7') has nan in column 0 of train example 1 (example 1 of pool 'six')",
        ),
        (
            float("inf"),
            (5, 0),
            "client 7 ('client-7') has inf in column 0 of test example 1 (example 5 of pool 'six')",
        ),
    ],
)
def test_an_input_that_is_no_number_is_refused_with_its_client_and_column(value, where, told):
    x = POOL.x.clone()
    x[where] = value
    with pytest.raises(DataError) as caught:
        Federation(replace(POOL, x=x), (client(7),))
    assert told in str(caught.value)


def test_an_input_of_nobody_may_be_anything_and_large_ones_are_numbers():
    x = POOL.x.clone()
    x[2], x[0] = float("nan"), torch.finfo(torch.float32).max
    assert len(Federation(replace(POOL, x=x), (client(7),))) == 1


def test_of_pictures_the_whole_place_is_told():
    x = torch.zeros(6, 1, 2, 2)
    x[1, 0, 1, 0] = float("nan")
    with pytest.raises(DataError, match=r"has nan in column \[0, 1, 0\] of train example 1"):
        Federation(replace(POOL, x=x), (client(0),))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"train": np.array([0, 6])},
            "the train indices of client 3 ('client-3') should lie in 0 .. 5, got values from 0 to 6",
        ),
        (
            {"test": np.array([-1, 3])},
            "the test indices of client 3 ('client-3') should lie in 0 .. 5, got values from -1 to 3",
        ),
    ],
)
def test_clients_hold_examples_that_there_are(changes: dict[str, Any], told: str):
    with pytest.raises(DataError) as caught:
        Federation(POOL, (client(3, **changes),))
    assert told in str(caught.value)


def test_a_true_cluster_is_a_whole_number():
    with pytest.raises(
        ConfigError, match=r"^true_clusters\[3\] of Federation should be a whole number, got 'x'$"
    ):
        Federation(POOL, (client(3),), true_clusters={3: "x"})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"name": 7},
            "the name of client 0 should be a string that can be encoded in UTF-8, got 7",
        ),
        (
            {"name": "\ud800"},
            "the name of client 0 should be a string that can be encoded in UTF-8, got '\\ud800'",
        ),
        ({"id": "0"}, "the id of client 'a' should be a whole number, got '0'"),
        ({"key": 0.5}, "the key of client 'a' should be a whole number, got 0.5"),
        (
            {"train": np.ones(6, dtype=bool)},
            "train of client 'a' should be an array [n] of whole numbers, got bool",
        ),
    ],
)
def test_a_client_that_is_none_is_refused(changes: dict[str, Any], told: str):
    with pytest.raises(DataError) as caught:
        ClientData(
            **(
                {"id": 0, "name": "a", "key": 0, "train": [0], "validation": [], "test": [1]}
                | changes
            )
        )
    assert told in str(caught.value)


def test_numbers_of_numpy_are_whole_numbers():
    made = ClientData(np.int64(3), "a", np.uint8(4), [0], [], [1], quarter_turns=np.int64(1))
    assert [type(number) for number in (made.id, made.key, made.quarter_turns)] == [int] * 3


def test_the_truth_names_every_client():
    with pytest.raises(DataError, match=r"missing or unknown are: \[1, 2\]"):
        Federation(POOL, (client(0), client(1)), true_clusters={0: 0, 2: 1})


def test_clients_see_the_pool_through_their_label_maps():
    swapped = ClientData(
        0, "a", 0, np.arange(3), np.arange(0), np.arange(4, 6), label_map=torch.tensor([2, 1, 0])
    )
    inputs, targets = Federation(POOL, (swapped,)).examples(0, "train")
    assert inputs.flatten().tolist() == [0.0, 1.0, 2.0]
    assert targets.tolist() == [2, 1, 0]


def test_targets_that_do_not_count_are_not_mapped():
    """Mapped as an index from the end, or out of range, -100 would become a label or an error."""
    tokens = torch.tensor([[0, 1, -100], [2, -100, -100]])
    swapped = ClientData(
        0, "a", 0, np.arange(1), np.arange(0), np.arange(1, 2), torch.tensor([2, 1, 0])
    )
    everyone = np.arange(2)
    pool = Pool(
        "text",
        tokens.clamp(min=0),
        tokens,
        np.zeros(2, dtype=np.int64),
        everyone,
        everyone[:0],
        3,
        "language",
    )
    assert swapped.labels(pool.y).tolist() == [[2, 1, -100], [0, -100, -100]]
    long_map = replace(swapped, label_map=torch.arange(199, -1, -1))
    assert long_map.labels(tokens).tolist() == [[199, 198, -100], [197, -100, -100]]


def test_a_fingerprint_is_that_of_all_that_training_depends_on():
    federation = Federation(POOL, (client(0), client(1)))
    same = Federation(
        replace(POOL, name="renamed"), (client(0), client(1)), {0: 0, 1: 1}, "described"
    )
    assert same.fingerprint == federation.fingerprint
    others = [
        Federation(replace(POOL, x=POOL.x + 1), federation.clients),
        Federation(replace(POOL, x=POOL.x.to(torch.uint8)), federation.clients),
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
    assert len({federation.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(
        others
    )


def test_newcomers_have_ids_of_their_own():
    late = Federation(POOL, (client(1), client(2)))
    assert Federation(POOL, (client(0),), newcomers=late).newcomers is late
    with pytest.raises(
        DataError,
        match=r"newcomers should have ids that no other client has, got these ids of other clients: \[2\]",
    ):
        Federation(POOL, (client(2), client(3)), newcomers=late)


def test_a_shard_holds_some_of_the_clients_over_the_same_pool():
    whole = Federation(POOL, (client(0), client(1), client(2)), {0: 0, 1: 1, 2: 0})
    shard = whole.shard({2, 0})
    assert shard.ids == (0, 2)
    assert shard.pool is whole.pool
    assert shard.true_clusters is None


def test_examples_that_a_federation_has_not_are_refused():
    federation = Federation(POOL, (client(3),))
    with pytest.raises(
        DataError, match=r"unknown data split 'tset'; expected one of train, validation, test"
    ):
        federation.examples(3, "tset")
    for odd in (4, "x", [3]):
        with pytest.raises(
            DataError, match=r"the federation has no client .*; .* has clients 3 to 3"
        ):
            federation.examples(odd, "test")
        with pytest.raises(
            DataError, match=r"the federation has no client .*; .* has clients 3 to 3"
        ):
            federation.alone(odd)
