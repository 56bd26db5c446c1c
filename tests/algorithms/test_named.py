"""Algorithms of a user's own, by ``module:Class``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedclade import ConfigError, Run, assign, simulate
from fedclade.algorithms import build_algorithm, describe
from fedclade.config import check_config
from tests.tiny import federation_of, linear

OWN = '''
from dataclasses import dataclass, field
import fedclade

@dataclass(frozen=True)
class Mine(fedclade.FedAvg):
    """By position too, and with a list."""
    depth: int
    names: tuple[str, ...] = field(default_factory=tuple)
    share: float = 0.5

    def __post_init__(self):
        if self.depth > 9:
            raise KeyError("deep")

class Plain(fedclade.Algorithm):
    def init(self, params, clients): ...
    def step(self, state, cohort, clients, this_round): ...

@dataclass(frozen=True)
class Unfinished(fedclade.Algorithm):
    """Lacks what it must have."""

def function():
    """No class."""
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "users_methods.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_methods", None)


def test_it_is_checked_built_and_described_by_its_name():
    raw = {"name": "users_methods:Mine", "depth": 2, "names": ["a"]}
    config = check_config({"algorithm": raw})
    noted = {"name": "users_methods:Mine", "depth": 2, "names": ("a",), "share": 0.5}
    assert config.algorithm == noted
    built = config.built_algorithm(None)
    assert describe(built) == noted
    assert (
        build_algorithm(
            noted["name"], {key: value for key, value in noted.items() if key != "name"}
        )
        == built
    )


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"name": "Mine", "depth": "x"}, "depth of [algorithm] should be a whole number, got 'x'"),
        ({"name": "Mine", "deph": 1}, "unknown key of [algorithm]: 'deph'; did you mean 'depth'?"),
        (
            {"name": "Mine"},
            "[algorithm] depth of algorithm 'users_methods:Mine' is not set and has no default; set it",
        ),
        (
            {"name": "Mine", "depth": 10},
            "[algorithm] algorithm 'users_methods:Mine' cannot be built with the options "
            "{'depth': 10}: KeyError: 'deep'",
        ),
        (
            {"name": "function"},
            "'users_methods:function' should be a subclass of fedclade.Algorithm, got <function",
        ),
        (
            {"name": "Plain"},
            "'users_methods:Plain' should be a dataclass: put @dataclass(frozen=True) above the class",
        ),
        (
            {"name": "Unfinished"},
            "'users_methods:Unfinished' should define the methods of fedclade.Algorithm, "
            "but lacks init, step; define them",
        ),
        ({"name": "Mne"}, "module 'users_methods' has no attribute 'Mne'; did you mean 'Mine'?"),
    ],
)
def test_what_is_wrong_with_it_is_said_in_one_line(raw: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        check_config({"algorithm": {**raw, "name": f"users_methods:{raw['name']}"}})
    assert "\n" not in str(error.value)


def test_a_run_notes_the_name_by_which_it_is_resumed_and_newcomers_are_assigned(tmp_path: Path):
    federation, folder = federation_of([0, 1, 0, 1]), tmp_path / "run"
    algorithm = build_algorithm("users_methods:Mine", {"depth": 3})
    simulate(algorithm, "mclr", federation, rounds=1, engine="loop", folder=folder)
    run = simulate(algorithm, "mclr", federation, rounds=2, engine="loop", folder=folder)
    assert (run.summary["algorithm"], run.summary["rounds"]) == ("users_methods:Mine", 2)
    found = assign(Run.load(folder, trust=True), federation, engine="loop")
    assert [row["node"] for row in found.rows] == [0, 0, 0, 0]


def test_a_class_that_only_the_program_knows_keeps_its_own_name():
    from fedclade import FedAvg

    class Here(FedAvg):
        """In a function."""

    assert describe(Here())["name"] == "Here"
    run = simulate(Here(), linear(), federation_of([0, 1]), rounds=1, engine="loop")
    with pytest.raises(ConfigError, match="unknown algorithm 'Here'"):
        assign(run, federation_of([0, 1]), model=linear())
