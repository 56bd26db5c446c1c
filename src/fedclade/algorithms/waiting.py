"""Clients that did not answer when their cluster was split: they wait at the node, until they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.algorithms.base import ClusterRound, Event
from fedclade.tree import Node, ParameterTree


def place_waiting(tree: ParameterTree, parts: Sequence[ClusterRound]) -> tuple[ParameterTree, list[Event]]:
    """Put those who waited at a node that was split, and have answered there, into the child that is most like them.

    As in CFL's Algorithm 4: their updates were made at the model of the split, and are compared with those cached then.
    Where the child was split as well, they go on waiting there.
    """
    events: list[Event] = []
    for part in parts:
        children = [child for child in tree.children(part.node) if child.cached is not None and child.members]
        if not part.waits or not part.updates.ids or not children:
            continue
        signatures = part.updates.signatures
        likeness = torch.stack([_most_like(signatures, child) for child in children])
        for k, child in enumerate(children):
            mine = (likeness.argmax(dim=0) == k).nonzero().flatten().tolist()
            if mine:
                joined = [part.updates.ids[i] for i in mine]
                tree = tree.with_members(child.id, joined, signatures[mine])
                events.append(Event("joined", child.id, {"clients": joined}))
    return tree, events


def _most_like(signatures: Tensor, node: Node) -> Tensor:
    """Return each signature's cosine similarity to the one most like it of those cached for a node, ``[n]``."""
    assert node.cached is not None
    theirs = functional.normalize(node.cached.double(), dim=1)
    return (functional.normalize(signatures.double(), dim=1) @ theirs.T).amax(dim=1)
