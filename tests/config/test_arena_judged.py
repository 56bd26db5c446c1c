"""``studies/arena_judged.py`` and ``studies/arena_page.py``: what runs, what is chosen, and what the page states."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedclade.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    return importlib.import_module("arena_judged")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    return importlib.import_module("arena_page")


def all_runs(judged, score: Callable[[dict], float]) -> list[dict]:
    """Return the lines of all runs, in the order in which the script makes them, with made-up scores."""
    lines: list[dict] = []
    for data in judged.TUNING_CELLS:
        while jobs := judged.missing_jobs(lines, data):
            lines += [{**job, "accuracy": score(job), **made_up_costs(job)} for job in jobs]
    return lines


def made_up_costs(job: dict) -> dict:
    return {
        "rounds_to_best": 7,
        "ari": None,
        "clusters": 3,
        "true": None,
        "steps": 300 if job["method"] == "ditto" else 100,
        "bytes_up": 10,
        "bytes_down": 20,
    }


def step_size_first(job: dict) -> float:
    """Score by the step size, of which 0.02 is best; later options are worse than the first."""
    better = {0.01: 0.1, 0.02: 0.3, 0.05: 0.2, 0.03: 0.25, 0.1: 0.0}
    return better[job["setting"]["lr"]]


def test_every_candidate_is_a_config_of_the_arena(judged):
    for data, cells in judged.JUDGED_CELLS.items():
        for method in judged.methods_of(data):
            for options in judged.SETTINGS[method] or ({},):
                setting = {"lr": 0.01, "options": options}
                config = judged.run_config(cells[0], method, setting, 2, tuning=False)
                assert config.local.lr == 0.01
                assert config.algorithm["name"] == method
                given = json.loads(json.dumps(config.algorithm))
                # selection is the number of clients
                assert {**given, **options, "selection": given.get("selection")} == {
                    **given,
                    "selection": given.get("selection"),
                }


def test_methods_are_those_that_cluster_and_a_few_others(judged):
    finds_clusters = {
        name
        for name, method in ALGORITHMS.items()
        if method.family in ("updates", "models", "data") and method.scenarios
    }
    assert finds_clusters <= set(judged.SETTINGS)


def test_tuning_uses_no_judged_fold_or_cell_of_mnist(judged):
    assert judged.TUNING_FOLD not in judged.FOLDS
    assert not set(judged.TUNING_CELLS["mnist"]) & set(judged.JUDGED_CELLS["mnist"])


def test_all_methods_have_the_same_budget_and_the_best_candidate_is_judged(judged):
    lines = all_runs(judged, step_size_first)
    for data, cells in judged.TUNING_CELLS.items():
        for method in judged.methods_of(data):
            tuned = [
                line
                for line in lines
                if (line["stage"], line["data"], line["method"]) == ("tuning", data, method)
            ]
            assert len(tuned) == judged.BUDGET[data] * len(cells)
            assert {line["fold"] for line in tuned} == {judged.TUNING_FOLD}
            runs = [
                line
                for line in lines
                if (line["stage"], line["data"], line["method"]) == ("judged", data, method)
            ]
            assert sorted({line["fold"] for line in runs}) == [2, 3, 4]
            assert len(runs) == 3 * len(judged.JUDGED_CELLS[data])
            first = (judged.SETTINGS[method] or ({},))[0]
            assert all(line["setting"] == {"lr": 0.02, "options": first} for line in runs)


def test_other_options_run_with_the_best_step_size_and_may_win(judged):
    def score(job: dict) -> float:
        best = job["setting"]["options"] == {"clusters": 8}
        return 0.9 if best else step_size_first(job)

    lines = all_runs(judged, score)
    assert judged.chosen_setting(lines, "ifca", "mnist") == {"lr": 0.02, "options": {"clusters": 8}}
    assert judged.chosen_setting(lines, "ifca", "cifar10")["options"] == {"clusters": 8}


def test_of_equal_candidates_the_first_is_chosen(judged):
    lines = all_runs(judged, lambda job: 0.5)
    first = {"lr": 0.01, "options": {"clusters": 4}}
    assert judged.chosen_setting(lines, "ifca", "mnist") == first
    assert judged.chosen_setting(lines[:50], "oracle", "mnist") is None


def test_the_page_names_the_first_method_and_those_that_are_not_significantly_worse(judged, page):
    draw = np.random.default_rng(0)
    level = {method: place for place, method in enumerate(judged.SETTINGS)}
    lines = all_runs(judged, lambda job: 0.9 - 0.01 * level[job["method"]] + 0.001 * draw.random())
    found = page.rank_lines(page.judged_lines(lines))
    assert "oracle" not in found.mean
    assert (found.sets, found.scenarios) == (15, 5)
    assert next(iter(found.mean)) == "rcfl"
    summary = page.state_summary(found)
    assert summary.startswith("In short: `rcfl` has the best mean rank, but not significantly")
    assert "`cfl`, `fl_hc`" in summary
    assert "`fedavg`" not in summary
    text = page.write_page(lines)[page.PAGE].decode()
    assert "327 of 327 judged runs have been made" in text
    assert "no method is more accurate than `rcfl`" in text


def test_without_all_runs_the_page_names_no_method(judged, page):
    assert page.state_summary(page.rank_lines([])).startswith("The runs are not finished yet")
    text = page.write_page([])[page.PAGE].decode()
    assert "0 of 327 judged runs have been made" in text


def test_holms_correction_is_that_of_its_definition(page):
    draw = np.random.default_rng(1)
    differences = {f"m{k}": (draw.normal(size=12) + k / 3).tolist() for k in range(4)}
    raw = {name: stats.wilcoxon(values).pvalue for name, values in differences.items()}
    expected, largest = {}, 0.0
    for place, name in enumerate(sorted(raw, key=raw.__getitem__)):
        largest = max(largest, min(1.0, raw[name] * (4 - place)))
        expected[name] = largest
    assert page.holm_p_values(differences) == pytest.approx(expected)
    assert page.holm_p_values({"same": [0.0, 0.0]}) == {"same": 1.0}


def test_costs_are_multiples_of_fedavgs(judged, page):
    lines = page.judged_lines(all_runs(judged, step_size_first))
    rows = {row.split("|")[1].strip(): row for row in page.cost_table(lines).splitlines()[2:]}
    assert rows["`ditto`"] == "| `ditto` | 30.0 | 3.0 | 1.0 | 1.0 | 7.0 |"
    assert rows["`fedavg`"] == "| `fedavg` | 30.0 | 1.0 | 1.0 | 1.0 | 7.0 |"


def test_names_in_the_picture_of_costs_are_apart_and_in_the_order_of_the_points(page):
    values = {"high": 3.0, "low": 1.0, "near": 1.2, "next": 1.3}
    moved = page.spread_out(values, 0.5)
    assert moved == {"low": 1.0, "near": 1.5, "next": 2.0, "high": 3.0}


def test_the_page_states_how_many_methods_chose_the_largest_step_size(judged, page):
    small = page.state_largest(all_runs(judged, lambda job: -job["setting"]["lr"]))
    assert "for 0 of 22 methods on MNIST and for 0 of 21 methods on CIFAR-10" in small
    large = page.state_largest(all_runs(judged, lambda job: job["setting"]["lr"]))
    assert "for 22 of 22 methods on MNIST and for 21 of 21 methods on CIFAR-10" in large


def test_there_is_a_page_only_of_judged_runs(judged, page):
    """Tables and sentences; the pictures also depend on the version of Matplotlib."""
    lines = page.jsonl.read(judged.RESULTS)
    written = page.PAGE.read_bytes() if page.PAGE.exists() else None
    assert written == (page.write_page(lines)[page.PAGE] if page.judged_lines(lines) else None)
