"""Every claim of every experiment: what its sentence says is what its test is about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedclade_papers import EXPERIMENTS, Claim
from fedclade_papers.docs import read_results
from fedclade_papers.experiment import Paper
from fedclade_papers.fl_hc.claims import Cell, claims_on
from fedclade_papers.outcome import within_printed

RESULTS = read_results(Path(__file__).parents[2] / "results")

HOW_MUCH = re.compile(
    r"\d%?x to \d|by \d[\d.]* (%|points)|\d+ % less|\d+ for \d+|monotonically|even increases|in any given"
)
"""Where a sentence says how much, how steadily or how often, besides which way."""

RANGE = re.compile(r"(\d+(?:\.\d+)?)x? to (\d+(?:\.\d+)?)(x| %)")

NUMBERED = ("jump", "more_clients", "end", "after", "end_of_cuts", "as_printed")
"""Claims of FL+HC's tables that state a range."""


def paper_of(name: str) -> Paper:
    """Return what the paper says of an experiment."""
    measure: Any = EXPERIMENTS[name].measure
    return measure.args[0]


RANGES = [
    (name, key)
    for name in EXPERIMENTS
    if name.startswith("flhc-")
    for key, text in paper_of(name).claims.items()
    if RANGE.search(text)
]


def pattern_of(text: str) -> str:
    """Return a pattern that a claim's text matches, whatever its fields are."""
    return re.sub(r"\\\{[^}]*\\\}", ".*", re.escape(text))


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.stem)
def test_every_sentence_is_one_of_its_experiment(result):
    patterns = [pattern_of(text) for text in paper_of(result.name).claims.values()]
    for claim in result.outcome.claims:
        assert any(re.fullmatch(pattern, claim.text) for pattern in patterns), claim.text


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.stem)
def test_a_sentence_that_says_how_much_is_tested_for_it(result):
    for claim in result.outcome.claims:
        if HOW_MUCH.search(claim.text) and claim.holds:
            assert claim.as_large is not None, claim.text


def test_sentences_that_say_how_much_are_found():
    texts = [claim.text for result in RESULTS for claim in result.outcome.claims]
    assert sum(bool(HOW_MUCH.search(text)) for text in texts) >= 12


def test_every_range_of_a_sentence_has_the_numbers_of_its_test():
    assert len(RANGES) >= 8
    for name, key in RANGES:
        low, high, _ = RANGE.search(paper_of(name).claims[key]).groups()
        assert paper_of(name).numbers[key.removesuffix("_of_cuts")] == [float(low), float(high)], (
            name,
            key,
        )
        assert key in NUMBERED, key


def run_of(accuracy: list[float], reached: float = 0.5) -> dict[str, Any]:
    shares = {"accuracy": accuracy, "reached": [reached] * len(accuracy)}
    return {"rounds": list(range(1, 21)), **shares, "ari": 1.0, "clusters": 4, "at_the_mean": None}


def claim_at(name: str, key: str, value: float) -> Claim:
    """Return a claim on a table where what it is about has a value: a ratio to FL, or an accuracy in %."""
    averaged, accuracy, reached = run_of([0.5] * 20, 0.5), [0.99] * 20, 0.6
    if key == "jump":
        averaged, accuracy = run_of([0.4] * 20, 0.5), [0.4 * value] * 20
    elif key == "more_clients":
        averaged, reached = run_of([0.5] * 20, 0.3), 0.3 * value
    else:
        accuracy = [value / 100] * 20
    first = run_of(accuracy, reached)
    other = run_of([0.4] * 20) if key == "jump" else first
    cells = [Cell("a", 1, [first], [averaged]), Cell("b", 3, [other], [averaged])]
    claims = dict(
        zip(paper_of(name).claims, claims_on(paper_of(name), cells, {"rounds": 20}), strict=True)
    )
    return claims[key]


@pytest.mark.parametrize(("name", "key"), RANGES)
def test_what_is_outside_of_a_range_is_not_seen(name: str, key: str):
    low, high = paper_of(name).numbers[key.removesuffix("_of_cuts")]
    for inside in (low - 0.04, (low + high) / 2, high + 0.04):
        assert claim_at(name, key, inside).seen == "yes", inside
    for outside in (low - 0.06, high + 0.06, low - 0.23):
        assert claim_at(name, key, outside).seen != "yes", outside


def test_a_figure_is_seen_as_it_is_printed():
    assert within_printed([80.46, 80.54], 80.5)
    assert not within_printed([67.0], 80.5)
    assert within_printed([36.4], 36)
    assert not within_printed([1.05, 2.25], 1.3, 1.9)
    assert not within_printed([0.97], 1.2, 2.1), "a loss"
    assert within_printed([], 1.0)
