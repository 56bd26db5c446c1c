from __future__ import annotations

import math

import pytest

from fedclade.tasks.metrics import (
    cluster_scores,
    gap_closed,
    mean_and_interval,
    mean_score,
    perplexity,
    spread,
)


def test_spread_of_eleven_clients():
    """0.0, 0.1, ..., 1.0: quantile q lies at q/100; the worst tenth of 11 is 2 clients."""
    summary = spread([k / 10 for k in reversed(range(11))])
    assert summary["mean"] == pytest.approx(0.5)
    assert summary["std"] == pytest.approx(
        math.sqrt(sum((k / 10 - 0.5) ** 2 for k in range(11)) / 11)
    )
    assert (summary["min"], summary["max"]) == (0.0, 1.0)
    assert {q: summary[f"p{q}"] for q in (5, 10, 25, 50, 75, 90)} == pytest.approx(
        {q: q / 100 for q in (5, 10, 25, 50, 75, 90)}
    )
    assert summary["worst10_mean"] == pytest.approx((0.0 + 0.1) / 2)


def test_the_worst_tenth_of_perplexities_are_the_largest():
    assert (
        spread([float(k) for k in range(1, 21)], lower_is_better=True)["worst10_mean"]
        == (19 + 20) / 2
    )


def test_perplexity_is_the_exponential_of_the_loss_and_does_not_overflow():
    assert perplexity(math.log(36.0)) == pytest.approx(36.0)
    assert perplexity(1e6) == math.exp(700.0)


def test_spread_of_one_client():
    found = spread([0.25])
    assert (found.pop("clients"), found.pop("without_score")) == (1, 0)
    assert set(found.values()) == {0.25, 0.0}
    assert found["std"] == 0.0


def test_clients_without_a_score_are_counted_and_left_out():
    found = spread([0.5, math.nan, 1.0, None], lower_is_better=True)
    assert (found["mean"], found["min"], found["worst10_mean"]) == (0.75, 0.5, 1.0)
    assert (found["clients"], found["without_score"]) == (2, 2)
    assert mean_score([0.5, math.nan, 1.0, None]) == 0.75


@pytest.mark.parametrize("values", [[], [math.nan, None]])
def test_without_any_score_there_is_no_number_and_no_nan(values: list[float | None]):
    found = spread(values)
    assert (found.pop("clients"), found.pop("without_score")) == (0, len(values))
    assert set(found.values()) == {None}
    assert mean_score(values) is None


def test_infinite_scores_of_models_that_diverged_leave_no_nan():
    found = spread([1.0, math.inf], lower_is_better=True)
    assert (found["mean"], found["std"]) == (math.inf, None)


@pytest.mark.parametrize(
    ("found", "ari", "nmi"),
    [
        ({0: 7, 1: 7, 2: 3, 3: 3}, 1.0, 1.0),  # other labels, same clusters
        ({0: 0, 1: 0, 2: 0, 3: 0}, 0.0, 0.0),
        ({0: 0, 1: 1, 2: 0, 3: 1}, -0.5, 0.0),  # ARI = (0 − 2·2/6) / ((2 + 2)/2 − 2·2/6)
    ],
)
def test_cluster_scores_against_the_truth(found, ari, nmi):
    scores = cluster_scores(found, {3: 1, 2: 1, 1: 0, 0: 0})
    assert scores["ari"] == pytest.approx(ari)
    assert scores["nmi"] == pytest.approx(nmi, abs=1e-12)


def test_without_a_truth_there_are_no_cluster_scores():
    assert cluster_scores({0: 0}, None) == {"ari": None, "nmi": None}


def test_gap_closed_is_0_at_fedavg_and_1_at_the_oracle():
    assert gap_closed(0.6, 0.6, 0.9) == 0.0
    assert gap_closed(0.9, 0.6, 0.9) == 1.0
    assert gap_closed(0.8, 0.5, 0.9) == pytest.approx((0.8 - 0.5) / (0.9 - 0.5))
    assert gap_closed(0.5, 0.6, 0.9) < 0


@pytest.mark.parametrize("oracle", [0.6, 0.5])
def test_there_is_no_gap_where_the_oracle_is_not_better(oracle):
    assert gap_closed(0.7, 0.6, oracle) is None


def test_interval_of_three_values_by_students_t():
    """t(0.975, 2) = 4.30265, the standard deviation of 1, 2, 3 is 1."""
    mean, half = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.30265 * 1 / math.sqrt(3), rel=1e-5)


def test_one_value_has_no_interval():
    assert mean_and_interval([0.7]) == (0.7, None)
