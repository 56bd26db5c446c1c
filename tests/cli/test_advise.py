"""The command ``advise``: its advice about tables and configs, and the config that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedclade.cli import app
from fedclade.core import ConfigError, DataError

FAST = ["--rounds", "6", "--seeds", "1"]


def call(*arguments: str) -> str:
    """Run a command; return its output."""
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of six tables, in the current folder; two groups have opposite targets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.delenv("FEDCLADE_DATA_DIR", raising=False)
    made = tmp_path / "tables"
    made.mkdir()
    generator = np.random.default_rng(0)
    for number in range(6):
        x = generator.normal(size=(120, 3))
        sign = 1 if number < 3 else -1
        back = (sign * (x @ [1, -2, 1]) > 0).astype(int)
        lines = [f"{a:.4f},{b:.4f},{c:.4f},{y}" for (a, b, c), y in zip(x, back, strict=True)]
        (made / f"h{number}.csv").write_text("\n".join(["age,dose,size,back", *lines]) + "\n")
    return made


def test_advice_about_tables_and_its_config_runs(folder: Path) -> None:
    output = call("advise", "tables", "--target", "back", *FAST)
    assert "budget: 4 methods, 6 rounds and 1 seed: about 6 times" in output
    assert "1. Serve all 6 clients with the model of their group (2 groups of 3 and 3" in output
    assert "2. Use the method rcfl" in output
    assert "3. Expect a gain of" in output
    assert "start the recommended run with: fedclade run best.toml" in output
    text = Path("best.toml").read_text(encoding="utf-8")
    assert text.startswith("# Made by 'fedclade advise':\n# Serve all 6 clients")
    assert "run folder: out" in call("run", "best.toml", "--out", "out", "-q")
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["algorithm"] == "rcfl"
    assert summary["clusters"]["sizes"] == [3, 3]


def test_json_has_all_numbers_and_nothing_else_is_printed(folder: Path) -> None:
    call("init", "tables", "--target", "back", "--out", "my.toml")
    config = Path("my.toml").read_text()
    output = call("advise", "my.toml", "--json", "--out", "other.toml", *FAST)
    found = json.loads(output)
    assert found["method"] == found["gain_of"] == "rcfl"
    assert found["served"] == {"cluster": 6}
    assert found["groups"] == [["h0", "h1", "h2"], ["h3", "h4", "h5"]]
    assert found["interval"][0] < found["gain"] <= found["interval"][1]
    assert found["out"] == "other.toml"
    assert len(found["sentences"]) == 3
    assert found["config"]["data"]["files"] == str(folder / "*.csv")
    assert Path("other.toml").exists()
    assert Path("my.toml").read_text() == config


def test_errors_come_before_any_training(folder: Path) -> None:
    Path("best.toml").write_text("")
    with pytest.raises(ConfigError, match=r"best\.toml exists already; choose another file"):
        call("advise", "tables")
    Path("best.toml").unlink()
    with pytest.raises(ConfigError, match=r"--out should end in \.toml, got best\.txt"):
        call("advise", "tables", "--out", "best.txt")
    with pytest.raises(DataError, match=r"'missing/.*' matches no file"):
        call("advise", "missing/*.csv")
    with pytest.raises(DataError, match=r"unknown target column .*'lack'"):
        call("advise", "tables", "--target", "lack")
    with pytest.raises(ConfigError, match=r"there is no config no\.toml"):
        call("advise", "no.toml")
    for table in sorted(folder.iterdir())[1:]:
        table.unlink()
    with pytest.raises(ConfigError, match="--client"):
        call("advise", "tables", "--target", "back")
    assert not Path("best.toml").exists()
