from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from fedclade import LocalTraining, simulate
from fedclade.core.errors import ConfigError, DataError
from fedclade.data import load_federation, one_client, pool_from_torch


class Pairs(torch.utils.data.Dataset[Any]):
    """A data set made of a list."""

    def __init__(self, *pairs: Any) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> Any:
        return self.pairs[row]


def test_tensors_with_a_test_set() -> None:
    x = torch.arange(12.0).reshape(4, 3)
    pool = pool_from_torch(
        TensorDataset(x, torch.tensor([2, 0, 1, 2])),
        TensorDataset(x[:1], torch.tensor([4])),
        "mine",
    )
    assert (pool.name, pool.outputs, pool.task) == ("mine", 5, "classification")
    assert (pool.train.tolist(), pool.test.tolist()) == ([0, 1, 2, 3], [4])
    assert pool.y.tolist() == pool.groups.tolist() == [2, 0, 1, 2, 4]
    assert pool.x[4].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (np.zeros((1, 2, 2), np.uint8), torch.uint8),
        (np.zeros(3), torch.float32),
        (torch.zeros(3, dtype=torch.int32), torch.int64),
        (0.5, torch.float32),
    ],
)
def test_kinds_of_input(x: Any, dtype: torch.dtype) -> None:
    assert pool_from_torch(Pairs((x, 0), (x, np.int64(1)))).x.dtype == dtype


class Stream(IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Pairs(), "data set 'custom' should have at least 1 example, got none"),
        (
            Stream(),
            "data set 'custom' should be a map-style torch data set (with len() and indexing), got ",
        ),
        (
            Pairs(torch.zeros(3)),
            "data set 'custom' should consist of pairs (x, label), but example 0 is not a pair",
        ),
        (
            Pairs((torch.zeros(3), 0), (torch.zeros(2), 0)),
            "should have the same type and shape, got float32 [3] in example 0 and float32 [2] in example 1",
        ),
        (
            Pairs((torch.zeros(3), 0.5)),
            "labels of data set 'custom' should be whole numbers from 0 on, got 0.5 in example 0",
        ),
        (Pairs((torch.zeros(3), -1)), "whole numbers from 0 on, got -1 in example 0"),
        (Pairs((torch.zeros(3), "cat")), "whole numbers from 0 on, got 'cat' in example 0"),
        (
            Pairs((torch.zeros(3), torch.tensor([1, 2]))),
            "whole numbers from 0 on, got tensor([1, 2]) in example 0",
        ),
        (
            Pairs((object(), 1)),
            "inputs of data set 'custom' should be tensors or arrays, got object in example 0",
        ),
    ],
)
def test_data_sets_that_cannot_be_used(dataset: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        pool_from_torch(dataset)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "label", [1.0, np.float32(1), torch.tensor(1.0), True, np.bool_(True), torch.tensor([1])]
)
def test_labels_that_are_whole_numbers_of_any_type(label: Any) -> None:
    assert pool_from_torch(Pairs((torch.zeros(3), 0), (torch.zeros(3), label))).y.tolist() == [0, 1]


def test_truth_values_are_features_and_not_words() -> None:
    pool = pool_from_torch(Pairs((np.array([True, False]), 0), (np.array([False, False]), 1)))
    assert (pool.x.dtype, pool.x.tolist()) == (torch.float32, [[1.0, 0.0], [0.0, 0.0]])


def test_a_row_with_nan_is_refused_by_the_name_of_its_client() -> None:
    rows = torch.zeros(4, 3)
    rows[2, 1] = float("nan")
    with pytest.raises(
        DataError, match=r"client 0 \('mine'\) has nan in column 1 of train example 2"
    ):
        one_client(TensorDataset(rows, torch.zeros(4)), examples(2, 1), labels=2, name="mine")


def test_test_data_that_looks_different() -> None:
    with pytest.raises(DataError) as caught:
        pool_from_torch(Pairs((torch.zeros(3), 0)), Pairs((torch.zeros(4), 0)))
    assert str(caught.value) == (
        "inputs of test data of 'custom' should have the type and shape of inputs of data set "
        "'custom' (float32 [3]), got float32 [4]"
    )


def test_federation_of_a_torch_data_set_holds_back_a_fifth() -> None:
    dataset = TensorDataset(torch.rand(40, 3), torch.arange(40) % 2)
    federation = load_federation(dataset, clients=4)
    assert [(len(client.train), len(client.test)) for client in federation.clients] == [(8, 2)] * 4


