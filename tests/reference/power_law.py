"""How Li et al. 2018 share out MNIST (the generator of FedProx, which FedGroup follows), in plain loops."""

from __future__ import annotations

import numpy as np


def examples_of_each(
    held_by_label: list[int], weights: np.ndarray, *, per_label_first: int
) -> list[dict[int, int]]:
    """Return for every client how many examples of each label it gets.

    Parameters
    ----------
    held_by_label
        How many examples there are of each label.
    weights
        The log-normal draw of each client for each of its labels, ``[clients, labels_per_client]``.
    per_label_first
        How many examples of each of its labels a client begins with; 5 in the generator, for two labels.
    """
    clients, labels_per_client = weights.shape
    n_labels = len(held_by_label)
    given: list[dict[int, int]] = [{} for _ in range(clients)]
    # First a few examples for everybody.
    for user in range(clients):
        for j in range(labels_per_client):
            given[user][(user + j) % n_labels] = per_label_first
    # Then what is left of each label, in proportion to the draws; int() rounds down.
    total = [0.0] * n_labels
    for user in range(clients):
        for j in range(labels_per_client):
            total[(user + j) % n_labels] += weights[user, j]
    left = [
        held - sum(of.get(label, 0) for of in given) for label, held in enumerate(held_by_label)
    ]
    for user in range(clients):
        for j in range(labels_per_client):
            label = (user + j) % n_labels
            given[user][label] += int(left[label] * weights[user, j] / total[label])
    return given
