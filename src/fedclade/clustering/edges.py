"""Edges between points, the minimum spanning tree of them, and the dendrogram of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from fedclade.clustering.linkage import Merges

Places = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Edges:
    """Pairs of points, ``[e]``, and how far they are apart."""

    one: Places
    other: Places
    apart: Numbers

    @classmethod
    def joined(cls, some: Sequence[Edges]) -> Edges:
        """Return the edges of all."""
        return cls(*(np.concatenate([getattr(e, name) for e in some]) for name in ("one", "other", "apart")))

    def spanning(self, n: int) -> Edges:
        """Return those of a minimum spanning forest of n points, the shortest first; ties go by the points."""
        one, other = np.minimum(self.one, self.other), np.maximum(self.one, self.other)
        order = np.lexsort((other, one, self.apart))
        _, first = np.unique(one[order] * n + other[order], return_index=True)
        order = order[np.sort(first)]
        # By rank: an edge of length 0 would be none to SciPy.
        ranks = np.arange(1.0, len(order) + 1)
        tree = scipy.sparse.csgraph.minimum_spanning_tree(
            scipy.sparse.csr_matrix((ranks, (one[order], other[order])), shape=(n, n))
        )
        kept = order[np.sort(tree.data).astype(np.int64) - 1]
        return Edges(one[kept], other[kept], self.apart[kept])


class Forest:
    """A minimum spanning forest of n points, of edges that come some at a time; only so many are held.

    In one place, as what is left of each block would scatter the memory that the next could use.
    """

    def __init__(self, n: int, most: int) -> None:
        self._n, self._count = n, 0
        room = n + most
        self._held = Edges(np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64), np.empty(room))

    def add(self, some: Edges) -> None:
        """Add edges; if there is no room for them, those of a spanning forest take the place of all."""
        if self._count + len(some.one) > len(self._held.one):
            some, self._count = Edges.joined([self._all, some]).spanning(self._n), 0
        new = slice(self._count, self._count + len(some.one))
        self._held.one[new], self._held.other[new], self._held.apart[new] = some.one, some.other, some.apart
        self._count = new.stop

    def tree(self) -> Edges:
        """Return the edges of the forest."""
        return self._all.spanning(self._n)

    @property
    def _all(self) -> Edges:
        held = self._held
        return Edges(held.one[: self._count], held.other[: self._count], held.apart[: self._count])


def merges_of(tree: Edges) -> Merges:
    """Return what merges with what, ``[n-1, 4]`` as SciPy has it, by a spanning tree with its shortest edge first."""
    n = len(tree.apart) + 1
    above, sizes = list(range(2 * n - 1)), [1] * (2 * n - 1)
    merges: list[tuple[int, int]] = []
    for new, ends in enumerate(zip(tree.one.tolist(), tree.other.tolist(), strict=True), start=n):
        tops: list[int] = []
        for end in ends:
            top = end
            while above[top] != top:
                above[top] = above[above[top]]
                top = above[top]
            above[top] = new
            tops.append(top)
        sizes[new] = sizes[tops[0]] + sizes[tops[1]]
        merges.append((min(tops), max(tops)))
    return np.column_stack([np.array(merges, dtype=np.float64), tree.apart, np.array(sizes[n:], dtype=np.float64)])


def in_order(merges: Merges) -> tuple[Places, Numbers]:
    """Return the points in the order of a dendrogram ``[n]``, and the heights at which neighbours merge ``[n-1]``."""
    n = len(merges) + 1
    sizes = [1] * n + merges[:, 3].astype(np.int64).tolist()
    starts, gaps = [0] * (2 * n - 1), np.empty(n - 1)
    pairs, heights = merges[:, :2].astype(np.int64).tolist(), merges[:, 2].tolist()
    for step in range(n - 2, -1, -1):
        (x, y), start = pairs[step], starts[n + step]
        starts[x], starts[y] = start, start + sizes[x]
        gaps[starts[y] - 1] = heights[step]
    return np.argsort(starts[:n]), gaps
