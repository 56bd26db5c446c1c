"""A federation's folder, written block by block, so that memory never holds all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import IGNORED, DataError, Indices, appear, make_folder, sha256_of
from fedclade.data.client_table import ClientTable
from fedclade.data.federation import Federation
from fedclade.data.folder import CLIENTS, EXAMPLES, Header, Raw, write_arrow
from fedclade.data.pool import Pool

EXAMPLES_AT_A_TIME = 2**16
"""Examples of a block that a federation is written in, unless one client has more."""


@dataclass(frozen=True, eq=False)
class ClientBlock:
    """Some clients, behind each other, to be written to a folder.

    Parameters
    ----------
    x, y
        Their examples ``[m, ...]``, in the types of the pool: client behind client, and of each
        those for training, for validation and for testing.
    counts
        How many each has of these, int64 ``[k, 3]``.
    ids, keys
        ``[k]``; None: the clients are numbered.
    names, clusters, view, quarter_turns
        Of each; None if no client has any. ``view`` is the row of its label map, -1 for none.
    """

    x: Tensor
    y: Tensor
    counts: Indices
    ids: Indices | None = None
    keys: Indices | None = None
    names: Sequence[str] | None = None
    clusters: Indices | None = None
    view: Indices | None = None
    quarter_turns: Indices | None = None


Counts = NDArray[np.int32]
"""Of training, validation and test examples, ``[n, 3]``: as files have them."""


@dataclass(eq=False)
class _Written:
    """What has been written so far."""

    counts: list[Counts] = field(default_factory=list[Any])
    others: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    digests: tuple[Any, Any] = field(default_factory=lambda: (hashlib.sha256(), hashlib.sha256()))
    clients: int = 0


OnClients = Callable[[int], object]
"""Called with the number of clients that have been written so far."""


def write_folder(
    folder: str | Path,
    like: Pool,
    blocks: Iterable[ClientBlock],
    *,
    description: str,
    label_maps: Tensor | None = None,
    newcomers: int = 0,
    on_clients: OnClients | None = None,
) -> None:
    """Write clients to a folder that appears when it is complete; memory holds one block, and some 100 bytes a client.

    Parameters
    ----------
    folder
        It must not exist.
    like
        A pool that says what the examples are; its own do not matter.
    blocks
        The clients; all with what the first block has.
    description
        For people.
    label_maps
        ``[V, outputs]``, to which ``view`` of the blocks refers.
    newcomers
        How many of the last clients are held back from training.
    on_clients
        Called after every block.

    Raises
    ------
    DataError
        If the folder exists or cannot be written, or examples are of no use.
    """
    folder = Path(folder)
    if folder.exists():
        raise DataError(f"{folder} exists already; name another folder, or remove it")

    def write(beside: Path) -> None:
        beside.mkdir()
        raw = beside / "x.raw", beside / "y.raw"
        written = _Written()
        with raw[0].open("wb") as inputs, raw[1].open("wb") as targets:
            for block in blocks:
                _check(block, like, written.clients)
                for file, digest, values in zip(
                    (inputs, targets), written.digests, (block.x, block.y), strict=True
                ):
                    data = values.contiguous().numpy().data
                    file.write(data)
                    digest.update(data)
                _note(written, block)
                if on_clients is not None:
                    on_clients(written.clients)
        kinds = _kind(like.x), _kind(like.y)
        columns = {
            name: Raw(file, *kind) for name, file, kind in zip("xy", raw, kinds, strict=True)
        }
        write_arrow(beside / EXAMPLES, columns)
        for file in raw:
            file.unlink()
        counts = np.concatenate(written.counts)
        write_arrow(beside / CLIENTS, _client_columns(counts, written))
        Header(
            name=like.name,
            task=like.task,
            outputs=like.outputs,
            mean=like.mean,
            std=like.std,
            vocabulary=like.vocabulary,
            columns=None if like.columns is None else asdict(like.columns),
            inputs=kinds[0],
            targets=kinds[1],
            examples=int(counts.sum()),
            clients=written.clients - newcomers,
            newcomers=newcomers,
            description=description,
            label_maps=() if label_maps is None else tuple(map(tuple, label_maps.tolist())),
            digest=hashlib.sha256(
                "".join(each.hexdigest() for each in written.digests).encode()
            ).hexdigest(),
            sizes={name: (beside / name).stat().st_size for name in (EXAMPLES, CLIENTS)},
            clients_digest=sha256_of(beside / CLIENTS),
        ).write(beside)

    try:
        make_folder(folder.parent)
        appear(folder, write)
    except OSError as error:
        raise DataError(
            f"cannot write {folder}: {error.strerror or error}; check the path and the free space"
        ) from error


def write_federation(
    federation: Federation, folder: str | Path, on_clients: OnClients | None = None
) -> None:
    """Write a federation to a folder, from which :func:`~fedclade.data.open_folder` maps it; see :func:`write_folder`.

    An example that several clients hold is written for each of them. What is done to batches
    (``augment``) is not kept.
    """
    if federation.stages:
        raise DataError(
            f"{federation} changes during a run, and a folder holds what does not; leave "
            "data.drift out"
        )
    late = federation.newcomers
    everyone = federation if late is None else federation.join(late)
    table = ClientTable.of(everyone.clients)
    write_folder(
        folder,
        federation.pool,
        _blocks(everyone, table),
        description=str(federation),
        label_maps=table.label_maps,
        newcomers=0 if late is None else len(late),
        on_clients=on_clients,
    )


def _kind(values: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the type and the shape of one entry."""
    return str(values.numpy().dtype), tuple(values.shape[1:])


