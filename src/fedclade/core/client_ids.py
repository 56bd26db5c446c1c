"""Client ids and mappings by id that are stored in arrays, so that clients need no Python objects.

A tuple of ids needs about 40 bytes for each client, and a mapping by id about 100. For
:data:`MANY_IDS` or more clients, the parameter tree stores ids in arrays of 8 bytes each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

V = TypeVar("V")

MANY_IDS = 10_000
"""Number of ids from which on they are stored in an array; fewer ids are a tuple."""

_AT_A_TIME = 2**16
"""Number of ids that are converted to Python integers at once in an iteration."""


class ClientIds(Sequence[int]):
    """Immutable sequence of distinct client ids, stored in an array.

    It equals a tuple of the same ids.

    Parameters
    ----------
    array
        The ids, int64 ``[n]``. The array must not be changed afterwards.
    """

    def __init__(self, array: NDArray[np.int64]) -> None:
        self.array = array

    @cached_property
    def positions(self) -> Positions:
        """Position of each id in the sequence."""
        return Positions(self.array)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> ClientIds: ...

    def __getitem__(self, index: int | slice) -> int | ClientIds:
        if isinstance(index, slice):
            return ClientIds(self.array[index])
        return int(self.array[index])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self.array), _AT_A_TIME):
            yield from self.array[start : start + _AT_A_TIME].tolist()

    def __contains__(self, value: object) -> bool:
        return value in self.positions

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the position of an id; raise a ValueError if the sequence does not have it."""
        place = self.positions.get(value)
        if place is None or place not in range(len(self))[start:stop]:
            raise ValueError(f"{value} is not in the sequence of client ids")
        return place

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClientIds | tuple):
            return NotImplemented
        if len(self) != len(other):
            return False
        if isinstance(other, ClientIds):
            return bool((self.array == other.array).all())
        return all(mine == its for mine, its in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))  # equal to the hash of an equal tuple

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = np.asarray(self.array, dtype=dtype)
        return values.copy() if copy else values

    def __repr__(self) -> str:
        return f"ClientIds({len(self)} ids)"


class Positions(Mapping[int, int]):
    """Mapping from client ids to their positions in an array of ids.

    Positions can be looked up for a single id, or by :meth:`of` for many ids at once.
    """

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self.ids = ids
        # Ids 0 to n - 1 are their own positions, so they need no search.
        self._plain = len(ids) == 0 or bool(ids[0] == 0 and (np.diff(ids) == 1).all())
        self._order = None if (np.diff(ids) > 0).all() else np.argsort(ids, kind="stable")
        self._sorted = ids if self._order is None else ids[self._order]

    @cached_property
    def sequence(self) -> Sequence[int]:
        """The ids in the order of the array.

        If the ids are 0 to n − 1, the sequence is a range, which takes no memory.
        """
        if self._plain:
            return range(len(self.ids))
        return tuple(self.ids.tolist()) if len(self.ids) < MANY_IDS else ClientIds(self.ids)

    @property
    def repeated(self) -> list[int]:
        """Ids that occur more than once in the array of ids."""
        return np.unique(self._sorted[1:][self._sorted[1:] == self._sorted[:-1]]).tolist()

    def of(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Return the positions of k ids in the array of ids, ``[k]``.

        Raises
        ------
        KeyError
            If an id is not in the array; the error has the first such id.
        """
        wanted = np.asarray(ids, dtype=np.int64).reshape(-1)
        found, there = self._find(wanted)
        if not there.all():
            raise KeyError(int(wanted[~there][0]))
        return found if self._order is None else self._order[found]

    def have(self, ids: NDArray[np.int64]) -> bool:
        """Return whether all of some ids are in the array of ids."""
        return bool(self._find(ids)[1].all())

    def _find(self, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the places of ids among the sorted ids, and which of the ids there are."""
        if self._plain:
            return wanted, (wanted >= 0) & (wanted < len(self.ids))
        found = np.searchsorted(self._sorted, wanted)
        inside = found < len(self.ids)
        if len(self.ids):
            inside &= self._sorted[np.where(inside, found, 0)] == wanted
        return found, inside

    def __getitem__(self, key: int) -> int:
        try:
            number = operator.index(key)
        except TypeError:
            raise KeyError(key) from None
        if self._plain:
            if not 0 <= number < len(self.ids):
                raise KeyError(key)
            return number
        place = int(np.searchsorted(self._sorted, number))
        if place == len(self.ids) or self._sorted[place] != number:
            raise KeyError(key)
        return place if self._order is None else int(self._order[place])

    def __iter__(self) -> Iterator[int]:
        return iter(self.sequence)

    def __len__(self) -> int:
        return len(self.ids)


class ArrayMapping(Mapping[int, V], Generic[V]):
    """Mapping from client ids to values that are stored in an array or another sequence.

    Parameters
    ----------
    positions
        The ids and their positions in ``array``.
    array
        The values, in the order of the ids.
    """

    def __init__(self, positions: Positions, array: NDArray[Any] | Sequence[V]) -> None:
        self.positions = positions
        self.array = array
        self._at: Callable[[int], V] = (
            array.item if isinstance(array, np.ndarray) else array.__getitem__
        )

    def of(self, ids: ArrayLike) -> NDArray[Any]:
        """Return the values of k ids as an array ``[k]``.

        The method requires that the values are stored in an array.
        """
        return cast("NDArray[Any]", self.array)[self.positions.of(ids)]

    def __getitem__(self, key: int) -> V:
        return self._at(self.positions[key])

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)

    def values(self) -> ValuesView[V]:
        """Return a view of all values, in the order of the ids."""
        return _Values(self)


