"""Results: what a measurement notes, how it is kept, and how it is written for people."""

from __future__ import annotations

import csv
import io
import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedclade.core.errors import DataError, RunError
from fedclade_papers import Claim, Outcome, Row
from fedclade_papers.command import changes
from fedclade_papers.markdown import (
    departures,
    difference,
    figure,
    ours,
    row_table,
    setting,
    to_csv,
    to_markdown,
)
from fedclade_papers.outcome import within_printed
from fedclade_papers.result import Result, measure
from tests.papers.examples import TINY


@pytest.fixture
def result() -> Result:
    return measure(TINY, "laptop")


def test_a_result_says_how_it_came_about(result: Result):
    assert result.command == "fedclade reproduce tiny --scale laptop"
    assert result.seeds == (1, 3)
    assert result.differences == {"seeds": ([0, 1, 2], [1, 3]), "rounds": (100, 10)}
    assert {"python", "torch", "fedclade"} <= set(result.versions)
    assert result.machine["cpus"] >= 1
    assert result.machine["device"]
    assert result.outcome.rows[0].seeds == (91.0, 93.0)


def test_a_result_reads_back_as_it_was_written(result: Result, tmp_path: Path):
    result.save(tmp_path / "tiny.json")
    again = Result.load(tmp_path / "tiny.json")
    assert again.outcome == result.outcome
    assert to_markdown(again) == to_markdown(result)
    assert replace(again, settings={}, differences={}) == replace(
        result, settings={}, differences={}
    )


def test_an_outcome_is_as_json_has_it():
    def of(value: object) -> Result:
        return measure(
            replace(TINY, measure=lambda cache, settings: Outcome(series={"x": value})), "smoke"
        )

    assert of((np.float64(0.5), np.bool_(True))).outcome.series == {"x": [0.5, True]}
    with pytest.raises(
        TypeError, match=r"an outcome should contain only values that JSON can represent, got \{1\}"
    ):
        of({1})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "TypeError"),
        ("{", "JSONDecodeError"),
        ('{"format": 2}', "KeyError: 'outcome'"),
        (None, "FileNotFound"),
    ],
)
def test_a_file_that_holds_no_result_is_said_to(tmp_path: Path, content: str | None, told: str):
    path = tmp_path / "odd.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(
        RunError, match=rf"cannot read the result of an experiment from .*odd.json: {told}"
    ):
        Result.load(path)


def test_a_result_of_another_format_is_refused(result: Result, tmp_path: Path):
    path = tmp_path / "tiny.json"
    result.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 7}))
    with pytest.raises(RunError, match="has format 7, but this version of fedclade reads format 2"):
        Result.load(path)


def test_data_that_is_missing_is_named_with_the_option(tmp_path: Path):
    with pytest.raises(
        DataError, match=rf"tiny needs the data set 'mnist', which is not in {tmp_path}.*--data-dir"
    ):
        measure(replace(TINY, data=("digits", "mnist")), "smoke", data_dir=tmp_path)


def test_what_was_measured_before_is_not_measured_again(tmp_path: Path):
    told: list[str] = []
    for _ in range(2):
        measure(TINY, "laptop", folder=tmp_path, say=told.append)
    assert told == ["seed 1", "seed 3"]


def test_what_was_set_by_hand_is_in_the_command_and_among_the_differences():
    changed = measure(TINY, "laptop", changed={"rounds": 20, "data": "a b"})
    assert (
        changed.command
        == """fedclade reproduce tiny --scale laptop --set rounds=20 --set 'data="a b"'"""
    )
    assert changes(shlex.split(changed.command)[6::2]) == {"rounds": 20, "data": "a b"}
    assert changed.differences == {
        "seeds": ([0, 1, 2], [1, 3]),
        "rounds": (100, 20),
        "data": ("mnist", "a b"),
    }
    assert departures(changed) == "seeds [0, 1, 2] → [1, 3]; rounds 100 → 20; also data"


def test_what_is_as_in_the_paper_departs_in_nothing():
    assert departures(measure(TINY, "paper")) == "nothing"


@pytest.mark.parametrize(
    ("claim", "seen"),
    [
        (Claim("it rises by 4 points", True, "+4.5", within_printed([4.4], 4)), "yes"),
        (Claim("it rises by 4 points", True, "+1.0", within_printed([1.0], 4)), "direction only"),
        (Claim("it rises by 4 points", False, "-4.0", within_printed([-4.0], 4)), "no"),
        (Claim("it rises", True, "+1.0"), "yes"),
        (Claim("it rises", None, "+1.0", as_large=True), "not tested"),
    ],
)
def test_a_claim_is_seen_only_if_it_is_as_large_as_it_says(claim: Claim, seen: str):
    assert claim.seen == seen


