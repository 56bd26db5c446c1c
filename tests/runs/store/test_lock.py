"""Two processes on one run folder: the second is told, and changes nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from fedclade import CFL, LocalTraining, Run, RunError, RunInterrupted, simulate
from fedclade.runs.store.manifest import LOCK, Lock
from tests.tiny import federation_of, linear

BUSY = "another process is writing to the run folder {}; wait until the process ends, stop it, or name another folder"


def run_in(folder: Path, **settings) -> Run:
    settings = {
        "local": LocalTraining(batch_size=10),
        "rounds": 3,
        "engine": "loop",
        "checkpoint_every": 1,
    } | settings
    return simulate(
        CFL(eps2=1e-3, split_rounds=(2,)),
        linear(),
        federation_of([0, 1]),
        folder=folder,
        **settings,
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def held_elsewhere(folder: Path) -> tuple[int, int]:
    """Return a process that has a folder's lock, and where to write to for its end."""
    (reading, writing), (waiting, ending) = os.pipe(), os.pipe()
    if (process := os.fork()) == 0:
        try:
            Lock().take(folder)
            os.write(writing, b".")
            os.close(ending)
            os.read(waiting, 1)
        finally:
            os._exit(0)
    assert os.read(reading, 1) == b"."
    os.close(waiting)
    return process, ending


@pytest.mark.parametrize("begun", [False, True])
def test_a_second_process_is_refused_and_changes_nothing(tmp_path, begun):
    folder = tmp_path / "run"
    if begun:
        with pytest.raises(RunInterrupted):
            run_in(folder, stop=lambda: True)
    folder.mkdir(exist_ok=True)
    process, ending = held_elsewhere(folder)
    before = snapshot(folder)
    with pytest.raises(RunError, match=re.escape(BUSY.format(folder))):
        run_in(folder)
    assert snapshot(folder) == before
    os.close(ending)
    os.waitpid(process, 0)
    assert run_in(folder).summary["rounds"] == 3
    assert not (folder / LOCK).exists()


def test_a_killed_process_leaves_no_lock(tmp_path):
    process, _ = held_elsewhere(tmp_path)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert (tmp_path / LOCK).exists()
    assert run_in(tmp_path).summary["rounds"] == 3


def test_a_run_within_a_run_is_refused_and_does_not_let_go_of_the_first(tmp_path):
    told: list[str] = []

    def again(row, tree):
        with pytest.raises(RunError) as caught:
            run_in(tmp_path / "run")
        told.append(str(caught.value))
        assert (tmp_path / "run" / LOCK).exists()

    run_in(tmp_path / "run", on_round=again)
    assert told == [BUSY.format(tmp_path / "run")] * 3


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_run_that_fails_lets_go(tmp_path, error):
    def fails(row, tree):
        raise error

    with pytest.raises(error):
        run_in(tmp_path / "run", on_round=fails)
    assert not (tmp_path / "run" / LOCK).exists()
    assert run_in(tmp_path / "run").summary["rounds"] == 3


def test_what_another_process_began_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    """Between the look at a free folder and its beginning, another process makes and ends a run there."""
    from fedclade.runs import rounds as rounds_module

    begin = rounds_module.run_rounds

    def late(*arguments, **named):
        with monkeypatch.context() as patch:
            patch.setattr("fedclade.runs.assembly.run_rounds", begin)
            run_in(tmp_path / "run", seed=7)
        return begin(*arguments, **named)

    monkeypatch.setattr("fedclade.runs.assembly.run_rounds", late)
    with pytest.raises(
        RunError,
        match="contains a run with another config: its seed is 7, not 0; name another folder",
    ):
        run_in(tmp_path / "run")
    assert Run.load(tmp_path / "run").config["seed"] == 7
    assert not (tmp_path / "run" / LOCK).exists()
