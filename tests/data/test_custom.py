from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from fedclade.data import load_federation, pool_from_torch
from fedclade.errors import DataError


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
        TensorDataset(x, torch.tensor([2, 0, 1, 2])), TensorDataset(x[:1], torch.tensor([4])), "mine"
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
        (Pairs(), "data set 'custom' is empty"),
        (Stream(), "data set 'custom' should be a map-style torch data set (with len() and indexing), got "),
        (Pairs(torch.zeros(3)), "data set 'custom' should give pairs (x, label); example 0 is not one"),
        (
            Pairs((torch.zeros(3), 0), (torch.zeros(2), 0)),
            "should look the same, got float32 [3] in example 0 and float32 [2] in example 1",
        ),
        (
            Pairs((torch.zeros(3), 0.5)),
            "labels of data set 'custom' should be whole numbers from 0 on, got 0.5 in example 0",
        ),
        (Pairs((torch.zeros(3), -1)), "whole numbers from 0 on, got -1 in example 0"),
        (Pairs((torch.zeros(3), "cat")), "whole numbers from 0 on, got 'cat' in example 0"),
        (Pairs((torch.zeros(3), torch.tensor([1, 2]))), "whole numbers from 0 on, got tensor([1, 2]) in example 0"),
        (Pairs((object(), 1)), "inputs of data set 'custom' should be tensors or arrays, got object in example 0"),
    ],
)
def test_data_sets_that_cannot_be_used(dataset: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        pool_from_torch(dataset)
    assert message in str(caught.value)


def test_test_data_that_looks_different() -> None:
    with pytest.raises(DataError) as caught:
        pool_from_torch(Pairs((torch.zeros(3), 0)), Pairs((torch.zeros(4), 0)))
    assert str(caught.value) == (
        "test data of 'custom' should look like its training data (float32 [3]), got float32 [4]"
    )


def test_federation_of_a_torch_data_set_holds_back_a_fifth() -> None:
    dataset = TensorDataset(torch.rand(40, 3), torch.arange(40) % 2)
    federation = load_federation(dataset, clients=4)
    assert [(len(client.train), len(client.test)) for client in federation.clients] == [(8, 2)] * 4
