"""The command ``reproduce``, as a user calls it."""

from __future__ import annotations

import csv
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.papers.examples import TINY

from fedclade.cli import app, main, plugged
from fedclade.core.errors import ConfigError
from fedclade_papers import EXPERIMENTS, Outcome, ResultCache, Settings, command
from fedclade_papers.result import Result

pytestmark = pytest.mark.usefixtures("default_signals")

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """Call the command in an empty folder, with one experiment that takes no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCLADE_DATA_DIR", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(command, "EXPERIMENTS", {"tiny": TINY})

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fedclade", "reproduce", *arguments])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_it_prints_both_figures_and_writes_four_files(call: Call, tmp_path: Path):
    code, out, _ = call("tiny")
    assert code == 0
    assert re.search(r"accuracy +95\.0 % +92\.0 ± 12\.7 % +−3\.0 % +short by 3", out)
    assert re.search(r"rounds +100 +10", out)
    assert "scale laptop · seeds 1, 3 · " in out
    folder = tmp_path / "reproduced" / "tiny-laptop"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == {f"tiny-laptop.{ending}" for ending in ("json", "csv", "md", "png")}
    assert Result.load(folder / "tiny-laptop.json").outcome.rows[0].ours == 92.0
    with (folder / "tiny-laptop.csv").open() as file:
        assert [row["paper"] for row in csv.DictReader(file)] == ["95.0"]
    assert "](tiny-laptop.png)" in (folder / "tiny-laptop.md").read_text()


def test_without_matplotlib_it_writes_three_files_and_says_so(
    call: Call, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, _ = call("tiny", "--out", "here")
    assert code == 0
    assert (
        "no figure: drawing figures needs the package 'matplotlib'; install it with: pip install 'fed"
        in out
    )
    assert "written to here: tiny-laptop.json, .csv, .md\n" in out
    assert not Path("here/tiny-laptop.png").exists()


def test_of_all_those_are_left_out_whose_data_is_missing(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    needy = replace(TINY, name="needy", data=("femnist",))
    monkeypatch.setattr(command, "EXPERIMENTS", {"needy": needy, "tiny": TINY})
    code, out, _ = call("all", "--data-dir", str(tmp_path), "--out", "here")
    assert code == 0
    assert f"experiment needy is skipped: femnist is not in {tmp_path}" in out
    assert {path.name for path in Path("here").glob("*.json")} == {"tiny-laptop.json"}
    code, _, err = call("needy", "--data-dir", str(tmp_path))
    assert code != 0
    assert "needy needs the data set 'femnist'" in err


def test_the_same_command_goes_on_and_does_not_measure_again(call: Call):
    assert "seed 3" in call("tiny", "--out", "here")[1]
    code, out, _ = call("tiny", "--out", "here")
    assert code == 0
    assert "  seed 3" not in out


def test_an_interrupted_command_goes_on_where_it_stopped(
    call: Call, monkeypatch: pytest.MonkeyPatch
):
    made: list[int] = []

    def interrupted(cache: ResultCache, settings: Settings) -> Outcome:
        def one(seed: int) -> dict[str, float]:
            made.append(seed)
            if len(made) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return {"right": 90.0}

        for seed in settings["seeds"]:
            cache.piece(f"seed {seed}", partial(one, seed))
        return Outcome(series={"right": [90.0, 90.0]})

    monkeypatch.setattr(command, "EXPERIMENTS", {"tiny": replace(TINY, measure=interrupted)})
    code, out, _ = call("tiny")
    assert code == 130
    assert (
        "interrupted before measuring the piece 'seed 3'; run the same command again to continue"
        in out
    )
    assert call("tiny")[0] == 0
    assert made == [1, 3]


def test_an_unknown_name_is_refused_with_the_nearest(call: Call):
    code, _, err = call("tinny")
    assert code == 2
    assert "unknown experiment 'tinny'; did you mean 'tiny'?" in err


def test_names_are_taken_once_and_all_means_all():
    known = {"a": TINY, "b": TINY}
    assert command.choose(["a", "a"], known) == [TINY]
    assert command.choose(["all"], known) == [TINY, TINY]
    with pytest.raises(
        ConfigError,
        match="no experiment is named; name experiments of 'fedclade reproduce --list', or 'all'",
    ):
        command.choose([], known)


def test_the_package_runs_as_a_module_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(plugged, "installed", lambda _: {})
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    monkeypatch.setattr("sys.argv", ["fedclade_papers", "fig-1000"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("fedclade_papers", run_name="__main__")
    assert capsys.readouterr().err.startswith(
        "error: unknown experiment 'fig-1000' (known: cfl-fig1-xor"
    )


def test_the_list_shows_every_experiment_and_whether_its_data_is_at_hand(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(command, "EXPERIMENTS", EXPERIMENTS)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train.parquet").touch()
    code, out, _ = call("--list", "--data-dir", str(tmp_path))
    assert code == 0
    for name in EXPERIMENTS:
        assert name in out
    assert re.search(r"cfl-fig3-theory .* yes", out)
    assert re.search(r"cfl-fig7-norms .* mnist +yes", out)
    assert re.search(r"cfl-fig8-cifar .* cifar10 +no: cifar10", out)
    assert re.search(r"cfl-fig8-cifar .* cifar10 +from the Hub", call("--list")[1])
