"""Any torch data set as a pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedclade.data.federation import Indices, Pool
from fedclade.errors import DataError


def pool_from_torch(dataset: Dataset[Any], test: Dataset[Any] | None = None, name: str = "custom") -> Pool:
    """Read a map-style torch data set of ``(x, label)`` pairs into a pool for classification.

    Parameters
    ----------
    dataset
        Examples to train on. All ``x`` are tensors or arrays of one shape: bytes become uint8 images (scaled to [0, 1]
        on the way to the model), other whole numbers int64 tokens, the rest float32.
    test
        Examples to test on; None lets every client hold back a part of its own examples.
    name
        What to call it.

    Raises
    ------
    DataError
        If there are no examples, they are not pairs, inputs differ in shape or kind, or a label is no whole number ≥ 0.
    """
    x, y = _read(dataset, f"data set {name!r}")
    train, tested = len(y), 0
    if test is not None:
        x_test, y_test = _read(test, f"test data of {name!r}")
        if x_test.shape[1:] != x.shape[1:] or x_test.dtype != x.dtype:
            raise DataError(
                f"test data of {name!r} should look like its training data ({_look(x[0])}), got {_look(x_test[0])}"
            )
        x, y, tested = torch.cat([x, x_test]), np.concatenate([y, y_test]), len(y_test)
    return Pool(
        name=name,
        x=x,
        y=torch.from_numpy(y),
        groups=y,
        train=np.arange(train),
        test=np.arange(train, train + tested),
        outputs=int(y.max()) + 1,
    )


def _read(dataset: Any, what: str) -> tuple[Tensor, Indices]:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(f"{what} should be a map-style torch data set (with len() and indexing), got {dataset!r}")
    if len(dataset) == 0:
        raise DataError(f"{what} is empty")
    inputs: list[Tensor] = []
    labels: list[int] = []
    for row in range(len(dataset)):
        try:
            x, label = dataset[row]
        except (TypeError, ValueError) as error:
            raise DataError(f"{what} should give pairs (x, label); example {row} is not one: {error}") from error
        inputs.append(_as_tensor(x, row, what))
        labels.append(_as_label(label, row, what))
        if inputs[row].shape != inputs[0].shape or inputs[row].dtype != inputs[0].dtype:
            raise DataError(
                f"all inputs of {what} should look the same, "
                f"got {_look(inputs[0])} in example 0 and {_look(inputs[row])} in example {row}"
            )
    return torch.stack(inputs), np.asarray(labels, dtype=np.int64)


def _as_tensor(x: Any, row: int, what: str) -> Tensor:
    try:
        tensor = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"inputs of {what} should be tensors or arrays, got {type(x).__name__} in example {row}; for pictures give "
            f"the data set a transform such as torchvision's ToTensor()"
        ) from error
    if tensor.dtype == torch.uint8:
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)


def _as_label(label: Any, row: int, what: str) -> int:
    array = np.asarray(label)
    if array.size != 1 or not np.issubdtype(array.dtype, np.integer) or array.item() < 0:
        raise DataError(f"labels of {what} should be whole numbers from 0 on, got {label!r} in example {row}")
    return int(array.item())


def _look(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
