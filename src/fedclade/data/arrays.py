"""Conversion and checks of users' numbers and arrays, and a cache of decoded arrays on disk.

The parameter ``what`` of the functions is the name of the value in the message of a DataError.
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
from math import prod
from operator import index
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import (
    DENSE,
    IGNORED,
    ConfigError,
    DataError,
    Indices,
    Structure,
    TaskKind,
    Tensors,
    array_problem,
    require,
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
    """Return decoded arrays from the cache on disk, or build the arrays and store them there.

    Parameters
    ----------
    name
        Name of the data set, with which the name of the cache file begins.
    key
        Everything on which the arrays depend, as values for JSON: files with their sizes and
        modification times (see :func:`stamp_files`), and options of the decoder.
    build
        Function that decodes the files and returns the arrays by name.

    Notes
    -----
    A cache file is an uncompressed ``.npz`` file. A damaged cache file is recognized by the
    checksums in it and built again. If the cache folder is not writable, the arrays are built at
    every start.
    """
    digest = hashlib.sha256(
        json.dumps([CACHE_FORMAT, name, key], sort_keys=True).encode()
    ).hexdigest()
    path = cache_folder() / f"{name}-{digest[:20]}.npz"
    arrays = _read_cache_file(path)
    if arrays is None:
        arrays = build()
        _write_cache_file(path, arrays)
    return arrays


def stamp_files(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return the path, the size in bytes and the modification time in ns of each file.

    The result is part of a cache key, so that a changed file is decoded again.
    """
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def cache_folder() -> Path:
    """Return the folder for cached data: ``FEDCLADE_CACHE_DIR``, by default ``~/.cache/fedclade``.

    The folder need not exist yet.
    """
    return Path(os.environ.get("FEDCLADE_CACHE_DIR") or "~/.cache/fedclade").expanduser()


def _read_cache_file(path: Path) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        _log.warning(
            "cannot use the cached data in %s (%s); decoding the original files again", path, error
        )
        return None


def _write_cache_file(path: Path, arrays: Arrays) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as beside:
            whole = Path(beside) / path.name
            np.savez(whole, allow_pickle=False, **arrays)
            # Renaming is atomic: a crash leaves the old or the new file, never an incomplete one.
            whole.replace(path)
    except OSError as error:
        _log.warning(
            "cannot store decoded data in the cache folder %s (%s); the next start will decode "
            "again",
            path.parent,
            error,
        )


FEW_LABELS = 1000
"""Number of labels up to which unused label numbers are always allowed.

A model has an output for every number up to the highest label, which is cheap below this number.
"""

SPARSEST = 100
"""Largest allowed ratio of the highest label plus 1 to the number of different labels that occur.

A client may lack some labels, so unused label numbers are allowed up to this ratio.
"""

MOST_OUTPUTS = 2**24
"""Largest number of outputs of a model; a server in a network accepts no more outputs."""

InputKind = Literal["auto", "numbers", "tokens"]
"""Kind of inputs: numbers, tokens (rows of an embedding table), or ``auto`` by their type.

With ``auto``, bytes are pixels, other whole numbers are tokens if the model takes whole numbers,
and all other inputs are numbers.
"""


def as_inputs(x: Any, what: str) -> torch.Tensor:
    """Convert a user's array of inputs to a tensor of uint8, int64 or float32.

    Arrays of type uint8 keep their type, other integers become int64, and booleans and real numbers
    become float32.
    """
    tensor = _as_tensor(x, what)
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.is_complex():
        raise DataError(f"{what} should be real numbers, got {tensor.dtype}")
    is_whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.to(torch.int64 if is_whole else torch.float32)


def as_fields(values: Mapping[str, Any] | tuple[Any, ...], what: str) -> Tensors:
    """Convert a dict or tuple of a user's arrays to tensors, each as :func:`as_inputs` does.

    Truth values stay truth values, since a mask is no number.
    """
    if isinstance(values, Mapping):
        return {name: as_field(each, f"{name!r} of {what}") for name, each in values.items()}
    return tuple(as_field(each, f"{place} of {what}") for place, each in enumerate(values))


def as_field(values: Any, what: str) -> torch.Tensor:
    """Convert one array of an example of several tensors."""
    tensor = _as_tensor(values, what)
    return tensor if tensor.dtype == torch.bool else as_inputs(tensor, what)


def is_structured(values: Any) -> bool:
    """Return whether inputs or targets are a dict of arrays, or a tuple of arrays or tensors.

    A tuple of numbers or lists is one array.
    """
    if not isinstance(values, tuple):
        return isinstance(values, Mapping)
    dimensions = [getattr(each, "ndim", -1) for each in values]
    return min(dimensions, default=-1) >= 0 and max(dimensions) >= 1


