"""Far groups: clients far from all other clients, separated before the rest is clustered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from fedclade.clustering.linkage import agglomerate

FARTHER = 1.25
"""Smallest distance of a far group from all other clients, as a multiple of the usual distance.

For honest clients on digits and MNIST with two or four label swaps, with rotations, or with
Dirichlet label shares, the last merge was at 0.97 to 1.05 times the usual distance.
"""

USUAL = 0.8
"""Quantile of a client's distances to the others that counts as usual.

If no cluster has more than four fifths of the clients, this is the distance to another cluster.
"""


@dataclass(frozen=True)
class FarGroup:
    """Group of clients that are near to each other and far from all other clients."""

    places: tuple[int, ...]  # row numbers of the clients, ascending
    distance: float  # distance between the group and all other clients
    usual: float  # usual distance among the other clients


def find_far_groups(
    apart: NDArray[np.float64], most: int, method: str = "average"
) -> list[FarGroup]:
    """Find groups of clients that are far from all other clients.

    Clients are merged, the nearest first. The last merge joins a group to the rest of the clients.
    If the group is small, and its distance from the rest is more than :data:`FARTHER` times the
    usual distance of the rest, the group is separated. The search is then repeated with the rest.
    The usual distance is computed from the rest alone, so the group's own updates cannot change the
    bound with which its distance is compared.

    Parameters
    ----------
    apart
        Distances ``[n, n]``, symmetric.
    most
        Largest number of clients in all groups together.
    method
        Linkage; see :func:`fedclade.clustering.agglomerate`.

    Returns
    -------
    list of FarGroup
        The groups in the order in which they were separated.

    Raises
    ------
    ConfigError
        If the linkage is unknown.
    UpdateError
        If a distance is not finite.
    """
    groups: list[FarGroup] = []
    remaining = np.arange(len(apart))
    while len(remaining) > 3:
        distances = apart[np.ix_(remaining, remaining)]
        merges = agglomerate(scipy.spatial.distance.squareform(distances, checks=False), method)
        group, rest = _split_last_merge(merges)
        if len(group) > most:
            break
        usual = compute_usual_distance(distances[np.ix_(rest, rest)])
        distance = float(merges[-1, 2])
        # A usual distance of 0 is no scale to compare with: nearly all clients are equal.
        if not distance > FARTHER * usual > 0:
            break
        groups.append(FarGroup(tuple(remaining[group].tolist()), distance, usual))
        remaining = remaining[rest]
        most -= len(group)
    return groups


def compute_usual_distance(apart: NDArray[np.float64]) -> float:
    """Return the usual distance of clients, with which the distance of a far group is compared.

    It is the median over clients of the :data:`USUAL` quantile of their distances to other clients.

    Parameters
    ----------
    apart
        Distances of n clients, ``[n, n]``, n at least 2.
    """
    others = apart[~np.eye(len(apart), dtype=bool)].reshape(len(apart), -1)
    return float(np.median(np.quantile(others, USUAL, axis=1, method="lower")))


def _split_last_merge(merges: NDArray[np.float64]) -> tuple[list[int], list[int]]:
    """Return the members of the smaller and of the larger of the two clusters that merge last.

    Members are row numbers in ascending order.

    Parameters
    ----------
    merges
        Merges of all clients in SciPy's format.
    """
    count = len(merges) + 1
    members = {client: [client] for client in range(count)}
    pairs = merges[:-1, :2].astype(int).tolist()
    for cluster, (first, second) in enumerate(pairs, start=count):
        members[cluster] = members.pop(first) + members.pop(second)
    first, second = (sorted(cluster) for cluster in members.values())
    return (first, second) if len(first) < len(second) else (second, first)
