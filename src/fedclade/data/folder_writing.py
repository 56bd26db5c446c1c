"""Writing of a federation's folder, block by block, so that memory never holds all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import IGNORED, DataError, Indices, appear, make_folder, sha256_of
from fedclade.data.client_table import ClientTable, take_optional
from fedclade.data.federation import Federation
from fedclade.data.folder import CLIENTS, EXAMPLES, Header, Raw, write_arrow
from fedclade.data.pool import Pool

EXAMPLES_AT_A_TIME = 2**16
"""Number of examples of a block, unless one client has more."""


@dataclass(frozen=True, eq=False)
class ClientBlock:
    """A batch of clients to write, with their examples concatenated.

    Parameters
    ----------
    x, y
        Examples ``[m, ...]`` of all clients, in the types of the pool; for each client those for
        training, for validation and for testing.
    counts
        Number of these for each client, int64 ``[k, 3]``.
    ids, keys
        ``[k]``; None: the clients are numbered.
    names, clusters, view, quarter_turns
        Values for each client; None if no client has any. ``view`` is the row of the client's label
        map, -1 for none.
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
"""Number of training, validation and test examples of each client ``[n, 3]``, as in files."""


@dataclass(eq=False)
class _Written:
    """Facts about the blocks that have been written."""

    counts: list[Counts] = field(default_factory=list[Any])
    others: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    digests: tuple[Any, Any] = field(default_factory=lambda: (hashlib.sha256(), hashlib.sha256()))
    clients: int = 0


OnClients = Callable[[int], object]
"""Function of the number of clients that have been written."""


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
    """Write clients to a folder that appears when it is complete.

    Memory holds one block, and some 100 bytes for each client.

    Parameters
    ----------
    folder
        Path of the folder, which must not exist.
    like
        A pool with the types and the description of the examples; its own examples do not matter.
    blocks
        The clients; all blocks have the same fields as the first one.
    description
        Description of the federation, for people.
    label_maps
        Label maps ``[V, outputs]``, to which ``view`` of the blocks refers.
    newcomers
        Number of the last clients that are held back from training.
    on_clients
        Called after every block.

    Raises
    ------
    DataError
        If the folder exists or cannot be written, or examples cannot be used.
    """
    folder = Path(folder)
    if folder.exists():
        raise DataError(f"{folder} exists already; name another folder, or remove it")

    def write(unfinished: Path) -> None:
        """Write all files to a folder that gets its name when it is complete."""
        unfinished.mkdir()
        x_file = unfinished / "x.raw"
        y_file = unfinished / "y.raw"
        written = _write_examples(x_file, y_file, like, blocks, on_clients)
        x_type = _describe_entry(like.x)
        y_type = _describe_entry(like.y)
        columns = {"x": Raw(x_file, *x_type), "y": Raw(y_file, *y_type)}
        write_arrow(unfinished / EXAMPLES, columns)
        x_file.unlink()
        y_file.unlink()
        counts = np.concatenate(written.counts)
        write_arrow(unfinished / CLIENTS, _build_client_columns(counts, written))
        digests = "".join(digest.hexdigest() for digest in written.digests)
        Header(
            name=like.name,
            task=like.task,
            outputs=like.outputs,
            mean=like.mean,
            std=like.std,
            vocabulary=like.vocabulary,
            columns=None if like.columns is None else asdict(like.columns),
            inputs=x_type,
            targets=y_type,
            examples=int(counts.sum()),
            clients=written.clients - newcomers,
            newcomers=newcomers,
            description=description,
            label_maps=() if label_maps is None else tuple(map(tuple, label_maps.tolist())),
            digest=hashlib.sha256(digests.encode()).hexdigest(),
            sizes={name: (unfinished / name).stat().st_size for name in (EXAMPLES, CLIENTS)},
            clients_digest=sha256_of(unfinished / CLIENTS),
        ).write(unfinished)

    try:
        make_folder(folder.parent)
        appear(folder, write)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"cannot write {folder}: {reason}; check the path and the free space"
        ) from error


def _write_examples(
    x_file: Path,
    y_file: Path,
    like: Pool,
    blocks: Iterable[ClientBlock],
    on_clients: OnClients | None,
) -> _Written:
    """Write the examples of all blocks to two files; return facts about them."""
    written = _Written()
    x_digest, y_digest = written.digests
    with x_file.open("wb") as x_target, y_file.open("wb") as y_target:
        for block in blocks:
            _check_block(block, like, written.clients)
            _append(x_target, x_digest, block.x)
            _append(y_target, y_digest, block.y)
            _record_block(written, block)
            if on_clients is not None:
                on_clients(written.clients)
    return written


def _append(file: BinaryIO, digest: Any, values: Tensor) -> None:
    """Append the bytes of values to a file and to its digest."""
    data = values.contiguous().numpy().data
    file.write(data)
    digest.update(data)