class _Values(ValuesView[V]):
    """View of the values of an :class:`ArrayMapping`, in the order of the ids.

    Iteration reads the array directly, which is faster than a look-up for each id.
    """

    _mapping: ArrayMapping[V]

    def __iter__(self) -> Iterator[V]:
        array = self._mapping.array
        return iter(array.tolist() if isinstance(array, np.ndarray) else array)


def id_array(ids: Iterable[int]) -> NDArray[np.int64]:
    """Return client ids as an array ``[n]``, without a copy if they are stored in one."""
    if isinstance(ids, ClientIds):
        return ids.array
    if isinstance(ids, ArrayMapping):
        return cast("ArrayMapping[Any]", ids).positions.ids
    if isinstance(ids, range):
        return np.arange(ids.start, ids.stop, ids.step, dtype=np.int64)
    return np.fromiter(ids, np.int64)


def ascending_ids(ids: Collection[int]) -> Sequence[int]:
    """Return ids in ascending order: a tuple, or :class:`ClientIds` for :data:`MANY_IDS`."""
    if len(ids) < MANY_IDS:
        return tuple(sorted(ids))
    array = id_array(ids)
    if not bool((array[1:] > array[:-1]).all()):
        return ClientIds(np.sort(array))
    return ids if isinstance(ids, ClientIds) else ClientIds(array)


def without_ids(ids: Sequence[int], gone: Collection[int]) -> Sequence[int]:
    """Return the ids that are not in ``gone``, given ids in ascending order."""
    if len(ids) < MANY_IDS:
        distinct = set(gone)
        return tuple(client for client in ids if client not in distinct)
    array = id_array(ids)
    return ascending_ids(ClientIds(array[~np.isin(array, id_array(gone))]))


def concatenated_ids(groups: Sequence[Collection[int]]) -> Sequence[int]:
    """Return the ids of several groups, one group after another."""
    if sum(len(group) for group in groups) < MANY_IDS:
        return [client for group in groups for client in group]
    return ClientIds(np.concatenate([id_array(group) for group in groups]))


def numbers_of(numbers: Mapping[int, int], ids: Iterable[int]) -> NDArray[np.int64]:
    """Return the whole numbers of some clients as an array ``[n]``, given the numbers by id."""
    if not isinstance(numbers, ArrayMapping) or not isinstance(numbers.array, np.ndarray):
        return np.array([numbers[client] for client in ids], dtype=np.int64)
    everyone = numbers.positions
    if ids is numbers or ids == everyone.sequence:
        return numbers.array
    array = id_array(ids)
    return numbers.array if array is everyone.ids else numbers.of(array)


def sum_of(numbers: Mapping[int, float]) -> float:
    """Return the sum of numbers by client id, such as the numbers of examples of all clients."""
    if not isinstance(numbers, ArrayMapping) or not isinstance(numbers.array, np.ndarray):
        return sum(numbers.values())
    return numbers.array.sum().item()
