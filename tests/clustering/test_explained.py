"""Share of the differences between clients that clusters explain, and its random reference."""

from __future__ import annotations

import numpy as np
import pytest

from fedclade.clustering import explain_differences


def explain(values, clusters):
    values = np.asarray(values, dtype=float)
    (found,) = explain_differences([values], clusters, np.random.default_rng(0))
    return found


def test_the_share_is_the_sum_of_squares_between_clusters_of_that_between_clients():
    found = explain([1.0, 3.0, 7.0, 9.0], [5, 5, 8, 8])
    # The means are 2 and 8, and the mean of all is 5.
    assert found.share == pytest.approx(4 * 9 / (16 + 4 + 4 + 16))


def test_random_clusters_are_the_reference_for_what_is_explained():
    draw = np.random.default_rng(1)
    clusters = [0] * 15 + [1] * 15
    noise = draw.normal(size=30)
    by_chance = explain(noise, clusters)
    assert by_chance.by_chance == pytest.approx(1 / 29, abs=0.01)
    assert by_chance.p_value > 0.05
    shifted = explain(noise + 3 * np.array(clusters), clusters)
    assert shifted.share > 0.5
    assert shifted.p_value == 0.001


def test_clusters_of_few_clients_can_explain_everything_and_prove_nothing():
    found = explain([1.0, 1.1, 9.0, 9.1], [0, 0, 1, 1])
    assert found.share > 0.99
    assert found.p_value > 0.3  # a third of all ways to pair four clients


def test_p_values_under_the_null_are_uniform_or_larger():
    draw = np.random.default_rng(0)
    clusters = [0] * 6 + [1] * 6
    values = [draw.normal(size=12) for _ in range(300)]
    found = explain_differences(values, clusters, np.random.default_rng(0))
    p_values = np.array([each.p_value for each in found])
    assert np.mean(p_values <= 0.05) < 0.1
    assert np.mean(p_values <= 0.5) < 0.6


def test_columns_count_together_and_missing_values_as_the_mean():
    clusters = [0, 0, 1, 1]
    table = np.array([[0.0, 1.0], [0.0, np.nan], [2.0, 1.0], [2.0, 1.0]])
    assert explain(table, clusters).share == pytest.approx(1.0)
    assert explain(table[:, 0], clusters).share == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "clusters"),
    [
        ([1.0, 2.0, 3.0], [0, 0, 0]),
        ([1.0, 2.0, 3.0], [0, 1, 2]),
        ([2.0, 2.0, 2.0, 2.0], [0, 0, 1, 1]),
        ([np.nan] * 4, [0, 0, 1, 1]),
    ],
)
def test_one_cluster_clusters_of_one_and_equal_clients_have_nothing_to_explain(values, clusters):
    assert explain(values, clusters) is None
