"""Writing of a federation to a folder in blocks of clients, so that it need not fit in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import IGNORED, DataError, Indices, Structure, appear, make_folder, sha256_of
from fedclade.data.client_table import ClientTable, take_optional
from fedclade.data.federation import Federation
from fedclade.data.folder import CLIENTS, EXAMPLES, Header, Raw, write_arrow
from fedclade.data.pool import Pool

EXAMPLES_AT_A_TIME = 2**16
"""Approximate number of examples in a block. A block has more if one client has more."""


@dataclass(frozen=True, eq=False)
class ClientBlock:
    """A batch of clients to write, with their examples concatenated.

    Parameters
    ----------
    x, y
        Inputs and targets ``[m, ...]`` of the m examples of all clients in the block, in the types
        of the pool. The examples of a client are adjacent, in the order training, validation, test.
    counts
        Number of training, validation and test examples of each of the k clients, int64 ``[k, 3]``.
    ids, keys
        Id and key of each client, ``[k]``; None if clients are numbered consecutively.
    names, clusters, view, quarter_turns
        Name, true cluster, row of the label map (-1 for none) and number of rotations of each
        client, ``[k]``; None if no client has such a value.
    related
        Group of dependent examples of each example, ``[m]``, see :class:`~fedclade.data.Pool`; None
        without groups.
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
    related: Indices | None = None


Counts = NDArray[np.int32]
"""Number of training, validation and test examples of each client ``[n, 3]``, as in files."""


@dataclass(eq=False)
class _Written:
    """Record of the blocks written so far, from which the clients' file and the header are made.

    Parameters
    ----------
    counts
        Numbers of training, validation and test examples of the clients in each block.
    others
        Other columns of the clients' file by name, such as names, with the values of each block.
    digests
        Hashes of the bytes of inputs and of targets.
    clients
        Number of clients in all blocks.
    related
        Groups of dependent examples of the blocks' examples.
    """

    counts: list[Counts] = field(default_factory=list[Any])
    others: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    digests: tuple[Any, Any] = field(default_factory=lambda: (hashlib.sha256(), hashlib.sha256()))
    clients: int = 0
    related: list[Indices] = field(default_factory=list[Any])