def test_a_figure_that_the_paper_does_not_print_is_written_as_it_puts_it():
    row = Row("P[g(α) > 0]", 100.0, 99.9, told="≈ 1")
    assert row_table([row])[1] == [("P[g(α) > 0]", "≈ 1", "99.9 %", "−0.1 %", "reached")]


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("x", 90.0, 90.9), "reached"),
        (Row("x", 90.0, 95.0, wanted="at least"), "exceeded"),
        (Row("x", 90.0, 85.0, wanted="at least"), "short by 5"),
        (Row("x", 36.0, 43.0, unit="", wanted="at most"), "short by 7"),
        (Row("x", 36.0, 30.0, unit="", wanted="at most"), "exceeded"),
        (Row("x", 90.0, 85.0), "off by -5"),
        (Row("x", None, 85.0), ""),
        (Row("x", 90.0, 90.0, own=True), ""),
        (Row("x", 90.0, 90.0, repeats="y"), "the run of y"),
        # One more of 84, 85, 86 lies within 4.303 · 1 · √(1 + 1/3) = 4.97 of 85.
        (Row("x", 89.9, 85.0, seeds=(84.0, 85.0, 86.0)), "off by -4.9, as seeds differ"),
        (Row("x", 90.0, 85.0, wanted="at least", seeds=(84.0, 85.0, 86.0)), "short by 5"),
        (Row("x", 86.5, 85.0, seeds=(84.0, 86.0)), "off by -1.5"),
    ],
)
def test_verdicts(row: Row, verdict: str):
    assert row.verdict == verdict


def test_numbers_as_people_read_them():
    assert figure(98.456, "%") == "98.5 %"
    assert figure(-2.5, "rounds") == "−2.5 rounds"
    assert figure(None) == "–"
    # By Student's t for two values: 12.706 · 0.7071 / √2 = 6.353.
    assert ours(Row("x", None, 97.0, seeds=(96.5, 97.5))) == "97.0 ± 6.4 %"
    assert ours(Row("x", None, 97.0, seeds=(97.0,))) == "97.0 %"
    assert difference(Row("x", 90.0, 97.0)) == "+7.0 %"
    assert difference(Row("x", 90.0, 83.0)) == "−7.0 %"
    assert difference(Row("x", None, 83.0)) == "–"
    assert setting("a" * 100) == "a" * 79 + "…"


def test_a_page_holds_rows_claims_remarks_changes_and_the_command(result: Result):
    page = to_markdown(result, "tiny.png", level=2)
    assert page.startswith(
        "## tiny, laptop\n\naccuracy by seed (Nobody 2000, table 1).\n\n![accuracy by seed](tiny.png)"
    )
    assert "| accuracy | 95.0 % | 92.0 ± 12.7 % | −3.0 % | short by 3 |" in page
    assert "| above 90 % (section I) | yes | 92.0 % |" in page
    assert "| always | no | once |" in page
    assert "- The paper does not say the seeds." in page
    assert "- **The paper shows:** 95 % on average.\n- **Measured here:** 92.0 %." in page
    assert "| rounds | 100 | 10 |" in page
    assert "`fedclade reproduce tiny --scale laptop` · scale laptop · seeds 1, 3 · " in page


def test_quantities_and_sentences_of_ours_stand_below_a_line_of_their_own(result: Result):
    rows = (
        Row("of the paper", 95.0, 95.0),
        Row("ours alone", 95.0, 95.0, own=True),
        Row("not printed", None, 1.0),
    )
    claims = (Claim("of the paper", True, "1"), Claim("ours", True, "1", own=True))
    page = to_markdown(replace(result, outcome=replace(result.outcome, rows=rows, claims=claims)))
    above, below = page.split(
        "Quantities that the paper does not report; they are not counted in any verdict:"
    )
    assert "| of the paper | 95.0 % | 95.0 % | +0.0 % | reached |" in above
    assert "| of the paper | yes | 1 |" in above
    assert "| ours alone | 95.0 % | 95.0 % | +0.0 % | – |" in below
    assert "| not printed | – | 1.0 % | – | – |" in below
    assert "| ours | yes | 1 |" in below
    assert [row.counts for row in rows] == [True, False, False]


def test_the_overview_names_cells_and_inner_settings_that_differ(result: Result):
    changes = {
        "tables": (
            {"a": {"rounds": 50, "x": 1}, "b": {"rounds": 50, "x": 1}},
            {"a": {"rounds": 10, "x": 2}},
        )
    }
    rows = (Row("cf 0.1, n 1 · accuracy", 95.0, 95.0), Row("cf 0.1, n 10 · accuracy", 95.0, 95.0))
    changed = replace(result, differences=changes, outcome=replace(result.outcome, rows=rows))
    assert (
        departures(changed, ["cf 0.1, n 1", "cf 0.1, n 3", "cf 0.1, n 10"])
        == "2 of 3 cells; rounds 50 → 10; also x"
    )
    assert departures(changed, ["cf 0.1, n 1", "cf 0.1, n 10"]) == "rounds 50 → 10; also x"


def test_csv_has_numbers_unrounded(result: Result):
    (row,) = csv.DictReader(io.StringIO(to_csv(result)))
    assert (row["what"], row["paper"], row["ours"], row["seeds"]) == (
        "accuracy",
        "95.0",
        "92.0",
        "91.0 93.0",
    )
    assert float(row["half_width_95"]) == pytest.approx(12.706, abs=1e-3)
