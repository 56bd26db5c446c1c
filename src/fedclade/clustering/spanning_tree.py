"""Single linkage of many clients from their signatures, by a minimum spanning tree.

The merges of single linkage are the edges of a minimum spanning tree (Gower and Ross 1969) of
points, which are the clients' signatures. The tree is found block by block: each distance is
computed once, and the distances of all pairs are never in memory together.

1. Build a first spanning tree. It consists of the minimum spanning tree of a sample of points and,
   for each other point, the edge to the nearest point of the sample.
2. Arrange all points in the order of that tree's dendrogram, with a gap between each two
   neighbours: the height at which they merge. The longest edge on the tree's path between two
   points equals the largest gap between them.
3. Compare all pairs, block against block. A pair that is no nearer than the longest edge on its
   path is not needed in a minimum spanning tree (cycle property). The distances of two blocks are
   one matrix product, and the longest edges follow from two vectors of running maxima. Few pairs
   remain: about n²/m with a sample of m, as in the lemma of Karger, Klein and Tarjan (1995).
4. The minimum spanning tree of the remaining pairs and the first tree's edges is the minimum
   spanning tree of all pairs.

The module also finds the optimal bi-partition of CFL, which is single linkage stopped before the
last merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

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

if TYPE_CHECKING:
    from torch import Tensor

# Edges between points, their minimum spanning tree, and its dendrogram.

Places = NDArray[np.int64]
"""Row numbers of points, ``[p]``."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges between points: e pairs of points, and the length of each edge.

    ``first`` and ``second`` are the numbers of both points, ``[e]``. Lengths are distances, or
    other numbers that sort edges as the distances would.
    """

    first: Places
    second: Places
    length: Numbers

    @classmethod
    def concatenate(cls, batches: Sequence[Edges]) -> Edges:
        """Concatenate several batches of edges."""
        return cls(
            np.concatenate([batch.first for batch in batches]),
            np.concatenate([batch.second for batch in batches]),
            np.concatenate([batch.length for batch in batches]),
        )

    def find_spanning_forest(self, n: int) -> Edges:
        """Select the edges that form a minimum spanning forest of n points, shortest edges first.

        Among edges of equal length, the numbers of their points decide, so the result does not
        depend on the order of the edges.
        """
        low = np.minimum(self.first, self.second)
        high = np.maximum(self.first, self.second)
        order = np.lexsort((high, low, self.length))

        # Of several edges between the same two points, only the shortest is used.
        pair_numbers = low[order] * n + high[order]
        _, shortest = np.unique(pair_numbers, return_index=True)
        order = order[np.sort(shortest)]

        # SciPy gets ranks instead of lengths: in a sparse matrix a length of 0 means "no edge".
        ranks = np.arange(1.0, len(order) + 1)
        graph = scipy.sparse.csr_matrix((ranks, (low[order], high[order])), shape=(n, n))
        tree = scipy.sparse.csgraph.minimum_spanning_tree(graph)
        in_tree = order[np.sort(tree.data).astype(np.int64) - 1]
        return Edges(low[in_tree], high[in_tree], self.length[in_tree])


class Forest:
    """Minimum spanning forest of edges that arrive in batches.

    The edges are stored in arrays that are allocated once. Separate arrays for each batch would
    fragment the memory.

    Parameters
    ----------
    n
        Number of points.
    max_extra_edges
        Number of edges that are stored in addition to n, before a spanning forest replaces all
        stored edges.
    """

    def __init__(self, n: int, max_extra_edges: int) -> None:
        self._n = n
        self._count = 0
        capacity = n + max_extra_edges
        self._buffer = Edges(
            np.empty(capacity, dtype=np.int64),
            np.empty(capacity, dtype=np.int64),
            np.empty(capacity),
        )

    def add(self, edges: Edges) -> None:
        """Add edges to the buffer; if it is full, first reduce all edges to a spanning forest."""
        if self._count + len(edges.first) > len(self._buffer.first):
            edges = Edges.concatenate([self._stored, edges]).find_spanning_forest(self._n)
            self._count = 0
        end = self._count + len(edges.first)
        free = slice(self._count, end)
        self._buffer.first[free] = edges.first
        self._buffer.second[free] = edges.second
        self._buffer.length[free] = edges.length
        self._count = end

    def find_tree(self) -> Edges:
        """Return the minimum spanning forest of all added edges, shortest edges first."""
        return self._stored.find_spanning_forest(self._n)

    @property
    def _stored(self) -> Edges:
        """Edges in the used part of the buffer."""
        used = slice(0, self._count)
        return Edges(self._buffer.first[used], self._buffer.second[used], self._buffer.length[used])


def build_merges(tree: Edges) -> Merges:
    """Convert the edges of a spanning tree of n points into merges ``[n-1, 4]`` in SciPy's format.

    Clusters are found by union-find: ``parent`` has an entry for each of the n points and, from n
    on, for each merged cluster.

    Parameters
    ----------
    tree
        Edges of the tree, shortest edges first.
    """
    n = len(tree.length) + 1
    parent = list(range(2 * n - 1))
    sizes = [1] * (2 * n - 1)
    merges: list[tuple[int, int]] = []
    edges = zip(tree.first.tolist(), tree.second.tolist(), strict=True)
    for cluster, (first, second) in enumerate(edges, start=n):
        first_root = _find_root(parent, first)
        parent[first_root] = cluster
        second_root = _find_root(parent, second)
        parent[second_root] = cluster
        sizes[cluster] = sizes[first_root] + sizes[second_root]
        merges.append((min(first_root, second_root), max(first_root, second_root)))
    merged_sizes = np.array(sizes[n:], dtype=np.float64)
    return np.column_stack([np.array(merges, dtype=np.float64), tree.length, merged_sizes])


def _find_root(parent: list[int], point: int) -> int:
    """Return the cluster that contains a point in a union-find structure.

    The path from the point to the cluster is shortened on the way (path halving).

    Parameters
    ----------
    parent
        Parent of each point and cluster; the parent of a root is the root itself.
    point
        Number of the point.
    """
    root = point
    while parent[root] != root:
        parent[root] = parent[parent[root]]
        root = parent[root]
    return root


def order_points(merges: Merges) -> tuple[Places, Numbers]:
    """Return the points in the order of a dendrogram's leaves, and the gaps between neighbours.

    Returns
    -------
    tuple of numpy.ndarray
        The points, ``[n]``, and the heights at which neighbours merge, ``[n-1]``.
    """
    n = len(merges) + 1
    sizes = [1] * n + merges[:, 3].astype(np.int64).tolist()
    starts = [0] * (2 * n - 1)  # position of each cluster's first point
    gaps = np.empty(n - 1)
    children = merges[:, :2].astype(np.int64).tolist()
    heights = merges[:, 2].tolist()
    # From the root down: the second child follows after all points of the first.
    for step in range(n - 2, -1, -1):
        left, right = children[step]
        starts[left] = starts[n + step]
        starts[right] = starts[left] + sizes[left]
        gaps[starts[right] - 1] = heights[step]
    return np.argsort(starts[:n]), gaps


SAMPLE = 2048
"""Number of points in the sample of the first tree, and in a block on most devices."""

BLOCK = {"cuda": 8192}
"""Number of points in a block, by device; :data:`SAMPLE` on other devices.

