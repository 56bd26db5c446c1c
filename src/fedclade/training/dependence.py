"""Signs that the examples of a client depend on each other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MOST_COMPARED = 256
"""Largest number of examples of a client that are compared."""

LEAST_PAIRS = 20
"""Smallest number of adjacent pairs from which a dependence is concluded."""

LARGEST_RANK = 0.4
"""Largest mean rank of the distances of adjacent pairs at which they count as similar."""

LEAST_DEVIATIONS = 6.0
"""Smallest number of standard deviations by which the mean rank is below that of random orders."""

ORDERS = 100
"""Number of random orders that estimate mean and standard deviation of the mean rank."""


def have_similar_neighbours(inputs: Tensor, labels: Tensor | None = None) -> bool:
    """Return whether adjacent examples are more similar than examples in a random order.

    Each adjacent pair has the rank of its distance among the distances of all pairs of examples, as
    a share from 0 (the smallest) to 1. In a random order the mean of these ranks is about 0.5. The
    order is not random if the mean rank is at most 0.4, and six standard deviations of the mean
    rank in random orders below its mean.

    Parameters
    ----------
    inputs
        Inputs of a client's examples in the order of its data, ``[n, ...]``. Integers are tokens,
        unless they are the pixels of images (uint8). Of more than 256 examples, 256 consecutive
        ones are compared.
    labels
        Label of each example, ``[n]``. Only examples of one label are then compared, so that rows
        that are sorted by label do not count as similar. None: all examples are compared.
    """
    first = max(0, (len(inputs) - MOST_COMPARED) // 2)
    some = slice(first, first + MOST_COMPARED)
    distances = _distances(inputs[some])
    count = len(distances)
    if labels is None:
        values = np.zeros(count, dtype=np.int64)
    else:
        values = labels[some].cpu().numpy()
    ranks = np.full((count, count), np.nan)
    for value in np.unique(values):
        rows = np.flatnonzero(values == value)
        ranks[np.ix_(rows, rows)] = _rank_pairs(distances[np.ix_(rows, rows)])
    found, pairs = _mean_of_adjacent(ranks, np.arange(count), values)
    if pairs < LEAST_PAIRS or found > LARGEST_RANK:
        return False
    draw = np.random.default_rng(0)
    means: list[float] = []
    for _ in range(ORDERS):
        mean, _ = _mean_of_adjacent(ranks, draw.permutation(count), values)
        means.append(mean)
    deviation = float(np.std(means))
    return deviation > 0 and float(np.mean(means)) - found >= LEAST_DEVIATIONS * deviation


def _distances(inputs: Tensor) -> np.ndarray:
    """Return the distances of all pairs of inputs, ``[n, n]``.

    The distance of tokens is the number of positions in which they differ. The distance of other
    inputs is Euclidean, after each column is scaled to a standard deviation of 1.
    """
    flat = inputs.reshape(len(inputs), -1).cpu()
    if flat.dtype == torch.int64:
        return torch.stack([(flat != row).sum(1) for row in flat]).double().numpy()
    columns = flat.double()
    columns = columns - columns.mean(0)
    deviation = columns.std(0, correction=0)
    columns = columns[:, deviation > 0] / deviation[deviation > 0]
    return torch.cdist(columns, columns).numpy()


def _rank_pairs(distances: np.ndarray) -> np.ndarray:
    """Return the ranks of the distances of all pairs, from 0 to 1, ``[n, n]``.

    Equal distances have their mean rank.
    """
    upper = np.triu_indices(len(distances), 1)
    ranks = np.full(distances.shape, np.nan)
    if len(upper[0]):
        _, places, counts = np.unique(distances[upper], return_inverse=True, return_counts=True)
        mean_ranks = np.cumsum(counts) - (counts - 1) / 2
        ranks[upper] = (mean_ranks[places] - 0.5) / len(upper[0])
        ranks.T[upper] = ranks[upper]
    return ranks


def _mean_of_adjacent(
    ranks: np.ndarray, order: np.ndarray, values: np.ndarray
) -> tuple[float, int]:
    """Return the mean rank of adjacent examples of one label, and the number of these pairs.

    Examples of one label are adjacent if no example between them has the label.
    """
    chains = order[np.argsort(values[order], kind="stable")]
    before = chains[:-1]
    after = chains[1:]
    is_pair = values[before] == values[after]
    if not is_pair.any():
        return 1.0, 0
    return float(ranks[before[is_pair], after[is_pair]].mean()), int(is_pair.sum())
