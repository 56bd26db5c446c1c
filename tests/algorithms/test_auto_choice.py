"""Choice of a model for each client by validation losses: by hand in small cases, and its properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedclade.algorithms.auto.choice import (
    LEAST_LOSS,
    MARGIN,
    Losses,
    choose_candidates,
    shrink_gains,
)
from fedclade.core import Evaluation


def losses_of(values, examples=100.0) -> Losses:
    """Return losses of clients 0, 1, ... from a row for each client."""
    matrix = np.array(values, dtype=np.float64)
    counts = np.broadcast_to(np.array(examples, dtype=np.float64), len(matrix))
    return Losses(tuple(range(len(matrix))), matrix, counts)


def reply(scores, losses=None, ids=None, **settings) -> Evaluation:
    """Return a reply with scores, losses (NaN by default) and 10 examples for each client."""
    ids = tuple(range(len(scores))) if ids is None else tuple(ids)
    losses = [math.nan] * len(ids) if losses is None else losses
    return Evaluation(
        ids,
        torch.tensor(scores, dtype=torch.float64)[:, None],
        torch.tensor(losses, dtype=torch.float64),
        torch.full((len(ids),), 10),
        **settings,
    )


SEVERAL = st.shared(st.integers(2, 8), key="clients")
POSITIVE = st.floats(0.01, 10)


@st.composite
def matrices(draw, least=0.01, largest=10.0) -> np.ndarray:
    """Draw losses ``[n, K]`` of up to 6 clients with up to 4 candidates."""
    shape = (draw(st.integers(1, 6)), draw(st.integers(1, 4)))
    return draw(arrays(np.float64, shape, elements=st.floats(least, largest)))


COUNTS = st.integers(1, 1000)


# Shrinkage


def test_shrinkage_by_hand():
    """Gains 0 and 2 of two clients whose noise has variance 1.

    The weights are 1, so Q = 2, and τ² = (2 − 1) / (2 − 1) = 1. A share of 1/2 of each difference
    from the mean remains, and the mean has the variance 2 / 2 = 1.
    """
    shrunk, deviations = shrink_gains(np.array([0.0, 2.0]), np.array([1.0, 1.0]))
    assert shrunk.tolist() == pytest.approx([0.5, 1.5])
    assert deviations.tolist() == pytest.approx([math.sqrt(0.5 + 0.25)] * 2)


def test_shrinkage_with_different_noise_by_hand():
    """Gains 0 and 3 with noise of variance 1 and 1/2: weights 1 and 2, mean 2, Q = 4 + 2 = 6.

    So τ² = 5 / (3 − 5/3) = 3.75, the weights are 1/4.75 and 1/4.25, and the shares 3.75/4.75 and
    3.75/4.25.
    """
    shrunk, _ = shrink_gains(np.array([0.0, 3.0]), np.array([1.0, 0.5]))
    mean = 3 / 4.25 / (1 / 4.75 + 1 / 4.25)
    expected = [mean - 3.75 / 4.75 * mean, mean + 3.75 / 4.25 * (3 - mean)]
    assert shrunk.tolist() == pytest.approx(expected)


def test_gains_that_differ_by_noise_alone_become_their_mean():
    shrunk, deviations = shrink_gains(np.array([0.1, 0.3]), np.array([1.0, 1.0]))
    assert shrunk.tolist() == pytest.approx([0.2, 0.2])
    assert deviations.tolist() == pytest.approx([math.sqrt(0.5)] * 2)


def test_the_gain_of_a_single_client_is_not_shrunk():
    shrunk, deviations = shrink_gains(np.array([0.4]), np.array([0.25]))
    assert (shrunk.tolist(), deviations.tolist()) == ([0.4], [0.5])


@given(
    arrays(np.float64, SEVERAL, elements=st.floats(-3, 3)),
    arrays(np.float64, SEVERAL, elements=st.floats(0.001, 1)),
)
def test_a_shrunk_gain_is_between_the_observed_gain_and_the_mean(observed, variances):
    shrunk, deviations = shrink_gains(observed, variances)
    assert (deviations > 0).all()
    lowest, highest = observed.min() - 1e-9, observed.max() + 1e-9
    assert ((lowest <= shrunk) & (shrunk <= highest)).all()
    # All are moved towards the same mean: there is a value between each pair.
    above = np.maximum(observed, shrunk)
    below = np.minimum(observed, shrunk)
    moved_up = shrunk > observed + 1e-9
    moved_down = shrunk < observed - 1e-9
    if moved_up.any() and moved_down.any():
        assert above[moved_up].max() <= below[moved_down].min() + 1e-9


@given(
    arrays(np.float64, SEVERAL, elements=st.floats(-3, 3)),
    arrays(np.float64, SEVERAL, elements=st.floats(0.001, 1)),
    st.floats(1.1, 10),
)
def test_a_client_with_more_examples_is_shrunk_less(observed, variances, factor):
    observed = np.concatenate([observed, observed[:1]])
    variances = np.concatenate([variances, variances[:1] / factor])
    shrunk, _ = shrink_gains(observed, variances)
    few, many = abs(shrunk[[0, -1]] - observed[0])
    assert many <= few + 1e-12


def test_a_client_with_more_examples_departs_where_another_does_not():
    """Three clients lose by candidate 1, two gain by it: the one with 400 examples is served with it."""
    values = [[1.0, 2.0]] * 6 + [[1.0, 0.7]] * 2
    choice = choose_candidates(losses_of(values, [100] * 6 + [2, 400]))
    assert choice.common == 0
    assert choice.chosen.tolist() == [0] * 7 + [1]


# Common candidate


def test_the_common_candidate_is_the_most_general_within_one_standard_error():
    """Candidate 1 has a lower mean loss than candidate 0, but only because of one client."""
    values = [[1.0, 1.0], [1.0, 1.0], [1.0, 0.5]]
    assert choose_candidates(losses_of(values)).common == 0
    values = [[1.0, 0.9], [1.0, 0.8], [1.0, 0.5]]
    assert choose_candidates(losses_of(values)).common == 1


def test_a_candidate_that_some_client_lacks_is_not_the_common_one():
    values = [[1.0, 0.1], [1.0, 0.1], [1.0, math.nan]]
    choice = choose_candidates(losses_of(values))
    assert choice.common == 0
    assert choice.chosen.tolist() == [1, 1, 0]
    assert choice.gains[2].tolist() == [0.0, -math.inf]


def test_gains_by_hand():
    """All clients gain log(1.02 / 0.52); the floor is 0.02 times the median loss of 1."""
    values = [[1.0, 0.5, 1.0]] * 4
    choice = choose_candidates(losses_of(values), margin=0.0)
    assert choice.common == 1
    gain = math.log((0.5 + LEAST_LOSS) / (1.0 + LEAST_LOSS))
    assert choice.gains == pytest.approx(np.array([[gain, 0.0, gain]] * 4))


def test_a_client_departs_only_by_more_than_the_margin():
    """Four clients have the gain g with candidate 1, four −g: τ² is large, so g is hardly shrunk."""
    gain = 0.4
    values = [[1.0, math.exp(-gain)]] * 4 + [[1.0, math.exp(gain)]] * 4
    losses = losses_of(values, 20)
    free, bound = choose_candidates(losses, margin=0.0), choose_candidates(losses, margin=3.0)
    assert free.chosen.tolist() == [1] * 4 + [0] * 4
    assert bound.chosen.tolist() == [0] * 8
    assert (
        choose_candidates(losses).chosen.tolist()
        == choose_candidates(losses, margin=MARGIN).chosen.tolist()
    )


# Properties of the choice


@given(matrices(), COUNTS, st.floats(0.001, 1000))
def test_a_factor_of_all_losses_changes_nothing(values, examples, factor):
    choice, scaled = (choose_candidates(losses_of(v, examples)) for v in (values, factor * values))
    # Rounding may decide between equal candidates.
    best = choice.gains.max(axis=1)
    assume(
        all(np.isclose(row, top).sum() == 1 for row, top in zip(choice.gains, best, strict=True))
    )
    assume(choice.common == scaled.common)
    assert scaled.gains == pytest.approx(choice.gains, abs=1e-6)


@given(matrices(), COUNTS, st.integers(0, 10))
def test_the_order_of_clients_changes_nothing(values, examples, seed):
    order = np.random.default_rng(seed).permutation(len(values))
    choice, other = (choose_candidates(losses_of(v, examples)) for v in (values, values[order]))
    assume(choice.common == other.common)
    assert other.gains == pytest.approx(choice.gains[order], abs=1e-6)


@given(matrices(), COUNTS, st.data())
def test_a_candidate_with_an_infinite_loss_is_never_chosen(values, examples, data):
    n, count = values.shape
    assume(count > 1)
    row, k = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, count - 1))
    values[row, k] = math.inf
    choice = choose_candidates(losses_of(values, examples))
    assert choice.chosen[row] != k
    assert not np.isnan(choice.gains).any()


def test_an_infinite_loss_is_not_chosen_though_all_others_gain():
    """The mean gain of the others is no reason to serve a client with a model that diverged for it."""
    values = [[1.0, 0.5]] * 20 + [[1.0, math.inf]]
    choice = choose_candidates(losses_of(values, [50] * 20 + [1]))
    assert choice.chosen.tolist() == [1] * 20 + [0]


def test_losses_of_0_and_infinity_have_an_order():
    choice = choose_candidates(losses_of([[0.0, math.inf], [0.0, 0.0], [math.inf, 0.0]]))
    assert choice.chosen.tolist() == [0, 0, 1]
    assert not np.isnan(choice.gains).any()


def test_without_any_finite_loss_all_have_the_common_candidate():
    choice = choose_candidates(losses_of([[math.inf, math.inf]] * 2))
    assert (choice.common, choice.chosen.tolist()) == (0, [0, 0])


@given(matrices(), COUNTS, st.data())
def test_a_candidate_that_a_client_lacks_is_never_chosen(values, examples, data):
    n, count = values.shape
    assume(count > 1)
    row, k = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, count - 1))
    values[row, k] = math.nan
    choice = choose_candidates(losses_of(values, examples))
    assert choice.chosen[row] != k
    assert choice.gains[row, k] == -math.inf


@given(st.lists(POSITIVE, min_size=1, max_size=6), st.integers(1, 4), COUNTS)
def test_identical_candidates_give_the_most_general_one(column, count, examples):
    values = np.repeat(np.array(column)[:, None], count, axis=1)
    choice = choose_candidates(losses_of(values, examples))
    assert choice.common == 0
    assert not choice.chosen.any()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=4), COUNTS)
def test_a_single_client_has_its_best_candidate(row, examples):
    choice = choose_candidates(losses_of([row], examples))
    assert row[choice.chosen[0]] == pytest.approx(min(row), abs=1e-9)


def test_losses_of_0():
    assert not choose_candidates(losses_of([[0.0, 0.0]] * 3)).chosen.any()
    choice = choose_candidates(losses_of([[0.5, 0.0]] * 3))
    assert choice.chosen.tolist() == [1] * 3
    assert np.isfinite(choice.gains).all()


@given(matrices(least=-10.0), COUNTS)
def test_negative_losses_have_finite_gains(values, examples):
    choice = choose_candidates(losses_of(values, examples))
    assert np.isfinite(choice.gains).all()


def test_of_negative_losses_the_lowest_is_the_best():
    choice = choose_candidates(losses_of([[-1.0, -3.0], [-1.1, -3.1], [-0.9, -2.9]]))
    assert choice.chosen.tolist() == [1] * 3


# Losses from replies


def test_losses_are_collected_by_client_and_candidate():
    first = reply([0.5, 0.5, 0.5], [1.0, 2.0, math.nan], ids=(4, 2, 7))
    second = reply([0.5, 0.5], [3.0, math.inf], ids=(2, 9))
    losses = Losses.of([first, second])
    assert losses.ids == (2, 4, 7)
    np.testing.assert_array_equal(
        losses.values, [[2.0, 3.0], [1.0, math.nan], [math.inf, math.nan]]
    )
    assert losses.examples.tolist() == [10.0] * 3


def test_if_one_client_sends_only_scores_all_are_compared_by_scores():
    first = reply([0.5, 0.75], [1.0, math.nan], without_loss=frozenset([1]))
    second = reply([0.25, 1.0], [0.1, math.nan], without_loss=frozenset([1]))
    assert Losses.of([first, second]).values.tolist() == [[0.5, 0.75], [0.25, 0.0]]


def test_errors_are_losses_themselves():
    first = reply([2.0, 3.0], higher_is_better=False, without_loss=frozenset([0, 1]))
    assert Losses.of([first]).values.tolist() == [[2.0], [3.0]]


def test_scores_of_all_candidates_are_read_in_the_same_way():
    """R² of one candidate is in [0, 1], of the other below 0: both are read as scores without bounds."""
    silent = frozenset([0, 1])
    first = reply([0.5, 0.75], without_loss=silent)
    second = reply([0.25, -2.0], without_loss=silent)
    assert Losses.of([first, second]).values.tolist() == [[-0.5, -0.25], [-0.75, 2.0]]
