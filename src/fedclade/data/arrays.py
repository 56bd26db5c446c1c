"""Numbers and arrays as users have them: converted to what a pool keeps, if that loses nothing, or refused.

Every function takes ``what`` to call the value in the message of a DataError.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedclade.core import IGNORED, ConfigError, DataError, Indices, TaskKind, unknown

InputKind = Literal["auto", "numbers", "tokens"]
"""What inputs are: numbers to compute with, or tokens, which are rows of a table. ``auto``: by their type.

Then bytes are pixels, other whole numbers are tokens if the model takes whole numbers, and all else is numbers.
"""


def as_inputs(x: Any, what: str) -> Tensor:
    """Return inputs as a pool keeps them: bytes as they are, other whole numbers as int64, the rest as float32."""
    tensor = _as_tensor(x, what)
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.is_complex():
        raise DataError(f"{what} should be real numbers, got {tensor.dtype}")
    is_whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.to(torch.int64 if is_whole else torch.float32)


def check_input_kind(kind: InputKind) -> None:
    """Check what inputs are said to be; a ConfigError if that is unknown."""
    if kind not in get_args(InputKind):
        raise ConfigError(unknown("inputs_are", kind, get_args(InputKind)))


def inputs_as(x: Tensor, kind: InputKind, what: str) -> Tensor:
    """Return inputs as numbers (float32) or as tokens (int64), whatever type they came in; ``auto`` goes by the type.

    Raises
    ------
    DataError
        If tokens are no whole numbers of at least 0.
    """
    if kind == "numbers":
        return x.to(torch.float32)
    if kind == "auto":
        return x
    whole = (x == x.round()) & (x >= 0) if x.is_floating_point() else x >= 0
    if not bool(whole.all()):
        odd = x[~whole].flatten()[0].item()
        raise DataError(f"{what} should be whole numbers of at least 0 where inputs_are = 'tokens', got {odd}")
    return x.to(torch.int64)


def as_targets(y: Any, what: str, task: TaskKind = "classification") -> Tensor:
    """Return targets as a task has them: labels and tokens as int64, all others as float32.

    Numbers of any type are accepted if that loses nothing; a column of one number for each example becomes a vector.
    """
    tensor, rule = _as_tensor(y, what), _TARGETS[task]
    if tensor.is_complex():
        raise DataError(f"{what} should be {rule}, got {tensor.dtype}")
    if task in ("classification", "language"):
        if tensor.is_floating_point():
            _require_all(tensor == tensor.round(), tensor, what, f"{rule}; other numbers are targets of a regression")
        return tensor.to(torch.int64)
    numbers = tensor.to(torch.float32)
    if numbers.dim() == 2 and numbers.shape[1] == 1 and task != "multilabel":
        numbers = numbers[:, 0]
    if numbers.dim() not in {"binary": (1,), "multilabel": (2,), "regression": (1, 2)}[task]:
        raise DataError(f"{what} should be {rule}, got shape {list(tensor.shape)}")
    holds = numbers.isfinite() if task == "regression" else (numbers == 0) | (numbers == 1)
    _require_all(holds, tensor, what, rule)
    return numbers


def outputs_of(y: Tensor, task: TaskKind) -> int:
    """Return how many numbers a model must give for targets: at least as many as there are labels or tokens in them."""
    if task in ("classification", "language"):
        return int(y.clamp(min=0).max()) + 1 if len(y) else 1
    return 1 if y.dim() == 1 else y.shape[1]


def groups_of(y: Tensor, task: TaskKind) -> Indices:
    """Return what a partition by label goes by: the label, or 0 where targets are no labels."""
    has_labels = task in ("classification", "binary")
    return (y if has_labels else torch.zeros(len(y))).to(torch.int64).numpy()


def as_indices(values: Any, what: str) -> Indices:
    """Return indices as an int64 array: the same one if it is that already."""
    array = np.asarray(values)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise DataError(f"{what} should be whole numbers, one behind the other, got {array.dtype} {list(array.shape)}")
    return array.astype(np.int64, copy=False)


def check_range(indices: Indices, count: int, what: str) -> None:
    """Check that indices into ``count`` examples are in range."""
    if len(indices) and not (indices.min() >= 0 and indices.max() < count):
        raise DataError(f"{what} should lie in 0 .. {count - 1}, got {indices.min()} .. {indices.max()}")


def whole_number(value: Any, what: str) -> int:
    """Return a whole number as Python's."""
    try:
        return index(value)
    except TypeError:
        raise DataError(f"{what} should be a whole number, got {value!r}") from None


def check_name(name: Any, what: str) -> None:
    """Check that a name is a string that can be written to a file."""
    try:
        str.encode(name)
    except (TypeError, UnicodeEncodeError):
        raise DataError(f"{what} should be a string that UTF-8 can write, got {name!r}") from None


_TARGETS: Mapping[TaskKind, str] = {
    "classification": "whole numbers from 0 on",
    "language": f"whole numbers from 0 on, or {IGNORED} where there is no next word",
    "binary": "0 or 1, one for each example",
    "multilabel": "0 or 1, [N, L] for L labels",
    "regression": "finite numbers, one or several for each example",
}


def _require_all(holds: Tensor, values: Tensor, what: str, rule: str) -> None:
    """Check that all of some values hold; name the first that does not, and where it is."""
    if bool(holds.all()):
        return
    row, *column = (~holds).nonzero()[0].tolist()
    value = float(values.reshape(holds.shape)[(row, *column)])
    where = f"example {row}" + (f", column {column[0]}" if column else "")
    head, _, tail = rule.partition("; ")
    raise DataError(f"{what} should be {head}, got {value} in {where}" + (f"; {tail}" if tail else ""))


def _as_tensor(values: Any, what: str) -> Tensor:
    try:
        own = isinstance(values, Tensor) or not hasattr(values, "__array__")
        return torch.as_tensor(values if own else np.asarray(values)).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} should be a tensor or an array, got {type(values).__name__}: {error}") from error
