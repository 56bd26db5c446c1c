"""Numbers and arrays as users have them: converted to what a pool keeps, if that loses nothing, or refused.

Every function takes ``what`` to call the value in the message of a DataError.
"""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import DataError

Indices = NDArray[np.int64]


def as_inputs(x: Any, what: str) -> Tensor:
    """Return inputs as a pool keeps them: bytes as they are, other whole numbers as int64, the rest as float32."""
    tensor = _as_tensor(x, what)
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.is_complex():
        raise DataError(f"{what} should be real numbers, got {tensor.dtype}")
    is_whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.to(torch.int64 if is_whole else torch.float32)


def as_targets(y: Any, what: str) -> Tensor:
    """Return targets as int64; floats and truth values are accepted if they are whole numbers."""
    tensor = _as_tensor(y, what)
    if tensor.is_floating_point() and bool((odd := tensor != tensor.round()).any()):  # NaN equals nothing
        first = tuple(odd.nonzero()[0].tolist())
        raise DataError(
            f"{what} should be whole numbers from 0 on, got {float(tensor[first])} in example {first[0]}; fedclade "
            "classifies and predicts words, and has no regression yet"
        )
    if tensor.is_complex():
        raise DataError(f"{what} should be whole numbers from 0 on, got {tensor.dtype}")
    return tensor.to(torch.int64)


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


def _as_tensor(values: Any, what: str) -> Tensor:
    try:
        return torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} should be a tensor or an array, got {type(values).__name__}: {error}") from error
