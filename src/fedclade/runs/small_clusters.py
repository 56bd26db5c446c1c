"""Clusters with few members: they are merged into others, and nothing is released or reported of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedclade.core import (
    Clustered,
    ClusterSplit,
    Event,
    GroupFounded,
    Joined,
    Node,
    ParameterTree,
    Withheld,
)

# What clusters have in common: layers that are averaged over all of them.
#
# IFCA's paper (Ghosh, Chung, Yin, Ramchandran 2020) proposes it, as weight sharing, where clusters
# are ambiguous.


def with_common(tree: ParameterTree, entries: Tensor, sizes: Mapping[int, int]) -> ParameterTree:
    """Return the tree after a round with the same values in all its leaves at some entries of their models.

    These are the mean over the leaves, by the training examples of their members. Before the round
    leaves agreed there, as they go on from one model, or were made to agree after the round in
    which they began; so after it all have moved by the mean of their steps, as one cluster of all
    clients would have. A leaf without members is moved along.

    Parameters
    ----------
    tree
        After the round.
    entries
        Which entries of a model are common, ``[S]``.
    sizes
        Training examples of each client.
    """
    held = [leaf for leaf in tree.leaves if leaf.members]
    if len(tree.leaves) < 2 or not held:
        return tree
    weights = torch.tensor([float(sum(sizes[client] for client in leaf.members)) for leaf in held])
    models = torch.stack([leaf.params for leaf in held])
    entries = entries.to(models.device)
    mean = (weights / weights.sum()).to(models) @ models[:, entries]
    for leaf in tree.leaves:
        model = leaf.params.clone()
        model[entries] = mean
        tree = tree.with_model(leaf.id, model)
    return tree


def merge_small(
    tree: ParameterTree, least: int, events: Sequence[Event]
) -> tuple[ParameterTree, list[Event]]:
    """Return a tree after a round without clusters of fewer than ``least`` members, and what may be said of the round.

    The smallest is first: its members go to the largest cluster below the nearest node above that
    has others, and it is left empty, with that cluster's model. So no client is served with the
    model of so few, and none is kept.
    """
    nodes = list(tree.nodes)
    gone = list[int]()
    leaves = {leaf.id for leaf in tree.leaves}
    while small := sorted(
        (len(nodes[i].members), i) for i in leaves if 0 < len(nodes[i].members) < least
    ):
        node = nodes[small[0][1]]
        if (into := _target(tree, nodes, node.id, leaves)) is None:
            break
        gone.append(node.id)
        nodes[node.id] = replace(
            node,
            members=(),
            params=nodes[into].params,
            cached=None,
            trained_from=None,
            continued=None,
        )
        _join(tree, nodes, node, into)
    merged = ParameterTree(tuple(nodes)) if gone else tree
    shown = [each for event in events for each in _shown(event, merged, set(gone), least)]
    return merged, [*shown, Withheld(0, len(gone), least)] if gone else shown


def is_withheld(tree: ParameterTree, node: int, least: int) -> bool:
    """Whether nothing may be released of a node, since it has too few members."""
    return least > 1 and len(tree.nodes[node].members) < least


def _target(tree: ParameterTree, nodes: list[Node], small: int, leaves: set[int]) -> int | None:
    """Return the largest cluster below the nearest node above a small one; None if there is no other."""
    for above in reversed(tree.above(small)[:-1]):
        below = [
            i for i in leaves if i != small and any(node.id == above.id for node in tree.above(i))
        ]
        if peopled := [i for i in below if nodes[i].members]:
            return max(peopled, key=lambda i: (len(nodes[i].members), -i))
    return None


def _join(tree: ParameterTree, nodes: list[Node], small: Node, into: int) -> None:
    """Make the members of a small cluster those of another, and of the nodes above it."""
    for node in tree.above(into):
        now = nodes[node.id]
        members = {**dict.fromkeys(now.members), **dict.fromkeys(small.members)}
        if len(members) == len(now.members):
            continue
        cached = None  # signatures that were made at another model cannot be compared
        if node.parent == small.parent and now.cached is not None and small.cached is not None:
            both = ParameterTree(tuple(nodes)).with_members(node.id, small.members, small.cached)
            cached = both.nodes[node.id].cached
        nodes[node.id] = replace(now, members=tuple(sorted(members)), cached=cached)


def _shown(event: Event, tree: ParameterTree, gone: set[int], least: int) -> list[Event]:
    """Return an event without what it says of clusters that are gone; nothing if that is all it says."""
    if event.node in gone:
        return []
    if isinstance(event, ClusterSplit):
        children = tuple(child for child in event.children if child not in gone)
        if len(children) < 2:
            return []
        return [
            replace(
                event,
                children=children,
                clusters=tuple(tree.nodes[child].members for child in children),
            )
        ]
    # its merges are those of single clients
    if isinstance(event, Clustered) and min(event.sizes) < least:
        return []
    # its sums are those of so few clients
    if isinstance(event, GroupFounded) and event.clients < least:
        return []
    if isinstance(event, Joined) and event.node and len(event.clients) < least:
        return []
    parts = getattr(event, "clusters", None)
    if isinstance(parts, tuple) and any(len(part) < least for part in parts):
        return []
    return [event]