def write_federation(
    federation: Federation, folder: str | Path, on_clients: OnClients | None = None
) -> None:
    """Write a federation to a folder, from which :func:`~fedclade.data.open_folder` maps it.

    An example that several clients have is written for each of them. The augmentation of batches is
    not stored. :func:`write_folder` describes the parameters and the errors.
    """
    if federation.stages:
        raise DataError(
            f"{federation} changes during a run, and a folder holds what does not; leave "
            "data.drift out"
        )
    everyone = federation
    newcomers = 0
    if federation.newcomers is not None:
        everyone = federation.join(federation.newcomers)
        newcomers = len(federation.newcomers)
    table = ClientTable.of(everyone.clients)
    write_folder(
        folder,
        federation.pool,
        _divide_into_blocks(everyone, table),
        description=str(federation),
        label_maps=table.label_maps,
        newcomers=newcomers,
        on_clients=on_clients,
    )


def _describe_entry(values: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the type and the shape of one entry."""
    return str(values.numpy().dtype), tuple(values.shape[1:])


def _check_block(block: ClientBlock, like: Pool, clients: int) -> None:
    """Check a block as the federation would check it when it is read."""
    where = f"the block of client {clients}"
    _check_values(f"inputs of {where}", block.x, like.x)
    _check_values(f"targets of {where}", block.y, like.y)
    if not block.y.is_floating_point():
        refused = ((block.y < 0) & (block.y != IGNORED)) | (block.y >= like.outputs)
        if bool(refused.any()):
            raise DataError(
                f"labels of {where} should lie in 0 .. {like.outputs - 1}, got "
                f"{int(block.y[refused][0])}"
            )
    if not len(block.x) == len(block.y) == int(block.counts.sum()):
        raise DataError(
            f"{where} has {len(block.x)} inputs, {len(block.y)} targets and {block.counts.sum()} "
            "examples"
        )
    training_and_test = block.counts[:, [0, 2]]
    short = np.flatnonzero((training_and_test < 1).any(1))
    if len(short):
        raise DataError(
            f"client {clients + short[0]} needs training and test examples, got "
            f"{block.counts[short[0]].tolist()}"
        )


def _check_values(what: str, values: Tensor, like: Tensor) -> None:
    """Check that inputs or targets look like those of the pool, and are finite."""
    if values.dtype != like.dtype or values.shape[1:] != like.shape[1:]:
        expected = f"{like.dtype} {list(like.shape[1:])}"
        actual = f"{values.dtype} {list(values.shape[1:])}"
        raise DataError(f"{what} should be {expected}, got {actual}")
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise DataError(
            f"{what} hold NaN or infinite numbers; fill them in, or leave the examples out"
        )


_CLIENT_COLUMNS = {
    "id": "ids",
    "key": "keys",
    "name": "names",
    "cluster": "clusters",
    "view": "view",
    "quarter_turns": "quarter_turns",
}
"""Fields of a block by the column of the clients' file."""


def _record_block(written: _Written, block: ClientBlock) -> None:
    """Record the clients of a block."""
    numbers = np.arange(written.clients, written.clients + len(block.counts))
    written.counts.append(block.counts.astype(np.int32))
    for name, attribute in _CLIENT_COLUMNS.items():
        values = getattr(block, attribute)
        if values is None and name in ("id", "key"):
            values = numbers
        if values is not None:
            written.others.setdefault(name, []).append(values)
    written.clients += len(block.counts)


def _build_client_columns(counts: Counts, written: _Written) -> dict[str, Any]:
    """Return the columns of the clients' file."""
    totals = counts.sum(1, dtype=np.int64)
    columns: dict[str, NDArray[Any] | Sequence[str]] = {"start": totals.cumsum() - totals}
    columns |= zip(("train", "validation", "test"), np.ascontiguousarray(counts.T), strict=True)
    for name, blocks in written.others.items():
        if name == "name":
            columns[name] = list(chain.from_iterable(blocks))
        else:
            columns[name] = np.concatenate(blocks)
        if len(columns[name]) != len(counts):
            raise DataError(
                f"all clients of a folder should have a {name}, or none, got "
                f"{len(columns[name])} of {len(counts)}"
            )
    return columns


def _divide_into_blocks(federation: Federation, table: ClientTable) -> Iterator[ClientBlock]:
    """Yield the clients of a federation in blocks of about :data:`EXAMPLES_AT_A_TIME` examples."""
    pool = federation.pool
    truth = federation.true_clusters
    splits = (table.train, table.validation, table.test)
    counts = np.stack([split.counts for split in splits], axis=1)
    block_of = counts.sum(1).cumsum() // EXAMPLES_AT_A_TIME
    block_starts = np.flatnonzero(np.diff(block_of)) + 1
    for places in np.split(np.arange(len(table)), block_starts):
        indices = [split.of(place) for place in places.tolist() for split in splits]
        rows = torch.from_numpy(np.concatenate(indices))
        ids = table.ids[places]
        names = clusters = None
        if table.names is not None:
            names = [table.all_names[int(place)] for place in places]
        if truth is not None:
            clusters = np.array([truth[client] for client in ids.tolist()], dtype=np.int64)
        yield ClientBlock(
            pool.x[rows],
            pool.y[rows],
            counts[places],
            ids=ids,
            keys=table.keys[places],
            names=names,
            clusters=clusters,
            view=take_optional(table.view, places),
            quarter_turns=take_optional(table.quarter_turns, places),
        )
