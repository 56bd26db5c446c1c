"""Stable groups among the final clusters of a run, collected from its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedclade.core import Checked, Regrouped, Withheld
from fedclade.runs.store.contents import Row


def summarize_stable_groups(events: Sequence[Row]) -> dict[str, Any]:
    """Summarize the stable groups of a run for the section ``clusters`` of its summary.

    Parameters
    ----------
    events
        Rows of the run's events, in order.

    Returns
    -------
    dict
        ``stability``, rounded, and ``stable_sizes``, the sizes of the stable groups in descending
        order; empty if the stability of the final clusters is unknown.
    """
    found = find_stable_groups(events)
    if found is None:
        return {}
    stability, groups = found
    return {
        "stability": round(stability, 3),
        "stable_sizes": sorted((len(group) for group in groups), reverse=True),
    }


def find_stable_groups(events: Sequence[Row]) -> tuple[float, list[list[int]]] | None:
    """Find the stability of a run's final clusters, and the stable groups among them.

    The check that formed the clusters of all clients states the stable groups
    (:mod:`fedclade.clustering.stability`), and so do later checks that confirmed the clusters. Of
    these checks, the one with the highest stability counts, since it had the least noise: checks
    compare updates from different numbers of examples, at different models. If a check divided a
    cluster that is one of the stable groups, its own stable groups replace the group.

    Parameters
    ----------
    events
        Rows of the run's events, in order.

    Returns
    -------
    tuple or None
        The stability, and the client ids of each stable group; there is no group if none is stable.
        None if no check measured the stability of the clusters, or if the log does not report small
        clusters.
    """
    if any(row["kind"] == Withheld.kind for row in events):
        return None
    stability: float | None = None
    groups: list[list[int]] = []
    for row in events:
        if row["kind"] not in (Regrouped.kind, Checked.kind):
            continue
        of_event: float | None = row.get("stability")
        of_clusters = [list(group) for group in row.get("stable_groups") or ()]
        if row["node"] == 0:
            is_new = row["kind"] == Regrouped.kind
            if is_new or (of_event is not None and of_event > (stability or 0.0)):
                stability, groups = of_event, of_clusters
        elif stability is not None and of_event is not None and of_clusters:
            members = {client for group in of_clusters for client in group}
            others = [group for group in groups if set(group) != members]
            if len(others) < len(groups):
                stability, groups = min(stability, of_event), [*others, *of_clusters]
    return None if stability is None else (stability, groups)
