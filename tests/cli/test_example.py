"""The example data sets that come with fedclade."""

from __future__ import annotations

import errno
import re
import runpy
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedclade.cli import app
from fedclade.cli.example import EXAMPLES, list_examples
from fedclade.config import read_config
from fedclade.core import ConfigError, RunError


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["example", *arguments], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_an_example_is_copied_with_a_config_that_reads_its_files(tmp_path: Path):
    folder = tmp_path / "hospitals"
    printed = " ".join(call("hospitals", "--out", str(folder)).split())
    assert "12 CSV files, one for each client, and the config hospitals.toml" in printed
    federation = read_config(folder / "hospitals.toml").federation()
    assert len(federation.clients) == 12
    assert federation.clients[0].name == "hospital-00"


def test_the_files_of_hospitals_are_those_that_the_script_makes(tmp_path: Path):
    module = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hospitals.py"))
    module["write_hospitals"](tmp_path)
    made = sorted((tmp_path / "hospitals").iterdir())
    assert len(made) == 12
    for path in made:
        copied = EXAMPLES / "hospitals" / path.name
        assert copied.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def test_without_out_the_folder_has_the_name_of_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    call("hospitals")
    copied = sorted(path.name for path in Path("hospitals").iterdir())
    assert copied == sorted(path.name for path in (EXAMPLES / "hospitals").iterdir())


def test_an_unknown_example_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError,
        match=re.escape(f"unknown example 'banks' (known: {', '.join(list_examples())})"),
    ):
        call("banks")


def test_a_folder_that_exists_is_left_alone(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=re.escape(f"{tmp_path} exists already; name another folder with --out")
    ):
        call("hospitals", "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_example_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(source: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", fail)
    folder = tmp_path / "hospitals"
    with pytest.raises(
        RunError,
        match=re.escape(f"cannot write {folder}: [Errno 28] No space left on device; name"),
    ):
        call("hospitals", "--out", str(folder))
    assert not folder.exists()
