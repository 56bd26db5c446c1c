"""Clients in arrays: those of a million take some 70 bytes each, and become objects when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, get_args, overload

import numpy as np
import torch
from torch import Tensor

from fedclade.core import DataError, Indices, Positions, Split
from fedclade.data.arrays import as_indices, check_range
from fedclade.data.client_data import ClientData, check_held, report_no_examples
from fedclade.data.pool import Pool


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Which examples of a pool are each client's, in one split.

    Parameters
    ----------
    starts, counts
        int64 ``[n]``: client ``k`` has ``counts[k]`` entries of ``indices`` from ``starts[k]`` on.
    indices
        Into the pool. None: a client's examples lie side by side in the pool, and ``starts`` are
        its rows themselves.
    """

    starts: Indices
    counts: Indices
    indices: Indices | None = None

    def __post_init__(self) -> None:
        for name in ("starts", "counts"):
            object.__setattr__(self, name, as_indices(getattr(self, name), f"{name} of a split"))
        if len(self.starts) != len(self.counts):
            raise DataError(f"a split has {len(self.starts)} starts, but {len(self.counts)} counts")

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, place: int) -> Indices:
        """Return the indices of the client at a place."""
        start, count = int(self.starts[place]), int(self.counts[place])
        return (
            np.arange(start, start + count)
            if self.indices is None
            else self.indices[start : start + count]
        )

    def rows(self, places: Indices) -> Indices:
        """Return the indices of the clients at some places, client behind client."""
        counts = self.counts[places]
        before = counts.cumsum() - counts
        at = np.arange(int(counts.sum())) + (self.starts[places] - before).repeat(counts)
        return at if self.indices is None else self.indices[at]

    def taken(self, places: Indices | slice) -> SplitRows:
        """Return those of some clients."""
        return SplitRows(self.starts[places], self.counts[places], self.indices)

    def joined(self, others: SplitRows) -> SplitRows:
        """Return those of these clients and of others."""
        starts, indices = others.starts, None
        if self.indices is not None and others.indices is not None:
            starts, indices = (
                starts + len(self.indices),
                np.concatenate([self.indices, others.indices]),
            )
        elif self.indices is not others.indices:
            raise DataError(
                "examples that lie side by side can be joined with others that do, only"
            )
        return SplitRows(
            np.concatenate([self.starts, starts]),
            np.concatenate([self.counts, others.counts]),
            indices,
        )

    def first_with(self, rows: Indices) -> int | None:
        """Return the place of the first client that holds one of these rows of the pool, given in order."""
        at = rows if self.indices is None else np.flatnonzero(np.isin(self.indices, rows))
        hits = np.searchsorted(at, self.starts + self.counts) > np.searchsorted(at, self.starts)
        return int(hits.argmax()) if hits.any() else None


