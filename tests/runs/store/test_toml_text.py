"""Configs as TOML: with tomli_w and without it they parse to the same."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from fedclade import FedAvg, Run, simulate
from fedclade.runs import to_toml
from tests.tiny import federation_of, linear

CONFIG = {
    "rounds": 20,
    "lr": 1e-05,
    "unset": None,
    "path": 'C:\\a "b"\n\x7f ü 🙂',
    "permute": True,
    "infinite": float("inf"),
    "data": {"clients": 4, "dotted.key": [1, 2.5, [True, "x"]], "unset": None},
    "tasks": [{"name": "a"}, {"name": "b", "empty": {}}],
}


@pytest.fixture
def no_tomli_w(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomli_w", None)


def test_a_config_parses_to_the_same_without_tomli_w(no_tomli_w: None):
    expected = {key: value for key, value in CONFIG.items() if value is not None}
    expected["data"] = {"clients": 4, "dotted.key": [1, 2.5, [True, "x"]]}
    assert tomllib.loads(to_toml(CONFIG)) == expected


def test_tomli_w_writes_the_config_where_it_is_installed():
    assert "[data]\n" in to_toml(CONFIG)


def test_what_toml_cannot_hold_is_named(no_tomli_w: None):
    with pytest.raises(TypeError, match=r"numbers, text, lists and tables, got \{1\}"):
        to_toml({"odd": {1}})


def test_a_run_is_saved_and_loaded_without_tomli_w(no_tomli_w: None, tmp_path):
    run = simulate(FedAvg(), linear(), federation_of([0, 1]), rounds=1, engine="loop")
    run.save(tmp_path / "run")
    assert Run.load(tmp_path / "run").config["rounds"] == 1


def test_the_command_line_works_without_tomli_w():
    code = (
        "import sys; sys.modules['tomli_w'] = None; sys.argv = ['fedclade', 'reproduce', '--list']; "
        "from fedclade.cli import app; app()"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "flhc-table1" in outcome.stdout
