"""Merging of clusters with few members, and averaging of layers that all clusters share."""

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

# Common layers, which are averaged over all clusters.
#
# IFCA's paper (Ghosh, Chung, Yin, Ramchandran 2020) proposes weight sharing of this kind for
# ambiguous clusters.


def with_common(tree: ParameterTree, entries: Tensor, sizes: Mapping[int, float]) -> ParameterTree:
    """Average the common entries of the models of all leaves, and return the new tree.

    Common entries are those that all clusters share, and leaves are the current clusters. The mean
    is weighted by the training examples of the leaves' members. Before a round, the common entries
    are equal in all leaves, and during the round each leaf changes them by its own update. After
    averaging, the common entries have therefore changed by the mean update of all clients, as if
    there were a single cluster. A leaf without members gets the same values.

    Parameters
    ----------
    tree
        The tree after the round.
    entries
        Mask ``[S]`` over the S entries of a model: true for entries that all clusters share.
    sizes
        Number of training examples of each client.
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
    """Merge clusters of fewer than ``least`` members into other clusters, after a round.

    The smallest cluster is merged first. Its members join another cluster: the largest one below
    the nearest common ancestor in the tree. The small cluster remains in the tree without members,
    with the model of the cluster that its members joined. As a result, no client is evaluated with
    a model of fewer clients than ``least``, and no such model is stored.

    Parameters
    ----------
    tree
        The tree after the round.
    least
        Smallest number of members of a cluster.
    events
        Events of the round.

    Returns
    -------
    tuple
        The tree after merging; and the events that may be reported. Events about merged or small
        clusters are left out or shortened, and a :class:`~fedclade.core.Withheld` event counts the
        merged clusters.
    """
    nodes = list(tree.nodes)
    gone = list[int]()
    leaves = {leaf.id for leaf in tree.leaves}
    while small := sorted(
        (len(nodes[i].members), i) for i in leaves if 0 < len(nodes[i].members) < least
    ):
        node = nodes[small[0][1]]
        if (into := _find_target(tree, nodes, node.id, leaves)) is None:
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
        _move_members(tree, nodes, node, into)
    merged = ParameterTree(tuple(nodes)) if gone else tree
    shown = [each for event in events for each in _filter_event(event, merged, set(gone), least)]
    return merged, [*shown, Withheld(0, len(gone), least)] if gone else shown


def is_withheld(tree: ParameterTree, node: int, least: int) -> bool:
    """Return whether a node's model and numbers must not be released, as it has too few members.

    ``least`` is the setting ``min_cluster_size``.
    """
    return least > 1 and len(tree.nodes[node].members) < least


def _find_target(
    tree: ParameterTree, nodes: list[Node], small: int, leaves: set[int]
) -> int | None:
    """Return the node of the cluster into which a small cluster is merged.

    Clusters are searched below the small cluster's parent, then below the parent's parent, and so
    on, until at least one other cluster with members is found; the largest of these is returned.
    The result is None if no other cluster has members.
    """
    for above in reversed(tree.above(small)[:-1]):
        below = [
            i for i in leaves if i != small and any(node.id == above.id for node in tree.above(i))
        ]
        if peopled := [i for i in below if nodes[i].members]:
            return max(peopled, key=lambda i: (len(nodes[i].members), -i))
    return None


def _move_members(tree: ParameterTree, nodes: list[Node], small: Node, into: int) -> None:
    """Add the members of a small cluster to another cluster, and to the ancestors of that cluster.

    ``nodes`` is updated in place; ``into`` is the node of the other cluster.
    """
    for node in tree.above(into):
        now = nodes[node.id]
        members = {**dict.fromkeys(now.members), **dict.fromkeys(small.members)}
        if len(members) == len(now.members):
            continue
        cached = None  # signatures of updates from different models cannot be compared
        if node.parent == small.parent and now.cached is not None and small.cached is not None:
            both = ParameterTree(tuple(nodes)).with_members(node.id, small.members, small.cached)
            cached = both.nodes[node.id].cached
        nodes[node.id] = replace(now, members=tuple(sorted(members)), cached=cached)


def _filter_event(event: Event, tree: ParameterTree, gone: set[int], least: int) -> list[Event]:
    """Return a list with the event as it may be reported, without merged and small clusters.

    The list is empty if nothing of the event may be reported.
    """
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
    # The event lists how single clients were merged into clusters.
    if isinstance(event, Clustered) and min(event.sizes) < least:
        return []
    # The event contains sums over fewer than ``least`` clients.
    if isinstance(event, GroupFounded) and event.clients < least:
        return []
    if isinstance(event, Joined) and event.node and len(event.clients) < least:
        return []
    parts = getattr(event, "clusters", None)
    if isinstance(parts, tuple) and any(len(part) < least for part in parts):
        return []
    return [event]
