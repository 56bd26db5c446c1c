"""Folders of federations, mapped to memory: examples stay in the file until they are used."""

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

# Files of a federation's folder:
#
# ``examples.arrow``: a record batch with a row for each example: ``x``, a fixed-size list of the
# entries of an input, and ``y``. The examples of a client are adjacent: first those for training,
# then those for validation and for testing.
#
# ``clients.arrow``: a record batch with a row for each client: ``id``, ``key``, ``start`` (row of
# its first example), ``train``, ``validation`` and ``test`` (numbers of examples), and if there are
# any ``name``, ``cluster`` (the true one), ``view`` (row of its label map, -1 for none) and
# ``quarter_turns``. Newcomers come last.
#
# ``federation.json``: all else, see :class:`Header`.

FORMAT = 1

EXAMPLES = "examples.arrow"
CLIENTS = "clients.arrow"
HEADER = "federation.json"

ALIGNED = 64
"""Alignment of the first column of a file, in bytes."""

COPIED_AT_A_TIME = 2**24
"""Size of the pieces in which columns are copied, in bytes."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Flag of a mapping for which no memory is set aside; Python 3.13 has it by name."""

INTACT = "build it anew with 'fedclade data build', or copy the whole folder again"
"""Advice for a folder whose files do not fit together."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """Content of ``federation.json``.

    Parameters
    ----------
    format
        Version of the folder; another one is refused.
    name, task, outputs, mean, std, vocabulary, columns
        See :class:`~fedclade.data.Pool`.
    inputs, targets
        NumPy type and shape of one input and of one target.
    examples, clients, newcomers
        Numbers of examples, clients and newcomers. Newcomers are held back from training.
    description
        Description of the federation, for people.
    label_maps
        The label maps of the clients.
    digest
        SHA-256 of the bytes of inputs and targets.
    sizes, clients_digest
        Size of each Arrow file in bytes by its name, and the SHA-256 of ``clients.arrow``.
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
        """Write the header to a folder."""
        (folder / HEADER).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Read the header of a folder; a DataError if there is none, or of another version."""
        path = folder / HEADER
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(
                f"{folder} is no folder of a federation: it has no {HEADER}; make one with "
                "'fedclade data build'"
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}; {INTACT}") from error
        version = values.get("format") if isinstance(values, dict) else None
        if version != FORMAT:
            raise DataError(
                f"{path} has format {version}, this version of fedclade reads {FORMAT}; build the "
                "folder anew with 'fedclade data build'"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise DataError(f"{path} is damaged: {error}; {INTACT}") from error


@dataclass(frozen=True)
class Raw:
    """A column whose entries are in a file of bytes.

    Parameters
    ----------
    path
        The file, with the concatenated entries.
    kind
        NumPy type of the numbers.
    shape
        Shape of one entry.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]


def write_arrow(path: Path, columns: Mapping[str, Raw | NDArray[Any] | Sequence[str]]) -> None:
    """Write columns as one record batch.

    The first column begins at a multiple of :data:`ALIGNED` bytes. Arrow promises 8 only, but
    matrix products round differently if numbers are aligned differently in memory, and tensors of
    torch are aligned to such multiples.
    """
    import pyarrow as pa

    raw_columns = {name: each for name, each in columns.items() if isinstance(each, Raw)}
    arrays: dict[str, Any] = {}
    for name, column in columns.items():
        arrays[name] = _map_zeros(column) if isinstance(column, Raw) else pa.array(column)
    batch = pa.record_batch(arrays)

    def write(sink: Any, some: Any, spaces: int) -> None:
        """Write a batch whose metadata is longer by a number of spaces."""
        padded = some.replace_schema_metadata({"spaces": " " * spaces})
        options = pa.ipc.IpcWriteOptions(allow_64bit=True)
        with pa.ipc.new_file(sink, padded.schema, options=options) as writer:
            writer.write_batch(padded)

    # The position of the first column is measured in a file with one row.
    trial = pa.BufferOutputStream()
    write(trial, batch.slice(0, 1), ALIGNED)
    file = trial.getvalue()
    first_column = pa.ipc.open_file(file).get_batch(0).column(0)
    offset = _get_buffer(first_column).address - file.address
    with pa.OSFile(str(path), "wb") as sink:
        write(sink, batch, ALIGNED + -offset % ALIGNED)
    if raw_columns:
        _fill(path, raw_columns)


