"""Clusters by descriptors of clients' data (FLUX): scaling, the knee, and the nearest mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.routing import Assignment, Step
from fedclade.clustering.similarity import Distances
from fedclade.core import ParameterTree, UpdateError

Points = NDArray[np.float64]

REACH = 1.02
"""Side of the cube that components are centred in, as a multiple of the largest latent entry."""

ROUNDING = 1e-9
"""Rounding of a difference curve, in [-1, 1]. Two clients that are each other's nearest make many
differences exactly 0."""

FARTHEST = 2.0
"""Largest distance of a newcomer that fits, as a multiple of the farthest member's distance."""


@dataclass(frozen=True, eq=False)
class DescriptorSpace:
    """Space in which descriptors are compared: centred, and each block scaled to [0, 1].

    A block has C numbers. Its minimum and its maximum are over all clients and components from
    which the space is made.
    """

    reach: float
    low: Points  # of each block, [B]
    span: Points  # [B]

    @classmethod
    def of(cls, descriptors: Tensor) -> DescriptorSpace:
        """Return the space of FLUX's descriptors of clients, ``[n, 2 + B, C]``."""
        numbers = descriptors.double().cpu().numpy()
        reach = REACH * float(numbers[:, 0].max())
        blocks = _center_blocks(numbers, reach)
        low = blocks.min((0, 2))
        high = blocks.max((0, 2))
        return cls(reach, low, np.where(high > low, high - low, 1.0))

    def points(self, descriptors: Tensor) -> Points:
        """Return descriptors ``[n, 2 + B', C]``, with the first B' blocks, as points ``[n, B' C]``."""
        blocks = _center_blocks(descriptors.double().cpu().numpy(), self.reach)
        count = blocks.shape[1]
        scaled = (blocks - self.low[:count, None]) / self.span[:count, None]
        return scaled.reshape(len(blocks), -1)


def _center_blocks(numbers: Points, reach: float) -> Points:
    """Return the blocks ``[n, B, C]``, with means relative to the middle of the cube.

    The means and deviations of a label with fewer than two examples are −1, and stay −1.
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
    """Return the Euclidean distances of all pairs of points ``[n, d]``, condensed."""
    return np.asarray(scipy.spatial.distance.pdist(points), dtype=np.float64)


def choose_epsilon_by_knee(distances: Distances) -> float:
    """Choose DBSCAN's ε: the knee of the sorted distances of points to their nearest neighbours.

    Parameters
    ----------
    distances
        Of all pairs of points, condensed.

    Returns
    -------
    float
        The largest of the nearest distances if there is no knee, as then no point stands out.
    """
    others = scipy.spatial.distance.squareform(distances)
    np.fill_diagonal(others, np.inf)
    nearest = np.sort(others.min(1))
    place = find_knee(nearest)
    return float(nearest[-1 if place is None else place])


def find_knee(values: NDArray[np.float64]) -> int | None:
    """Find where ascending values begin to rise steeply (Kneedle, Satopaa et al. 2011).

    The sensitivity is 1. The curve is scanned from the top, for its last peak above a straight
    line. A peak is a knee if the curve falls more than one step of that line below it or, after a
    dip, below the line itself. This is the behaviour of kneed 0.8.5, which FLUX's authors used;
    from 0.8.6 on, no knee is found between a dip and the next peak.

    Returns
    -------
    int or None
        Place of the knee in ``values``, or None if there is no knee.
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
        The newcomers.
    found
        Their descriptors, one row each; zeros for a client that did not reply.

    Raises
    ------
    UpdateError
        If a newcomer did not reply.
    """
    by_client = dict(zip(ids, found, strict=True))
    missing = [client for client, row in by_client.items() if not row.any()]
    if missing:
        raise UpdateError(
            f"a newcomer without a descriptor cannot be assigned: {missing}; take it out"
        )
    return by_client


def assign_to_nearest_descriptor(
    tree: ParameterTree,
    newcomers: Mapping[int, Tensor],
    members: Mapping[int, Tensor],
    space: DescriptorSpace,
) -> list[Assignment]:
    """Assign newcomers to the leaf with the nearest mean descriptor, without labels.

    A newcomer fits if it is at most :data:`FARTHEST` times as far from the mean as the farthest
    member, or if the leaf has one member only, which shows no range.

    Parameters
    ----------
    tree
        The parameter tree that has the leaves.
    newcomers
        Descriptor ``[4, C]`` of each newcomer, by client.
    members
        Descriptors of each leaf's members ``[k, 2 + B, C]``, by leaf.
    space
        Space in which they are compared.

    Returns
    -------
    list of Assignment
        One for each newcomer.
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
