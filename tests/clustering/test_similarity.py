from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform

from fedclade import ConfigError
from fedclade.clustering import compute_part_similarity, single_linkage
from fedclade.clustering.similarity import (
    METRICS,
    are_signs,
    compute_cosines,
    compute_distances,
    cosine_similarity,
)


def in_float64(signatures: torch.Tensor) -> np.ndarray:
    rows = signatures.double().numpy()
    norms = np.sqrt((rows**2).sum(1))
    return rows @ rows.T / np.outer(norms, norms)


def test_equals_the_definition_in_float64():
    """Eq. 51."""
    signatures = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(cosine_similarity(signatures), in_float64(signatures), atol=1e-6)


def test_equal_directions_are_alike_to_the_end_for_updates_of_600000_entries():
    """The square roots of the product's diagonal cancel its rounding, where norms of their own would not (by 3e-5)."""
    base = 0.01 * torch.randn(600_000, generator=torch.Generator().manual_seed(0))
    alpha = cosine_similarity(torch.stack([base, base, 1.7 * base, base]))
    np.testing.assert_allclose(alpha, np.ones((4, 4)), rtol=0, atol=1e-5)


def test_is_symmetric_with_ones_on_the_diagonal_and_within_bounds():
    alpha = cosine_similarity(
        torch.randn(30, 5, generator=torch.Generator().manual_seed(3)).repeat(2, 1)
    )
    assert np.array_equal(alpha, alpha.T)
    assert (np.diagonal(alpha) == 1).all()
    assert alpha.min() >= -1
    assert alpha.max() <= 1
    assert alpha.dtype == np.float64


def test_a_row_of_zeros_is_like_nothing_but_itself():
    alpha = cosine_similarity(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]))
    assert alpha.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_lengths_do_not_matter():
    alpha = cosine_similarity(torch.tensor([[3.0, 0.0], [0.001, 0.0], [-7.0, 0.0], [0.0, 2.0]]))
    np.testing.assert_allclose(alpha[0], [1, 1, -1, 0], atol=1e-7)


@pytest.mark.parametrize(
    ("metric", "name"), [("l1", "cityblock"), ("l2", "euclidean"), ("cosine", "cosine")]
)
@pytest.mark.parametrize(("n", "size"), [(2, 1), (7, 40), (5, 256), (6, 1000)])
def test_distances_equal_the_definitions_in_float64(metric, name, n, size):
    signatures = torch.randn(n, size, generator=torch.Generator().manual_seed(n))
    found = compute_distances(signatures, metric)
    assert found.dtype == np.float64
    np.testing.assert_allclose(
        found, pdist(signatures.double().numpy(), name), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("metric", METRICS)
def test_equal_rows_are_at_distance_0_to_the_end_even_far_from_the_origin(metric):
    """Differences of squares would not tell 1e-4 from 0 at norm 1,000."""
    row = 1.0 + torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    other = row.clone()
    other[:50_000] *= 1.01
    apart = squareform(compute_distances(torch.stack([row, other, row, row]), metric))
    assert (apart[np.ix_([0, 2, 3], [0, 2, 3])] == 0).all()
    assert (apart[1, [0, 2, 3]] > 0).all()


def test_a_row_of_zeros_is_at_cosine_distance_1():
    assert compute_distances(
        torch.tensor([[0.0, 0.0], [1.0, 0.0], [-2.0, 0.0]]), "cosine"
    ).tolist() == [1, 1, 2]


@pytest.mark.parametrize("metric", METRICS)
def test_one_row_has_no_distances(metric):
    assert compute_distances(torch.ones(1, 300), metric).shape == (0,)


def test_an_unknown_metric_suggests_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r"unknown metric 'cosin'; did you mean 'cosine'\? \(known: cosine, l1, l2\)",
    ):
        compute_distances(torch.ones(2, 2), "cosin")


def test_cosines_of_some_to_others_are_those_of_all():
    rows = torch.randn(7, 30, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(
        compute_cosines(rows[:3], rows[3:]), cosine_similarity(rows)[:3, 3:], atol=1e-6
    )


def test_a_row_of_zeros_has_cosine_0_to_all():
    zeros = torch.tensor([[0.0, 0.0]])
    assert compute_cosines(zeros, torch.tensor([[1.0, 0.0], [0.0, 0.0]])).tolist() == [[0.0, 0.0]]
    assert compute_cosines(torch.tensor([[3.0, 0.0]]), zeros).tolist() == [[0.0]]


def test_cosines_of_updates_are_estimated_from_their_signs():
    """Of updates at an angle φ a share φ/π of the signs differ: here a quarter, so φ = π/4."""
    signs = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, -1.0], [-1.0, -1.0, -1.0, -1.0]])
    expected = np.array(
        [[1.0, 0.5**0.5, -1.0], [0.5**0.5, 1.0, -(0.5**0.5)], [-1.0, -(0.5**0.5), 1.0]]
    )
    np.testing.assert_allclose(cosine_similarity(signs), expected, atol=1e-7)
    np.testing.assert_allclose(compute_cosines(signs, signs), expected, atol=1e-7)
    np.testing.assert_allclose(
        compute_part_similarity(signs[:, None]) + np.eye(3), expected, atol=1e-6
    )
    np.testing.assert_allclose(
        compute_distances(signs, "cosine"), 1 - squareform(expected - np.eye(3)), atol=1e-6
    )
    np.testing.assert_allclose(single_linkage(signs, "cosine")[0, 2], 1 - 0.5**0.5, atol=1e-6)


def test_numbers_are_no_signs():
    assert are_signs(torch.tensor([[1.0, -1.0]]))
    assert not are_signs(torch.tensor([[1.0, -1.0], [1.0, 0.5]]))
    assert not are_signs(torch.empty(0, 3))


def test_means_of_signs_stand_for_their_updates_where_that_is_said():
    signs = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, -1.0]])
    means = torch.stack([signs.mean(0), signs[1]])
    both = np.sin(np.pi / 2 * np.array([[0.75, 0.75], [0.75, 1.0]]))
    expected = both[0, 1] / np.sqrt(both[0, 0] * both[1, 1])
    assert cosine_similarity(means, signs=True)[0, 1] == pytest.approx(expected)