def _map_zeros(raw: Raw) -> Any:
    """Return a column of zeros as long as a file, which take no memory.

    Arrow writes whole columns only; the zeros are overwritten afterwards.
    """
    import pyarrow as pa

    size = raw.path.stat().st_size
    options: dict[str, int] = {}
    if os.name != "nt":
        options["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    kind = np.dtype(raw.kind)
    zeros = pa.py_buffer(mmap.mmap(-1, size, **options))
    entries = size // kind.itemsize
    flat = pa.Array.from_buffers(pa.from_numpy_dtype(kind), entries, [None, zeros])
    if raw.shape == ():
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, prod(raw.shape))


def _fill(path: Path, raw_columns: Mapping[str, Raw]) -> None:
    """Overwrite the zeros of columns with the content of their files."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        whole = source.read_buffer()
    batch = pa.ipc.open_file(whole).get_batch(0)
    with path.open("r+b") as target:
        for name, raw in raw_columns.items():
            target.seek(_get_buffer(batch.column(name)).address - whole.address)
            with raw.path.open("rb") as entries:
                shutil.copyfileobj(entries, target, COPIED_AT_A_TIME)


def _get_buffer(column: Any) -> Any:
    """Return the buffer with the entries of a column."""
    values = column.values if hasattr(column, "values") else column
    return values.buffers()[1]


class Mapped:
    """Record batch of an Arrow file, mapped to memory; changes of it stay in memory.

    Parameters
    ----------
    path
        The file.
    size
        Its expected size in bytes.

    Raises
    ------
    DataError
        If the file cannot be read, is damaged, or has another size.
    """

    def __init__(self, path: Path, size: int) -> None:
        import pyarrow as pa

        try:
            with path.open("rb") as file:
                actual_size = os.fstat(file.fileno()).st_size
                if actual_size != size:
                    raise DataError(f"{path} has {actual_size} bytes, expected {size}; {INTACT}")
                self.whole = _copy_on_write(file.fileno())
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}; {INTACT}") from error
        self._path = path
        self._buffer = pa.py_buffer(self.whole)
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
        """Names of the columns."""
        return self._batch.schema.names

    def array(
        self, name: str, rows: int, kind: str = "int64", shape: tuple[int, ...] = ()
    ) -> NDArray[Any]:
        """Return a column of numbers as an array ``[rows, *shape]`` over the file.

        Raises
        ------
        DataError
            If the file has no such column, or one of another type or length.
        """
        import pyarrow as pa

        column = self._find_column(name)
        flat = column.values if shape else column
        expected = pa.from_numpy_dtype(np.dtype(kind))
        has_shape = len(column) == rows and len(flat) == rows * prod(shape)
        if not has_shape or flat.type != expected or flat.null_count:
            raise DataError(
                f"{name} of {self._path} should be {rows} rows of {prod(shape)} {expected}, got "
                f"{len(column)} of {column.type}; {INTACT}"
            )
        offset = _get_buffer(column).address - self._buffer.address
        values = np.frombuffer(self.whole, kind, rows * prod(shape), offset)
        return values.reshape(rows, *shape)

    def strings(self, name: str) -> list[str]:
        """Return a column of strings; a DataError if there is none."""
        return self._find_column(name).to_pylist()

    def _find_column(self, name: str) -> Any:
        """Return a column; a DataError if there is none."""
        if name not in self.names:
            raise DataError(
                f"{self._path} has no column {name!r}, only {', '.join(self.names)}; {INTACT}"
            )
        return self._batch.column(name)


def _copy_on_write(file: int) -> mmap.mmap:
    """Map a file so that an accidental write neither changes it nor ends the process."""
    if os.name == "nt":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    # Without memory that is reserved for writes, which are not intended: else large files could not
    # be mapped.
    return mmap.mmap(
        file, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )


def open_folder(folder: str | Path, augment: Augment | str | None = None) -> Federation:
    """Map a federation from a folder that :func:`write_folder` wrote.

    Nothing is read before it is used.

    Parameters
    ----------
    folder
        Path of the folder.
    augment
        Function of a batch of inputs, or its ``module:function``; see :class:`Federation`.

    Raises
    ------
    DataError
        If a file is missing or damaged; the error names it. The bytes of the examples are not
        checked.
    """
    folder = Path(folder)
    header = Header.read(folder)
    examples = Mapped(folder / EXAMPLES, int(header.sizes.get(EXAMPLES, 0)))
    clients = Mapped(folder / CLIENTS, int(header.sizes.get(CLIENTS, 0)))
    if hashlib.sha256(clients.whole).hexdigest() != header.clients_digest:
        raise DataError(
            f"{folder / CLIENTS} is damaged: its SHA-256 is not that of {folder}'s header; {INTACT}"
        )
    pool = _build_pool(folder, header, examples)
    table, truth = _build_table(clients, header)
    augment_function = resolve_augment(augment)

    def build(some: slice, description: str, newcomers: Federation | None = None) -> Federation:
        """Build the federation of some of the clients."""
        members = table[some]
        known = None
        if truth is not None:
            known = ArrayMapping(members.positions, truth[some])
        return Federation(
            pool,
            members,
            known,
            description=description,
            newcomers=newcomers,
            augment=augment_function,
        )

    newcomers = None
    if header.newcomers:
        description = f"{header.name}, {header.newcomers} newcomers"
        newcomers = build(slice(header.clients, None), description)
    return build(slice(0, header.clients), header.description, newcomers)


def open_pool(folder: str, digest: str) -> Pool:
    """Map the examples of a folder again, in another process.

    Raises
    ------
    DataError
        If the folder does not exist, or has other data.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(
            f"{path} is not there; a run from a folder of data needs it on every machine, at one "
            "path"
        )
    header = Header.read(path)
    if header.digest != digest:
        raise DataError(
            f"{path} holds other data than where the run began; it should be the same on every "
            "machine"
        )
    examples = Mapped(path / EXAMPLES, int(header.sizes.get(EXAMPLES, 0)))
    return _build_pool(path, header, examples)


