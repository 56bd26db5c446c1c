"""Clients that are clustered anew, and the models that their new clusters go on from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedclade.clustering import Labels
from fedclade.core import Group, ParameterTree, Updates, row_norms

SHARING_FADES = 0.9
"""What is left of the sharing of new clusters from one round to the next."""

TOO_FAR = 3.0
"""How many times as far as the median cluster one may move; honest ones of one federation are nearer to each other."""

LEAST_SHARING = 1e-3
"""Less of the way has no effect, and is not gone."""


def clusters_of(ids: Sequence[int], labels: Labels) -> tuple[tuple[int, ...], ...]:
    """Return the clients of each cluster, by labels ``[n]``."""
    return tuple(tuple(ids[i] for i in np.flatnonzero(labels == k).tolist()) for k in np.unique(labels))


def regrouped(
    tree: ParameterTree,
    clusters: Sequence[tuple[int, ...]],
    made: Updates,
    at: Tensor,
    *,
    round_number: int,
    criteria: Mapping[str, float],
) -> ParameterTree:
    """Return the tree with these clusters, found by updates that their members made at a model ``[S]``."""
    groups = [Group(cluster, *_origin(tree, cluster), made.signatures_of(cluster)) for cluster in clusters]
    return tree.regrouped(groups, params=at, round_number=round_number, criteria=criteria)


def divided(tree: ParameterTree, node: int, clusters: Sequence[tuple[int, ...]], round_number: int) -> ParameterTree:
    """Return the star after members of one of its leaves went apart; they keep the signatures that they have there.

    Members in none of the clusters are the root's alone.
    """
    others = [leaf for leaf in tree.leaves if leaf.id != node and leaf.members]
    groups = [Group(leaf.members, leaf.id, leaf.params, leaf.cached) for leaf in others]
    apart = tree.nodes[node]
    for cluster in clusters:
        rows = [apart.members.index(client) for client in cluster]
        cached = None if apart.cached is None else apart.cached[rows]
        groups.append(Group(cluster, *_origin(tree, cluster), cached))
    return tree.regrouped(groups, round_number=round_number)


def joint_model(tree: ParameterTree, sizes: Mapping[int, int]) -> Tensor:
    """Return the mean of the clusters' models, by the training examples of their members.

    A cluster that has moved more than :data:`TOO_FAR` times as far as the median one since all had one model is left
    out: the model of clients that lie has no bound where they have a cluster of their own, and nobody else is to learn
    from it. The median is by examples, and of clusters that have moved.
    """
    leaves = [leaf for leaf in tree.leaves if leaf.members]
    weights = torch.tensor([float(sum(sizes[client] for client in leaf.members)) for leaf in leaves])
    models = torch.stack([leaf.params for leaf in leaves])
    moved = row_norms(models, tree.nodes[0].params)
    ordered, order = moved.sort()
    up_to = weights.where(moved > 0, 0.0)[order].cumsum(0)
    median = ordered[min(int((2 * up_to <= up_to[-1]).sum()), len(leaves) - 1)]
    weights = weights.where(moved <= TOO_FAR * median, 0.0)
    return (weights / weights.sum()).to(models) @ models


def _origin(tree: ParameterTree, cluster: Sequence[int]) -> tuple[int, Tensor]:
    """Return the leaf that a new cluster goes on with, 0 for none, and the model that it goes on from."""
    come_from = Counter(tree.leaf_of[client] for client in cluster)
    taken_over = {leaf: n for leaf, n in come_from.items() if leaf and 2 * n > len(tree.nodes[leaf].members)}
    if not taken_over:
        return 0, tree.nodes[come_from.most_common(1)[0][0]].params
    weights = torch.tensor([float(n) for n in taken_over.values()])
    models = torch.stack([tree.nodes[leaf].params for leaf in taken_over])
    return max(taken_over, key=lambda leaf: taken_over[leaf]), (weights / weights.sum()).to(models) @ models


def drawn_together(tree: ParameterTree, sizes: Mapping[int, int], number: int, sharing: float) -> ParameterTree:
    """Move the models of clusters that are new towards the mean of all, after a round in which they trained apart.

    What they have in common they go on learning together for a while, though nobody knows which part of a model that
    is; then each is on its own. In the round in which a cluster was found its model goes this share of the way, in each
    further one a tenth less.

    Parameters
    ----------
    tree
        After the round.
    sizes
        Training examples of each client.
    number
        Of the round.
    sharing
        A share of the way, in [0, 1).
    """
    pulls = {
        leaf.id: sharing * SHARING_FADES ** (number - leaf.born - 1)
        for leaf in tree.leaves
        if leaf.members and leaf.parent is not None
    }
    if len(pulls) < 2 or max(pulls.values()) < LEAST_SHARING:
        return tree
    joint = joint_model(tree, sizes)
    for node, pull in pulls.items():
        model = tree.nodes[node].params
        tree = tree.with_model(node, model + pull * (joint - model))
    return tree
