from __future__ import annotations

import math

import pytest
import torch

from fedclade.clustering import SplitCriteria, cosine_similarity
from fedclade.clustering import separation as criteria
from fedclade.core import Updates, mean


def updates(deltas, sizes=None, n_parameters=2) -> Updates:
    n = len(deltas)
    return Updates.received(
        range(n), sizes or [1] * n, torch.tensor(deltas), n_parameters, torch.zeros(n), 1
    )


def criteria_of(made: Updates, *, compared: bool = False) -> SplitCriteria:
    return SplitCriteria.of(
        made, mean(made), cosine_similarity(made.signatures) if compared else None
    )


def test_mean_norm_is_the_norm_of_the_weighted_mean():
    """Eq. 32: (1·(8, 0) + 3·(0, 4)) / 4 = (2, 3)."""
    assert criteria_of(updates([[8.0, 0.0], [0.0, 4.0]], [1, 3])).mean_norm == pytest.approx(
        math.hypot(2, 3)
    )


def test_max_norm_is_the_largest_norm_of_an_update():
    """Eq. 33, unweighted."""
    assert criteria_of(updates([[3.0, 4.0], [0.0, 1.0]], [1, 99])).max_norm == 5.0


def test_buffers_are_left_out_of_norms_and_similarities():
    criteria = criteria_of(updates([[3.0, 4.0, 100.0], [3.0, 4.0, 300.0]]), compared=True)
    assert criteria.mean_norm == 5.0
    assert criteria.max_norm == 5.0
    assert criteria.similarity[0, 1] == pytest.approx(1.0)


def test_norms_of_long_updates_are_exact():
    criteria = criteria_of(updates(torch.full((1, 600_000), 0.001).tolist(), n_parameters=600_000))
    expected = float(torch.tensor(0.001).double()) * math.sqrt(600_000)
    assert criteria.max_norm == pytest.approx(expected, rel=1e-12)
    assert criteria.mean_norm == pytest.approx(expected, rel=1e-12)


def test_criteria_of_two_opposite_updates():
    """α_cross^max = −1, so that eq. 39 allows any noise below √((1 + 1)/2) = 1."""
    criteria = criteria_of(updates([[1.0, 0.0], [-1.0, 0.0]]), compared=True).numbers
    assert criteria == {
        "mean_norm": 0.0,
        "max_norm": 1.0,
        "alpha_cross_max": -1.0,
        "gamma_bound": 1.0,
    }


def test_a_cluster_of_one_has_norms_only():
    criteria = criteria_of(updates([[3.0, 4.0]]))
    assert criteria.bipartition is None
    assert criteria.numbers == {"mean_norm": 5.0, "max_norm": 5.0}


def test_similarities_are_computed_only_when_asked_for():
    few = updates([[1.0, 0.0], [-1.0, 0.0]])
    assert criteria_of(few).similarity is None
    assert criteria_of(few).bipartition is None
    assert criteria_of(few).numbers.keys() == {"mean_norm", "max_norm"}


def test_many_clients_are_compared_without_a_matrix(monkeypatch):
    """The numbers are the same; similarities there are none."""
    made = updates(
        torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).tolist(), n_parameters=4
    )
    few = criteria_of(made).compared(made.signatures, made.ids)
    monkeypatch.setattr(criteria, "MOST_PAIRED", 29)
    many = criteria_of(made).compared(made.signatures, made.ids)
    assert few.similarity is not None
    assert many.similarity is None
    assert (many.bipartition.first, many.bipartition.second) == (
        few.bipartition.first,
        few.bipartition.second,
    )
    assert many.numbers == pytest.approx(few.numbers, abs=1e-6)
