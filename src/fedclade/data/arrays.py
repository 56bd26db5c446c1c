"""Conversion and checks of users' numbers and arrays, and a cache of decoded arrays.

The parameter ``what`` of the functions names the value in the message of a DataError.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from operator import index
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import (
    IGNORED,
    ConfigError,
    DataError,
    Indices,
    TaskKind,
    array_problem,
    shown,
    unknown,
)

# Decoded arrays on disk, so that only the first start decodes.

Arrays = Mapping[str, NDArray[Any]]

CACHE_FORMAT = 1
"""Version in every key of the cache.

Increase it if the same files and options decode differently.
"""

_log = logging.getLogger(__name__)


def load_cached(name: str, key: Mapping[str, object], build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of a key from the cache, or build and store them.

    Parameters
    ----------
    name
        Name of the data.
    key
        All that the arrays depend on, as values for JSON: files with their stamps (see
        :func:`stamp_files`), and options of the decoder.
    build
        Builds the arrays.

    Notes
    -----
    A file of the cache is an uncompressed ``.npz``. Its checksums show whether it is damaged and
    must be built again. If the folder cannot be written, every start decodes.
    """
    digest = hashlib.sha256(
        json.dumps([CACHE_FORMAT, name, key], sort_keys=True).encode()
    ).hexdigest()
    path = cache_folder() / f"{name}-{digest[:20]}.npz"
    arrays = _read(path)
    if arrays is None:
        arrays = build()
        _write(path, arrays)
    return arrays


