"""Stable groups among the final clusters of a run, collected from its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedclade.core import Checked, Regrouped, Withheld
from fedclade.runs.store.contents import Row


def collect_stable_groups(events: Sequence[Row]) -> dict[str, Any]:
    """Collect the stability of a run's final clusters for the section ``clusters`` of the summary.

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
    dict
        ``stability``, and ``stable_groups``: a list of client ids for each group, empty if no
        groups are stable. The dictionary is empty if no check measured the stability of the
        clusters, or if the log does not report small clusters.
    """
    if any(row["kind"] == Withheld.kind for row in events):
        return {}
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
    if stability is None:
        return {}
    return {"stability": stability, "stable_groups": groups}
