"""Any torch data set as a pool, or as all that one client has."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedclade.core import DataError, checked
from fedclade.data.arrays import Indices, as_inputs
from fedclade.data.federation import ClientData, Federation
from fedclade.data.pool import Pool

READ_TWICE = 8
"""Examples of a data set that are read a second time: a random flip of every other picture is missed once in 256."""

_log = logging.getLogger(__name__)


@checked("dataset", "test")
def pool_from_torch(dataset: Dataset[Any], test: Dataset[Any] | None = None, name: str = "custom") -> Pool:
    """Read a map-style torch data set of ``(x, label)`` pairs into a pool for classification.

    Every example is read once. A random transform is frozen by that, which is warned of.

    Parameters
    ----------
    dataset
        Examples to train on. All ``x`` are tensors or arrays of one shape: bytes become uint8 images (scaled to [0, 1]
        on the way to the model), other whole numbers int64 tokens, the rest float32. Labels may be whole numbers of any
        type.
    test
        Examples to test on; None lets every client hold back a part of its own examples.
    name
        What to call it.

    Raises
    ------
    DataError
        If there are no examples, they are not pairs, inputs differ in shape or kind, or a label is no whole number ≥ 0.
    """
    given = {f"data set {name!r}": dataset} | ({} if test is None else {f"test data of {name!r}": test})
    x, y, (train, *tested) = _read_alike(given)
    return Pool(name, x, torch.from_numpy(y), y, train, tested[0] if tested else train[:0], outputs=int(y.max()) + 1)


@checked("train", "test", "validation")
def one_client(
    train: Dataset[Any],
    test: Dataset[Any],
    *,
    labels: int,
    validation: Dataset[Any] | None = None,
    name: str = "client",
    key: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
) -> Federation:
    """Read the data sets of one client into a federation of this client alone, as an app for Flower takes it.

    To a Flower server the name of its data is ``custom``.

    Parameters
    ----------
    train, test, validation
        Map-style torch data sets of ``(x, label)`` pairs, as :func:`pool_from_torch` takes them.
    labels
        Number of labels among all clients: a client that lacks the last of them needs the same model as the others.
    name
        For people.
    key
        The client's own number for its random draws, such as the order of its batches; at least 0.
    mean, std
        Of the pixels in [0, 1], where ``x`` are bytes: the same for all clients.

    Raises
    ------
    DataError
        If a data set cannot be read, or does not look like ``train``, a label is not below ``labels``, or the key is
        negative.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> mine = TensorDataset(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    >>> len(one_client(mine, mine, labels=10, name="hospital-1"))
    1
    """
    given = {f"training data of {name!r}": train, f"test data of {name!r}": test}
    given |= {} if validation is None else {f"validation data of {name!r}": validation}
    x, y, (trained, tested, *validated) = _read_alike(given)
    if (last := int(y.max())) >= labels:
        raise DataError(f"client {name!r} has examples of label {last}, so labels should be above that, got {labels}")
    if key < 0:
        raise DataError(f"the key of client {name!r} should be at least 0, got {key}")
    pool = Pool("custom", x, torch.from_numpy(y), y, trained, tested, labels, mean=mean, std=std)
    client = ClientData(0, name, key, trained, validated[0] if validated else trained[:0], tested)
    return Federation(pool, (client,), description="clients with data of their own")


def _read_alike(given: Mapping[str, Dataset[Any]]) -> tuple[Tensor, Indices, list[Indices]]:
    """Read data sets, by what to call them, into inputs and labels; return the indices of each one's examples."""
    xs, ys = zip(*(_read(dataset, what) for what, dataset in given.items()), strict=True)
    (first, *_), like = given, xs[0]
    for what, x in zip(given, xs, strict=True):
        if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
            raise DataError(f"{what} should look like {first} ({_look(like[0])}), got {_look(x[0])}")
    y = np.concatenate(ys)
    return torch.cat(xs), y, np.split(np.arange(len(y)), np.cumsum([len(y) for y in ys])[:-1])


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
    _warn_of_chance(dataset, inputs, what)
    return torch.stack(inputs), np.asarray(labels, dtype=np.int64)


def _warn_of_chance(dataset: Any, inputs: Sequence[Tensor], what: str) -> None:
    """Warn of examples that differ when they are read again."""
    for row in np.unique(np.linspace(0, len(inputs) - 1, READ_TWICE).astype(int)).tolist():
        again = _as_tensor(dataset[row][0], row, what)
        if again.shape != inputs[row].shape or not torch.equal(again.nan_to_num(), inputs[row].nan_to_num()):
            _log.warning(
                "example %d of %s is another each time that it is read, as with a random transform; all examples are "
                "read once, and every epoch trains on what they were then: take the random part out",
                *(row, what),
            )
            return


def _as_tensor(x: Any, row: int, what: str) -> Tensor:
    try:
        tensor = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"inputs of {what} should be tensors or arrays, got {type(x).__name__} in example {row}; for pictures give "
            f"the data set a transform such as torchvision's ToTensor()"
        ) from error
    return as_inputs(tensor, f"inputs of {what}")


def _as_label(label: Any, row: int, what: str) -> int:
    array = np.asarray(label)
    whole = array.size == 1 and (array.dtype.kind in "iub" or (array.dtype.kind == "f" and array.item() % 1 == 0))
    if not whole or array.item() < 0:
        raise DataError(f"labels of {what} should be whole numbers from 0 on, got {label!r} in example {row}")
    return int(array.item())


def _look(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
