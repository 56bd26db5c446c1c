"""Clusters by descriptors of clients' data, as in the method FLUX.

A descriptor is a matrix of statistics of a client's data. The latent of each example (the
representation that a model computes) is projected on C directions. The rows of a descriptor, with C
numbers each, are: the largest entry of all latents, repeated; the C components of a point near the
middle of the space; and blocks with means and standard deviations of the components, over all
examples and over the examples of each label. The module scales descriptors, chooses the distance ε
of DBSCAN, and assigns newcomers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy
from numpy.typing import NDArray

from fedclade.clustering.routing import Assignment, Step
from fedclade.clustering.similarity import Distances
from fedclade.core import ParameterTree, UpdateError

if TYPE_CHECKING:
    from torch import Tensor

Points = NDArray[np.float64]

REACH = 1.02
"""Side of the cube in which components are centred, as a multiple of the largest latent entry."""

ROUNDING = 1e-9
"""Rounding of a difference curve, in [-1, 1]. Two clients that are each other's nearest make many
differences exactly 0."""

FARTHEST = 2.0
"""Largest distance of a newcomer that fits, as a multiple of the farthest member's distance."""


@dataclass(frozen=True, eq=False)
class DescriptorSpace:
    """Space in which descriptors of clients' data are compared.

    A descriptor has blocks of C numbers: means or standard deviations of C components of the
    client's data. First, the components of a point near the middle of the space are subtracted from
    the means. Then each block is scaled so that its smallest number becomes 0 and its largest
    number becomes 1. These are the smallest and the largest of all C numbers of all clients from
    which the space is made.
    """

    reach: float
    low: Points  # of each block, [B]
    span: Points  # [B]

    @classmethod
    def of(cls, descriptors: Tensor) -> DescriptorSpace:
        """Return the space in which the given clients' descriptors are compared.

        Parameters
        ----------
        descriptors
            Descriptors of n clients, ``[n, 2 + B, C]``: the largest latent entry, the components of
            a central point, and B blocks of C numbers.
        """
        numbers = descriptors.double().cpu().numpy()
        reach = REACH * float(numbers[:, 0].max())
        blocks = _center_blocks(numbers, reach)
        low = blocks.min((0, 2))
        high = blocks.max((0, 2))
        return cls(reach, low, np.where(high > low, high - low, 1.0))

    def points(self, descriptors: Tensor) -> Points:
        """Scale descriptors to points of the space.

        Parameters
        ----------
        descriptors
            Descriptors of n clients, ``[n, 2 + B', C]``. They may have only the first B' of the
            space's blocks, such as those that need no labels.

        Returns
        -------
        numpy.ndarray
            Points, ``[n, B' C]``.
        """
        blocks = _center_blocks(descriptors.double().cpu().numpy(), self.reach)
        count = blocks.shape[1]
        scaled = (blocks - self.low[:count, None]) / self.span[:count, None]
        return scaled.reshape(len(blocks), -1)


def _center_blocks(numbers: Points, reach: float) -> Points:
    """Subtract the middle of the space from the blocks of means in descriptors.

    Blocks of standard deviations are unchanged. The means and deviations of a label with fewer than
    two examples are −1, and remain −1.

    Parameters
    ----------
    numbers
        Descriptors of n clients, ``[n, 2 + B, C]``.
    reach
        Side of the cube that contains the latents of the clients' examples. The central point in a
        descriptor belongs to a cube of side 1, so it is multiplied by ``reach``.

    Returns
    -------
    numpy.ndarray
        The blocks, ``[n, B, C]``, with means relative to the middle of the cube.
    """
    centre = numbers[:, 1:2]
    blocks = numbers[:, 2:].copy()
    labels = (blocks.shape[1] - 2) // 2
    means = [0, *range(2, 2 + labels)]
    deviations = [1, *range(2 + labels, 2 + 2 * labels)]
    absent = (blocks[:, deviations] == -1).all(2, keepdims=True)
    blocks[:, means] = np.where(absent, -1.0, blocks[:, means] - reach * centre)
    return blocks


def compute_point_distances(points: Points) -> Distances:
    """Return the Euclidean distances of all pairs of points ``[n, d]``, in SciPy's format."""
    return np.asarray(scipy.spatial.distance.pdist(points), dtype=np.float64)


