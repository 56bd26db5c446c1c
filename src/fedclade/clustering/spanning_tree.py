"""Single linkage of many clients from their signatures alone: a minimum spanning tree, found block by block.

The merges of single linkage are the edges of a minimum spanning tree (Gower and Ross 1969), so the distances of all
pairs need not be held, though each is computed once:

1. A first tree, of some kind: the minimum spanning tree of a sample of points, and of all others the edge to the
   nearest of the sample.
2. Points are put in the order of that tree's dendrogram, with the gaps between neighbours. The longest edge on the
   tree's way from one point to another is the largest gap between them.
3. A pair that is no nearer than the longest edge on its way is not needed in a minimum spanning tree (the cycle
   property). The distances of one block of points to another are one matrix product, the longest edges follow from two
   vectors of running maxima, and one comparison leaves few pairs: about n²/m with a sample of m, as in the lemma of
   Karger, Klein and Tarjan (1995).
4. The minimum spanning tree of these and of the first tree's edges is that of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.linkage import Merges, cut
from fedclade.clustering.similarity import (
    COLUMNS,
    METRICS,
    ROUNDING,
    Labels,
    Similarity,
    are_signs,
    convert_sign_cosines,
)
from fedclade.core import ConfigError, UpdateError, rng, row_norms, unknown

# Edges between points, the minimum spanning tree of them, and the dendrogram of that.

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


def build_merges(tree: Edges) -> Merges:
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


def order_points(merges: Merges) -> tuple[Places, Numbers]:
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


SAMPLE = 2048
"""Points that the first tree is built on, and of a block."""

BLOCK = {"cuda": 8192}
"""Points of a block, by device: the distances of two blocks take 256 MiB there, on others 16."""

BLOCK_ENTRIES = 2**25
"""Of signatures in a block, and in the sample: 128 MiB; of long ones there are fewer in it."""

MOST_EDGES = 2**20
"""Edges that are held before a spanning tree takes their place: 24 MiB, and four times that while it is found."""

RESOLVED = 1 / 32
"""A squared distance of a smaller share of what it was computed from is not as precise as it should be."""

ENTRIES_AT_ONCE = 2**21
"""Of signatures that are converted to float64 together: 16 MiB."""


def single_linkage(signatures: Tensor, metric: str, block: int | None = None, sample: int | None = None) -> Merges:
    """Merge clients by single linkage as :func:`fedclade.clustering.agglomerate` does, without a distance of each pair.

    It takes about the time of one product of the signatures with themselves, and beside them memory for two blocks and
    for numbers of each client. Which pairs make the tree is decided by distances in the precision of the signatures, or
    in float64 where points are so near that it does not suffice; the heights are then computed in float64. So they are
    those of exact single linkage up to the rounding of the former, about 1e-6 of a height for float32, and merges whose
    heights are further apart are the same.

    Parameters
    ----------
    signatures
        ``[n, R]``, on any device; it computes the products.
    metric
        ``l1``, ``l2`` or ``cosine``, as :func:`fedclade.clustering.compute_distances` has them. ``l1`` has no matrix product,
        and takes much longer.
    block
        Points of a block; it changes time and memory alone. As suits the device and R, if left out.
    sample
        Points that the first tree is built on; it changes time and memory alone. As suits R, if left out.

    Returns
    -------
    numpy.ndarray
        ``[n-1, 4]`` as SciPy has it.

    Raises
    ------
    ConfigError
        If the metric is unknown.
    UpdateError
        If a signature is not finite.
    """
    if metric not in METRICS:
        raise ConfigError(unknown("metric", metric, METRICS))
    points = Points(signatures, metric)
    if odd := int(torch.count_nonzero(~torch.isfinite(points.norms))):
        raise UpdateError(f"signatures should be finite, got {odd} that are not")
    if points.n < 2:
        return np.empty((0, 4))
    most = max(64, BLOCK_ENTRIES // max(1, signatures.shape[1]))
    sample, block = sample or min(SAMPLE, most), block or min(BLOCK.get(points.device.type, SAMPLE), most)
    tree = _first_tree(points, sample)
    if points.n > sample:
        forest = Forest(points.n, MOST_EDGES)
        forest.add(tree)
        for lighter in _lighter_pairs(points, tree, block):
            forest.add(lighter)
        tree = forest.tree()
    heights = points.distances(tree.one, tree.other)
    if metric == "cosine" and are_signs(signatures):  # whose order is that of the updates' own cosines
        heights = 1 - convert_sign_cosines(1 - heights)
    order = np.argsort(heights, kind="stable")
    return build_merges(Edges(tree.one[order], tree.other[order], heights[order]))


class Points:
    """Signatures as points whose squared distances, or with ``l1`` distances, order the pairs: their keys."""

    def __init__(self, signatures: Tensor, metric: str) -> None:
        self._signatures, self._metric = signatures, metric
        self.n, self.device = len(signatures), signatures.device
        self.dtype = torch.promote_types(signatures.dtype, torch.float32)
        self.norms = row_norms(signatures).to(self.device)
        # To length 1, or between 1 and 2 at most, so that no square is too large or small; a power of 2 rounds nothing.
        lengths = self.norms if metric == "cosine" else self.norms.max().log2().floor().exp2().expand(self.n)
        self._scales = 1 / torch.where(lengths > 0, lengths, 1.0)
        # Rows of zeros are at cosine distance 1, so √2 apart: as if each had a direction of its own.
        self._beside = ((self.norms == 0) & (metric == "cosine")).to(self.dtype)

    def keys_from(self, some: Places, dtype: torch.dtype | None = None) -> Callable[[Places], tuple[Tensor, float]]:
        """Return a function of other points that returns the keys ``[p, q]`` of all pairs of these and those.

        It also returns what they were computed from: their rounding is that of numbers as large.
        """
        dtype = dtype or self.dtype
        a, beside = self._rows(some, dtype)
        if self._metric == "l1":
            return lambda others: (_l1(a, self._rows(others, dtype)[0]), 0.0)
        # From the middle of some of them: the nearer the points, the smaller the products, and their rounding.
        middle = a.mean(0)
        a -= middle
        lengths = (a.square().sum(1) + beside)[:, None]

        def keys_to(others: Places) -> tuple[Tensor, float]:
            b, beside = self._rows(others, dtype)
            b -= middle
            squares = b.square().sum(1) + beside
            return torch.addmm(squares, a, b.T, alpha=-2).add_(lengths), float(lengths.max() + squares.max())

        return keys_to

    def _rows(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a copy of some points ``[p, R]``, and what their squared distances are larger by, ``[p]``."""
        at = torch.from_numpy(places).to(self.device)
        rows = self._signatures[at].to(dtype)
        rows *= self._scales[at].to(dtype)[:, None]
        return rows, self._beside[at].to(dtype)

    def distances(self, one: Places, other: Places) -> Numbers:
        """Return the distances of pairs ``[e]``, in float64."""
        found = np.empty(len(one))
        step = max(1, ENTRIES_AT_ONCE // max(1, self._signatures.shape[1]))
        for start in range(0, len(one), step):
            some = slice(start, start + step)
            i, j = (torch.from_numpy(ends[some]).to(self.device) for ends in (one, other))
            a, b = self._signatures[i].double(), self._signatures[j].double()
            if self._metric == "cosine":
                apart = 1 - (a * b).sum(1) * self._scales[i] * self._scales[j]
                apart = torch.where(apart < ROUNDING, 0.0, apart.clamp(max=2.0))
            else:
                apart = torch.linalg.vector_norm(a - b, 1 if self._metric == "l1" else 2, dim=1)
            found[some] = apart.cpu().numpy()
        return found

    def keys(self, one: Places, other: Places) -> Numbers:
        """Return the keys of pairs ``[e]``, in float64."""
        apart = self.distances(one, other)
        if self._metric == "cosine":
            return 2 * apart
        scaled = apart * float(self._scales[0])
        return scaled if self._metric == "l1" else scaled**2


def _first_tree(points: Points, sample: int) -> Edges:
    """Return the edges of a spanning tree, by their keys; the minimum one if the sample is all points."""
    drawn = rng.generator(0, "spanning tree").permutation(points.n)
    some, rest = np.sort(drawn[:sample]), np.sort(drawn[sample:])
    i, j = np.triu_indices(len(some), 1)
    keys, _ = points.keys_from(some, torch.float64)(some)
    tree = Edges(some[i], some[j], keys.cpu().numpy()[i, j]).spanning(points.n)
    one, other = [tree.one], [tree.other]
    for start in range(0, len(rest), len(some)):
        block = rest[start : start + len(some)]
        keys, _ = points.keys_from(block)(some)
        one.append(block)
        other.append(some[keys.argmin(1).cpu().numpy()])
    pairs = np.concatenate(one), np.concatenate(other)
    return Edges(*pairs, points.keys(*pairs)).spanning(points.n)


def _lighter_pairs(points: Points, tree: Edges, block: int) -> Iterator[Edges]:
    """Go through all pairs; yield those that are nearer than the longest edge on the tree's way between them."""
    order, gaps = order_points(build_merges(tree))
    # Nearer by more than rounding: of points in great numbers at equal distances half of all pairs would seem so.
    gaps *= 1 - 4 * torch.finfo(points.dtype).eps
    smallest = gaps[gaps > 0].min(initial=np.inf)
    longest = torch.from_numpy(np.where(gaps > 0, gaps, -np.inf)).to(points.device, points.dtype)
    for start in range(0, points.n, block):
        end = start + block
        some = Comparison(points, order[start:end])
        within = longest[start : end - 1]
        yield some.lighter(order[start:end], _ways_within(within), smallest if len(within) else np.inf)
        out = _running_max(longest[start:end].flip(0)).flip(0)[:, None]  # from each to the first of the next block
        for first in range(end, points.n, block):
            last = first + block
            into = torch.cat([longest.new_tensor([-torch.inf]), _running_max(longest[first : last - 1])])
            yield some.lighter(order[first:last], torch.maximum(out, into), max(float(out.min()), smallest))
            out = torch.maximum(out, longest[first:last].max()) if last < points.n else out


class Comparison:
    """Some points, to be compared with others: in the precision of the signatures, or in float64 where that fails."""

    def __init__(self, points: Points, some: Places) -> None:
        self._points, self._some = points, some
        self._keys_to = points.keys_from(some)

    def lighter(self, others: Places, ways: Tensor, smallest: float) -> Edges:
        """Return the pairs whose keys are below the longest edges on their ways ``[p, q]``, none below the smallest."""
        keys, scale = self._keys_to(others)
        if smallest < RESOLVED * scale:
            keys, _ = self._points.keys_from(self._some, torch.float64)(others)
        found = (keys < ways).nonzero(as_tuple=True)
        i, j = (place.cpu().numpy() for place in found)
        return Edges(self._some[i], others[j], keys[found].to("cpu", torch.float64).numpy().clip(min=0))


def _running_max(numbers: Tensor) -> Tensor:
    return numbers.cummax(0).values


def _ways_within(longest: Tensor) -> Tensor:
    """Return the longest edges ``[b, b]`` on the ways between points in order; −∞ but for each to those behind it."""
    b = len(longest) + 1
    ways = longest.new_full((b, b), -torch.inf)
    ways[:, 1:] = torch.where(torch.ones_like(ways[:, 1:], dtype=torch.bool).triu(), longest, -torch.inf)
    return ways.cummax(1).values


def _l1(some: Tensor, others: Tensor) -> Tensor:
    """Return Σ|a − b| of each row of ``[p, R]`` and each of ``[q, R]``."""
    total = some.new_zeros(len(some), len(others))
    for a, b in zip(some.split(COLUMNS, 1), others.split(COLUMNS, 1), strict=True):
        total += torch.cdist(a, b, p=1.0)
    return total


# From similarities to clusters.


@dataclass(frozen=True)
class Bipartition:
    """Two clusters in place of one; the larger is the first, or at equal size the one with the smallest id."""

    first: tuple[int, ...]  # members in ascending order
    second: tuple[int, ...]
    alpha_cross_max: float  # largest similarity between members of different clusters (CFL eq. 17)


def find_optimal_bipartition(alpha: Similarity, ids: Sequence[int]) -> Bipartition:
    """Split clients in two so that the largest similarity across the split is as small as possible (CFL eq. 25).

    Algorithm 1 of the paper joins clients in descending order of similarity until two clusters are left. That is single
    linkage, stopped before its last merge: O(m²) here, where the paper's loop is O(m³). Single linkage depends on the
    order of the similarities only, so it is given −α, which is exact; 1 − α would round small differences to ties.

    Parameters
    ----------
    alpha
        Similarities ``[m, m]``, symmetric, m ≥ 2.
    ids
        The clients, ``[m]``. Where several partitions are optimal, the choice depends on the ids, not on their order.

    Raises
    ------
    UpdateError
        If there are fewer than two clients, or a similarity is not finite.
    """
    order = _in_order(ids)
    if not np.isfinite(alpha).all():
        raise UpdateError(f"similarities should be finite, got {np.count_nonzero(~np.isfinite(alpha))} that are not")
    similar = scipy.spatial.distance.squareform(alpha[np.ix_(order, order)], checks=False)
    merges = scipy.cluster.hierarchy.linkage(np.negative(similar, out=similar), method="single")
    return _two(merges, np.asarray(ids)[order], float(-merges[-1, 2]))


def find_bipartition_by_tree(signatures: Tensor, ids: Sequence[int]) -> Bipartition:
    """Return the optimal bi-partition of signatures ``[m, R]`` by cosine similarity, without that of every pair.

    As :func:`find_optimal_bipartition` finds it, where the similarities that decide are further apart than float32 rounds
    them, about 1e-6; see :func:`fedclade.clustering.single_linkage`. The similarity across is computed in float64.

    Raises
    ------
    UpdateError
        If there are fewer than two clients, or a signature is not finite.
    """
    order = _in_order(ids)
    if (np.diff(order) != 1).any():
        signatures = signatures[torch.from_numpy(order).to(signatures.device)]
    merges = single_linkage(signatures, "cosine")
    return _two(merges, np.asarray(ids)[order], 1 - float(merges[-1, 2]))


def _in_order(ids: Sequence[int]) -> Labels:
    """Return the places of the clients by their ids."""
    if len(ids) < 2:
        raise UpdateError(f"a bi-partition needs at least 2 clients, got {len(ids)}")
    return np.argsort(ids)


def _two(merges: Merges, ids: Labels, alpha_cross_max: float) -> Bipartition:
    """Return the clusters that merge last, of clients in ascending order."""
    labels = cut(merges, 2)
    first, second = (tuple(ids[labels == label].tolist()) for label in (0, 1))
    return Bipartition(first, second, alpha_cross_max)
