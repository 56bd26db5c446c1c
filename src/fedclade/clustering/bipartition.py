"""From similarities to clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from fedclade.clustering.linkage import Merges, cut
from fedclade.clustering.similarity import Labels, Similarity
from fedclade.clustering.spanning_tree import single_linkage
from fedclade.core import UpdateError


@dataclass(frozen=True)
class Bipartition:
    """Two clusters in place of one; the larger is the first, or at equal size the one with the smallest id."""

    first: tuple[int, ...]  # members in ascending order
    second: tuple[int, ...]
    alpha_cross_max: float  # largest similarity between members of different clusters (CFL eq. 17)


def optimal_bipartition(alpha: Similarity, ids: Sequence[int]) -> Bipartition:
    """Split clients in two so that the largest similarity across the split is as small as possible (CFL eq. 25).

    Algorithm 1 of the paper joins clients in descending order of similarity until two clusters are left. That is single
    linkage, stopped before its last merge: O(m²) here, where the paper's loop is O(m³). Single linkage depends on the
    order of the similarities only, so it is given −α, which is exact; 1 − α would round small differences to ties.

    Parameters
    ----------
    alpha
        Similarities ``[m, m]``, symmetric, m ≥ 2.
    ids
        The clients, ``[m]``. Where several partitions are optimal, the choice depends on the ids, not on their order.

    Raises
    ------
    UpdateError
        If there are fewer than two clients, or a similarity is not finite.
    """
    order = _in_order(ids)
    if not np.isfinite(alpha).all():
        raise UpdateError(f"similarities should be finite, got {np.count_nonzero(~np.isfinite(alpha))} that are not")
    similar = scipy.spatial.distance.squareform(alpha[np.ix_(order, order)], checks=False)
    merges = scipy.cluster.hierarchy.linkage(np.negative(similar, out=similar), method="single")
    return _two(merges, np.asarray(ids)[order], float(-merges[-1, 2]))


def bipartition_by_tree(signatures: Tensor, ids: Sequence[int]) -> Bipartition:
    """Return the optimal bi-partition of signatures ``[m, R]`` by cosine similarity, without that of every pair.

    As :func:`optimal_bipartition` finds it, where the similarities that decide are further apart than float32 rounds
    them, about 1e-6; see :func:`fedclade.clustering.single_linkage`. The similarity across is computed in float64.

    Raises
    ------
    UpdateError
        If there are fewer than two clients, or a signature is not finite.
    """
    order = _in_order(ids)
    if (np.diff(order) != 1).any():
        signatures = signatures[torch.from_numpy(order).to(signatures.device)]
    merges = single_linkage(signatures, "cosine")
    return _two(merges, np.asarray(ids)[order], 1 - float(merges[-1, 2]))


def _in_order(ids: Sequence[int]) -> Labels:
    """Return the places of the clients by their ids."""
    if len(ids) < 2:
        raise UpdateError(f"a bi-partition needs at least 2 clients, got {len(ids)}")
    return np.argsort(ids)


def _two(merges: Merges, ids: Labels, alpha_cross_max: float) -> Bipartition:
    """Return the clusters that merge last, of clients in ascending order."""
    labels = cut(merges, 2)
    first, second = (tuple(ids[labels == label].tolist()) for label in (0, 1))
    return Bipartition(first, second, alpha_cross_max)
