"""The analysis of tuned comparisons: every test and cost against a literal computation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedclade.core import ConfigError
from fedclade.report import corrected_difference
from fedclade.sweeps import SetResults, TunedResults, TunedRun, holm
from fedclade.sweeps.tuned_results import set_rows, write_p_value, write_score

SEEDS = (40, 41, 42)


def run_of(name: str, method: str, score: float | None, seed: int, **more: object) -> TunedRun:
    planned = TunedRun(
        set=name,
        method=method,
        purpose="test",
        number=seed,
        seed=seed,
        step_size=0.1,
        setting="",
        config_sha256="",
        data_sha256="",
    )
    known = {"metric": "accuracy", "clients": 4, "score": score, "best_round": 10, **more}
    return replace(planned, **known)


def cost_of(name: str, method: str, steps: int, up: int, down: int) -> TunedRun:
    costs = {"steps": steps, "bytes_up": up, "bytes_down": down}
    return replace(run_of(name, method, 0.5, 40, **costs), purpose="cost")


def set_of(
    scores: dict[str, list[float | None]], name: str = "x", **more: object
) -> list[TunedRun]:
    return [
        run_of(name, method, score, seed, **more)
        for method, values in scores.items()
        for seed, score in zip(SEEDS, values, strict=True)
    ]


def test_differences_have_the_corrected_resampled_t_test():
    values = [0.1, 0.3, 0.2, 0.25, 0.05]
    found = corrected_difference(values, test_to_train=0.25)
    error = math.sqrt((1 / 5 + 0.25) * np.var(values, ddof=1))
    t = np.mean(values) / error
    assert found.mean == pytest.approx(np.mean(values))
    assert found.p_value == pytest.approx(2 * (1 - stats.t.cdf(t, 4)))
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 4) * error)
    # without the correction it is the paired t-test
    plain = corrected_difference(values, test_to_train=0)
    assert plain.p_value == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_differences_of_one_seed_or_without_variation():
    assert corrected_difference([0.1]).half_width is None
    assert corrected_difference([0.0, 0.0]).p_value == 1
    assert corrected_difference([0.1, 0.1]).p_value == 0


def test_holm_equals_a_literal_step_down():
    generator = np.random.default_rng(1)
    for _ in range(20):
        raw = {f"m{i}": float(p) for i, p in enumerate(generator.uniform(0, 0.1, size=6))}
        found = holm(raw)
        ordered = sorted(raw, key=raw.get)
        for place, name in enumerate(ordered):
            literal = max((6 - i) * raw[other] for i, other in enumerate(ordered[: place + 1]))
            assert found[name] == pytest.approx(min(1, literal))


def test_a_first_place_needs_a_difference_to_every_other_method():
    scores = {"a": [0.9, 0.91, 0.9], "b": [0.5, 0.51, 0.5], "c": [0.4, 0.41, 0.41]}
    results = SetResults("x", set_of(scores))
    assert results.complete == ["a", "b", "c"]
    assert results.sole_best == "a"
    close = SetResults("x", set_of({**scores, "d": [0.95, 0.85, 0.9]}))
    assert close.sole_best is None
    assert close.p_values["d"] > 0.05
    failed = SetResults("x", set_of({**scores, "d": [0.1, 0.1, None]}))
    assert failed.sole_best is None, "a method without all scores was not tested"


def test_errors_are_better_if_lower():
    runs = set_of({"fedavg": [1.0, 1.2, 1.1], "b": [0.9, 1.0, 1.1]}, metric="mae")
    results = SetResults("x", [replace(run, higher_is_better=False) for run in runs])
    assert results.complete == ["b", "fedavg"]
    assert results.difference("b", "fedavg").mean == pytest.approx(0.1)
    assert set_rows(results)[0][:2] == ["b", "1.00"]
    assert set_rows(results)[0][2].startswith("−0.10 ± ")


def test_costs_are_multiples_of_fedavg():
    runs = set_of({"fedavg": [0.5] * 3, "b": [0.5] * 3, "local": [0.5] * 3})
    runs = [replace(run, best_round=5) if run.method == "b" else run for run in runs]
    runs += [cost_of("x", "fedavg", 100, 10, 20), cost_of("x", "b", 250, 15, 60)]
    runs += [cost_of("x", "local", 100, 0, 1)]
    results = SetResults("x", runs)
    assert (results.steps("b"), results.bytes_up("b"), results.bytes_down("b")) == (2.5, 1.5, 3)
    assert results.rounds("b") == 0.5
    both = TunedResults([*runs, *(replace(run, set="y") for run in runs)])
    assert both.mean_cost("b", "steps") == pytest.approx(2.5)
    assert both.mean_cost("local", "bytes_up") == 0
    assert both.mean_cost("unknown", "steps") is None


def test_ranks_are_of_mean_scores_and_a_failed_method_is_last():
    generator = np.random.default_rng(2)
    scores = {
        name: {method: generator.uniform(size=3).tolist() for method in "abcd"} for name in "wxyz"
    }
    scores["w"]["a"][1] = None
    results = TunedResults([run for name, of in scores.items() for run in set_of(of, name)])
    table = np.array(
        [[np.mean(of[m]) if None not in of[m] else -1 for m in "abcd"] for of in scores.values()]
    )
    literal = stats.rankdata(-table, axis=1).mean(0)
    assert results.ranks.mean == pytest.approx(dict(zip("abcd", literal, strict=True)))
    best = min(results.ranks.mean, key=results.ranks.mean.get)
    raw = {
        m: 2 * (1 - stats.norm.cdf((r - results.ranks.mean[best]) / math.sqrt(4 * 5 / (6 * 4))))
        for m, r in results.ranks.mean.items()
        if m != best
    }
    assert results.p_values == pytest.approx(holm(raw))
    assert results.sole_best is None


def test_a_clear_best_method_is_first_over_enough_data_sets():
    runs: list[TunedRun] = []
    for number in range(12):
        runs += set_of({"a": [0.9] * 3, "b": [0.6] * 3, "c": [0.5] * 3}, f"set {number}")
    results = TunedResults(runs)
    assert results.sole_best == "a"
    assert TunedResults(runs[:9]).ranks is None, "one data set has no ranks"


def test_a_comparison_needs_runs():
    with pytest.raises(ConfigError, match="at least 1 run, got 0"):
        TunedResults([])


def test_numbers_as_text():
    share = SetResults("x", set_of({"a": [0.123] * 3}))
    assert write_score(share, 0.1234) == "12.3"
    assert write_score(share, -0.02, signed=True) == "−2.0"
    assert [write_p_value(p) for p in (0.001, 0.034, 1.0)] == ["< 0.01", "0.03", "1.00"]


def test_a_method_whose_runs_failed_has_a_row():
    runs = set_of({"fedavg": [0.5, 0.6, 0.7], "b": [0.5, None, 0.7], "c": [None, None, None]})
    rows = {row[0]: row[1] for row in set_rows(SetResults("x", runs))}
    assert rows == {"fedavg": "60.0", "b": "60.0 (1 of 3 failed)", "c": "failed"}
