"""Reading of users' examples from torch data sets and from pairs ``(x, y)`` of arrays.

A *part* is one data set or pair, such as the training data of one client. The parameter ``what`` of
the functions is the name of a part in error messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedclade.core import ConfigError, DataError, Indices, TaskKind, shown
from fedclade.data.arrays import as_array, as_inputs, as_targets, check_kind

READ_TWICE = 8
"""Number of examples of a data set that are read twice, to detect random transforms.

A transform that flips half of the images at random remains undetected in one of 256 cases.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Examples:
    """Concatenated examples of several parts, such as the data sets of several clients.

    Parameters
    ----------
    x, y
        Inputs ``[N, ...]`` or N texts, and targets ``[N, ...]``.
    task
        The given or detected task.
    parts
        Row numbers of the examples of each part.
    """

    x: Tensor | list[str]
    y: Tensor
    task: TaskKind
    parts: list[Indices]


def read_parts(given: Mapping[str, Any], task: TaskKind | None) -> Examples:
    """Read several data sets or pairs of arrays, and concatenate their examples.

    Parameters
    ----------
    given
        Data sets, or pairs ``(x, y)`` of arrays, by the names that error messages use for them. The
        inputs of all examples must have the same type and shape.
    task
        The task. If None, the targets determine it: whole numbers are labels, other numbers are
        targets of a regression.

    Raises
    ------
    DataError
        If there are no examples, an example is not a pair, inputs differ in shape or type, or
        targets do not fit the task.
    ConfigError
        If the targets allow more than one task.
    """
    inputs: dict[str, Tensor | list[str]] = {}
    raw_targets: dict[str, Tensor | list[Any]] = {}
    for what, part in given.items():
        if is_pair(part):
            inputs[what], raw_targets[what] = _read_arrays(part, what)
        else:
            inputs[what], raw_targets[what] = _read_rows(part, what)
    task = task or _detect_task(raw_targets)
    targets = {what: _convert_targets(y, what, task) for what, y in raw_targets.items()}
    first = next(iter(given))
    for what, x in inputs.items():
        if describe_inputs(x) != describe_inputs(inputs[first]):
            raise DataError(
                f"inputs of {what} should have the type and shape of inputs of {first} "
                f"({describe_inputs(inputs[first])}), got {describe_inputs(x)}"
            )
        shape = list(targets[what].shape[1:])
        first_shape = list(targets[first].shape[1:])
        if shape != first_shape:
            raise DataError(
                f"targets of {what} should have the shape of the targets of {first}, {first_shape} "
                f"for each example, got {shape}"
            )
    parts = number_rows([len(y) for y in targets.values()])
    y = torch.cat([*targets.values()])
    # Either all parts have tensors or all parts have texts, as was checked above.
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    if tensors:
        return Examples(torch.cat(tensors), y, task, parts)
    texts = [text for x in inputs.values() if isinstance(x, list) for text in x]
    return Examples(texts, y, task, parts)


def number_rows(sizes: Sequence[int]) -> list[Indices]:
    """Return the row numbers of each part after concatenation, given the sizes of the parts."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def is_pair(part: Any) -> bool:
    """Return whether an object is a pair ``(x, y)`` rather than a data set."""
    return isinstance(part, tuple) and len(part) == 2


def is_dataset(part: Any) -> bool:
    """Return whether an object is a map-style data set, and not an array, list or mapping."""
    if isinstance(part, Dataset):
        return True
    if isinstance(part, list | tuple | str | Mapping | Tensor) or hasattr(part, "__array__"):
        return False
    return hasattr(part, "__len__") and hasattr(part, "__getitem__")


def describe_inputs(x: Tensor | list[str]) -> str:
    """Describe the type and shape of the first input of a part, or "texts", for messages."""
    if isinstance(x, list):
        return "texts"
    return _describe_input(x[0])


def _describe_input(x: Tensor) -> str:
    """Describe the type and shape of one input for messages, such as ``float32 [3, 32]``."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _read_arrays(pair: tuple[Any, Any], what: str) -> tuple[Tensor | list[str], Tensor]:
    """Read a pair of inputs and targets given as arrays; inputs may be a list of texts.

    Returns
    -------
    tuple
        Inputs and targets. The targets keep their type until the task is known.
    """
    x, y = pair
    inputs = _read_inputs(x, f"inputs of {what}")
    check_kind(y, f"targets of {what}")
    try:
        if isinstance(y, Tensor):
            array = y
        else:
            array = np.asarray(y)
        targets = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"targets of {what} should be numbers, got {type(y).__name__}: {error}"
        ) from error
    if isinstance(inputs, Tensor):
        shape = list(inputs.shape)
    else:
        shape = [len(inputs)]
    if shape[:1] != list(targets.shape[:1]) or not shape:
        raise DataError(
            f"{what} should be arrays x and y of the same length, got shapes {shape} and "
            f"{list(targets.shape)}"
        )
    if len(targets) == 0:
        raise DataError(f"{what} should have at least 1 example, got none")
    return inputs, targets