def stamp_files(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return path, size in bytes and modification time in ns of each file."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def cache_folder() -> Path:
    """Return ``FEDCLADE_CACHE_DIR``, by default ``~/.cache/fedclade``; it need not exist yet."""
    return Path(os.environ.get("FEDCLADE_CACHE_DIR") or "~/.cache/fedclade").expanduser()


def _read(path: Path) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        _log.warning("cannot use the cached data in %s (%s); decoding again", path, error)
        return None


def _write(path: Path, arrays: Arrays) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as beside:
            whole = Path(beside) / path.name
            np.savez(whole, allow_pickle=False, **arrays)
            # in one step: a crash leaves the old file or the new one, never a half
            whole.replace(path)
    except OSError as error:
        _log.warning(
            "cannot keep decoded data in %s (%s); the next start decodes again", path.parent, error
        )


FEW_LABELS = 1000
"""Labels below this number may have gaps of any size: a model has outputs for all of them."""

SPARSEST = 100
"""Largest ratio of the numbers up to the highest label to the labels that occur.

A client may lack some labels, so gaps are allowed.
"""

MOST_OUTPUTS = 2**24
"""Largest number of outputs of a model, which is the limit of a server in a network."""

InputKind = Literal["auto", "numbers", "tokens"]
"""Kind of inputs: numbers, tokens (rows of an embedding table), or ``auto`` by their type.

With ``auto``, bytes are pixels, other whole numbers are tokens if the model takes whole numbers,
and all other inputs are numbers.
"""


def as_inputs(x: Any, what: str) -> Tensor:
    """Convert inputs: bytes stay, other whole numbers become int64, the rest float32."""
    tensor = _as_tensor(x, what)
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.is_complex():
        raise DataError(f"{what} should be real numbers, got {tensor.dtype}")
    is_whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.to(torch.int64 if is_whole else torch.float32)


def check_input_kind(kind: InputKind) -> None:
    """Check a kind of inputs; a ConfigError if it is unknown."""
    if kind not in get_args(InputKind):
        raise ConfigError(unknown("inputs_are", kind, get_args(InputKind)))


def convert_inputs(x: Tensor, kind: InputKind, what: str) -> Tensor:
    """Convert inputs to numbers (float32) or tokens (int64); with ``auto`` they stay.

    Raises
    ------
    DataError
        If tokens are no whole numbers of at least 0.
    """
    if kind == "numbers":
        return x.to(torch.float32)
    if kind == "auto":
        return x
    is_token = x >= 0
    if x.is_floating_point():
        is_token &= x == x.round()
    if not bool(is_token.all()):
        odd = x[~is_token].flatten()[0].item()
        raise DataError(
            f"{what} should be whole numbers of at least 0 where inputs_are = 'tokens', got {odd}"
        )
    return x.to(torch.int64)


def as_targets(y: Any, what: str, task: TaskKind = "classification") -> Tensor:
    """Convert targets to the type of a task: labels and tokens to int64, others to float32.

    Numbers of any type are accepted if that loses nothing; a column of one number for each example
    becomes a vector.
    """
    if task not in _TARGETS:
        raise ConfigError(unknown("task:", task, _TARGETS))
    tensor = _as_tensor(y, what)
    rule = _TARGETS[task]
    if tensor.is_complex():
        raise DataError(f"{what} should be {rule}, got {tensor.dtype}")
    if task in ("classification", "language"):
        if tensor.is_floating_point():
            _require_all(
                tensor == tensor.round(),
                tensor,
                what,
                f"{rule}; other numbers are targets of a regression",
            )
        return tensor.to(torch.int64)
    numbers = tensor.to(torch.float32)
    if numbers.dim() == 2 and numbers.shape[1] == 1 and task != "multilabel":
        numbers = numbers[:, 0]
    if numbers.dim() not in {"binary": (1,), "multilabel": (2,), "regression": (1, 2)}[task]:
        raise DataError(f"{what} should be {rule}, got shape {list(tensor.shape)}")
    holds = (numbers == 0) | (numbers == 1)
    if task == "regression":
        holds = numbers.isfinite()
    _require_all(holds, tensor, what, rule)
    return numbers


def count_outputs(y: Tensor, task: TaskKind) -> int:
    """Return the number of outputs that targets need: labels, tokens, or columns of numbers."""
    if task in ("classification", "language"):
        return int(y.clamp(min=0).max()) + 1 if len(y) else 1
    return 1 if y.dim() == 1 else y.shape[1]


def check_numbering(y: Tensor, what: str, task: TaskKind) -> None:
    """Check that labels are numbered from 0: a model has an output for each number.

    Raises
    ------
    DataError
        If the last is at least :data:`FEW_LABELS`, and not even one in :data:`SPARSEST` numbers up
        to it is a label.
    """
    if task != "classification" or not len(y) or (last := int(y.max())) < FEW_LABELS:
        return
    different = len(torch.unique(y[y >= 0]))
    if last + 1 > SPARSEST * different:
        raise DataError(
            f"{what} go up to {last:,}, but only {different:,} different ones occur, and a model "
            "has an output for each number from 0 on; number them anew, as numpy.unique(labels, "
            "return_inverse=True) does, or give them as texts; if there are really so many, say "
            "how many labels there are"
        )


def require_outputs(outputs: int, what: str) -> None:
    """Check that a model can have this number of outputs; a DataError if not."""
    if not 1 <= outputs <= MOST_OUTPUTS:
        raise DataError(
            f"{what} should be from 1 to {MOST_OUTPUTS:,}, as a model has one for each label, got "
            f"{outputs:,}; number the labels from 0 on, as numpy.unique(labels, "
            "return_inverse=True) does"
        )


def group_by_label(y: Tensor, task: TaskKind) -> Indices:
    """Return the groups of a partition by label: the labels, or 0 if targets are no labels."""
    if task in ("classification", "binary"):
        return y.to(torch.int64).numpy()
    return np.zeros(len(y), dtype=np.int64)


def as_indices(values: Any, what: str) -> Indices:
    """Convert indices to an int64 array, without a copy if they are one."""
    array = as_array(values, what)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise DataError(
            f"{what} should be an array [n] of whole numbers, got {array.dtype} {list(array.shape)}"
        )
    return array.astype(np.int64, copy=False)


def check_range(indices: Indices, count: int, what: str) -> None:
    """Check that indices into ``count`` examples are in range."""
    if len(indices) and not (indices.min() >= 0 and indices.max() < count):
        raise DataError(
            f"{what} should lie in 0 .. {count - 1}, got {indices.min()} .. {indices.max()}"
        )


def whole_number(value: Any, what: str) -> int:
    """Return a whole number as Python's."""
    try:
        return index(value)
    except TypeError:
        raise DataError(f"{what} should be a whole number, got {shown(value)}") from None


def check_name(name: Any, what: str) -> None:
    """Check that a name is a string that can be written to a file."""
    try:
        str.encode(name)
    except (TypeError, UnicodeEncodeError):
        raise DataError(
            f"{what} should be a string that UTF-8 can write, got {shown(name)}"
        ) from None


_TARGETS: Mapping[TaskKind, str] = {
    "classification": "whole numbers from 0 on",
    "language": f"whole numbers from 0 on, or {IGNORED} where there is no next word",
    "binary": "0 or 1, one for each example",
    "multilabel": "0 or 1, [N, L] for L labels",
    "regression": "finite numbers, one or several for each example",
}


def _require_all(holds: Tensor, values: Tensor, what: str, rule: str) -> None:
    """Check that all values fulfil a rule; an error names the first wrong value and its place."""
    if bool(holds.all()):
        return
    row, *column = (~holds).nonzero()[0].tolist()
    value = float(values.reshape(holds.shape)[(row, *column)])
    where = f"example {row}"
    if column:
        where += f", column {column[0]}"
    requirement, separator, advice = rule.partition("; ")
    raise DataError(f"{what} should be {requirement}, got {value} in {where}{separator}{advice}")


def as_array(values: Any, what: str) -> NDArray[Any]:
    """Convert values to an array of NumPy; a DataError if that is not possible without loss."""
    check_kind(values, what)
    try:
        if isinstance(values, Tensor):
            return np.asarray(values.detach().cpu())
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} should be numbers, got {type(values).__name__}: {error}"
        ) from error


def check_kind(values: Any, what: str) -> None:
    """Check that no value of an array is masked or missing, and that the values can be read."""
    if problem := array_problem(values):
        raise DataError(f"{what} should be a plain array or tensor: {problem}")


def _as_tensor(values: Any, what: str) -> Tensor:
    """Convert values to a tensor on the CPU; a DataError if that is not possible."""
    check_kind(values, what)
    try:
        is_array = not isinstance(values, Tensor) and hasattr(values, "__array__")
        array = np.asarray(values) if is_array else values
        return torch.as_tensor(array).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} should be a tensor or an array, got {type(values).__name__}: {error}"
        ) from error
