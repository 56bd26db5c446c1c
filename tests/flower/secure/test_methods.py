"""Which methods run under secure aggregation: what the documentation says of each is what the code does."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fedclade import Signature
from fedclade.algorithms import ALGORITHMS, build_algorithm
from fedclade.core import ConfigError
from fedclade.flower.kinds import disclosures
from fedclade.flower.secure.terms import check_sums, disclosures_of, with_signs
from fedclade.runs import RunSettings

PAGE = Path(__file__).parents[3] / "docs" / "secure-aggregation.md"
TRUTH = {0: 0, 1: 1, 2: 0, 3: 1}


@dataclass(frozen=True)
class Documented:
    """A row of the table of methods."""

    works: bool
    settings: dict[str, Any]
    disclosed: set[str]


def documented() -> dict[str, Documented]:
    """Return the rows of the table, by method."""
    section = PAGE.read_text().partition("\n## Methods\n")[2].partition("\n## ")[0]
    rows: dict[str, Documented] = {}
    for line in section.splitlines():
        if not line.startswith("| `"):
            continue
        name, works, settings, disclosed, _ = (cell.strip() for cell in line.strip("|").split("|"))
        assert works in ("yes", "no")
        lines = "\n".join(re.findall("`([^`]+)`", settings))
        rows[name.strip("`")] = Documented(
            works == "yes", tomllib.loads(lines), set(re.findall("`([^`]+)`", disclosed))
        )
    return rows


def disclosed_by(name: str, settings: dict[str, Any]) -> set[str]:
    """Return what clients must disclose in a run of a method; a ConfigError if it is refused."""
    algorithm = build_algorithm(name, settings.get("algorithm"), true_clusters=TRUTH)
    if algorithm.requires.simulation:
        raise ConfigError(algorithm.requires.simulation)
    run = RunSettings(rounds=20, signature=replace(Signature(), **settings.get("signature", {})))
    run = with_signs(run.completed(algorithm))
    check_sums(run, algorithm, len(TRUTH))
    return set(disclosures_of(run, algorithm))


def test_every_method_is_in_the_table():
    assert set(documented()) == set(ALGORITHMS)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_method_works_or_is_refused_as_the_table_says(name: str):
    row = documented()[name]
    if not row.works:
        assert not row.settings
        assert not row.disclosed
        with pytest.raises(ConfigError):
            disclosed_by(name, {})
        return
    assert disclosed_by(name, row.settings) == row.disclosed
    assert row.disclosed <= set(disclosures())


@pytest.mark.parametrize("name", [name for name, row in documented().items() if row.settings])
def test_without_its_settings_a_method_is_refused(name: str):
    with pytest.raises(ConfigError, match=r"network.secure_aggregation = true: "):
        disclosed_by(name, {})
