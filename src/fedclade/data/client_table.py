"""Tables of clients: arrays in place of one object per client.

A table needs about 70 bytes per client, so that federations of a million clients fit in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, get_args, overload

import numpy as np
import torch

from fedclade.core import DataError, Indices, Positions, Split
from fedclade.data.arrays import as_indices, check_range
from fedclade.data.client_data import ClientData, check_examples, report_no_examples
from fedclade.data.pool import Pool


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Indices of the examples of each client in one split (train, validation or test).

    Parameters
    ----------
    starts, counts
        int64 ``[n]``: client ``k`` has ``counts[k]`` entries of ``indices``, from ``starts[k]`` on.
    indices
        Indices into the pool. None if each client's examples are adjacent in the pool; ``starts``
        are then rows of the pool.
    """

    starts: Indices
    counts: Indices
    indices: Indices | None = None

    def __post_init__(self) -> None:
        for name in ("starts", "counts"):
            object.__setattr__(self, name, as_indices(getattr(self, name), f"{name} of a split"))
        if len(self.starts) != len(self.counts):
            raise DataError(
                f"a split should have as many starts as counts, got {len(self.starts)} starts and "
                f"{len(self.counts)} counts"
            )

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, place: int) -> Indices:
        """Return the pool indices of the examples of one client, given its row in the table."""
        start = int(self.starts[place])
        stop = start + int(self.counts[place])
        if self.indices is None:
            return np.arange(start, stop)
        return self.indices[start:stop]

    def rows(self, places: Indices) -> Indices:
        """Return concatenated pool indices of several clients, given their rows in the table."""
        counts = self.counts[places]
        before = counts.cumsum() - counts
        entries = np.arange(int(counts.sum())) + (self.starts[places] - before).repeat(counts)
        if self.indices is None:
            return entries
        return self.indices[entries]

    def take(self, places: Indices | slice) -> SplitRows:
        """Return the split restricted to some clients, given their rows in the table."""
        return SplitRows(self.starts[places], self.counts[places], self.indices)

    def join(self, others: SplitRows) -> SplitRows:
        """Return the split of these clients followed by the clients of another table."""
        starts = others.starts
        indices = None
        if self.indices is not None and others.indices is not None:
            starts = starts + len(self.indices)
            indices = np.concatenate([self.indices, others.indices])
        elif self.indices is not others.indices:
            raise DataError(
                "cannot join two client tables: the examples of each client should be adjacent in "
                "the pool in both tables or in neither, but they are adjacent in only one table; "
                "set 'indices' in the splits of both tables"
            )
        return SplitRows(
            np.concatenate([self.starts, starts]),
            np.concatenate([self.counts, others.counts]),
            indices,
        )

    def first_with(self, rows: Indices) -> int | None:
        """Find the first client that has any of the given examples, such as invalid examples.

        Parameters
        ----------
        rows
            Indices of the examples in the pool, in ascending order.

        Returns
        -------
        int or None
            Row of the client in the table; None if no client has any of the examples.
        """
        entries = rows
        if self.indices is not None:
            entries = np.flatnonzero(np.isin(self.indices, rows))
        ends = np.searchsorted(entries, self.starts + self.counts)
        has_entry = ends > np.searchsorted(entries, self.starts)
        if not has_entry.any():
            return None
        return int(has_entry.argmax())


