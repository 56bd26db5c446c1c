"""Splits: clusters of a round whose members were in one cluster before the round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedclade import core
from fedclade.core import ParameterTree

if TYPE_CHECKING:
    from fedclade.core import Event, Regrouped

Members = Mapping[int, Sequence[int]]
"""Client ids of the members of each cluster, by node id."""


def splits_of(
    before: ParameterTree, after: ParameterTree, events: Sequence[Event]
) -> list[tuple[int, Members, Event | None]]:
    """List the splits of clusters in a round.

    See :meth:`fedclade.Callback.on_split` for the definition of a split.

    Parameters
    ----------
    before, after
        The trees before and after the round.
    events
        Events of the round.

    Returns
    -------
    list
        A tuple for each split: the id of the node that was split, the members of each new cluster
        by node id, and the event that reports the split, or None if no event reports it.
    """
    found: list[tuple[int, Members, Event | None]] = [
        (event.node, dict(zip(event.children, event.clusters, strict=False)), event)
        for event in events
        if isinstance(event, core.ClusterSplit)
    ]
    if found:
        return found
    was: set[int] = set()
    if len(before.nodes) > 1:
        was = {leaf.id for leaf in before.leaves if leaf.members}
    regrouped = [event for event in events if isinstance(event, core.Regrouped)]
    if was and not regrouped:
        return []
    now = {leaf.id: leaf.members for leaf in after.leaves if leaf.members}
    if len(now) < 2 or now.keys() <= was:
        return []
    if regrouped:
        return [(event.node, _members_by_leaf(event, after), event) for event in regrouped]
    clustered: list[Event] = [event for event in events if isinstance(event, core.Clustered)]
    return [(0, now, clustered[-1] if clustered else None)]


def _members_by_leaf(event: Regrouped, tree: ParameterTree) -> Members:
    """Return the members of the clusters that a regrouping formed, by node id.

    The node of a cluster is the leaf of the tree in which the cluster's first member is.
    """
    leaves = [tree.leaf_of[cluster[0]] for cluster in event.clusters]
    return dict(zip(leaves, event.clusters, strict=True))