The distances of two blocks take 256 MiB on CUDA, and 16 MiB on other devices.
"""

BLOCK_ENTRIES = 2**25
"""Largest number of signature entries in a block and in the sample: 128 MiB.

If signatures are long, a block has fewer points.
"""

MOST_EDGES = 2**20
"""Number of edges that are stored before a spanning tree replaces them.

The edges take 24 MiB, and the replacement temporarily takes four times as much.
"""

RESOLVED = 1 / 32
"""Smallest squared distance that float32 resolves, as a share of the terms of its computation."""

ENTRIES_AT_ONCE = 2**21
"""Signature entries converted to float64 at a time: 16 MiB."""


def single_linkage(
    signatures: Tensor, metric: str, block: int | None = None, sample: int | None = None
) -> Merges:
    """Merge clients by single linkage, without the distances of all pairs in memory.

    The result is that of :func:`fedclade.clustering.agglomerate`. The function takes about the time
    of one product of the matrix of signatures with itself, and memory for two blocks and for a few
    numbers per client.

    The edges of the spanning tree are chosen by distances in the precision of the signatures, or in
    float64 where points are too near for this precision. The heights of merges are then computed in
    float64. Rounding can therefore only change the choice between edges of nearly equal length,
    which for float32 differ by about 1e-6 of their length. Such a choice changes a height by as
    little. Merges whose heights differ by more are the same as in exact single linkage.

    Parameters
    ----------
    signatures
        Signatures of n clients, ``[n, R]``. Distances are computed on the device of this tensor.
    metric
        ``l1``, ``l2`` or ``cosine``; see :func:`fedclade.clustering.compute_distances`. ``l1`` is
        much slower, as it is not a matrix product.
    block
        Number of points in a block. It affects time and memory only. By default it depends on the
        device and R.
    sample
        Number of points in the first tree's sample. It affects time and memory only. By default it
        depends on R.

    Returns
    -------
    numpy.ndarray
        Merges, ``[n-1, 4]``, in SciPy's format.

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
    invalid = int(torch.count_nonzero(~torch.isfinite(points.norms)))
    if invalid:
        raise UpdateError(
            f"signatures of clients should be finite, got {invalid} with NaN or infinite entries; "
            "leave out the clients with these signatures"
        )
    if points.n < 2:
        return np.empty((0, 4))
    max_points = max(64, BLOCK_ENTRIES // max(1, signatures.shape[1]))
    sample = sample or min(SAMPLE, max_points)
    block = block or min(BLOCK.get(points.device.type, SAMPLE), max_points)
    tree = _build_first_tree(points, sample)
    if points.n > sample:
        forest = Forest(points.n, MOST_EDGES)
        forest.add(tree)
        for lighter in _find_lighter_pairs(points, tree, block):
            forest.add(lighter)
        tree = forest.find_tree()
    heights = points.compute_distances(tree.first, tree.second)
    if metric == "cosine" and are_signs(signatures):
        # The estimate increases with the cosine of the signs, so both have the same spanning tree.
        heights = 1 - convert_sign_cosines(1 - heights)
    order = np.argsort(heights, kind="stable")
    return build_merges(Edges(tree.first[order], tree.second[order], heights[order]))


class Points:
    """Signatures as points in space, with a *key* for each pair that orders pairs by distance.

    Keys sort pairs as their distances would, and are faster to compute: the key of a pair is its
    squared Euclidean distance, or with ``l1`` the distance itself. For ``cosine`` the points are
    unit vectors, whose squared distance is twice the cosine distance.

    Parameters
    ----------
    signatures
        Signatures of n clients, ``[n, R]``.
    metric
        ``l1``, ``l2`` or ``cosine``.
    """

    def __init__(self, signatures: Tensor, metric: str) -> None:
        self._signatures = signatures
        self._metric = metric
        self.n = len(signatures)
        self.device = signatures.device
        self.dtype = torch.promote_types(signatures.dtype, torch.float32)
        self.norms = row_norms(signatures).to(self.device)
        # Scale so that no square overflows or underflows: to length 1 for cosine, else by one
        # power of 2, which rounds nothing, so that the longest row has a length from 1 to 2.
        lengths = self.norms
        if metric != "cosine":
            lengths = self.norms.max().log2().floor().exp2().expand(self.n)
        self._scales = 1 / torch.where(lengths > 0, lengths, 1.0)
        # A row of zeros has cosine distance 1 to all others, so its squared distance to each is 2:
        # as if it had length 1 along a dimension of its own. This is the square of that length.
        self._own_squares = ((self.norms == 0) & (metric == "cosine")).to(self.dtype)

    def build_key_function(
        self, places: Places, dtype: torch.dtype | None = None
    ) -> Callable[[Places], tuple[Tensor, float]]:
        """Build a function that computes the keys of all pairs of p points and q other points.

        Keys are numbers that sort pairs as their distances would, and are faster to compute. The
        returned function takes the row numbers of the q other points. It returns the keys
        ``[p, q]``, and a magnitude for judging their rounding errors. A key is a sum of larger
        terms that cancel; the magnitude is that of these terms, and the rounding error of a key is
        relative to the magnitude, not to the key. With ``l1``, no terms cancel, and the magnitude
        is 0.

        Parameters
        ----------
        places
            Row numbers of the p points.
        dtype
            Precision of the computation; by default that of the signatures.
        """
        dtype = dtype or self.dtype
        rows, own_squares = self._scale_rows(places, dtype)
        if self._metric == "l1":
            return lambda others: (_compute_l1(rows, self._scale_rows(others, dtype)[0]), 0.0)

        # |a − b|² = |a|² + |b|² − 2ab is one matrix product. Moving the origin to the middle of
        # these points makes the three terms, and so their rounding, small for near points.
        middle = rows.mean(0)
        rows -= middle
        squares = (rows.square().sum(1) + own_squares)[:, None]

        def compute_keys_to(others: Places) -> tuple[Tensor, float]:
            other_rows, other_own_squares = self._scale_rows(others, dtype)
            other_rows -= middle
            other_squares = other_rows.square().sum(1) + other_own_squares
            keys = torch.addmm(other_squares, rows, other_rows.T, alpha=-2).add_(squares)
            return keys, float(squares.max() + other_squares.max())

        return compute_keys_to

    def _scale_rows(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return scaled copies of p points ``[p, R]``, and an addition to each squared length.

        The addition ``[p]`` is 1 for a row of zeros if the metric is ``cosine``, and otherwise 0.
        It gives a row of zeros the cosine distance 1 to every other point.
        """
        index = torch.from_numpy(places).to(self.device)
        rows = self._signatures[index].to(dtype)
        rows *= self._scales[index].to(dtype)[:, None]
        return rows, self._own_squares[index].to(dtype)

    def compute_distances(self, first: Places, second: Places) -> Numbers:
        """Return the distances of e pairs of points, ``[e]``, in float64."""
        result = np.empty(len(first))
        batch_size = max(1, ENTRIES_AT_ONCE // max(1, self._signatures.shape[1]))
        for start in range(0, len(first), batch_size):
            batch = slice(start, start + batch_size)
            result[batch] = self._compute_batch(first[batch], second[batch]).cpu().numpy()
        return result

    def _compute_batch(self, first: Places, second: Places) -> Tensor:
        """Return the distances of one batch of e pairs of points, ``[e]``, in float64."""
        i = torch.from_numpy(first).to(self.device)
        j = torch.from_numpy(second).to(self.device)
        a = self._signatures[i].double()
        b = self._signatures[j].double()
        if self._metric == "cosine":
            distance = 1 - (a * b).sum(1) * self._scales[i] * self._scales[j]
            return torch.where(distance < ROUNDING, 0.0, distance.clamp(max=2.0))
        return torch.linalg.vector_norm(a - b, 1 if self._metric == "l1" else 2, dim=1)

    def compute_keys(self, first: Places, second: Places) -> Numbers:
        """Return the keys of e pairs of points, ``[e]``, in float64.

        Keys are numbers that sort pairs of points as their distances would.
        """
        distances = self.compute_distances(first, second)
        if self._metric == "cosine":
            return 2 * distances
        scaled = distances * float(self._scales[0])
        return scaled if self._metric == "l1" else scaled**2


def _build_first_tree(points: Points, sample: int) -> Edges:
    """Return a first spanning tree, made of the minimum spanning tree of a sample of points.

    Each other point is connected to the nearest point of the sample. The lengths of edges are keys,
    numbers that sort pairs of points as their distances would. If the sample has all points, the
    tree is the minimum spanning tree.

    Parameters
    ----------
    points
        All points.
    sample
        Number of points in the sample.
    """
    shuffled = rng.generator(0, "spanning tree").permutation(points.n)
    sampled = np.sort(shuffled[:sample])
    rest = np.sort(shuffled[sample:])
    i, j = np.triu_indices(len(sampled), 1)
    keys, _ = points.build_key_function(sampled, torch.float64)(sampled)
    pairs = Edges(sampled[i], sampled[j], keys.cpu().numpy()[i, j])
    tree = pairs.find_spanning_forest(points.n)
    firsts = [tree.first]
    seconds = [tree.second]
    for start in range(0, len(rest), len(sampled)):
        block = rest[start : start + len(sampled)]
        keys, _ = points.build_key_function(block)(sampled)
        firsts.append(block)
        seconds.append(sampled[keys.argmin(1).cpu().numpy()])
    first = np.concatenate(firsts)
    second = np.concatenate(seconds)
    lengths = points.compute_keys(first, second)
    return Edges(first, second, lengths).find_spanning_forest(points.n)


def _find_lighter_pairs(points: Points, tree: Edges, block: int) -> Iterator[Edges]:
    """Compare all pairs of points, and yield the pairs that the minimum spanning tree may need.

    These are the pairs that are nearer than the longest edge on their path in the first tree.

    Parameters
    ----------
    points
        All points.
    tree
        First spanning tree.
    block
        Number of points that are compared at a time.
    """
    order, gaps = order_points(build_merges(tree))
    # A pair must be nearer by more than rounding. Otherwise, where very many points have equal
    # distances, half of all pairs would seem to be nearer.
    gaps *= 1 - 4 * torch.finfo(points.dtype).eps
    smallest = gaps[gaps > 0].min(initial=np.inf)
    # No pair is nearer than a path of length 0.
    longest = torch.from_numpy(np.where(gaps > 0, gaps, -np.inf)).to(points.device, points.dtype)
    for start in range(0, points.n, block):
        end = start + block
        comparison = Comparison(points, order[start:end])
        inner_gaps = longest[start : end - 1]
        smallest_inside = smallest if len(inner_gaps) else np.inf
        paths = _find_paths_within(inner_gaps)
        yield comparison.find_lighter(order[start:end], paths, smallest_inside)

        # Longest edge from each point of this block to the first point of the next block.
        path_out = _running_max(longest[start:end].flip(0)).flip(0)[:, None]
        for first in range(end, points.n, block):
            last = first + block
            inner_maxima = _running_max(longest[first : last - 1])
            path_in = torch.cat([longest.new_tensor([-torch.inf]), inner_maxima])
            paths = torch.maximum(path_out, path_in)
            smallest_across = max(float(path_out.min()), smallest)
            yield comparison.find_lighter(order[first:last], paths, smallest_across)
            if last < points.n:
                path_out = torch.maximum(path_out, longest[first:last].max())


class Comparison:
    """Comparison of one block of points with other blocks, by keys that order pairs by distance.

    Keys are computed in the precision of the signatures, or in float64 if that is too coarse.

    Parameters
    ----------
    points
        All points.
    places
        Numbers of the points in the block.
    """

    def __init__(self, points: Points, places: Places) -> None:
        self._points = points
        self._places = places
        self._compute_keys_to = points.build_key_function(places)

    def find_lighter(self, others: Places, paths: Tensor, smallest: float) -> Edges:
        """Compare the block with other points, and return the pairs that are near enough.

        The first spanning tree has one path between any two points. A pair is near enough if its
        key is less than the key of the longest edge on this path. Only such pairs can be edges of a
        minimum spanning tree in place of edges of the first tree.

        Parameters
        ----------
        others
            Row numbers of the q points that are compared with the p points of the block.
        paths
            Key of the longest edge on the path between each two points in the first spanning tree,
            ``[p, q]``.
        smallest
            Lower bound of all finite entries of ``paths``.
        """
        keys, scale = self._compute_keys_to(others)
        if smallest < RESOLVED * scale:
            keys, _ = self._points.build_key_function(self._places, torch.float64)(others)
        found = (keys < paths).nonzero(as_tuple=True)
        i, j = (index.cpu().numpy() for index in found)
        lengths = keys[found].to("cpu", torch.float64).numpy().clip(min=0)
        return Edges(self._places[i], others[j], lengths)


def _running_max(numbers: Tensor) -> Tensor:
    """Return the largest number up to each position."""
    return numbers.cummax(0).values


def _find_paths_within(gaps: Tensor) -> Tensor:
    """Return the longest edge on the path between each two of b consecutive points, ``[b, b]``.

    The points are in the order of a dendrogram's leaves, and ``gaps [b − 1]`` has the heights at
    which neighbours merge. The longest edge between two points is the largest gap between them.
    Entries on and below the diagonal are −∞, so that each pair is compared once.
    """
    b = len(gaps) + 1
    paths = gaps.new_full((b, b), -torch.inf)
    above_diagonal = torch.ones_like(paths[:, 1:], dtype=torch.bool).triu()
    paths[:, 1:] = torch.where(above_diagonal, gaps, -torch.inf)
    return paths.cummax(1).values


def _compute_l1(rows: Tensor, others: Tensor) -> Tensor:
    """Return the l1 distance Σ|a − b| of each row a of ``[p, R]`` and each row b of ``[q, R]``."""
    total = rows.new_zeros(len(rows), len(others))
    for a, b in zip(rows.split(COLUMNS, 1), others.split(COLUMNS, 1), strict=True):
        total += torch.cdist(a, b, p=1.0)
    return total


# Bi-partitions.


@dataclass(frozen=True)
class Bipartition:
    """Two clusters into which one cluster is split.

    The first cluster is the larger cluster or, if both have the same size, the cluster with the
    smallest client id.
    """

    first: tuple[int, ...]  # members in ascending order
    second: tuple[int, ...]
    alpha_cross_max: float  # largest similarity between the two clusters (CFL eq. 17)


def find_optimal_bipartition(alpha: Similarity, ids: Sequence[int]) -> Bipartition:
    """Split clients into the two clusters that are least similar to each other (CFL eq. 25).

    The similarity of two clusters is the largest similarity α of two clients across the split.
    Algorithm 1 of the paper joins clients in descending order of similarity until two clusters
    remain. This is single linkage, stopped before its last merge. It takes O(m²) time here, and
    O(m³) in the paper. Single linkage depends on the order of the similarities only, so −α is used
    as the distance. This is exact, while 1 − α would round small differences to ties.

    Parameters
    ----------
    alpha
        Similarities of m clients, ``[m, m]``, symmetric, m ≥ 2.
    ids
        Ids of the clients, ``[m]``. If several partitions are optimal, the choice depends on the
        ids, not on their order.

    Returns
    -------
    Bipartition
        The two clusters, and the largest similarity between them.

    Raises
    ------
    UpdateError
        If there are fewer than two clients, or a similarity is not finite.
    """
    order = _sort_clients(ids)
    invalid = np.count_nonzero(~np.isfinite(alpha))
    if invalid:
        raise UpdateError(
            f"similarities of clients should be finite, got {invalid} that are NaN or infinite; "
            "leave out the clients with these similarities"
        )
    similar = scipy.spatial.distance.squareform(alpha[np.ix_(order, order)], checks=False)
    negated = np.negative(similar, out=similar)
    merges = scipy.cluster.hierarchy.linkage(negated, method="single")
    return _cut_last_merge(merges, np.asarray(ids)[order], float(-merges[-1, 2]))


def find_bipartition_by_tree(signatures: Tensor, ids: Sequence[int]) -> Bipartition:
    """Find the optimal bi-partition by cosine similarity, without the similarities of all pairs.

    The result is that of :func:`find_optimal_bipartition` if the similarities that decide differ by
    more than the rounding of float32, about 1e-6; see :func:`fedclade.clustering.single_linkage`.
    The similarity across the split is computed in float64.

    Parameters
    ----------
    signatures
        Signatures of m clients, ``[m, R]``, m ≥ 2.
    ids
        Ids of the clients, ``[m]``.

    Returns
    -------
    Bipartition
        The two clusters, and the largest similarity between them.

    Raises
    ------
    UpdateError
        If there are fewer than two clients, or a signature is not finite.
    """
    order = _sort_clients(ids)
    if (np.diff(order) != 1).any():
        signatures = signatures[torch.from_numpy(order).to(signatures.device)]
    merges = single_linkage(signatures, "cosine")
    return _cut_last_merge(merges, np.asarray(ids)[order], 1 - float(merges[-1, 2]))


def _sort_clients(ids: Sequence[int]) -> Labels:
    """Return the row numbers of the clients in ascending order of their ids."""
    if len(ids) < 2:
        raise UpdateError(
            f"a bi-partition needs at least 2 clients, got {len(ids)}; do not split a smaller cluster"
        )
    return np.argsort(ids)


def _cut_last_merge(merges: Merges, ids: Labels, alpha_cross_max: float) -> Bipartition:
    """Return the bi-partition into the two clusters that merge last.

    Parameters
    ----------
    merges
        Merges of the clients in SciPy's format.
    ids
        Ids of the clients, in ascending order.
    alpha_cross_max
        Largest similarity between both clusters.
    """
    labels = cut(merges, 2)
    first = tuple(ids[labels == 0].tolist())
    second = tuple(ids[labels == 1].tolist())
    return Bipartition(first, second, alpha_cross_max)