def _build_pool(folder: Path, header: Header, examples: Mapped) -> Pool:
    """Return the pool of a folder."""
    x_kind, x_shape = header.inputs
    y_kind, y_shape = header.targets
    x = examples.array("x", header.examples, x_kind, tuple(x_shape))
    y = examples.array("y", header.examples, y_kind, tuple(y_shape))
    nothing = np.empty(0, dtype=np.int64)
    pool = Pool(
        name=header.name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        groups=np.broadcast_to(np.int64(0), len(x)),
        train=nothing,
        test=nothing,
        outputs=header.outputs,
        task=header.task,
        vocabulary=tuple(header.vocabulary),
        mean=header.mean,
        std=header.std,
        columns=None if header.columns is None else _read_columns(header.columns),
    )
    pool.record_file(header.digest, open_pool, str(folder.absolute()), header.digest)
    return pool


def _build_table(clients: Mapped, header: Header) -> tuple[ClientTable, Indices | None]:
    """Return the clients, and their true clusters if known."""
    count = header.clients + header.newcomers

    def read_optional(name: str) -> Indices | None:
        """Return a column if there is one."""
        return clients.array(name, count) if name in clients.names else None

    begins = clients.array("start", count)
    splits: dict[str, SplitRows] = {}
    for name in ("train", "validation", "test"):
        counts = clients.array(name, count, "int32")
        splits[name] = SplitRows(begins, counts)
        begins = begins + counts
    names = None
    if "name" in clients.names:
        names = clients.strings("name")
    label_maps = None
    if header.label_maps:
        label_maps = torch.tensor(header.label_maps)
    table = ClientTable(
        clients.array("id", count),
        clients.array("key", count),
        **splits,
        names=names,
        label_maps=label_maps,
        view=read_optional("view"),
        quarter_turns=read_optional("quarter_turns"),
    )
    return table, read_optional("cluster")


def _read_columns(values: dict[str, Any]) -> Columns:
    """Return columns from values of JSON, which has no tuples."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = tuple(value)
        fields[name] = value
    return Columns(**fields)
