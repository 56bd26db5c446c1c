"""What a federation's folder holds: the files' names, what ``federation.json`` says, and the Arrow files, mapped.

``examples.arrow``
    A record batch with a row for each example: ``x``, a fixed-size list of the entries of an input, and ``y``. Those of
    a client lie side by side: for training, validation and testing.
``clients.arrow``
    A record batch with a row for each client: ``id``, ``key``, ``start`` (the row of its first example), ``train``,
    ``validation`` and ``test`` (how many it has of each), and where there are any ``name``, ``cluster`` (the true one),
    ``view`` (its label map; -1 for none) and ``quarter_turns``. Newcomers come last.
``federation.json``
    All else: see :class:`Header`.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.core import DataError, TaskKind

FORMAT = 1

EXAMPLES, CLIENTS, HEADER = "examples.arrow", "clients.arrow", "federation.json"

ALIGNED = 64
"""Bytes."""

COPIED_AT_A_TIME = 2**24
"""Bytes."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Flag of a mapping for which no memory is set aside; Python 3.13 has it by name."""

INTACT = "build it anew with 'fedclade data build', or copy the whole folder again"
"""What to do about a folder whose files do not fit together."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What ``federation.json`` says.

    Parameters
    ----------
    format
        Version of the folder; another one is refused.
    name, task, outputs, mean, std, vocabulary, columns
        See :class:`~fedclade.data.Pool`.
    inputs, targets
        NumPy type and shape of one input and of one target.
    examples, clients, newcomers
        How many there are; newcomers are held back from training.
    description
        For people.
    label_maps
        The label maps that clients have.
    digest
        SHA-256 of the inputs' bytes and the targets' bytes.
    sizes, clients_digest
        Bytes of each Arrow file by its name, and the SHA-256 of ``clients.arrow``.
    """

    format: int = FORMAT
    name: str
    task: TaskKind
    outputs: int
    mean: float
    std: float
    vocabulary: tuple[str, ...]
    columns: dict[str, Any] | None
    inputs: tuple[str, tuple[int, ...]]
    targets: tuple[str, tuple[int, ...]]
    examples: int
    clients: int
    newcomers: int
    description: str
    label_maps: tuple[tuple[int, ...], ...]
    digest: str
    sizes: dict[str, int]
    clients_digest: str

    def write(self, folder: Path) -> None:
        """Write it to its file."""
        (folder / HEADER).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Read it from a folder; a DataError if there is none, or one of another version."""
        path = folder / HEADER
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(
                f"{folder} is no folder of a federation: it has no {HEADER}; make one with 'fedclade data build'"
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}; {INTACT}") from error
        version = found.get("format") if isinstance(found, dict) else None
        if version != FORMAT:
            raise DataError(
                f"{path} has format {version}, this version of fedclade reads {FORMAT}; build the folder anew with "
                "'fedclade data build'"
            )
        try:
            return cls(**found)
        except TypeError as error:
            raise DataError(f"{path} is damaged: {error}; {INTACT}") from error


@dataclass(frozen=True)
class Raw:
    """A column whose entries lie in a file, behind each other: of a NumPy type, so many a row as the shape has."""

    path: Path
    kind: str
    shape: tuple[int, ...]


def write_arrow(path: Path, columns: Mapping[str, Raw | NDArray[Any] | Sequence[str]]) -> None:
    """Write columns as one record batch, whose first column begins at a multiple of :data:`ALIGNED` bytes.

    Arrow promises 8. But products round otherwise where numbers lie otherwise in memory, and tensors of torch's own lie
    at such multiples.
    """
    import pyarrow as pa

    raw = {name: each for name, each in columns.items() if isinstance(each, Raw)}
    arrays = {name: _zeros(raw[name]) if name in raw else pa.array(each) for name, each in columns.items()}
    batch = pa.record_batch(arrays)

    def write(sink: Any, some: Any, spaces: int) -> None:
        told = some.replace_schema_metadata({"spaces": " " * spaces})
        with pa.ipc.new_file(sink, told.schema, options=pa.ipc.IpcWriteOptions(allow_64bit=True)) as writer:
            writer.write_batch(told)

    write(trial := pa.BufferOutputStream(), batch.slice(0, 1), ALIGNED)
    one = trial.getvalue()
    offset = _data(pa.ipc.open_file(one).get_batch(0).column(0)).address - one.address
    with pa.OSFile(str(path), "wb") as sink:
        write(sink, batch, ALIGNED + -offset % ALIGNED)
    if raw:
        _fill(path, raw)


def _zeros(raw: Raw) -> Any:
    """Return a column as long as a file, of zeros that take no memory: Arrow writes whole columns only."""
    import pyarrow as pa

    size = raw.path.stat().st_size
    kinds: dict[str, int] = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE}
    entries, kind = size // np.dtype(raw.kind).itemsize, pa.from_numpy_dtype(np.dtype(raw.kind))
    flat = pa.Array.from_buffers(kind, entries, [None, pa.py_buffer(mmap.mmap(-1, size, **kinds))])
    return flat if raw.shape == () else pa.FixedSizeListArray.from_arrays(flat, prod(raw.shape))


def _fill(path: Path, raw: Mapping[str, Raw]) -> None:
    """Put what lies in the files of some columns in the place of their zeros."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        whole = source.read_buffer()
    batch = pa.ipc.open_file(whole).get_batch(0)
    with path.open("r+b") as target:
        for name, each in raw.items():
            target.seek(_data(batch.column(name)).address - whole.address)
            with each.path.open("rb") as entries:
                shutil.copyfileobj(entries, target, COPIED_AT_A_TIME)


