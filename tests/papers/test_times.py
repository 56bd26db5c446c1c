"""Estimates of times on a GPU: the examples of an experiment, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedclade_papers import EXPERIMENTS, Result
from fedclade_papers.times import GPU, RATES, count_examples, estimate_seconds

ALL = 100 * 600 * 3
"""Examples of a round of FL+HC in which all of its 100 clients train for 3 epochs."""

BY_HAND = {
    "cfl-fig5-data": {
        "cnn": 3 * 50 * 3 * 20 * (10 + 20 + 50 + 100 + 150 + 200),
        "cifar_cnn": 3 * 50 * 3 * 20 * (100 + 200 + 500 + 1000 + 1500 + 2400),
    },
    "cfl-fig6-rounds": {"cnn": 3 * 50 * 3 * 20 * 100, "cifar_cnn": 3 * 50 * 3 * 20 * 1500},
    "cfl-fig7-norms": {"cnn": 2 * 1000 * 3 * 60_000},
    "cfl-fig7-steps": {"cnn": 2 * 2 * 1000 * 3 * 2 * 30_000},
    "cfl-fig8-cifar": {"cifar_cnn": 2 * 200 * 3 * 50_000},
    "cfl-fig9-agnews": {"lstm": 2 * 100 * 3 * 120_000},
    # FL; FL+HC with n = 1; updates after n = 1, 3, 5, 10 and 10 rounds at α = 0.2.
    "flhc-iid": {"cnn": round(ALL * (10 + 0.2 + 1 + 49 + 29 * 0.2 + 5))},
    # FL at four fractions; four cells at each fraction, with n = 1, 3, 5, 10.
    "flhc-table1": {
        "cnn": round(ALL * sum(50 * a + 19 * a + 4 + 4 * 50 - 19 for a in (0.1, 0.2, 0.5, 1.0)))
    },
    # FL; updates after ten rounds; five cuts of each of ten linkages.
    "flhc-table5": {"cnn": round(ALL * (10 + 3 + 5 * 10 * (2 + 1 + 40)))},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_examples_of_an_experiment_are_counted_as_by_hand(name: str):
    assert count_examples(name, EXPERIMENTS[name].paper) == BY_HAND[name]


def test_tables_of_the_same_runs_have_the_same_number():
    examples = {
        name: count_examples(name, EXPERIMENTS[name].paper)
        for name in ("flhc-table1", "flhc-table2", "flhc-table4", "flhc-table5")
    }
    assert examples["flhc-table1"] == examples["flhc-table2"]
    assert examples["flhc-table4"] == examples["flhc-table5"]


def test_fewer_examples_of_a_client_are_counted():
    settings = EXPERIMENTS["cfl-fig8-cifar"].settings("laptop")
    assert count_examples("cfl-fig8-cifar", settings) == {"cifar_cnn": 2 * 30 * 3 * 20 * 800}
    settings = EXPERIMENTS["cfl-fig7-norms"].settings("laptop")
    assert count_examples("cfl-fig7-norms", settings) == {"mlp": 2 * 1000 * 3 * 2 * 6000}


def test_other_experiments_have_no_count():
    assert count_examples("flhc-table3", EXPERIMENTS["flhc-table3"].paper) is None


def test_seconds_are_added_over_models():
    examples = {"cnn": 2 * RATES["cnn"], "lstm": 3 * RATES["lstm"]}
    assert estimate_seconds(examples) == 5


def test_the_rate_of_cifar_cnn_is_that_of_the_committed_result():
    results = Path(__file__).parents[2] / "results"
    result = Result.load(results / "cfl-fig8-cifar-paper.json")
    assert result.machine["device"] == GPU
    examples = count_examples(result.name, result.settings)
    assert examples is not None
    assert examples["cifar_cnn"] / result.seconds == pytest.approx(RATES["cifar_cnn"], rel=0.01)
