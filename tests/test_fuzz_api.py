"""A sample of the fuzz of the Python API, in this process: no call may end in an error of another class."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "fuzz_api.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_api", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_api"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("only", "count"), [("tree.", 40), ("CFL", 20), ("Pool", 60), ("Task", 40), ("k_means", 10)]
)
def test_wrong_calls_end_in_errors_of_fedclades_own(only, count, fuzz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    targets = fuzz.all_targets()
    outcomes = []
    for call in fuzz.calls(7, count, only):
        told, given = fuzz.prepared(call, targets)
        outcome, detail = fuzz.outcome_of(targets[call.target], given)
        assert outcome != "raw", f"{told}: {detail}"
        outcomes.append(outcome)
    assert outcomes.count("refused") > count / 2


def test_an_error_of_another_class_is_found(fuzz):
    target = fuzz.Target("odd", lambda value: len(value))
    assert fuzz.outcome_of(target, {"value": "abc"}) == ("accepted", "3")
    assert fuzz.outcome_of(fuzz.Target("odd", lambda value: 1 / value), {"value": 0})[0] == "raw"
    assert fuzz.outcome_of(target, {"value": fuzz.Raising()})[0] == "own"