@dataclass(frozen=True, eq=False)
class ClientTable(Sequence[ClientData]):
    """Sequence of clients stored in arrays, which creates a :class:`ClientData` on access.

    Parameters
    ----------
    ids, keys
        int64 ``[n]``, see :class:`ClientData`.
    train, validation, test
        Examples of each client.
    names
        Name of each client; None if the names are ``client-<id>``.
    label_maps, view
        The V different label maps, int64 ``[V, outputs]``, and the row of each client's label map,
        ``[n]``; -1 for a client without label map.
    quarter_turns
        Number of rotations by 90° for each client, ``[n]``; None if no client has rotated images.

    Raises
    ------
    DataError
        If the arrays differ in length, or are not whole numbers.
    """

    ids: Indices
    keys: Indices
    train: SplitRows
    validation: SplitRows
    test: SplitRows
    names: Sequence[str] | None = None
    label_maps: torch.Tensor | None = None
    view: Indices | None = None
    quarter_turns: Indices | None = None

    def __post_init__(self) -> None:
        for name in ("ids", "keys", "view", "quarter_turns"):
            array = getattr(self, name)
            if array is not None:
                object.__setattr__(self, name, as_indices(array, f"{name} of the clients"))
        lengths: dict[str, int] = {}
        for each in fields(self):
            array = getattr(self, each.name)
            if each.name != "label_maps" and array is not None:
                lengths[each.name] = len(array)
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"the arrays of a client table should have the same length, got {lengths}"
            )
        if self.label_maps is None:
            maps = 0
        else:
            maps = len(self.label_maps)
        if self.view is not None and len(self.view):
            what = "the label maps of the clients, counted from 1,"
            check_range(self.view + 1, maps + 1, what)

    @classmethod
    def of(cls, clients: Sequence[ClientData]) -> ClientTable:
        """Convert a sequence of clients to a table.

        An array of indices that several clients share is copied for each client.
        """
        if isinstance(clients, ClientTable):
            return clients
        label_maps = [client.label_map for client in clients if client.label_map is not None]
        maps = {id(label_map): label_map for label_map in label_maps}
        stacked_maps = view = None
        if maps:
            stacked_maps = torch.stack([*maps.values()])
            map_rows = {key: row for row, key in enumerate(maps)}
            view = np.array([map_rows.get(id(client.label_map), -1) for client in clients])
        ids = np.array([client.id for client in clients])
        # Names that follow from the ids, and turns of 0, need no memory.
        names = [client.name for client in clients]
        if names == list(NumberedNames(ids)):
            names = None
        turns = np.array([client.quarter_turns for client in clients])
        if not turns.any():
            turns = None
        return cls(
            ids,
            keys=np.array([client.key for client in clients]),
            train=_concatenate_rows([client.train for client in clients]),
            validation=_concatenate_rows([client.validation for client in clients]),
            test=_concatenate_rows([client.test for client in clients]),
            names=names,
            label_maps=stacked_maps,
            view=view,
            quarter_turns=turns,
        )

    def split(self, split: Split) -> SplitRows:
        """Return the examples of all clients in one split (train, validation or test)."""
        return getattr(self, split)

    @cached_property
    def positions(self) -> Positions:
        """Row of each client in the table, by the id of the client."""
        return Positions(self.ids)

    @cached_property
    def lies_in_order(self) -> bool:
        """Whether the clients' examples follow one another in the pool, in the order of the table.

        The examples of a client in each split are then adjacent in the pool.
        """
        splits = [self.split(split) for split in get_args(Split)]
        ends = np.maximum.reduce([split.starts + split.counts for split in splits])
        begins = np.minimum.reduce([split.starts for split in splits])
        are_adjacent = all(split.indices is None for split in splits)
        return are_adjacent and bool((begins[1:] >= ends[:-1]).all())

    @property
    def nbytes(self) -> int:
        """Size of the table's arrays in bytes, without client names and arrays of pool indices."""
        arrays = [self.ids, self.keys, self.view, self.quarter_turns]
        for split in get_args(Split):
            rows = self.split(split)
            arrays += [rows.starts, rows.counts]
        return sum(array.nbytes for array in arrays if array is not None)

    @cached_property
    def all_names(self) -> Sequence[str]:
        """Name of each client, in order; ``client-<id>`` if the table stores no names."""
        if self.names is None:
            return NumberedNames(self.ids)
        return self.names

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> ClientData: ...
    @overload
    def __getitem__(self, index: slice) -> ClientTable: ...

    def __getitem__(self, index: int | slice) -> ClientData | ClientTable:
        if isinstance(index, slice):
            return self.take(index)
        place = range(len(self))[index]
        label_map = None
        if self.view is not None and self.view[place] >= 0:
            label_map = self._unstacked_maps[int(self.view[place])]
        quarter_turns = 0
        if self.quarter_turns is not None:
            quarter_turns = int(self.quarter_turns[place])
        return ClientData(
            int(self.ids[place]),
            name=self.all_names[place],
            key=int(self.keys[place]),
            train=self.train.of(place),
            validation=self.validation.of(place),
            test=self.test.of(place),
            label_map=label_map,
            quarter_turns=quarter_turns,
        )

    def take(self, places: Indices | slice) -> ClientTable:
        """Return a table of some of the clients, given their rows in this table."""
        parts: dict[str, Any] = {}
        for name in ("ids", "keys", "view", "quarter_turns"):
            parts[name] = take_optional(getattr(self, name), places)
        if self.names is not None:
            numbers = np.arange(len(self))[places].tolist()
            parts["names"] = [self.names[place] for place in numbers]
        for split in get_args(Split):
            parts[split] = self.split(split).take(places)
        return replace(self, **parts)

    def join(self, others: ClientTable) -> ClientTable:
        """Return a table of these clients followed by the clients of another table.

        Both tables must have the same label maps. Each optional array, such as ``names``, must be
        set in both tables or in neither.
        """
        parts: dict[str, Any] = {}
        for split in get_args(Split):
            parts[split] = self.split(split).join(others.split(split))
        for name in ("ids", "keys", "names", "view", "quarter_turns"):
            own = getattr(self, name)
            added = getattr(others, name)
            if (own is None) != (added is None):
                raise DataError(
                    f"cannot join two client tables: both tables or neither should have {name}, "
                    "but only one table has them"
                )
            if own is None:
                parts[name] = None
            elif name == "names":
                parts[name] = [*own, *added]
            else:
                parts[name] = np.concatenate([own, added])
        return replace(self, **parts)

    def check(self, pool: Pool) -> None:
        """Check what a federation requires: distinct ids, and valid training and test examples."""
        repeated = self.positions.repeated
        if repeated:
            raise DataError(f"client ids should be distinct, got these more than once: {repeated}")
        for split in get_args(Split):
            self._check_split(pool, split)

    def _check_split(self, pool: Pool, split: Split) -> None:
        """Check that each client has examples in a split, with valid pool indices.

        Only the validation split may be empty.
        """
        rows = self.split(split)
        least = 0 if split == "validation" else 1
        short = np.flatnonzero(rows.counts < least)
        if len(short):
            place = int(short[0])
            raise report_no_examples(int(self.ids[place]), self.all_names[place], split, len(self))
        if rows.indices is None:
            count = len(pool.x)
        else:
            count = len(rows.indices)
        for bound in (rows.starts, rows.starts + rows.counts):
            check_range(bound, count + 1, f"the starts and ends of the clients' {split} examples")
        if rows.indices is not None:
            check_range(rows.indices, len(pool.x), f"the {split} indices")
        if len(pool.not_finite) == 0:
            return
        place = rows.first_with(pool.not_finite)
        if place is not None:
            client = f"client {self.ids[place]} ({self.all_names[place]!r})"
            check_examples(pool, rows.of(place), split, client)

    def digest(self) -> str:
        """Return a SHA-256 of all clients' ids, keys, examples, label maps and rotations."""
        digest = hashlib.sha256()
        for split in get_args(Split):
            rows = self.split(split)
            for array in (rows.starts, rows.counts, rows.indices):
                _add_array(digest, array)
        for array in (self.ids, self.keys, self.view, self.quarter_turns):
            _add_array(digest, array)
        _add_array(digest, None if self.label_maps is None else self.label_maps.numpy())
        return digest.hexdigest()

    @cached_property
    def _unstacked_maps(self) -> tuple[torch.Tensor, ...]:
        if self.label_maps is None:
            return ()
        return self.label_maps.unbind()


class NumberedNames(Sequence[str]):
    """Sequence of the names ``client-<id>``, computed on access so that names need no memory."""

    def __init__(self, ids: Indices) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> NumberedNames: ...

    def __getitem__(self, index: int | slice) -> str | NumberedNames:
        if isinstance(index, slice):
            return NumberedNames(self._ids[index])
        return f"client-{self._ids[index]}"


def take_optional(values: Indices | None, places: Indices | slice) -> Indices | None:
    """Select clients from an optional array of a table: ``values[places]``, or None without array."""
    if values is None:
        return None
    return values[places]


def _concatenate_rows(indices: Sequence[Indices]) -> SplitRows:
    """Return one split of a client table, given the array of pool indices of each client."""
    counts = np.array([len(each) for each in indices], dtype=np.int64)
    # An empty array makes the result int64 if there are no clients.
    rows = np.concatenate([*indices, np.empty(0, np.int64)])
    return SplitRows(counts.cumsum() - counts, counts, rows)


def _add_array(digest: Any, array: Any) -> None:
    """Update a hash with the type, shape and bytes of an array, or with ``none`` if it is None."""
    if array is None:
        digest.update(b"none")
        return
    digest.update(f"{array.dtype}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
