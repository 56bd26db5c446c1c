"""Clients that did not answer when their cluster was split: they wait at the node, until they do."""

from __future__ import annotations

from collections.abc import Sequence

from fedclade.algorithms.cluster_update import ClusterUpdate
from fedclade.clustering import placed
from fedclade.core import Event, Joined, ParameterTree


def place_stragglers(tree: ParameterTree, parts: Sequence[ClusterUpdate]) -> tuple[ParameterTree, list[Event]]:
    """Put those who waited at a node that was split, and have answered there, into the child that is most like them.

    As in CFL's Algorithm 4: their updates were made at the model of the split, and are compared with those cached then.
    Where the child was split as well, they go on waiting there.
    """
    events: list[Event] = []
    for part in parts:
        if part.waits:
            tree, joined = placed(tree, part.node, part.updates)
            events += [Joined(node, tuple(clients)) for node, clients in joined.items()]
    return tree, events