def _check(block: ClientBlock, like: Pool, clients: int) -> None:
    """Check what a federation would check once it is read."""
    where = f"the block of client {clients}"
    for what, mine, its in (("inputs", block.x, like.x), ("targets", block.y, like.y)):
        if mine.dtype != its.dtype or mine.shape[1:] != its.shape[1:]:
            wanted, got = (f"{each.dtype} {list(each.shape[1:])}" for each in (its, mine))
            raise DataError(f"{what} of {where} should be {wanted}, got {got}")
        if mine.is_floating_point() and not bool(mine.isfinite().all()):
            raise DataError(
                f"{what} of {where} hold NaN or infinite numbers; fill them in, or leave the "
                "examples out"
            )
    if not block.y.is_floating_point():
        odd = ((block.y < 0) & (block.y != IGNORED)) | (block.y >= like.outputs)
        if bool(odd.any()):
            raise DataError(
                f"labels of {where} should lie in 0 .. {like.outputs - 1}, got "
                f"{int(block.y[odd][0])}"
            )
    if not len(block.x) == len(block.y) == int(block.counts.sum()):
        raise DataError(
            f"{where} has {len(block.x)} inputs, {len(block.y)} targets and {block.counts.sum()} "
            "examples"
        )
    odd = np.flatnonzero((block.counts[:, [0, 2]] < 1).any(1))
    if len(odd):
        few = block.counts[odd[0]].tolist()
        raise DataError(f"client {clients + odd[0]} needs training and test examples, got {few}")


_OTHERS = {"id": "ids", "key": "keys", "name": "names", "cluster": "clusters", "view": "view"} | {
    "quarter_turns": "quarter_turns"
}
"""Columns of clients by the fields of a block."""


def _note(written: _Written, block: ClientBlock) -> None:
    numbers = np.arange(written.clients, written.clients + len(block.counts))
    written.counts.append(block.counts.astype(np.int32))
    for name, attribute in _OTHERS.items():
        values = getattr(block, attribute)
        values = numbers if values is None and name in ("id", "key") else values
        if values is not None:
            written.others.setdefault(name, []).append(values)
    written.clients += len(block.counts)


def _client_columns(counts: Counts, written: _Written) -> dict[str, Any]:
    each = counts.sum(1, dtype=np.int64)
    columns: dict[str, NDArray[Any] | Sequence[str]] = {"start": each.cumsum() - each}
    columns |= zip(("train", "validation", "test"), np.ascontiguousarray(counts.T), strict=True)
    for name, values in written.others.items():
        whole = [v for some in values for v in some] if name == "name" else np.concatenate(values)
        columns[name] = whole
        if len(whole) != len(counts):
            raise DataError(
                f"all clients of a folder should have a {name}, or none, got {len(whole)} of "
                f"{len(counts)}"
            )
    return columns


def _blocks(federation: Federation, table: ClientTable) -> Iterator[ClientBlock]:
    pool, truth = federation.pool, federation.true_clusters
    counts = np.stack([table.train.counts, table.validation.counts, table.test.counts], axis=1)
    part = counts.sum(1).cumsum() // EXAMPLES_AT_A_TIME
    for some in np.split(np.arange(len(table)), np.flatnonzero(np.diff(part)) + 1):
        held = [
            split.of(place)
            for place in some.tolist()
            for split in (table.train, table.validation, table.test)
        ]
        rows = torch.from_numpy(np.concatenate(held))
        ids = table.ids[some]
        yield ClientBlock(
            pool.x[rows],
            pool.y[rows],
            counts[some],
            ids,
            table.keys[some],
            None if table.names is None else [table.all_names[int(place)] for place in some],
            None
            if truth is None
            else np.array([truth[client] for client in ids.tolist()], dtype=np.int64),
            None if table.view is None else table.view[some],
            None if table.quarter_turns is None else table.quarter_turns[some],
        )
