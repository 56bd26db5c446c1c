from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclade.clustering.sampling import assign_to_nearest_mean
from fedclade.clustering.similarity import METRICS

ROWS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.5], [0.5, 2.0], [9.0, 8.0], [0.1, 0.0]])


@pytest.mark.parametrize(
    ("metric", "expected"),
    # The means are (2, 0.25) and (0, 1); their directions (1, 0.16) and (0, 1).
    [("l1", [0, 1, 0, 1, 0, 1]), ("l2", [0, 1, 0, 1, 0, 1]), ("cosine", [0, 1, 0, 1, 0, 0])],
)
def test_all_but_those_drawn_join_the_nearest_mean(metric, expected):
    found = assign_to_nearest_mean(ROWS, np.array([0, 1, 2]), np.array([0, 1, 0]), metric)
    assert found.tolist() == expected


@pytest.mark.parametrize("metric", METRICS)
def test_those_drawn_keep_their_clusters(metric):
    """Though client 0 is nearer to the mean of the others."""
    rows = torch.tensor([[1.0, 0.1], [1.0, 0.0], [-5.0, 9.0], [1.0, 0.2]])
    found = assign_to_nearest_mean(rows, np.array([0, 1, 2]), np.array([0, 1, 0]), metric)
    assert found.tolist() == [0, 1, 0, 1]


def test_a_row_of_zeros_joins_the_first_cluster():
    assert assign_to_nearest_mean(
        torch.eye(3) * 0, np.array([0, 1]), np.array([0, 1]), "cosine"
    ).tolist() == [0, 1, 0]
