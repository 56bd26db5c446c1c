"""Large matrices whose rows lie in a temporary file instead of in memory.

A server stores the updates at which each cluster was split, for newcomers (:attr:`Node.cached
<fedclade.core.Node.cached>`), and a run whose method compares single updates stores all updates of
a round. Such matrices may be larger than the memory. They are written to a file, which is then
mapped into memory: a tensor whose entries the system reads from the file when they are used, and
may drop again when the memory is needed. The entries are the same, so results do not change.

The file has no name, so it disappears with the tensor, also if the process is killed. Only its
owner can read it.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_IN_MEMORY = 2**23
"""Bytes of a matrix of stored updates up to which it lies in memory: 8 MiB."""

_log = logging.getLogger(__name__)

_folder: ContextVar[Path | None] = ContextVar("folder of matrices in files", default=None)

_mapped: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Address and size in bytes of each file that is mapped into memory, as long as a tensor uses it."""


@contextmanager
def files_of_rows_in(folder: Path | None) -> Generator[None]:
    """Write the files of large matrices into a folder during the ``with`` block.

    None is the system's folder for temporary files, which may itself lie in memory.
    """
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def empty_rows(count: int, length: int, like: Tensor, *, in_file: bool = True) -> Tensor:
    """Return a new matrix ``[count, length]``, in a file if it is large.

    Parameters
    ----------
    count, length
        Numbers of rows and columns.
    like
        Tensor whose type and device the matrix has. Matrices on other devices than the CPU are not
        in files.
    in_file
        Whether a matrix of more than :data:`LARGEST_IN_MEMORY` bytes lies in a file. If the file
        cannot be created, for example because the disk is full, it lies in memory.
    """
    size = count * length * like.itemsize
    if not in_file or size <= LARGEST_IN_MEMORY or like.device.type != "cpu":
        return like.new_empty(count, length)
    try:
        file = _map_new_file(size)
    except OSError as error:
        _log.warning(
            "%.1f GB of updates are stored in memory, since no file can be written for them: %s; "
            "free disk space in the run's folder or, for a run without a folder, in %s",
            size / 1e9,
            error,
            tempfile.gettempdir(),
        )
        return like.new_empty(count, length)
    matrix = torch.frombuffer(file, dtype=like.dtype).view(count, length)
    _mapped[file] = matrix.data_ptr(), matrix.nbytes
    return matrix


def is_in_file(matrix: Tensor) -> bool:
    """Return whether a matrix is all of a matrix in a file that this module has created."""
    return matrix.is_contiguous() and (matrix.data_ptr(), matrix.nbytes) in _mapped.values()


def copy_rows(matrix: Tensor, rows: Sequence[int] | None = None) -> Tensor:
    """Return a copy of some rows of a matrix ``[n, m]``, or of all; in a file if it is large."""
    if rows is None:
        rows = range(len(matrix))
    return merge_rows(matrix, matrix[:0], rows)


def merge_rows(first: Tensor, second: Tensor, order: Sequence[int]) -> Tensor:
    """Return a new matrix of rows of two matrices; in a file if it is large.

    A few rows are copied at a time, so that no second copy of a large matrix is in memory.

    Parameters
    ----------
    first, second
        Matrices ``[n, m]`` and ``[k, m]``.
    order
        Numbers of the rows; row i of the second matrix has the number n + i.
    """
    count, length = len(order), first.shape[1]
    numbers = torch.as_tensor(order, dtype=torch.int64)
    merged = empty_rows(count, length, first)
    at_once = max(1, LARGEST_IN_MEMORY // max(1, length * first.itemsize))
    for start in range(0, count, at_once):
        place = numbers[start : start + at_once]
        is_first = place < len(first)
        target = merged[start : start + at_once]
        target[is_first] = first[place[is_first]]
        target[~is_first] = second[place[~is_first] - len(first)].to(first)
        if count > at_once:
            release_pages()
    return merged


def release_pages() -> None:
    """Take the entries of all mapped files out of the process's memory; they remain in the files.

    They are read from the files again when they are used.
    """
    advice: Any = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None:  # the system drops the entries itself when memory is short
        return
    for file in list(_mapped):
        file.madvise(advice)


def _map_new_file(size: int) -> mmap.mmap:
    """Create a file of ``size`` bytes without a name, and map it into memory.

    Raises
    ------
    OSError
        If the file cannot be created, or the disk has too little space.
    """
    with tempfile.TemporaryFile(dir=_folder.get()) as file:
        # Reserves the space now: if the disk were full later, writing to the mapped memory would
        # end the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return mmap.mmap(file.fileno(), size)