def _data(found: Any) -> Any:
    """Return the buffer of a column's entries."""
    return (found.values if hasattr(found, "values") else found).buffers()[1]


class Mapped:
    """The record batch of an Arrow file, mapped: what is looked at is read, and what is changed stays in memory."""

    def __init__(self, path: Path, size: int) -> None:
        import pyarrow as pa

        try:
            with path.open("rb") as file:
                there = os.fstat(file.fileno()).st_size
                if there != size:
                    raise DataError(f"{path} has {there} bytes, expected {size}; {INTACT}")
                self.whole = _copy_on_write(file.fileno())
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}; {INTACT}") from error
        self._path, self._buffer = path, pa.py_buffer(self.whole)
        try:
            reader = pa.ipc.open_file(self._buffer)
            if reader.num_record_batches != 1:
                raise DataError(f"{path} has {reader.num_record_batches} record batches, expected 1; {INTACT}")
            self._batch = reader.get_batch(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is damaged: {error}; {INTACT}") from error

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return self._batch.schema.names

    def array(self, name: str, rows: int, kind: str | None = None, shape: tuple[int, ...] = ()) -> NDArray[Any]:
        """Return a column of numbers as an array ``[rows, *shape]`` over the file itself."""
        import pyarrow as pa

        kind, found = kind or "int64", self._column(name)
        flat = found.values if shape else found
        expected = pa.from_numpy_dtype(np.dtype(kind))
        if len(found) != rows or flat.type != expected or len(flat) != rows * prod(shape) or flat.null_count:
            raise DataError(
                f"{name} of {self._path} should be {rows} rows of {prod(shape)} {expected}, got {len(found)} of "
                f"{found.type}; {INTACT}"
            )
        offset = _data(found).address - self._buffer.address
        return np.frombuffer(self.whole, kind, rows * prod(shape), offset).reshape(rows, *shape)

    def strings(self, name: str) -> list[str]:
        """Return a column of strings."""
        return self._column(name).to_pylist()

    def _column(self, name: str) -> Any:
        if name not in self.names:
            raise DataError(f"{self._path} has no column {name!r}, only {', '.join(self.names)}; {INTACT}")
        return self._batch.column(name)


def _copy_on_write(file: int) -> mmap.mmap:
    """Map a file so that what is written there by mistake neither reaches it nor ends the process."""
    if os.name == "nt":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    # Nothing is meant to be written: no memory need be set aside for that, or large files could not be mapped.
    return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