def examples(n: int, label: int) -> TensorDataset:
    return TensorDataset(torch.full((n, 3), float(label)), torch.full((n,), label))


def test_one_client_keeps_every_example_where_it_was_given() -> None:
    federation = one_client(
        examples(5, 0), examples(3, 1), labels=4, validation=examples(2, 2), name="mine", key=7
    )
    (client,) = federation.clients
    assert (client.id, client.name, client.key) == (0, "mine", 7)
    for split, n, label in (("train", 5, 0), ("test", 3, 1), ("validation", 2, 2)):
        x, y = federation.examples(0, split)
        assert y.tolist() == [label] * n
        assert x.tolist() == [[label] * 3] * n
    assert federation.pool.outputs == 4
    assert federation.roster.true_clusters is None


def test_one_client_without_validation_data_trains() -> None:
    federation = one_client(examples(5, 0), examples(3, 0), labels=2)
    assert len(federation.clients[0].validation) == 0
    run = simulate(
        "fedavg", "mclr", federation, rounds=2, local=LocalTraining(lr=0.5), engine="loop"
    )
    assert run.summary["accuracy"]["mean"] == 1.0


def test_bytes_of_one_client_are_scaled() -> None:
    picture = Pairs((np.full((1, 2, 2), 255, np.uint8), 0))
    pool = one_client(picture, picture, labels=1, mean=0.5, std=0.25).pool
    assert pool.inputs(pool.train).flatten().tolist() == [2.0] * 4
    assert pool.schema.scaled == (0.5, 0.25)


def test_the_keys_of_clients_set_their_draws_apart() -> None:
    data = TensorDataset(torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2)
    runs = [
        simulate(
            "fedavg",
            "mclr",
            one_client(data, data, labels=2, key=k),
            rounds=1,
            local=LocalTraining(batch_size=2),
        )
        for k in (0, 0, 1)
    ]
    same, again, other = (run.tree.nodes[0].params for run in runs)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": 2}, "labels should be at least 3, as client 'mine' has the label 2, got 2"),
        ({"key": -1}, "the key of client 'mine' should be at least 0, got -1"),
        ({"test": Pairs()}, "test data of 'mine' should have at least 1 example, got none"),
        (
            {"validation": Pairs((0.5, "cat"))},
            "labels of validation data of 'mine' should be whole numbers from 0 on",
        ),
        (
            {"test": Pairs((torch.zeros(4), 0))},
            "inputs of test data of 'mine' should have the type and shape of inputs of training data of "
            "'mine' (float32 [3]), got float32 [4]",
        ),
        (
            {"validation": Pairs((torch.zeros(3, dtype=torch.uint8), 0))},
            "inputs of validation data of 'mine' should have the type and shape of inputs of training "
            "data of 'mine' (float32 [3]), got uint8 [3]",
        ),
    ],
)
def test_data_of_one_client_that_cannot_be_used(given: dict[str, Any], message: str) -> None:
    usable: dict[str, Any] = {
        "train": examples(2, 2),
        "test": examples(2, 1),
        "labels": 3,
        "name": "mine",
    }
    with pytest.raises(DataError) as caught:
        one_client(**{**usable, **given})
    assert message in str(caught.value)


class Noisy(Pairs):
    """A data set whose transform adds noise each time."""

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        return x + torch.rand(()), y


@pytest.mark.parametrize(("kind", "warns"), [(Noisy, True), (Pairs, False)])
def test_a_random_transform_is_warned_of(kind, warns, caplog):
    """Which is read once, and so frozen."""
    pool_from_torch(
        kind(*((torch.tensor([row, torch.nan]), row % 2) for row in range(20))), name="mine"
    )
    assert (
        "example 0 of data set 'mine' changes each time that it is read" in caplog.text
    ) is warns
    assert len(caplog.records) == int(warns)


def test_targets_of_a_regression() -> None:
    dataset = TensorDataset(torch.zeros(3, 2), torch.tensor([0.5, -1.0, 2.0]))
    assert pool_from_torch(dataset, task="regression").y.tolist() == [0.5, -1.0, 2.0]
    assert one_client(dataset, dataset, task="regression").pool.outputs == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "labels should be the number of labels among all clients, got None"),
        (
            {"labels": 2, "task": "regression"},
            "labels should be left out for a regression task, got 2",
        ),
    ],
)
def test_one_client_has_to_know_of_all_labels(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        one_client(examples(2, 0), examples(2, 0), **given)
    assert str(caught.value) == message
