"""What the README shows works as shown."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedclade import Run
from fedclade.config import check_config, read_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return found


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """And finds what ``make demo`` finds: the four clusters."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block("python"), "README.md", "exec"), {})
    assert "'found': 4, 'true': 4, 'ari': 1.0" in capsys.readouterr().out
    assert Run.load(tmp_path / "runs/first").summary["rounds"] == 40


def test_the_config_of_the_readme_is_the_one_that_comes_along():
    shipped = read_config(ROOT / "configs/cfl-mnist-label-swap.toml").as_dict()
    shown = check_config(tomllib.loads(block("toml"))).as_dict()
    without_target: dict[str, Any] = {"target": {"accuracy": None}}
    assert {**shown, **without_target} == {**shipped, **without_target}


def test_every_file_that_the_docs_link_to_exists_or_is_made_with_the_site(monkeypatch: pytest.MonkeyPatch):
    docs = ROOT / "docs"
    monkeypatch.syspath_prepend(docs)
    made = {docs / page for page in importlib.import_module("hooks").made()}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs.rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            there = (page.parent / target).resolve()
            assert there.exists() or (there in made and docs in page.parents), f"{page.name} links to {target}"