OnClients = Callable[[int], object]
"""Callback that gets the number of clients written so far, to report progress."""


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
    """Write a federation to a folder, given its clients in blocks.

    The files are written to a temporary folder, which is renamed to ``folder`` when it is complete.
    Memory is needed for one block, and about 100 bytes for each client.

    Parameters
    ----------
    folder
        Path of the folder, which must not exist.
    like
        A pool that states the types, shapes and names of the data; its own examples are not used.
    blocks
        The clients. All blocks set the same optional fields.
    description
        Description of the federation, for reports.
    label_maps
        The V distinct label maps ``[V, outputs]``, to whose rows ``view`` of the blocks refers.
    newcomers
        Number of clients at the end that are newcomers, which are excluded from training.
    on_clients
        Function that is called after every block with the number of clients written so far.

    Raises
    ------
    DataError
        If the folder exists or cannot be written, or examples are invalid.
    """
    folder = Path(folder)
    if folder.exists():
        raise DataError(f"the folder {folder} already exists; choose another folder, or remove it")

    def write(unfinished: Path) -> None:
        """Write all files to a temporary folder, which is renamed when it is complete."""
        unfinished.mkdir()
        x_file = unfinished / "x.raw"
        y_file = unfinished / "y.raw"
        written = _write_examples(x_file, y_file, like, blocks, on_clients)
        x_type = _describe_entry(like.x)
        y_type = _describe_entry(like.y)
        examples: dict[str, Raw | Indices] = {"x": Raw(x_file, *x_type), "y": Raw(y_file, *y_type)}
        if written.related:
            examples["related"] = np.concatenate(written.related)
        write_arrow(unfinished / EXAMPLES, examples)
        x_file.unlink()
        y_file.unlink()
        counts = np.concatenate(written.counts)
        write_arrow(unfinished / CLIENTS, _build_client_columns(counts, written))
        digests = "".join(digest.hexdigest() for digest in written.digests)
        if like.columns is None:
            columns = None
        else:
            # The folder has no raw inputs, so no later run can undo the scaling.
            columns = asdict(replace(like.columns, by_default=False))
        if label_maps is None:
            maps = ()
        else:
            maps = tuple(map(tuple, label_maps.tolist()))
        Header(
            name=like.name,
            task=like.task,
            outputs=like.outputs,
            mean=like.mean,
            std=like.std,
            vocabulary=like.vocabulary,
            columns=columns,
            inputs=x_type,
            targets=y_type,
            examples=int(counts.sum()),
            clients=written.clients - newcomers,
            newcomers=newcomers,
            description=description,
            label_maps=maps,
            digest=hashlib.sha256(digests.encode()).hexdigest(),
            sizes={name: (unfinished / name).stat().st_size for name in (EXAMPLES, CLIENTS)},
            clients_digest=sha256_of(unfinished / CLIENTS),
            structures=(_describe(like.structure), _describe(like.target_structure)),
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
    """Write the inputs and the targets of all blocks to two raw files, and record the clients."""
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
    """Append the bytes of a tensor to a file, and update the hash of the file."""
    data = values.contiguous().numpy().data
    file.write(data)
    digest.update(data)


def write_federation(
    federation: Federation, folder: str | Path, on_clients: OnClients | None = None
) -> None:
    """Write a federation to a folder that :func:`~fedclade.data.open_folder` can open.

    An example that several clients have is written once for each of these clients. The augmentation
    of batches is not stored. :func:`write_folder` describes the parameters and the errors.
    """
    if federation.stages:
        raise DataError(
            f"a folder cannot store a federation whose data changes during a run, got "
            f"{federation}; leave out data.drift"
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
    """Return the NumPy type and the shape of one example of a tensor ``[n, ...]``."""
    return str(values.numpy().dtype), tuple(values.shape[1:])


def _describe(structure: Structure | None) -> dict[str, Any] | None:
    """Return a structure as values for JSON; None without one."""
    return None if structure is None else asdict(structure)


def _check_block(block: ClientBlock, like: Pool, clients: int) -> None:
    """Check that a block has valid inputs, targets and counts, before it is written.

    ``clients`` is the number of clients in earlier blocks.
    """
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
            f"{where} should have as many inputs and targets as its counts state, got "
            f"{len(block.x)} inputs, {len(block.y)} targets and counts of "
            f"{block.counts.sum()} examples"
        )
    training_and_test = block.counts[:, [0, 2]]
    short = np.flatnonzero((training_and_test < 1).any(1))
    if len(short):
        raise DataError(
            f"client {clients + short[0]} should have at least 1 training and 1 test example, got "
            f"[train, validation, test] = {block.counts[short[0]].tolist()}"
        )


def _check_values(what: str, values: Tensor, like: Tensor) -> None:
    """Check that inputs or targets have the type and shape of the pool's, and are finite."""
    if values.dtype != like.dtype or values.shape[1:] != like.shape[1:]:
        expected = f"{like.dtype} {list(like.shape[1:])}"
        actual = f"{values.dtype} {list(values.shape[1:])}"
        raise DataError(f"{what} should be {expected}, got {actual}")
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise DataError(
            f"{what} should be finite, got NaN or infinite numbers; replace these numbers, or "
            "leave the examples out"
        )


_CLIENT_COLUMNS = {
    "id": "ids",
    "key": "keys",
    "name": "names",
    "cluster": "clusters",
    "view": "view",
    "quarter_turns": "quarter_turns",
}
"""Name of a block's field by the name of the column in the clients' file."""


def _record_block(written: _Written, block: ClientBlock) -> None:
    """Record the counts, ids and other fields of a block's clients for the clients' file."""
    numbers = np.arange(written.clients, written.clients + len(block.counts))
    written.counts.append(block.counts.astype(np.int32))
    for name, attribute in _CLIENT_COLUMNS.items():
        values = getattr(block, attribute)
        if values is None and name in ("id", "key"):
            values = numbers
        if values is not None:
            written.others.setdefault(name, []).append(values)
    if block.related is not None:
        written.related.append(block.related)
    written.clients += len(block.counts)


def _build_client_columns(counts: Counts, written: _Written) -> dict[str, Any]:
    """Build the columns of the clients' file from the recorded blocks.

    ``counts [n, 3]`` has the training, validation and test examples of each of the n clients.
    """
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
                f"either all clients of a folder or none should have a {name}, got values for "
                f"{len(columns[name])} of {len(counts)} clients"
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
            related=take_optional(pool.related, rows.numpy()),
        )
