"""How PFLlib shares out a data set by ``dir`` (TsingZ0/PFLlib, dataset/utils/dataset_utils.py), in plain loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def examples_of_each(
    held_by_label: Sequence[int], clients: int, draw: Callable[[], np.ndarray], least_samples: int
) -> list[list[int]]:
    """Return for every client how many examples of each label it gets.

    Parameters
    ----------
    held_by_label
        How many examples there are of each label, of the training and the test split together.
    draw
        Returns shares of the clients from a Dirichlet distribution.
    least_samples
        Of a client; 40 in PFLlib, so that there is a batch of 10 in the quarter that it tests on.
    """
    n = sum(held_by_label)
    min_size, given = -1, [[0]]
    while min_size < least_samples:
        given = [[0] * len(held_by_label) for _ in range(clients)]
        for k, held in enumerate(held_by_label):
            proportions = draw()
            proportions = np.array(
                [p * (sum(of) < n / clients) for p, of in zip(proportions, given, strict=True)]
            )
            proportions = proportions / proportions.sum()
            cuts = [0, *(np.cumsum(proportions) * held).astype(int)[:-1].tolist(), held]
            for client in range(clients):
                given[client][k] = cuts[client + 1] - cuts[client]
        min_size = min(map(sum, given))
    return given
