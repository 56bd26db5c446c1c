"""Clusters by what a model makes of clients' data (FLUX): descriptors beside each other, the knee, the nearest mean."""

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
"""So many times the largest entry of all latents is the side of the cube that components are centred in."""

ROUNDING = 1e-9
"""Of a difference curve, in [-1, 1]; two clients that are each other's nearest make many a difference exactly 0."""

FARTHEST = 2.0
"""So many times as far from a cluster's mean as its farthest member a newcomer still fits."""


@dataclass(frozen=True, eq=False)
class DescriptorSpace:
    """Where descriptors lie beside each other: centred, and each block scaled to [0, 1] over those that it is made of.

    A block, of C numbers, has one minimum and one maximum over all clients and its components.
    """

    reach: float
    low: Points  # of each block, [B]
    span: Points  # [B]

    @classmethod
    def of(cls, descriptors: Tensor) -> DescriptorSpace:
        """Return the space of FLUX's descriptors of clients, ``[n, 2 + B, C]``."""
        numbers = descriptors.double().cpu().numpy()
        reach = REACH * float(numbers[:, 0].max())
        blocks = _centred(numbers, reach)
        low, high = blocks.min((0, 2)), blocks.max((0, 2))
        return cls(reach, low, np.where(high > low, high - low, 1.0))

    def points(self, descriptors: Tensor) -> Points:
        """Return descriptors ``[n, 2 + B', C]`` as points ``[n, B' C]``, by the first B' of the B blocks."""
        blocks = _centred(descriptors.double().cpu().numpy(), self.reach)
        count = blocks.shape[1]
        return ((blocks - self.low[:count, None]) / self.span[:count, None]).reshape(len(blocks), -1)


def _centred(numbers: Points, reach: float) -> Points:
    """Return the blocks ``[n, B, C]``: means are from the middle of the cube, those of labels with −1 stay so."""
    centre, blocks = numbers[:, 1:2], numbers[:, 2:].copy()
    labels = (blocks.shape[1] - 2) // 2
    means, deviations = [0, *range(2, 2 + labels)], [1, *range(2 + labels, 2 + 2 * labels)]
    absent = (blocks[:, deviations] == -1).all(2, keepdims=True)
    blocks[:, means] = np.where(absent, -1.0, blocks[:, means] - reach * centre)
    return blocks


def compute_point_distances(points: Points) -> Distances:
    """Return the Euclidean distances of all pairs of n points, as SciPy lists them."""
    return np.asarray(scipy.spatial.distance.pdist(points), dtype=np.float64)


def choose_epsilon_by_knee(distances: Distances) -> float:
    """Return the distance at the knee of the distances of points to their nearest, given those of all pairs.

    Where there is no knee, none of them stands out, and it is the largest.
    """
    others = scipy.spatial.distance.squareform(distances)
    np.fill_diagonal(others, np.inf)
    nearest = np.sort(others.min(1))
    place = find_knee(nearest)
    return float(nearest[-1 if place is None else place])


def find_knee(values: NDArray[np.float64]) -> int | None:
    """Return where ascending values begin to rise steeply (Satopaa et al. 2011, Kneedle, sensitivity 1); None: nowhere.

    From the top: the last peak of how far the curve has fallen, beyond a straight line, when it is left by more than
    one step of that line, or after a dip for less than the line itself. So does kneed 0.8.5, which FLUX's authors had;
    from 0.8.6 on no knee is found behind a dip before the next peak.
    """
    count, span = len(values), float(values[-1] - values[0])
    if count < 3 or span == 0:
        return None
    curve = (values[-1] - values[::-1]) / span - np.arange(count) / (count - 1)
    before, after = np.concatenate([curve[:1], curve[:-1]]), np.concatenate([curve[1:], curve[-1:]])
    peak, least = None, 0.0
    for place in range(count - 1):
        if curve[place] >= max(before[place], after[place]):
            peak, least = place, curve[place] - 1 / (count - 1)
        if curve[place] <= min(before[place], after[place]):
            least = 0.0
        if peak is not None and curve[place + 1] < least - ROUNDING:
            return count - 1 - peak
    return None


def require_descriptors(ids: Sequence[int], found: Tensor) -> dict[int, Tensor]:
    """Return the descriptors of newcomers, by client; an UpdateError if one did not send any."""
    if absent := [client for client, row in zip(ids, found, strict=True) if not row.any()]:
        raise UpdateError(f"a newcomer without a descriptor cannot be assigned: {absent}; take it out")
    return dict(zip(ids, found, strict=True))


def assign_to_nearest_descriptor(
    tree: ParameterTree, newcomers: Mapping[int, Tensor], members: Mapping[int, Tensor], space: DescriptorSpace
) -> list[Assignment]:
    """Assign newcomers to the leaf whose members' mean is nearest to them, by descriptors without labels.

    Parameters
    ----------
    tree
        The leaves' own.
    newcomers
        The descriptor ``[4, C]`` of each, by client.
    members
        Those of each leaf's members ``[k, 2 + B, C]``, by leaf.
    space
        In which they are compared.
    """
    of_members = {leaf: space.points(rows[:, :4]) for leaf, rows in members.items()}
    means = {leaf: points.mean(0) for leaf, points in of_members.items()}
    reach = {leaf: float(np.linalg.norm(of_members[leaf] - mean, axis=1).max()) for leaf, mean in means.items()}
    found: list[Assignment] = []
    for client, row in newcomers.items():
        point = space.points(row[None])[0]
        scores = {leaf: float(np.linalg.norm(point - mean)) for leaf, mean in means.items()}
        taken = min(scores, key=scores.__getitem__)
        fits = len(of_members[taken]) < 2 or scores[taken] <= FARTHEST * reach[taken]
        found.append(Assignment.along(tree, client, [Step(0, "distance", scores, taken, fits)]))
    return found
