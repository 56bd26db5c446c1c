"""The clustering step that FL+HC and PACFL share: all clients at once, merged from the nearest on, and cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedclade.clustering import Distances, agglomerate, cut, where_to_cut
from fedclade.core import Clustered, require

Rule = tuple[str, object, bool, str]
"""A setting, its value, whether it holds, and what it should be; see :func:`fedclade.core.errors.require`."""


def cut_rules(threshold: float | str | None, n_clusters: int | None, largest: float = math.inf) -> tuple[Rule, ...]:
    """Return what the options ``threshold``, up to the largest distance there is, and ``n_clusters`` must be."""
    number = isinstance(threshold, int | float)
    holds = 0 < threshold <= largest if number else threshold in (None, "auto")
    unit = "" if math.isinf(largest) else f" and at most {largest:g} degrees"
    either = threshold is None or n_clusters is None
    return (
        ("algorithm.threshold", threshold, holds, f"greater than 0{unit}, or 'auto'"),
        ("algorithm.threshold", threshold, either, "left out where n_clusters is given"),
        ("algorithm.n_clusters", n_clusters, n_clusters is None or n_clusters >= 1, "at least 1"),
    )


def check_enough(name: str, n_clusters: int | None, clients: int) -> None:
    """Check that there are as many clients as a setting asks for clusters.

    Raises
    ------
    ConfigError
        If there are fewer.
    """
    holds = n_clusters is None or n_clusters <= clients
    require((f"algorithm.{name}", n_clusters, holds, f"at most the number of clients, {clients}"))


def merged(
    clients: Sequence[int],
    apart: Distances,
    metric: str,
    linkage: str,
    threshold: float | str | None,
    n_clusters: int | None,
) -> tuple[list[list[int]], float | None, Clustered]:
    """Merge clients to clusters.

    Parameters
    ----------
    clients
        In the order in which they were compared, ``[m]``.
    apart
        Their distances, condensed, ``[m(m-1)/2]``.
    metric, linkage
        How they were compared, for the event; how clusters are.
    threshold, n_clusters
        Where to cut, see :func:`fedclade.clustering.where_to_cut`.

    Returns
    -------
    tuple
        The members of each cluster, the largest first; the height of the cut, None where nothing is cut; and an event
        that tells all that a dendrogram needs.
    """
    merges = agglomerate(apart, linkage)
    count, height = where_to_cut(merges[:, 2], threshold, n_clusters)
    labels = cut(merges, count)
    clusters = [[clients[i] for i in np.flatnonzero(labels == label).tolist()] for label in range(count)]
    event = Clustered(
        0,
        metric=metric,
        linkage=linkage,
        threshold=height,
        sizes=tuple(len(cluster) for cluster in clusters),
        clients=tuple(clients),
        merges=tuple((int(a), int(b), at) for a, b, at, _ in merges.tolist()),
    )
    return clusters, height, event