def pack_fields(values: Any, what: str) -> tuple[torch.Tensor, Structure]:
    """Store a dict or tuple of a user's arrays ``[N, ...]`` as rows of numbers ``[N, W]``.

    Raises
    ------
    DataError
        If a value is no array, or the arrays differ in their number of examples.
    """
    tensors = as_fields(values, what)
    structure = Structure.of(tensors, what)
    return structure.pack(tensors), structure


def check_input_kind(kind: InputKind) -> None:
    """Check that the setting ``inputs_are`` is a known kind; raise a ConfigError otherwise."""
    if kind not in get_args(InputKind):
        raise ConfigError(unknown("value of inputs_are:", kind, get_args(InputKind)))


def check_one_tensor(kind: InputKind, structure: Structure | None) -> None:
    """Check that ``inputs_are`` is ``auto`` for inputs that are a dict or tuple of tensors."""
    rule = "'auto' for inputs that are a dict or tuple, whose arrays keep their types"
    require(("inputs_are", kind, kind == "auto" or structure is None, rule))


def convert_inputs(x: torch.Tensor, kind: InputKind, what: str) -> torch.Tensor:
    """Convert inputs to numbers (float32) or tokens (int64); ``auto`` leaves inputs unchanged.

    Raises
    ------
    DataError
        If ``kind`` is ``tokens`` and an input is not a whole number of at least 0.
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


def as_targets(y: Any, what: str, task: TaskKind = "classification") -> torch.Tensor:
    """Convert targets to the type of a task: labels and tokens to int64, other targets to float32.

    Numbers of any type are accepted if the conversion is exact. For ``classification``, ``binary``
    and ``regression``, targets of shape ``[N, 1]`` become shape ``[N]``, and masks ``[N, 1, H, W]``
    of a ``segmentation`` become ``[N, H, W]``; the shape of other targets does not change.
    """
    if task not in _TARGETS:
        raise ConfigError(unknown("task:", task, _TARGETS))
    tensor = _as_tensor(y, what)
    if tensor.ndim == 0:
        raise DataError(f"{what} should have an entry for each example, got one number")
    rule = _TARGETS[task]
    if tensor.is_complex():
        raise DataError(f"{what} should be {rule}, got {tensor.dtype}")
    if task == "classification" or task in DENSE:
        if tensor.is_floating_point():
            _require_all(
                tensor == tensor.round(),
                tensor,
                what,
                f"{rule}; other numbers are targets of a regression",
            )
        return _label_shape(tensor.to(torch.int64), what, task)
    numbers = tensor.to(torch.float32)
    if numbers.dim() == 2 and numbers.shape[1] == 1 and task != "multilabel":
        numbers = numbers[:, 0]
    if task != "regression" and numbers.dim() != {"binary": 1, "multilabel": 2}[task]:
        raise DataError(f"{what} should be {rule}, got shape {list(tensor.shape)}")
    holds = (numbers == 0) | (numbers == 1)
    if task == "regression":
        holds = numbers.isfinite()
    _require_all(holds, tensor, what, rule)
    return numbers


def _label_shape(labels: torch.Tensor, what: str, task: TaskKind) -> torch.Tensor:
    """Return labels without a dimension of size 1 that libraries add to labels and masks.

    Raises
    ------
    DataError
        If the targets of a segmentation are no masks.
    """
    if task == "classification" and labels.dim() == 2 and labels.shape[1] == 1:
        return labels[:, 0]
    if task != "segmentation":
        return labels
    if labels.dim() == 4 and labels.shape[1] == 1:
        return labels[:, 0]
    if labels.dim() < 3:
        raise DataError(
            f"{what} should be masks [N, H, W] with a label for each pixel, got shape "
            f"{list(labels.shape)}"
        )
    return labels


def count_outputs(y: torch.Tensor, task: TaskKind) -> int:
    """Return the number of model outputs that targets need.

    This is the highest label or token plus 1, or the number of numbers in a target in other tasks.
    """
    if task == "classification" or task in DENSE:
        if len(y) == 0:
            return 1
        return int(y.clamp(min=0).max()) + 1
    if y.dim() == 1:
        return 1
    return prod(y.shape[1:])


def check_numbering(y: torch.Tensor, what: str, task: TaskKind) -> None:
    """Check that label numbers have no large gaps, as a model has an output for each number from 0.

    Raises
    ------
    DataError
        If the highest label is at least :data:`FEW_LABELS`, and the highest label plus 1 is more
        than :data:`SPARSEST` times the number of different labels that occur.
    """
    if task != "classification" or not len(y) or (last := int(y.max())) < FEW_LABELS:
        return
    different = len(torch.unique(y[y >= 0]))
    if last + 1 > SPARSEST * different:
        raise DataError(
            f"{what} go up to {last:,}, but only {different:,} different labels occur, and a model "
            "has an output for each number from 0 on; renumber the labels from 0, as "
            "numpy.unique(labels, return_inverse=True) does, or pass the labels as texts; if there "
            "are really this many labels, pass their number: outputs of a Pool, or labels of "
            "one_client"
        )


def require_outputs(outputs: int, what: str) -> None:
    """Check that a model can have a number of outputs; raise a DataError otherwise."""
    if not 1 <= outputs <= MOST_OUTPUTS:
        raise DataError(
            f"{what} should be from 1 to {MOST_OUTPUTS:,}, as a model has an output for each "
            f"label, got {outputs:,}; number the labels from 0 on, as numpy.unique(labels, "
            "return_inverse=True) does"
        )


def group_by_label(y: torch.Tensor, task: TaskKind) -> Indices:
    """Return the group number of each example, for partitions by label.

    Such a partition gives each client another mixture of groups. The group is the label in
    classification and binary tasks, and 0 for all other targets.
    """
    if task in ("classification", "binary"):
        return y.to(torch.int64).numpy()
    return np.zeros(len(y), dtype=np.int64)


def as_indices(values: Any, what: str) -> Indices:
    """Convert indices to a one-dimensional int64 array; an int64 array is not copied."""
    array = as_array(values, what)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise DataError(
            f"{what} should be an array [n] of whole numbers, got {array.dtype} {list(array.shape)}"
        )
    return array.astype(np.int64, copy=False)


def check_range(indices: Indices, count: int, what: str) -> None:
    """Check that all indices are at least 0 and less than ``count``, the number of examples."""
    if len(indices) and not (indices.min() >= 0 and indices.max() < count):
        raise DataError(
            f"{what} should lie in 0 .. {count - 1}, got values from {indices.min()} to "
            f"{indices.max()}"
        )


def whole_number(value: Any, what: str) -> int:
    """Convert a whole number of any type (such as a NumPy integer) to a Python ``int``."""
    try:
        return index(value)
    except TypeError:
        raise DataError(f"{what} should be a whole number, got {shown(value)}") from None


def check_name(name: Any, what: str) -> None:
    """Check that a name is a string that can be encoded in UTF-8, as files require."""
    try:
        str.encode(name)
    except (TypeError, UnicodeEncodeError):
        raise DataError(
            f"{what} should be a string that can be encoded in UTF-8, got {shown(name)}"
        ) from None


_TARGETS: Mapping[TaskKind, str] = {
    "classification": "whole numbers from 0 on",
    "language": f"whole numbers from 0 on, or {IGNORED} where there is no next word",
    "binary": "0 or 1, one for each example",
    "multilabel": "0 or 1, [N, L] for L labels",
    "regression": "finite numbers, one or several for each example",
    "segmentation": f"whole numbers from 0 on for each pixel, or {IGNORED} for an ignored pixel",
}


def _require_all(holds: torch.Tensor, values: torch.Tensor, what: str, rule: str) -> None:
    """Raise a DataError for the first value that does not fulfil a rule.

    Parameters
    ----------
    holds
        Whether each value fulfils the rule, ``[n]`` or ``[n, columns]``.
    values
        The values, of the same shape or with an additional dimension of size 1.
    what
        Name of the values in the message.
    rule
        Requirement in words, and advice after a semicolon, if any.
    """
    if bool(holds.all()):
        return
    row, *column = (~holds).nonzero()[0].tolist()
    value = float(values.reshape(holds.shape)[(row, *column)])
    where = f"example {row}"
    if column:
        where += f", column {column[0] if len(column) == 1 else column}"
    requirement, separator, advice = rule.partition("; ")
    raise DataError(f"{what} should be {requirement}, got {value} in {where}{separator}{advice}")


def as_array(values: Any, what: str) -> NDArray[Any]:
    """Convert a user's values to a NumPy array; raise a DataError if this is not possible."""
    check_kind(values, what)
    try:
        if isinstance(values, torch.Tensor):
            return np.asarray(values.detach().cpu())
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} should be numbers, got {type(values).__name__}: {error}"
        ) from error


def check_kind(values: Any, what: str) -> None:
    """Check that an array has no masked values, and that a tensor is dense and has values.

    Sparse, quantized and nested tensors are refused, as are tensors on the device ``meta``.
    """
    if problem := array_problem(values):
        raise DataError(f"{what} should be a plain array or tensor: {problem}")


def _as_tensor(values: Any, what: str) -> torch.Tensor:
    """Convert a user's values to a tensor on the CPU; raise a DataError if this is not possible."""
    check_kind(values, what)
    try:
        is_array = not isinstance(values, torch.Tensor) and hasattr(values, "__array__")
        if is_array:
            array = np.asarray(values)
        else:
            array = values
        return torch.as_tensor(array).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} should be a tensor or an array, got {type(values).__name__}: {error}"
        ) from error
