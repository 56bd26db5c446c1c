"""What users have as examples, read into inputs and targets: torch data sets, and pairs ``(x, y)`` of arrays."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedclade.core import ConfigError, DataError, Indices, TaskKind, shown
from fedclade.data.arrays import as_array, as_inputs, as_targets, check_kind

READ_TWICE = 8
"""Examples of a data set that are read a second time: a random flip of every other picture is missed once in 256."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of several parts, one behind the other."""

    x: Tensor | list[str]
    y: Tensor
    task: TaskKind
    parts: list[Indices]  # which of them belong to each part


def read_parts(given: Mapping[str, Any], task: TaskKind | None) -> Examples:
    """Read data sets or pairs, by what to call them; all inputs must look the same.

    If no task is given, the targets say it: whole numbers are labels, other numbers those of a
    regression.

    Raises
    ------
    DataError
        If there are no examples, they are not pairs, inputs differ in shape or kind, or targets are
        not the task's.
    ConfigError
        If the targets do not say what the task is.
    """
    read = {
        what: _arrays(part, what) if is_pair(part) else _rows(part, what)
        for what, part in given.items()
    }
    task = task or _task_of({what: y for what, (_, y) in read.items()})
    targets = [_targets(y, what, task) for what, (_, y) in read.items()]
    (first, (like, _)), *_ = read.items()
    for (what, (x, _)), y in zip(read.items(), targets, strict=True):
        if look(x) != look(like):
            raise DataError(f"{what} should look like {first} ({look(like)}), got {look(x)}")
        if y.shape[1:] != targets[0].shape[1:]:
            raise DataError(
                f"targets of {what} should be like those of {first}, {list(targets[0].shape[1:])} "
                f"for each example, got {list(y.shape[1:])}"
            )
    tensors = [x for x, _ in read.values() if isinstance(x, Tensor)]
    texts = [text for x, _ in read.values() if isinstance(x, list) for text in x]
    x = torch.cat(tensors) if tensors else texts
    return Examples(x, torch.cat(targets), task, number_rows([len(y) for y in targets]))