def choose_epsilon_by_knee(distances: Distances) -> float:
    """Choose DBSCAN's ε: the knee of the sorted distances of points to their nearest neighbours.

    Parameters
    ----------
    distances
        Distances of all pairs of points, in SciPy's condensed form.

    Returns
    -------
    float
        The distance at the knee. Without a knee no point is an outlier, and the result is the
        largest of the distances to the nearest neighbours.
    """
    others = scipy.spatial.distance.squareform(distances)
    np.fill_diagonal(others, np.inf)
    nearest = np.sort(others.min(1))
    place = find_knee(nearest)
    return float(nearest[-1 if place is None else place])


def find_knee(values: NDArray[np.float64]) -> int | None:
    """Find where ascending values begin to rise steeply (Kneedle, Satopaa et al. 2011).

    The n values are scaled to [0, 1] and scanned from the largest to the smallest. They form a
    curve from 1 to 0, which is compared with the straight line between its ends. Let d be the
    height of the line minus the height of the curve. A peak (local maximum) of d is the knee if d
    falls below a threshold before the next peak. The threshold is d at the peak, minus 1/(n − 1)
    (Kneedle's sensitivity 1). After a dip (local minimum) of d the threshold is 0. This is the
    behaviour of kneed 0.8.5, which FLUX's authors used; from 0.8.6 on, no knee is found between a
    dip and the next peak.

    Returns
    -------
    int or None
        Index of the knee in ``values``, or None if there is no knee.
    """
    count = len(values)
    span = float(values[-1] - values[0])
    if count < 3 or span == 0:
        return None
    curve = (values[-1] - values[::-1]) / span - np.arange(count) / (count - 1)
    before = np.concatenate([curve[:1], curve[:-1]])
    after = np.concatenate([curve[1:], curve[-1:]])
    peak = None
    threshold = 0.0
    for place in range(count - 1):
        if curve[place] >= max(before[place], after[place]):  # a peak
            peak = place
            threshold = curve[place] - 1 / (count - 1)
        if curve[place] <= min(before[place], after[place]):  # a dip
            threshold = 0.0
        if peak is not None and curve[place + 1] < threshold - ROUNDING:
            return count - 1 - peak
    return None


def require_descriptors(ids: Sequence[int], found: Tensor) -> dict[int, Tensor]:
    """Return the descriptors of newcomers by client, or raise an error if some are missing.

    Parameters
    ----------
    ids
        Ids of the newcomers.
    found
        Descriptors of the newcomers, one row each; zeros for a newcomer that did not reply.

    Raises
    ------
    UpdateError
        If a newcomer did not reply.
    """
    by_client = dict(zip(ids, found, strict=True))
    missing = [client for client, row in by_client.items() if not row.any()]
    if missing:
        raise UpdateError(
            f"newcomers {missing} sent no descriptor, so they cannot be assigned to a cluster; "
            "remove them from the newcomers"
        )
    return by_client


def assign_to_nearest_descriptor(
    tree: ParameterTree,
    newcomers: Mapping[int, Tensor],
    members: Mapping[int, Tensor],
    space: DescriptorSpace,
) -> list[Assignment]:
    """Assign newcomers to the leaf with the nearest mean descriptor, without using labels.

    A newcomer fits into its leaf if it is at most :data:`FARTHEST` times as far from the mean as
    the farthest member, or if the leaf has only one member, from which no range of distances is
    known.

    Parameters
    ----------
    tree
        Parameter tree, whose leaves are the clusters.
    newcomers
        Descriptor ``[4, C]`` of each newcomer, by client. It has no blocks that need labels.
    members
        Descriptors of each leaf's members ``[k, 2 + B, C]``, by leaf.
    space
        Space in which descriptors are compared.

    Returns
    -------
    list of Assignment
        One assignment for each newcomer.
    """
    means: dict[int, Points] = {}
    farthest: dict[int, float] = {}  # distance of the farthest member from the mean
    sizes: dict[int, int] = {}
    for leaf, rows in members.items():
        points = space.points(rows[:, :4])
        means[leaf] = points.mean(0)
        farthest[leaf] = float(np.linalg.norm(points - means[leaf], axis=1).max())
        sizes[leaf] = len(points)
    assignments: list[Assignment] = []
    for client, row in newcomers.items():
        point = space.points(row[None])[0]
        scores = {leaf: float(np.linalg.norm(point - mean)) for leaf, mean in means.items()}
        taken = min(scores, key=scores.__getitem__)
        fits = sizes[taken] < 2 or scores[taken] <= FARTHEST * farthest[taken]
        step = Step(0, "distance", scores, taken=taken, fits=fits)
        assignments.append(Assignment.along(tree, client, [step]))
    return assignments
