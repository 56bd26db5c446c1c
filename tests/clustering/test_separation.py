"""When a bi-partition is right: the theorem's bounds against its letters and against drawn gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade import ConfigError
from fedclade.clustering.separation import (
    bound_cross_similarity,
    bound_intra_similarity,
    gamma_bound,
    noise_cosine,
    separation_gap,
)
from fedclade.clustering.similarity import cosine_similarity
from fedclade.clustering.spanning_tree import find_optimal_bipartition
from tests.reference.separation import bound_of_eq_19, bound_of_eq_21


@given(st.integers(2, 6), st.integers(0, 10_000), st.floats(0, 0.6))
@settings(max_examples=60, deadline=None)
def test_bounds_with_unequal_noise_are_the_theorems_letters(k, seed, largest):
    draw = np.random.default_rng(seed)
    truth = [*range(k), *draw.integers(k, size=4).tolist()]
    gammas = draw.uniform(0, largest, len(truth)).tolist()
    assert bound_cross_similarity(gammas, truth) == pytest.approx(
        bound_of_eq_19(gammas, truth), abs=1e-12
    )
    assert bound_intra_similarity(gammas, truth) == pytest.approx(
        bound_of_eq_21(gammas, truth), abs=1e-12
    )


@given(st.integers(2, 5), st.integers(2, 40), st.integers(0, 10_000), st.floats(0.01, 0.95))
@settings(max_examples=200, deadline=None)
def test_no_drawn_gradients_break_the_bounds(k, d, seed, largest):
    """Theorem 1 and eq. 39, with gradients that sum to zero and another γ for every client."""
    draw = np.random.default_rng(seed)
    means = draw.normal(size=(k, d))
    means -= means.mean(0)
    truth = np.repeat(np.arange(k), 3)
    noise = draw.normal(size=(3 * k, d))
    noise *= (
        draw.uniform(0, largest, 3 * k)
        * np.linalg.norm(means[truth], axis=1)
        / np.linalg.norm(noise, axis=1)
    )[:, None]
    gradients = means[truth] + noise
    gammas = np.linalg.norm(noise, axis=1) / np.linalg.norm(means[truth], axis=1)  # eq. 16
    alpha = cosine_similarity(torch.from_numpy(gradients))
    split = find_optimal_bipartition(alpha, range(3 * k))
    cross, intra = (
        bound_cross_similarity(gammas.tolist(), truth.tolist()),
        bound_intra_similarity(gammas.tolist(), truth.tolist()),
    )
    gap = separation_gap(alpha, truth.tolist(), split.alpha_cross_max)
    assert split.alpha_cross_max <= cross + 1e-9
    assert gap + split.alpha_cross_max >= intra - 1e-9
    assert intra >= 1 - 2 * gammas.max() ** 2 - 1e-12, "eq. 38"
    right = not set(truth[list(split.first)]) & set(truth[list(split.second)])
    if cross < intra or gammas.max() < gamma_bound(split.alpha_cross_max):  # eqs. 36 and 39
        assert right


def test_bounds_by_hand():
    # two gradients that sum to zero
    assert bound_cross_similarity([0.0] * 2, [0, 1]) == pytest.approx(-1)
    assert bound_cross_similarity([0.0] * 3, [0, 1, 2]) == pytest.approx(0, abs=1e-15)  # cos(π/2)
    assert bound_cross_similarity([0.9] * 3, [0, 1, 2]) == 1.0
    # Eq. 22 for k = 2: −H, with H = 1 − 2γ² for equal γ.
    assert bound_cross_similarity([0.5] * 2, [0, 1]) == pytest.approx(-(1 - 2 * 0.25))
    assert bound_cross_similarity([0.6, 0.8], [0, 1]) == pytest.approx(0.6 * 0.8 - 0.8 * 0.6)
    assert bound_intra_similarity([0.5, 0.5], [0, 0]) == pytest.approx(0.5)
    assert bound_intra_similarity([0.9, 0.0, 0.6], [0, 0, 1]) == pytest.approx(math.sqrt(1 - 0.81))
    assert bound_intra_similarity([0.9, 0.5], [0, 1]) == 1.0, "nobody shares a distribution"
    assert noise_cosine(0.6, [0.8, 0.0]).tolist() == pytest.approx([-0.6 * 0.8 + 0.8 * 0.6, 0.8])


@pytest.mark.parametrize(
    ("gammas", "truth", "text"),
    [
        ([0.1, 1.0], [0, 1], r"gammas should be in \[0, 1\), got \[1\.0\]"),
        ([0.1, float("nan")], [0, 1], r"gammas should be in \[0, 1\), got \[nan\]"),
        ([0.1], [0, 1], "gammas should be one number for each of the 2 clients in truth, got 1"),
        (
            [0.1, 0.2],
            [3, 3],
            "truth should be labels of at least 2 distributions, got '1 distribution'",
        ),
    ],
)
def test_what_the_theorem_says_nothing_of_is_refused(gammas, truth, text):
    with pytest.raises(ConfigError, match=text):
        bound_cross_similarity(gammas, truth)


def test_a_split_can_be_right_without_a_gap():
    """Remark 2 has 'only if': here three like clients, 40° apart, hang together, and the outer two are 80° apart."""
    turn = math.radians(40)
    fan = [[math.cos(angle), math.sin(angle), 0.0] for angle in (turn, 0.0, -turn)]
    alpha = cosine_similarity(
        torch.tensor([*fan, [0.5, 0.0, math.sqrt(0.75)]], dtype=torch.float64)
    )
    split = find_optimal_bipartition(alpha, range(4))
    assert {split.first, split.second} == {(0, 1, 2), (3,)}
    assert separation_gap(alpha, [0, 0, 0, 1], split.alpha_cross_max) == pytest.approx(
        math.cos(2 * turn) - 0.5
    )
    assert math.cos(2 * turn) < 0.5


@pytest.mark.parametrize(
    ("alpha", "bound"), [(-1.0, 1.0), (0.0, math.sqrt(1 / 2)), (0.5, math.sqrt(1 / 4)), (1.0, 0.0)]
)
def test_gamma_bound_is_eq_39(alpha, bound):
    assert gamma_bound(alpha) == bound


ALPHA = np.array([[1.0, 0.8, 0.1], [0.8, 1.0, -0.2], [0.1, -0.2, 1.0]])


def test_separation_gap_is_the_smallest_similarity_inside_less_the_largest_across():
    """Eq. 28: clients 0 and 1 belong together."""
    assert separation_gap(ALPHA, [5, 5, 6], alpha_cross_max=0.1) == 0.8 - 0.1


def test_separation_gap_is_negative_in_a_pure_cluster():
    """All three have the same distribution: α_intra^min = -0.2."""
    assert separation_gap(ALPHA, [5, 5, 5], alpha_cross_max=0.1) == -0.2 - 0.1


def test_separation_gap_of_clients_that_are_all_different():
    """No pair lies inside a cluster: a client's similarity to itself, 1, is the smallest inside."""
    assert separation_gap(ALPHA, [5, 6, 7], alpha_cross_max=0.1) == 1 - 0.1
