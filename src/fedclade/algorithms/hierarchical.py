"""The clustering step that FL+HC and PACFL share: all clients at once, merged from the nearest on, and cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedclade.clustering import Merges, cut, where_to_cut
from fedclade.core import Clustered

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


def merged(
    clients: Sequence[int],
    merges: Merges,
    metric: str,
    linkage: str,
    threshold: float | str | None,
    n_clusters: int | None,
) -> tuple[list[list[int]], float | None, Clustered]:
    """Cut the dendrogram of some clients, ``[m-1, 4]``; see :func:`fedclade.clustering.where_to_cut`.

    Return the members of each cluster, the largest first; the height of the cut, None where nothing is cut; and the
    event.
    """
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