def number_rows(sizes: Sequence[int]) -> list[Indices]:
    """Return the indices of each of several parts of these sizes, one behind the other."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def is_pair(part: Any) -> bool:
    """Return whether something is a pair ``(x, y)`` rather than a data set."""
    return isinstance(part, tuple) and len(part) == 2


def is_dataset(part: Any) -> bool:
    """Return whether something is a map-style data set, and no array, list or table."""
    indexed = hasattr(part, "__len__") and hasattr(part, "__getitem__")
    return isinstance(part, Dataset) or (
        indexed
        and not isinstance(part, list | tuple | str | Mapping | Tensor)
        and not hasattr(part, "__array__")
    )


def look(x: Tensor | list[str]) -> str:
    """Return what each of some inputs looks like, for people."""
    return "texts" if isinstance(x, list) else _look(x[0])


def _look(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _arrays(pair: tuple[Any, Any], what: str) -> tuple[Tensor | list[str], Tensor]:
    """Read a pair of arrays; inputs may be a list of texts."""
    x, y = pair
    check_kind(x, f"inputs of {what}")
    may_be_text = getattr(getattr(x, "dtype", None), "kind", None) in ("O", "U", "T")
    values = x.tolist() if may_be_text and hasattr(x, "tolist") else x
    is_text = (
        isinstance(values, list) and bool(values) and all(isinstance(text, str) for text in values)
    )
    inputs = list(values) if is_text else as_inputs(x, f"inputs of {what}")
    check_kind(y, f"targets of {what}")
    try:
        targets = torch.as_tensor(y if isinstance(y, Tensor) else np.asarray(y))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"targets of {what} should be numbers, got {type(y).__name__}: {error}"
        ) from error
    shape = list(inputs.shape) if isinstance(inputs, Tensor) else [len(inputs)]
    if shape[:1] != list(targets.shape[:1]) or not shape:
        raise DataError(
            f"{what} should be arrays x and y of one length, got shapes {shape} and "
            f"{list(targets.shape)}"
        )
    if len(targets) == 0:
        raise DataError(f"{what} is empty")
    return inputs, targets


def _rows(dataset: Any, what: str) -> tuple[Tensor | list[str], list[Any]]:
    """Read a data set, example by example."""
    # An array of no dimension and a class have the methods of a data set, and yet no length.
    has_no_length = getattr(dataset, "ndim", None) == 0 or issubclass(type(dataset), type)
    if has_no_length or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{what} should be a map-style torch data set (with len() and indexing), got "
            f"{shown(dataset)}"
        )
    if len(dataset) == 0:
        raise DataError(f"{what} is empty")
    inputs: list[Any] = []
    targets: list[Any] = []
    for row in range(len(dataset)):
        try:
            x, target = dataset[row]
        except (TypeError, ValueError, LookupError) as error:
            raise DataError(
                f"{what} should give pairs (x, label); example {row} is not one: {error}"
            ) from error
        check_kind(target, f"the target of example {row} of {what}")
        targets.append(target)
        inputs.append(
            x
            if isinstance(x, str) and isinstance(inputs[0] if inputs else x, str)
            else _input(x, row, what)
        )
        first = inputs[0]
        if isinstance(first, str):
            continue
        if inputs[row].shape != first.shape or inputs[row].dtype != first.dtype:
            raise DataError(
                f"all inputs of {what} should look the same, "
                f"got {_look(first)} in example 0 and {_look(inputs[row])} in example {row}"
            )
    if isinstance(inputs[0], str):
        return inputs, targets
    _warn_of_chance(dataset, inputs, what)
    return torch.stack(inputs), targets


def _warn_of_chance(dataset: Any, inputs: Sequence[Tensor], what: str) -> None:
    """Warn of examples that differ when they are read again."""
    for row in np.unique(np.linspace(0, len(inputs) - 1, READ_TWICE).astype(int)).tolist():
        again = _input(dataset[row][0], row, what)
        if again.shape != inputs[row].shape or not torch.equal(
            again.nan_to_num(), inputs[row].nan_to_num()
        ):
            _log.warning(
                "example %d of %s is another each time that it is read, as with a random "
                "transform; all examples are read once, and every epoch trains on what they were "
                "then: take the random part out, and give it as the federation's 'augment'",
                *(row, what),
            )
            return


def _input(x: Any, row: int, what: str) -> Tensor:
    check_kind(x, f"the inputs of example {row} of {what}")
    try:
        tensor = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"inputs of {what} should be tensors or arrays, got {type(x).__name__} in example "
            f"{row}; for pictures give the data set a transform such as torchvision's ToTensor()"
        ) from error
    return as_inputs(tensor, f"inputs of {what}")


def _task_of(targets: Mapping[str, Tensor | list[Any]]) -> TaskKind:
    """Return the task that targets say by their type."""
    examples = {
        what: [
            as_array(each, f"targets of {what}")
            for each in y[: 1 if isinstance(y, Tensor) else None]
        ]
        for what, y in targets.items()
    }
    if any(each.dtype.kind == "f" for arrays in examples.values() for each in arrays):
        return "regression"
    if several := next((what for what, (first, *_) in examples.items() if first.size > 1), None):
        raise ConfigError(
            f"targets of {several} are several whole numbers for each example; say by "
            "task='multilabel', task='language' or task='regression' what they are"
        )
    return "classification"


def _targets(y: Tensor | list[Any], what: str, task: TaskKind) -> Tensor:
    """Return targets as the task has them."""
    if task != "classification":
        return as_targets(
            y if isinstance(y, Tensor) else _stacked(y, what), f"targets of {what}", task
        )
    if isinstance(y, list):
        return torch.tensor(
            [_label(label, row, what) for row, label in enumerate(y)], dtype=torch.int64
        )
    labels = as_targets(y, f"labels of {what}")
    if bool((odd := labels < 0).any()):
        row = int(odd.nonzero()[0, 0])
        raise DataError(
            f"labels of {what} should be whole numbers from 0 on, got {int(labels[odd][0])} in "
            f"example {row}, one of {int(odd.sum())}; {_WITHOUT_LABEL}"
        )
    return labels


def _stacked(targets: Sequence[Any], what: str) -> Tensor:
    each: list[Tensor] = []
    for row, target in enumerate(targets):
        try:
            each.append(torch.as_tensor(target))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"targets of {what} should be numbers, got {shown(target)} in example {row}"
            ) from error
        if each[row].shape != each[0].shape:
            raise DataError(
                f"targets of {what} should be alike, got shape {list(each[0].shape)} in example 0 "
                f"and {list(each[row].shape)} in example {row}"
            )
    return torch.stack(
        [target.to(torch.float64) if target.is_floating_point() else target for target in each]
    )


_WITHOUT_LABEL = "where a negative number means that there is no label, leave these examples out"


def _label(label: Any, row: int, what: str) -> int:
    array = as_array(label, f"the label of example {row} of {what}")
    whole = array.size == 1 and (
        array.dtype.kind in "iub" or (array.dtype.kind == "f" and array.item() % 1 == 0)
    )
    if not whole or array.item() < 0:
        hint = f"; {_WITHOUT_LABEL}" if whole else ""
        if not whole and array.dtype.kind == "f":
            hint = "; other numbers are targets of a regression"
        raise DataError(
            f"labels of {what} should be whole numbers from 0 on, got {shown(label)} in example "
            f"{row}{hint}"
        )
    return int(array.item())
