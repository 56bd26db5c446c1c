"""Clients that did not answer when their cluster was split: they wait at the node, until they do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedclade.algorithms.base import ClusterRound, Event
from fedclade.routing import likeness
from fedclade.tree import ParameterTree


def place_waiting(tree: ParameterTree, parts: Sequence[ClusterRound]) -> tuple[ParameterTree, list[Event]]:
    """Put those who waited at a node that was split, and have answered there, into the child that is most like them.

    As in CFL's Algorithm 4: their updates were made at the model of the split, and are compared with those cached then.
    Where the child was split as well, they go on waiting there.
    """
    events: list[Event] = []
    for part in parts:
        children = [child for child in tree.children(part.node) if child.members]
        if not part.waits or not part.updates.ids or not children:
            continue
        signatures = part.updates.signatures
        nearest = likeness(signatures, children).argmax(axis=1)
        for k, child in enumerate(children):
            if mine := np.flatnonzero(nearest == k).tolist():
                joined = [part.updates.ids[i] for i in mine]
                tree = tree.with_members(child.id, joined, signatures[mine])
                events.append(Event("joined", child.id, {"clients": joined}))
    return tree, events
