"""Folders with a federation on disk, whose examples are mapped to memory.

The operating system reads examples from the file when they are used, so that a federation may be
larger than memory.
"""

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

from fedclade.core import ArrayMapping, DataError, Indices, Structure, TaskKind
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
# ``federation.json``: everything else, see :class:`Header`.

FORMAT = 1

EXAMPLES = "examples.arrow"
CLIENTS = "clients.arrow"
HEADER = "federation.json"

ALIGNED = 64
"""Alignment in bytes of the first column in an Arrow file; see :func:`write_arrow`."""

COPIED_AT_A_TIME = 2**24
"""Size in bytes of the pieces in which columns are copied to an Arrow file."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Flag of ``mmap`` by which no memory is reserved; named in Python 3.13 and later only."""

INTACT = "build the folder again with 'fedclade data build', or copy the whole folder again"
"""Advice at the end of error messages about a damaged or incomplete folder."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """Content of ``federation.json``: all facts about a folder's federation except its arrays.

    Parameters
    ----------
    format
        Version of the folder format. Folders of other versions are refused.
    name, task, outputs, mean, std, vocabulary, columns
        See :class:`~fedclade.data.Pool`.
    inputs, targets
        NumPy type and shape of one input and of one target.
    examples, clients, newcomers
        Numbers of examples, clients and newcomers. Newcomers are excluded from training.
    description
        Description of the federation, for reports.
    label_maps
        The distinct label maps of the clients.
    digest
        SHA-256 of the bytes of inputs and targets.
    structures
        The structure of inputs and of targets that are a dict or a tuple; None for single tensors.
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
    structures: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)

    def write(self, folder: Path) -> None:
        """Write the header to the file ``federation.json`` in a folder."""
        (folder / HEADER).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Read the header from the file ``federation.json`` in a folder.

        Raises
        ------
        DataError
            If the file is missing, damaged or of another version.
        """
        path = folder / HEADER
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(
                f"{folder} is not the folder of a federation, as it has no {HEADER}; create such a "
                "folder with 'fedclade data build'"
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}; {INTACT}") from error
        if isinstance(values, dict):
            version = values.get("format")
        else:
            version = None
        if version != FORMAT:
            raise DataError(
                f"{path} has format {version}, but this version of fedclade reads format {FORMAT}; "
                "build the folder again with 'fedclade data build'"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise DataError(f"{path} is damaged: {error}; {INTACT}") from error


@dataclass(frozen=True)
class Raw:
    """Column to write to an Arrow file, whose entries are copied from a file of raw bytes.

    Parameters
    ----------
    path
        The file of raw bytes, with the concatenated entries.
    kind
        NumPy type of the numbers.
    shape
        Shape of one entry.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]


def write_arrow(path: Path, columns: Mapping[str, Raw | NDArray[Any] | Sequence[str]]) -> None:
    """Write columns to an Arrow file as one record batch.

    The first column begins at a multiple of :data:`ALIGNED` bytes, like tensors that torch
    allocates, whereas Arrow guarantees only a multiple of 8 bytes. Matrix products are rounded
    differently if numbers are aligned differently in memory. With equal alignment, a run gets the
    same results from the file as from tensors.
    """
    import pyarrow as pa

    raw_columns = {name: each for name, each in columns.items() if isinstance(each, Raw)}
    arrays: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Raw):
            arrays[name] = _map_zeros(column)
        else:
            arrays[name] = pa.array(column)
    batch = pa.record_batch(arrays)

    def write(sink: Any, some: Any, spaces: int) -> None:
        """Write a batch with a number of spaces in its metadata.

        The metadata precedes the columns, so that the spaces move the first column in the file.
        """
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
        _overwrite_zeros(path, raw_columns)