def _read_inputs(x: Any, what: str) -> Tensor | list[str]:
    """Convert inputs to a tensor, or to a list of texts if the inputs are texts."""
    check_kind(x, what)
    values = x
    # Kind codes of NumPy types: object (O), text of fixed length (U) and of any length (T).
    may_be_text = getattr(getattr(x, "dtype", None), "kind", None) in ("O", "U", "T")
    if may_be_text and hasattr(x, "tolist"):
        values = x.tolist()
    if isinstance(values, list) and values and all(isinstance(text, str) for text in values):
        return list(values)
    return as_inputs(x, what)


def _read_rows(dataset: Any, what: str) -> tuple[Tensor | list[str], list[Any]]:
    """Read all examples of a map-style data set, one after another.

    Returns
    -------
    tuple
        The stacked inputs (or a list of texts), and the list of targets.
    """
    # A 0-dimensional array and a class object have the methods of a data set, but no length.
    has_no_length = getattr(dataset, "ndim", None) == 0 or issubclass(type(dataset), type)
    if has_no_length or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{what} should be a map-style torch data set (with len() and indexing), got "
            f"{shown(dataset)}"
        )
    if len(dataset) == 0:
        raise DataError(f"{what} should have at least 1 example, got none")
    inputs: list[Any] = []
    targets: list[Any] = []
    for row in range(len(dataset)):
        try:
            x, target = dataset[row]
        except (TypeError, ValueError, LookupError) as error:
            raise DataError(
                f"{what} should consist of pairs (x, label), but example {row} is not a pair: "
                f"{error}"
            ) from error
        check_kind(target, f"the target of example {row} of {what}")
        targets.append(target)
        is_text = isinstance(x, str) and (not inputs or isinstance(inputs[0], str))
        if not is_text:
            x = _read_input(x, row, what)
        inputs.append(x)
        if not isinstance(inputs[0], str):
            _check_alike(inputs[0], inputs[row], row, what)
    if isinstance(inputs[0], str):
        return inputs, targets
    _warn_of_randomness(dataset, inputs, what)
    return torch.stack(inputs), targets


def _check_alike(first: Tensor, x: Tensor, row: int, what: str) -> None:
    """Check that the input of example ``row`` has the type and shape of the first input."""
    if x.shape != first.shape or x.dtype != first.dtype:
        raise DataError(
            f"all inputs of {what} should have the same type and shape, got "
            f"{_describe_input(first)} in example 0 and {_describe_input(x)} in example {row}"
        )


def _warn_of_randomness(dataset: Any, inputs: Sequence[Tensor], what: str) -> None:
    """Warn if some inputs of a data set change when they are read a second time.

    They change if the data set applies a random transform. Examples are read only once, before
    training, so the transform would not vary between epochs. ``inputs`` are all inputs as read
    first.
    """
    rows = np.unique(np.linspace(0, len(inputs) - 1, READ_TWICE).astype(int))
    for row in rows.tolist():
        again = _read_input(dataset[row][0], row, what)
        is_same_shape = again.shape == inputs[row].shape
        if is_same_shape and torch.equal(again.nan_to_num(), inputs[row].nan_to_num()):
            continue
        _log.warning(
            "example %d of %s changes each time that it is read, as with a random transform; "
            "examples are read only once, so every epoch trains on the same random values: remove "
            "the random part from the data set, and pass it as the federation's 'augment'",
            row,
            what,
        )
        return


