"""A federation's folder, mapped: the examples stay in the file until they are used."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedclade.core import ArrayMapping, DataError, Indices
from fedclade.data.augment import Augment, augment_of
from fedclade.data.client_table import ClientTable, SplitRows
from fedclade.data.federation import Federation
from fedclade.data.folder_format import CLIENTS, EXAMPLES, INTACT, Header, Mapped
from fedclade.data.pool import Columns, Pool


def open_folder(folder: str | Path, augment: Augment | str | None = None) -> Federation:
    """Map a federation from a folder that :func:`write_folder` wrote: nothing is read before it is used.

    ``augment`` is a function of a batch of inputs, or its ``module:function``; see :class:`Federation`.

    Raises
    ------
    DataError
        If a file is missing or damaged; it names the file. The bytes of the examples are not looked at.
    """
    folder = Path(folder)
    header = Header.read(folder)
    sizes = header.sizes
    examples, clients = (Mapped(folder / name, int(sizes.get(name, 0))) for name in (EXAMPLES, CLIENTS))
    if hashlib.sha256(clients.whole).hexdigest() != header.clients_digest:
        raise DataError(f"{folder / CLIENTS} is damaged: its SHA-256 is not that of {folder}'s header; {INTACT}")
    pool = _pool(folder, header, examples)
    table, truth = _table(clients, header)

    def of(some: slice, text: str, newcomers: Federation | None = None) -> Federation:
        mine = table[some]
        known = None if truth is None else ArrayMapping(mine.positions, truth[some])
        return Federation(pool, mine, known, text, newcomers, augment_of(augment))

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
        raise DataError(f"{there} is not there; a run from a folder of data needs it on every machine, at one path")
    header = Header.read(there)
    if header.digest != digest:
        raise DataError(f"{there} holds other data than where the run began; it should be the same on every machine")
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
    pool.known(header.digest, open_pool, str(folder.absolute()), header.digest)
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
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in known.items()}
    return Columns(**values)
