"""All experiments: what they say of themselves, and what comes out at the scale ``smoke``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from fedclade.data import SOURCES
from fedclade_papers import EXPERIMENTS, Outcome
from fedclade_papers.markdown import to_csv, to_markdown
from fedclade_papers.result import Result

Smoke = Callable[[str], Result]

LARGEST_SERIES = 60_000
"""Letters of JSON: what a picture shows is committed."""


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_settings_are_json_and_data_is_known(name: str):
    experiment = EXPERIMENTS[name]
    assert json.loads(json.dumps(experiment.paper)) == experiment.paper
    assert set(experiment.changes) == {"smoke", "laptop"}
    assert set(experiment.data) <= set(SOURCES)
    assert experiment.paper["seeds"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_smoke_run_has_rows_claims_and_a_picture_drawn_of_its_json_alone(
    name: str, smoke: Smoke, tmp_path: Path
):
    result = smoke(name)
    outcome = result.outcome
    assert outcome.rows
    assert outcome.claims
    assert all(math.isfinite(row.ours) for row in outcome.rows)
    assert all(claim.holds in (True, False, None) and claim.measured for claim in outcome.claims)
    assert len(json.dumps(outcome.series)) < LARGEST_SERIES
    again = Outcome.from_json(json.loads(json.dumps(asdict(outcome))))
    assert again == outcome
    picture = EXPERIMENTS[name].draw(again, json.loads(json.dumps(result.settings)))
    picture.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert picture.axes


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_smoke_run_is_written_for_people(name: str, smoke: Smoke):
    result = smoke(name)
    page = to_markdown(result)
    for row in result.outcome.rows:
        assert row.what.replace("|", "\\|") in page
    assert len(to_csv(result).splitlines()) == len(result.outcome.rows) + 1