def _map_zeros(raw: Raw) -> Any:
    """Return an Arrow column of zeros that has as many bytes as a raw file, but needs no memory.

    Arrow can write only whole columns, and the raw file may be larger than memory. Therefore zeros
    are written first, and :func:`_overwrite_zeros` then copies the raw file over the zeros.
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


def _overwrite_zeros(path: Path, raw_columns: Mapping[str, Raw]) -> None:
    """Overwrite the zeros of columns in an Arrow file with the content of their raw files."""
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
    """Return the Arrow buffer with the entries of a column, also if entries are lists."""
    values = column.values if hasattr(column, "values") else column
    return values.buffers()[1]


class Mapped:
    """Record batch of an Arrow file that is mapped to memory.

    Writes to the mapped memory do not change the file.

    Parameters
    ----------
    path
        The file.
    size
        Expected size of the file in bytes.

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
                    raise DataError(f"{path} should have {size} bytes, got {actual_size}; {INTACT}")
                self.whole = _copy_on_write(file.fileno())
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}; {INTACT}") from error
        self._path = path
        self._buffer = pa.py_buffer(self.whole)
        try:
            reader = pa.ipc.open_file(self._buffer)
            if reader.num_record_batches != 1:
                raise DataError(
                    f"{path} should have 1 record batch, got {reader.num_record_batches}; {INTACT}"
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
        """Return a column of numbers as an array ``[rows, *shape]`` that is mapped to the file.

        Raises
        ------
        DataError
            If the file lacks the column, or the column has another type or length.
        """
        import pyarrow as pa

        column = self._find_column(name)
        flat = column.values if shape else column
        expected = pa.from_numpy_dtype(np.dtype(kind))
        has_shape = len(column) == rows and len(flat) == rows * prod(shape)
        if not has_shape or flat.type != expected or flat.null_count:
            raise DataError(
                f"column {name} of {self._path} should have {rows} rows of {prod(shape)} "
                f"{expected}, got {len(column)} rows of {column.type}; {INTACT}"
            )
        offset = _get_buffer(column).address - self._buffer.address
        values = np.frombuffer(self.whole, kind, rows * prod(shape), offset)
        return values.reshape(rows, *shape)

    def strings(self, name: str) -> list[str]:
        """Return a column of strings; raise a DataError if the file lacks the column."""
        return self._find_column(name).to_pylist()

    def _find_column(self, name: str) -> Any:
        """Return a column as an Arrow array; raise a DataError if the file lacks the column."""
        if name not in self.names:
            raise DataError(
                f"{self._path} should have a column {name!r}, got the columns "
                f"{', '.join(self.names)}; {INTACT}"
            )
        return self._batch.column(name)


def _copy_on_write(file: int) -> mmap.mmap:
    """Map a file to memory so that an accidental write neither changes the file nor crashes."""
    if os.name == "nt":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    # No memory is reserved for writes, which are not intended. Otherwise files larger than the
    # available memory could not be mapped.
    return mmap.mmap(
        file, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )


def open_folder(folder: str | Path, augment: Augment | str | None = None) -> Federation:
    """Open a federation from a folder that :func:`write_folder` wrote.

    Examples are mapped to memory, and read from the file when they are used.

    Parameters
    ----------
    folder
        Path of the folder.
    augment
        Function that changes the inputs of training batches, or its ``module:function``; see
        :class:`Federation`. A folder does not store it.

    Raises
    ------
    DataError
        If a file is missing or damaged; the error names the file. Only the first example is
        checked, since a check of all would read the whole file.
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
        """Build the federation of a range of rows of the client table."""
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
    """Open the examples of a folder in a worker process, so that they need not be sent to it.

    Raises
    ------
    DataError
        If the folder does not exist, or its examples do not have the given SHA-256 ``digest``.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(
            f"the data folder {path} does not exist on this machine; a run from a data folder "
            "needs the folder at the same path on every machine"
        )
    header = Header.read(path)
    if header.digest != digest:
        raise DataError(
            f"the data folder {path} has other data than on the machine that started the run; copy "
            "the folder of that machine to every machine"
        )
    examples = Mapped(path / EXAMPLES, int(header.sizes.get(EXAMPLES, 0)))
    return _build_pool(path, header, examples)


def _build_pool(folder: Path, header: Header, examples: Mapped) -> Pool:
    """Build the pool of a folder from its header and its mapped examples."""
    x_kind, x_shape = header.inputs
    y_kind, y_shape = header.targets
    x = examples.array("x", header.examples, x_kind, tuple(x_shape))
    y = examples.array("y", header.examples, y_kind, tuple(y_shape))
    nothing = np.empty(0, dtype=np.int64)
    related = None
    if "related" in examples.names:
        related = examples.array("related", header.examples)
    one = Pool(
        name=header.name,
        x=torch.from_numpy(x[:1]),
        y=torch.from_numpy(y[:1]),
        groups=np.zeros(len(x[:1]), dtype=np.int64),
        train=nothing,
        test=nothing,
        outputs=header.outputs,
        task=header.task,
        vocabulary=tuple(header.vocabulary),
        mean=header.mean,
        std=header.std,
        columns=None if header.columns is None else _read_columns(header.columns),
        related=None if related is None else related[:1],
        structure=_read_structure(header.structures[0]),
        target_structure=_read_structure(header.structures[1]),
    )
    pool = one.with_file(torch.from_numpy(x), torch.from_numpy(y), related)
    pool.record_file(header.digest, open_pool, str(folder.absolute()), header.digest)
    return pool


def _read_structure(stated: dict[str, Any] | None) -> Structure | None:
    """Read the structure of inputs or targets from the values of a header."""
    if stated is None:
        return None
    try:
        return Structure.read(stated)
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"{HEADER} is damaged: {error}; {INTACT}") from error


def _build_table(clients: Mapped, header: Header) -> tuple[ClientTable, Indices | None]:
    """Build the client table of a folder.

    Returns
    -------
    tuple
        The table of clients and newcomers, and the true cluster of each, or None if unknown.
    """
    count = header.clients + header.newcomers

    def read_optional(name: str) -> Indices | None:
        """Return a column of the clients' file, or None if the file lacks the column."""
        if name not in clients.names:
            return None
        return clients.array(name, count)

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
    """Convert JSON values to :class:`Columns`, with lists converted to tuples."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = tuple(value)
        fields[name] = value
    return Columns(**fields)
