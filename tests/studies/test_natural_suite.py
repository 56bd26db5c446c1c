"""``docs/natural.md`` has the numbers of the committed results, and says no more than the tests allow."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest

from fedclade.config import find_configs, read_scenarios

ROOT = Path(__file__).parents[2]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    return importlib.import_module("natural_suite")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Rows of the committed table, read without fedclade."""
    return pq.read_table(ROOT / "results" / "natural" / "runs.parquet").to_pylist()


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "natural.md").read_text(encoding="utf-8")


def table_after(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading, without the marks of Markdown."""
    lines = page.partition(f"{heading}\n")[2].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    cells: list[list[str]] = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([re.sub(r"[*`]", "", cell).strip() for cell in line.strip("|").split(" | ")])
    return [cells[0], *cells[2:]]


def scores_of(rows: list[dict], name: str, method: str) -> list[float | None]:
    found = [r for r in rows if (r["set"], r["method"], r["purpose"]) == (name, method, "test")]
    return [row["score"] for row in sorted(found, key=lambda row: row["seed"])]


def test_the_page_is_that_of_the_committed_results(suite, page):
    results = suite.TunedResults(suite.complete_sets(suite.read_table(suite.RESULTS)))
    assert page == suite.page(results), "write it with: python studies/natural_suite.py"
    assert suite.choice_page(results) == suite.CHOICE.read_text(encoding="utf-8")
    assert suite.summary(results) in suite.CHOICE.read_text(encoding="utf-8")


def test_every_score_of_the_page_is_a_mean_of_the_rows(page, rows):
    heading, *lines = table_after(page, "## Results")
    sets = [cell.partition(":")[0] for cell in heading[1 : heading.index("mean rank")]]
    assert sets
    checked = 0
    for line in lines:
        for name, cell in zip(sets, line[1:], strict=False):
            scores = scores_of(rows, name, line[0])
            assert len(scores) == 5
            if cell == "failed":
                assert None in scores
                continue
            unit = 1 if rows_metric(rows, name) == "mae" else 100
            shown = float(cell)
            digits = len(cell.partition(".")[2])
            assert shown == pytest.approx(unit * fmean(scores), abs=0.51 * 10**-digits)
            checked += 1
    assert checked > 20 * len(sets)


def rows_metric(rows: list[dict], name: str) -> str:
    (metric,) = {row["metric"] for row in rows if row["set"] == name and row["metric"]}
    return metric


def test_costs_of_the_page_are_multiples_of_fedavg(page, rows):
    for name in dict.fromkeys(row["set"] for row in rows):
        if f"### {name}\n" not in page:
            continue
        costs = {r["method"]: r for r in rows if r["set"] == name and r["purpose"] == "cost"}
        heading, *lines = table_after(page, f"### {name}")
        for line in lines:
            cells = dict(zip(heading, line, strict=True))
            if not cells["steps"]:
                continue
            for column in ("steps", "bytes up", "bytes down"):
                key = column.replace(" ", "_")
                expected = costs[line[0]][key] / costs["fedavg"][key]
                assert float(cells[column]) == pytest.approx(expected, abs=0.0051)


def test_every_choice_has_the_best_validation_score_of_its_trials(rows):
    for name in dict.fromkeys(row["set"] for row in rows):
        for method in dict.fromkeys(row["method"] for row in rows if row["set"] == name):
            own = [r for r in rows if (r["set"], r["method"]) == (name, method)]
            trials = [r for r in own if r["purpose"] == "trial" and r["validation"] is not None]
            chosen = {(r["step_size"], r["setting"]) for r in own if r["purpose"] == "test"}
            if not chosen or not trials:
                continue
            sign = 1 if trials[0]["higher_is_better"] else -1
            best = max(trials, key=lambda row: (sign * row["validation"], -row["number"]))
            assert chosen == {(best["step_size"], best["setting"])}


def test_rows_are_of_the_suite_as_it_is(rows):
    scenarios = {each.name: each for each in read_scenarios(find_configs("natural")[0])}
    for row in rows:
        scenario = scenarios[row["set"]]
        assert row["data_sha256"] == scenario.source.digest
        assert row["method"] in scenario.configs
        is_trial = row["purpose"] == "trial"
        assert is_trial == (row["seed"] == scenario.tuning.seed)
        assert is_trial or 40 <= row["seed"] <= 44


def test_the_first_place_needs_all_tests(suite):
    results = suite.TunedResults(suite.complete_sets(suite.read_table(suite.RESULTS)))
    for each in results.sets:
        sentence = suite.first_place(each)
        assert ("significantly better than every other" in sentence) == (each.sole_best is not None)


def test_efficient_methods_are_those_that_no_other_beats(suite):
    points = {"a": (1.0, 0.5), "b": (2.0, 0.6), "c": (2.0, 0.5), "d": (3.0, 0.6)}
    assert suite.efficient(points, 1) == ["a", "b"]
    assert suite.efficient(points, -1) == ["a"]
