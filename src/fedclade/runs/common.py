"""What clusters have in common: layers that are averaged over all of them.

IFCA's paper (Ghosh, Chung, Yin, Ramchandran 2020) proposes it, as weight sharing, where clusters are ambiguous.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedclade.core import ParameterTree


def with_common(tree: ParameterTree, entries: Tensor, sizes: Mapping[int, int]) -> ParameterTree:
    """Return the tree after a round with the same values in all its leaves at some entries of their models.

    These are the mean over the leaves, by the training examples of their members. Before the round leaves agreed there,
    as they go on from one model, or were made to agree after the round in which they began; so after it all have moved
    by the mean of their steps, as one cluster of all clients would have. A leaf without members is moved along.

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
