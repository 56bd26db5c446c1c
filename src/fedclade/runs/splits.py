"""Which clusters of a round came out of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedclade.core import Clustered, ClusterSplit, Event, ParameterTree, Regrouped

Members = Mapping[int, tuple[int, ...]]
"""Of clusters, by node."""


def splits_of(
    before: ParameterTree, after: ParameterTree, events: Sequence[Event]
) -> list[tuple[int, Members, Event | None]]:
    """Return the splits of a round: of each the node, the members of what it became, and the event, if there is one.

    See :meth:`fedclade.Callback.on_split` for what is a split.
    """
    found: list[tuple[int, Members, Event | None]] = [
        (event.node, dict(zip(event.children, event.clusters, strict=False)), event)
        for event in events
        if isinstance(event, ClusterSplit)
    ]
    if found:
        return found
    was = {leaf.id for leaf in before.leaves if leaf.members} if len(before.nodes) > 1 else set[int]()
    regrouped = [event for event in events if isinstance(event, Regrouped)]
    if was and not regrouped:
        return []
    now = {leaf.id: leaf.members for leaf in after.leaves if leaf.members}
    if len(now) < 2 or now.keys() <= was:
        return []
    if regrouped:
        leaves = [[after.leaf_of[cluster[0]] for cluster in event.clusters] for event in regrouped]
        pairs = zip(regrouped, leaves, strict=True)
        return [(event.node, dict(zip(to, event.clusters, strict=True)), event) for event, to in pairs]
    clustered = [event for event in events if isinstance(event, Clustered)]
    return [(0, now, clustered[-1] if clustered else None)]
