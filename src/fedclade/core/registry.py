"""Registry of the clients of a run: their names, numbers of examples, and properties of the data.

The module also contains mappings by client id that are backed by arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedclade.core.structure import Structure

# Mappings by client id that are backed by arrays, so that a million clients need no Python objects.

V = TypeVar("V")


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
        """The ids as Python integers, in the order of the array.

        If the ids are 0 to n − 1, the sequence is a range, which takes no memory.
        """
        return range(len(self.ids)) if self._plain else tuple(self.ids.tolist())

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
        found = wanted if self._plain else np.searchsorted(self._sorted, wanted)
        inside = (found >= 0) & (found < len(self.ids))
        there = (
            inside & (self._sorted[np.where(inside, found, 0)] == wanted)
            if len(self.ids)
            else inside
        )
        if not there.all():
            raise KeyError(int(wanted[~there][0]))
        return found if self._order is None else self._order[found]

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


TaskKind = Literal[
    "classification", "binary", "multilabel", "regression", "language", "segmentation"
]
"""Kinds of tasks, which determine the target of an example.

The target is a label (classification), yes or no (binary), several labels (multilabel), numbers
(regression), the next token at each position of a text (language), or a label of each pixel of an
image (segmentation).
"""

DENSE: tuple[TaskKind, ...] = ("language", "segmentation")
"""Kinds of tasks with a label at each position of an example, some of which may be ignored."""

IGNORED = -100
"""Value of targets that are ignored in losses and metrics, such as targets of padding.

``torch.nn.functional.cross_entropy`` ignores it by default.
"""


@dataclass(frozen=True)
class DataSpec:
    """Properties of training and test examples, which are the same for all clients.

    A server, which has no access to the clients' data, needs no other information about the data.
    """

    data: str  # name of the data
    input_shape: tuple[int, ...]  # shape of one input
    # outputs of a model: number of labels, of numbers in a target, or of words in the vocabulary
    outputs: int
    task: TaskKind = "classification"
    vocabulary_size: int = 0  # 0 for data that is not text
    # mean and standard deviation that scale pixels in [0, 1]; None: inputs are not scaled
    scaled: tuple[float, float] | None = None
    # tensors of an input that is a dict or tuple; None: an input is one tensor
    structure: Structure | None = None
    # tensors of a target that is a dict or tuple; None: a target is one tensor
    target_structure: Structure | None = None

    @property
    def labels(self) -> int | None:
        """Number of different labels; None if the task is not one label per example."""
        return {"classification": self.outputs, "binary": 2}.get(self.task)


@dataclass(eq=False)
class ClientRegistry:
    """Registry of the clients of a run and their properties.

    In a run over a network, the registry grows when clients join.
    """

    schema: DataSpec
    description: str  # for people: data, partition, shift
    names: Mapping[int, str] = field(default_factory=dict[int, str])
    sizes: Mapping[int, int] = field(default_factory=dict[int, int])  # training examples |D_i|
    true_clusters: Mapping[int, int] | None = None  # None if unknown; used for scoring only
    # columns of a table, for people
    columns: Mapping[str, object] = field(default_factory=dict[str, object])
    # registries with the round from which each applies, if clients' data changes
    stages: Sequence[tuple[int, ClientRegistry]] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""
        return (
            self.names.positions.sequence
            if isinstance(self.names, ArrayMapping)
            else tuple(self.names)
        )

    def in_round(self, number: int) -> ClientRegistry:
        """Return the registry that applies in a round; rounds are numbered from 1.

        If the clients' data changes during a run, :attr:`stages` has a registry for each change.
        """
        begun = [registry for first, registry in self.stages if first <= number]
        return begun[-1] if begun else self
