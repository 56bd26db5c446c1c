"""A federation's folder, mapped: the examples stay in the file until they are used."""

from __future__ import annotations

import hashlib
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
import torch
from numpy.typing import NDArray

from fedclade.core import ArrayMapping, DataError, Indices, TaskKind
from fedclade.data.client_data import Augment, resolve_augment
from fedclade.data.client_table import ClientTable, SplitRows
from fedclade.data.federation import Federation
from fedclade.data.pool import Columns, Pool

# What a federation's folder holds: the files' names, what ``federation.json`` says, and the Arrow
# files, mapped.
#
# ``examples.arrow`` A record batch with a row for each example: ``x``, a fixed-size list of the
# entries of an input, and ``y``. Those of a client lie side by side: for training, validation and
# testing. ``clients.arrow`` A record batch with a row for each client: ``id``, ``key``, ``start``
# (the row of its first example), ``train``, ``validation`` and ``test`` (how many it has of each),
# and where there are any ``name``, ``cluster`` (the true one), ``view`` (its label map; -1 for
# none) and ``quarter_turns``. Newcomers come last. ``federation.json`` All else: see
# :class:`Header`.

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
                f"{folder} is no folder of a federation: it has no {HEADER}; make one with "
                "'fedclade data build'"
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}; {INTACT}") from error
        version = found.get("format") if isinstance(found, dict) else None
        if version != FORMAT:
            raise DataError(
                f"{path} has format {version}, this version of fedclade reads {FORMAT}; build the "
                "folder anew with 'fedclade data build'"
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

    Arrow promises 8. But products round otherwise where numbers lie otherwise in memory, and
    tensors of torch's own lie at such multiples.
    """
    import pyarrow as pa

    raw = {name: each for name, each in columns.items() if isinstance(each, Raw)}
    arrays = {
        name: _zeros(raw[name]) if name in raw else pa.array(each) for name, each in columns.items()
    }
    batch = pa.record_batch(arrays)

    def write(sink: Any, some: Any, spaces: int) -> None:
        told = some.replace_schema_metadata({"spaces": " " * spaces})
        with pa.ipc.new_file(
            sink, told.schema, options=pa.ipc.IpcWriteOptions(allow_64bit=True)
        ) as writer:
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
    kinds: dict[str, int] = (
        {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE}
    )
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
                raise DataError(
                    f"{path} has {reader.num_record_batches} record batches, expected 1; {INTACT}"
                )
            self._batch = reader.get_batch(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is damaged: {error}; {INTACT}") from error

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return self._batch.schema.names

    def array(
        self, name: str, rows: int, kind: str | None = None, shape: tuple[int, ...] = ()
    ) -> NDArray[Any]:
        """Return a column of numbers as an array ``[rows, *shape]`` over the file itself."""
        import pyarrow as pa

        kind, found = kind or "int64", self._column(name)
        flat = found.values if shape else found
        expected = pa.from_numpy_dtype(np.dtype(kind))
        if (
            len(found) != rows
            or flat.type != expected
            or len(flat) != rows * prod(shape)
            or flat.null_count
        ):
            raise DataError(
                f"{name} of {self._path} should be {rows} rows of {prod(shape)} {expected}, got "
                f"{len(found)} of {found.type}; {INTACT}"
            )
        offset = _data(found).address - self._buffer.address
        return np.frombuffer(self.whole, kind, rows * prod(shape), offset).reshape(rows, *shape)

    def strings(self, name: str) -> list[str]:
        """Return a column of strings."""
        return self._column(name).to_pylist()

    def _column(self, name: str) -> Any:
        if name not in self.names:
            raise DataError(
                f"{self._path} has no column {name!r}, only {', '.join(self.names)}; {INTACT}"
            )
        return self._batch.column(name)


def _copy_on_write(file: int) -> mmap.mmap:
    """Map a file so that what is written there by mistake neither reaches it nor ends the process."""
    if os.name == "nt":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    # Nothing is meant to be written: no memory need be set aside for that, or large files could not
    # be mapped.
    return mmap.mmap(
        file, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )


def open_folder(folder: str | Path, augment: Augment | str | None = None) -> Federation:
    """Map a federation from a folder that :func:`write_folder` wrote: nothing is read before it is used.

    ``augment`` is a function of a batch of inputs, or its ``module:function``; see
    :class:`Federation`.

    Raises
    ------
    DataError
        If a file is missing or damaged; it names the file. The bytes of the examples are not looked
        at.
    """
    folder = Path(folder)
    header = Header.read(folder)
    sizes = header.sizes
    examples, clients = (
        Mapped(folder / name, int(sizes.get(name, 0))) for name in (EXAMPLES, CLIENTS)
    )
    if hashlib.sha256(clients.whole).hexdigest() != header.clients_digest:
        raise DataError(
            f"{folder / CLIENTS} is damaged: its SHA-256 is not that of {folder}'s header; {INTACT}"
        )
    pool = _pool(folder, header, examples)
    table, truth = _table(clients, header)

    def of(some: slice, text: str, newcomers: Federation | None = None) -> Federation:
        mine = table[some]
        known = None if truth is None else ArrayMapping(mine.positions, truth[some])
        return Federation(pool, mine, known, text, newcomers, resolve_augment(augment))

    late = None
    if header.newcomers:
        late = of(slice(header.clients, None), f"{header.name}, {header.newcomers} newcomers")
    return of(slice(0, header.clients), header.description, late)


def open_pool(folder: str, digest: str) -> Pool:
    """Map the examples of a folder again, in another process.

    Raises
    ------
    DataError
        If the folder is not there, or is another.
    """
    there = Path(folder)
    if not there.is_dir():
        raise DataError(
            f"{there} is not there; a run from a folder of data needs it on every machine, at one "
            "path"
        )
    header = Header.read(there)
    if header.digest != digest:
        raise DataError(
            f"{there} holds other data than where the run began; it should be the same on every "
            "machine"
        )
    return _pool(there, header, Mapped(there / EXAMPLES, int(header.sizes.get(EXAMPLES, 0))))


def _pool(folder: Path, header: Header, examples: Mapped) -> Pool:
    x, y = (
        torch.from_numpy(examples.array(name, header.examples, kind, tuple(shape)))
        for name, (kind, shape) in (("x", header.inputs), ("y", header.targets))
    )
    nothing = np.empty(0, dtype=np.int64)
    pool = Pool(
        name=header.name,
        x=x,
        y=y,
        groups=np.broadcast_to(np.int64(0), len(x)),
        train=nothing,
        test=nothing,
        outputs=header.outputs,
        task=header.task,
        vocabulary=tuple(header.vocabulary),
        mean=header.mean,
        std=header.std,
        columns=None if header.columns is None else _columns(header.columns),
    )
    pool.record_file(header.digest, open_pool, str(folder.absolute()), header.digest)
    return pool


def _table(clients: Mapped, header: Header) -> tuple[ClientTable, Indices | None]:
    """Return the clients, and their true clusters where these are known."""
    n, there = header.clients + header.newcomers, clients.names

    def numbers(name: str) -> Indices | None:
        return clients.array(name, n) if name in there else None

    begins, splits = clients.array("start", n), dict[str, SplitRows]()
    for name in ("train", "validation", "test"):
        counts = clients.array(name, n, "int32")
        splits[name] = SplitRows(begins, counts)
        begins = begins + counts
    table = ClientTable(
        clients.array("id", n),
        clients.array("key", n),
        **splits,
        names=clients.strings("name") if "name" in there else None,
        label_maps=torch.tensor(header.label_maps) if header.label_maps else None,
        view=numbers("view"),
        quarter_turns=numbers("quarter_turns"),
    )
    return table, numbers("cluster")


def _columns(known: dict[str, Any]) -> Columns:
    values: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in known.items()
    }
    return Columns(**values)