@dataclass(frozen=True, eq=False)
class ClientTable(Sequence[ClientData]):
    """Clients of a federation in arrays, in place of a tuple of :class:`ClientData`, which are made when asked for.

    Parameters
    ----------
    ids, keys
        int64 ``[n]``, see :class:`ClientData`.
    train, validation, test
        Which examples each holds.
    names
        Of each client; None: ``client-<id>``.
    label_maps, view
        The label maps that there are, int64 ``[V, outputs]``, and which of them each client has,
        ``[n]``; -1 for none.
    quarter_turns
        Of each client, ``[n]``; None: none is turned.

    Raises
    ------
    DataError
        If the arrays are not of one length, or are not whole numbers.
    """

    ids: Indices
    keys: Indices
    train: SplitRows
    validation: SplitRows
    test: SplitRows
    names: Sequence[str] | None = None
    label_maps: Tensor | None = None
    view: Indices | None = None
    quarter_turns: Indices | None = None

    def __post_init__(self) -> None:
        for name in ("ids", "keys", "view", "quarter_turns"):
            if (array := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_indices(array, f"{name} of the clients"))
        arrays = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name != "label_maps"
        }
        lengths = {name: len(array) for name, array in arrays.items() if array is not None}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the arrays of a client table should have one length, got {lengths}")
        maps = 0 if self.label_maps is None else len(self.label_maps)
        if self.view is not None and len(self.view):
            check_range(self.view + 1, maps + 1, "the label maps of the clients, counted from 1,")

    @classmethod
    def of(cls, clients: Sequence[ClientData]) -> ClientTable:
        """Return clients as a table; indices that several share are copied for each."""
        if isinstance(clients, ClientTable):
            return clients
        maps = {
            id(client.label_map): client.label_map
            for client in clients
            if client.label_map is not None
        }
        row_of = {key: row for row, key in enumerate(maps)}
        named = [client.name for client in clients]
        ids = np.array([client.id for client in clients])
        turns = np.array([client.quarter_turns for client in clients])
        return cls(
            ids,
            np.array([client.key for client in clients]),
            *(
                _side_by_side([getattr(client, split) for client in clients])
                for split in ("train", "validation", "test")
            ),
            names=None if named == list(Numbered(ids)) else named,
            label_maps=_stacked(list(maps.values())),
            view=np.array([row_of.get(id(client.label_map), -1) for client in clients])
            if maps
            else None,
            quarter_turns=turns if turns.any() else None,
        )

    def split(self, split: Split) -> SplitRows:
        """Return which examples each client holds in a split."""
        return getattr(self, split)

    @cached_property
    def positions(self) -> Positions:
        """At which place each id stands."""
        return Positions(self.ids)

    @cached_property
    def lies_in_order(self) -> bool:
        """Whether each client's examples lie side by side in the pool, client behind client."""
        splits = [self.split(split) for split in get_args(Split)]
        ends = np.maximum.reduce([split.starts + split.counts for split in splits])
        begins = np.minimum.reduce([split.starts for split in splits])
        return all(split.indices is None for split in splits) and bool(
            (begins[1:] >= ends[:-1]).all()
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take, without names and indices."""
        splits = [
            array
            for split in get_args(Split)
            for array in (self.split(split).starts, self.split(split).counts)
        ]
        given = [self.ids, self.keys, self.view, self.quarter_turns, *splits]
        return sum(array.nbytes for array in given if array is not None)

    @cached_property
    def all_names(self) -> Sequence[str]:
        """The name of each client."""
        return Numbered(self.ids) if self.names is None else self.names

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> ClientData: ...
    @overload
    def __getitem__(self, index: slice) -> ClientTable: ...

    def __getitem__(self, index: int | slice) -> ClientData | ClientTable:
        if isinstance(index, slice):
            return self.taken(index)
        place = range(len(self))[index]
        view = -1 if self.view is None else int(self.view[place])
        return ClientData(
            int(self.ids[place]),
            self.all_names[place],
            int(self.keys[place]),
            self.train.of(place),
            self.validation.of(place),
            self.test.of(place),
            None if view < 0 else self._maps[view],
            0 if self.quarter_turns is None else int(self.quarter_turns[place]),
        )

    def taken(self, places: Indices | slice) -> ClientTable:
        """Return some of the clients."""
        parts: dict[str, Any] = {}
        for name in ("ids", "keys", "view", "quarter_turns"):
            parts[name] = None if (values := getattr(self, name)) is None else values[places]
        if self.names is not None:
            parts["names"] = [self.names[place] for place in np.arange(len(self))[places].tolist()]
        for split in get_args(Split):
            parts[split] = self.split(split).taken(places)
        return replace(self, **parts)

    def joined(self, others: ClientTable) -> ClientTable:
        """Return these clients and others that see the labels by the same maps, in arrays of the same kind."""

        def both(name: str) -> Any:
            mine, theirs = getattr(self, name), getattr(others, name)
            if (mine is None) != (theirs is None):
                raise DataError(f"client tables can be joined if both have {name}, or neither")
            if mine is None:
                return None
            return [*mine, *theirs] if name == "names" else np.concatenate([mine, theirs])

        parts = {split: self.split(split).joined(others.split(split)) for split in get_args(Split)}
        given = {name: both(name) for name in ("ids", "keys", "names", "view", "quarter_turns")}
        return replace(self, **parts, **given)

    def check(self, pool: Pool) -> None:
        """Check what a federation asks of its clients; see :class:`Federation`."""
        if twice := self.positions.repeated:
            raise DataError(f"client ids should be distinct, got these more than once: {twice}")
        for split in get_args(Split):
            held = self.split(split)
            if len(short := np.flatnonzero(held.counts < (split != "validation"))):
                place = int(short[0])
                raise report_no_examples(
                    int(self.ids[place]), self.all_names[place], split, len(self)
                )
            there = len(pool.x) if held.indices is None else len(held.indices)
            for bound in (held.starts, held.starts + held.counts):
                check_range(bound, there + 1, f"the places of the {split} examples")
            if held.indices is not None:
                check_range(held.indices, len(pool.x), f"the {split} indices")
            if len(pool.not_finite) and (place := held.first_with(pool.not_finite)) is not None:
                check_held(
                    pool,
                    held.of(place),
                    split,
                    f"client {self.ids[place]} ({self.all_names[place]!r})",
                )

    def digest(self) -> str:
        """Return a SHA-256 of which examples each client holds, and how it sees them."""
        found = hashlib.sha256()
        for split in get_args(Split):
            rows = self.split(split)
            for array in (rows.starts, rows.counts, rows.indices):
                _add(found, array)
        for array in (self.ids, self.keys, self.view, self.quarter_turns):
            _add(found, array)
        _add(found, None if self.label_maps is None else self.label_maps.numpy())
        return found.hexdigest()

    @cached_property
    def _maps(self) -> tuple[Tensor, ...]:
        return () if self.label_maps is None else self.label_maps.unbind()


class Numbered(Sequence[str]):
    """Names that say no more than the id."""

    def __init__(self, ids: Indices) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Numbered: ...

    def __getitem__(self, index: int | slice) -> str | Numbered:
        return (
            Numbered(self._ids[index]) if isinstance(index, slice) else f"client-{self._ids[index]}"
        )


def _side_by_side(indices: Sequence[Indices]) -> SplitRows:
    counts = np.array([len(each) for each in indices], dtype=np.int64)
    return SplitRows(
        counts.cumsum() - counts, counts, np.concatenate([*indices, np.empty(0, np.int64)])
    )


def _stacked(maps: Sequence[Tensor]) -> Tensor | None:
    return torch.stack([*maps]) if maps else None


def _add(digest: Any, array: Any) -> None:
    if array is None:
        digest.update(b"none")
        return
    digest.update(f"{array.dtype}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