def _read_input(x: Any, row: int, what: str) -> Tensor:
    """Convert the input of one example to a tensor."""
    check_kind(x, f"the inputs of example {row} of {what}")
    try:
        tensor = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"inputs of {what} should be tensors or arrays, got {type(x).__name__} in example "
            f"{row}; for images give the data set a transform such as torchvision's ToTensor()"
        ) from error
    return as_inputs(tensor, f"inputs of {what}")


def _detect_task(targets: Mapping[str, Tensor | list[Any]]) -> TaskKind:
    """Detect the task from the types of all targets.

    Floats are targets of a regression, and single whole numbers are labels.

    Raises
    ------
    ConfigError
        If an example has several whole numbers as targets, which several tasks allow.
    """
    examples: dict[str, list[NDArray[Any]]] = {}
    for what, y in targets.items():
        # The entries of a tensor have one type; those of a list may differ.
        if isinstance(y, Tensor):
            entries = y[:1]
        else:
            entries = y
        examples[what] = [as_array(each, f"targets of {what}") for each in entries]
    for arrays in examples.values():
        if any(each.dtype.kind == "f" for each in arrays):
            return "regression"
    for what, (first, *_) in examples.items():
        if first.size > 1:
            raise ConfigError(
                f"targets of {what} are several whole numbers for each example, which several "
                "tasks allow; set task='multilabel', task='language' or task='regression'"
            )
    return "classification"


def _convert_targets(y: Tensor | list[Any], what: str, task: TaskKind) -> Tensor:
    """Convert the targets of a part to the tensor type of the task, and check them."""
    if task != "classification":
        if not isinstance(y, Tensor):
            y = _stack_targets(y, what)
        return as_targets(y, f"targets of {what}", task)
    if isinstance(y, list):
        labels = [_read_label(label, row, what) for row, label in enumerate(y)]
        return torch.tensor(labels, dtype=torch.int64)
    labels = as_targets(y, f"labels of {what}")
    is_negative = labels < 0
    if bool(is_negative.any()):
        row = int(is_negative.nonzero()[0, 0])
        raise DataError(
            f"labels of {what} should be whole numbers from 0 on, got "
            f"{int(labels[is_negative][0])} in example {row} (negative labels in all: "
            f"{int(is_negative.sum())}); {_WITHOUT_LABEL}"
        )
    return labels


def _stack_targets(targets: Sequence[Any], what: str) -> Tensor:
    """Stack the targets of all examples of a part to one tensor."""
    tensors: list[Tensor] = []
    for row, target in enumerate(targets):
        try:
            tensor = torch.as_tensor(target)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"targets of {what} should be numbers, got {shown(target)} in example {row}"
            ) from error
        # float64 for all, as Python numbers and tensors may differ in precision.
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float64)
        tensors.append(tensor)
        if tensor.shape != tensors[0].shape:
            raise DataError(
                f"targets of {what} should have the same shape, got {list(tensors[0].shape)} in "
                f"example 0 and {list(tensor.shape)} in example {row}"
            )
    return torch.stack(tensors)


_WITHOUT_LABEL = "if a negative number means that the label is missing, leave these examples out"


def _read_label(label: Any, row: int, what: str) -> int:
    """Convert the label of one example to an ``int``; raise a DataError if it is not a label."""
    array = as_array(label, f"the label of example {row} of {what}")
    is_float = array.dtype.kind == "f"
    is_whole = array.size == 1 and (
        array.dtype.kind in "iub" or (is_float and array.item() % 1 == 0)
    )
    if is_whole and array.item() >= 0:
        return int(array.item())
    hint = ""
    if is_whole:
        hint = f"; {_WITHOUT_LABEL}"
    elif is_float:
        hint = "; other numbers are targets of a regression"
    raise DataError(
        f"labels of {what} should be whole numbers from 0 on, got {shown(label)} in example "
        f"{row}{hint}"
    )
