"""The part of a data set that the config of a message names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from scipy.sparse import csr_array
from torch.utils.data import DataLoader, TensorDataset

from fedclade import ConfigError
from fedclade.core import DataError, SplitPart
from fedclade.flower import part_of
from fedclade.flower.strategy.parts import PartSent


def config_of(place: int, count: int = 2, size: int = 0, client: int = 3) -> dict[str, int]:
    return PartSent(SplitPart(place, count, size), client, 0, 5).values()


def test_parts_are_disjoint_and_have_all_examples():
    parts = [part_of(list(range(11)), config_of(place, 3)) for place in range(3)]
    assert sorted(map(len, parts)) == [3, 4, 4]
    assert sorted(each for part in parts for each in part) == list(range(11))
    sized = [part_of(list(range(11)), config_of(place, 2, 4)) for place in range(2)]
    assert [len(each) for each in sized] == [4, 4]
    assert not set(sized[0]) & set(sized[1])


def test_without_a_part_all_data_is_returned():
    data = np.arange(5)
    assert part_of(data, {"lr": 0.1}) is data


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (np.arange(8), list),
        (torch.arange(8), torch.Tensor.tolist),
        (list(range(8)), list),
        (pd.DataFrame({"x": range(8)}), lambda part: part["x"].tolist()),
        (Dataset.from_dict({"x": list(range(8))}), lambda part: list(part["x"])),
        (TensorDataset(torch.arange(8)), lambda part: [int(part[k][0]) for k in range(len(part))]),
        ((np.arange(8), np.arange(8) * 2), lambda part: list(part[1] // 2)),
        ({"x": np.arange(8)}, lambda part: list(part["x"])),
        (csr_array(np.arange(8)[:, None]), lambda part: part.toarray()[:, 0].tolist()),
        ((csr_array(np.arange(8)[:, None]), np.arange(8)), lambda part: list(part[1])),
    ],
)
def test_all_forms_of_data_have_the_same_part(data: Any, read: Any):
    expected = part_of(list(range(8)), config_of(1))
    assert [int(each) for each in read(part_of(data, config_of(1)))] == expected
    assert type(part_of(data, config_of(1))) is type(data) or isinstance(data, TensorDataset)


def test_rows_of_a_frame_are_selected_whose_select_selects_columns():
    """As in a data frame of Polars."""

    class Frame:
        def __len__(self) -> int:
            return 8

        def __array__(self) -> np.ndarray:
            return np.arange(8)

        def __getitem__(self, rows: np.ndarray) -> list[int]:
            return rows.tolist()

        def select(self, columns: Any) -> Any:
            raise AssertionError("select selects columns")

    assert part_of(Frame(), config_of(1)) == part_of(list(range(8)), config_of(1))


def test_what_is_no_data_is_refused():
    with pytest.raises(ConfigError, match=r"needs the examples of a client, got a DataLoader"):
        part_of(DataLoader(TensorDataset(torch.arange(8))), config_of(0))
    with pytest.raises(ConfigError, match=r"needs the examples of a client, got a generator"):
        part_of((k for k in range(3)), config_of(0))
    with pytest.raises(DataError, match=r"an entry for each example, got the lengths \[7, 8\]"):
        part_of((np.arange(8), np.arange(7)), config_of(0))
    with pytest.raises(DataError, match=r"has 1 training examples, fewer than the 2 that 2 parts"):
        part_of([1], config_of(0))
    with pytest.raises(
        ConfigError, match=r"names a part of the client's data by .*'fedclade-part'"
    ):
        part_of([1, 2], {"fedclade-part": 0})
    with pytest.raises(ConfigError, match=r"below fedclade-part-count = 2, got 2"):
        part_of([1, 2], {**config_of(0), "fedclade-part": 2})
