"""Runs that are killed and interrupted, and end as if they had not been."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.properties.test_resume import bytes_of
from tests.tiny import federation_of, linear

from fedclade import CFL, LocalTraining, RunError, simulate
from fedclade.config import Config, read_config
from fedclade.data import Federation

CONFIG = """
rounds = 40
evaluate_every = 2
checkpoint_every = 1
engine = "loop"
[data]
name = "digits"
clients = 6
samples_per_client = 40
shift = "label_swap"
clusters = 2
[model]
name = "mclr"
[local]
batch_size = 20
[algorithm]
name = "cfl"
eps2 = 0.1
split_rounds = [8, 20, 30]
"""
LONG = CONFIG.replace("rounds = 40", "rounds = 150")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Federation, Path]:
    """A config, its data, and the folder of its run without an interrupt."""
    return uninterrupted(tmp_path_factory.mktemp("whole"), CONFIG)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that takes so long that a signal to it comes in time, however busy the machine is."""
    return uninterrupted(tmp_path_factory.mktemp("long"), LONG)[2]


def uninterrupted(folder: Path, text: str) -> tuple[Config, Federation, Path]:
    (folder / "digits.toml").write_text(text)
    config = read_config(folder / "digits.toml")
    federation = config.federation()
    config.run(federation, folder=folder / "run")
    return config, federation, folder / "run"


def forked(work: Callable[[], object]) -> int:
    """Return the id of a process that does some work, and is then gone without a trace of the tests."""
    if process := os.fork():
        return process
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def signalled(process: int) -> int | None:
    """Wait for the end of a process; return the signal that ended it, or None if it ended well."""
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code <= 0, "the run failed"
    return -code or None


def test_a_run_killed_at_20_random_moments_ends_in_the_same_bytes(digits, tmp_path):
    """Each time some rounds after it was started, and some milliseconds. A run that finishes makes room for another."""
    config, federation, whole = digits
    draw = np.random.default_rng(0)
    killed, folder, folders = 0, tmp_path / "run-0", [tmp_path / "run-0"]
    while killed < 20:
        reading, writing = os.pipe()

        def work(folder=folder, writing=writing):
            config.run(federation, folder=folder, on_round=lambda *_: os.write(writing, b"."))

        process = forked(work)
        os.close(writing)
        for _ in range(draw.integers(5)):
            os.read(reading, 1)
        time.sleep(draw.uniform(0, 0.03))
        os.kill(process, signal.SIGKILL)
        os.close(reading)
        if signalled(process) == signal.SIGKILL:
            killed += 1
        if (folder / "summary.json").exists():
            folder = tmp_path / f"run-{len(folders)}"
            folders.append(folder)
    assert folders
    for each in folders:
        config.run(federation, folder=each)
        assert bytes_of(each) == bytes_of(whole)


def tiny_run(folder: Path, **changes) -> None:
    settings = {
        "local": LocalTraining(batch_size=10),
        "rounds": 3,
        "engine": "loop",
        "checkpoint_every": 1,
    } | changes
    simulate(
        CFL(eps2=1e-3, split_rounds=(2,)),
        linear(),
        federation_of([0, 1, 0, 1]),
        folder=folder,
        **settings,
    )


def killing_itself(folder: Path, at: int) -> None:
    """Run, and end by SIGKILL before the so-many-th time that a file below the folder is touched."""
    left = at

    def hook(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"):
            left -= any(str(folder.parent) in str(argument) for argument in arguments)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    tiny_run(folder)


@pytest.mark.slow
def test_a_run_killed_at_any_file_it_touches_resumes_to_the_same_bytes(tmp_path):
    """From the making of the folder over every file of a checkpoint to the last file of the results."""
    tiny_run(tmp_path / "whole")
    at, stages = 1, set()
    while True:
        folder = tmp_path / "runs" / "run"
        folder.parent.mkdir()
        if signalled(forked(lambda folder=folder, at=at: killing_itself(folder, at))) is None:
            break
        stages.add(
            "results"
            if (folder / "summary.json").exists()
            else len(list(folder.glob("checkpoints/round-*")))
        )
        tiny_run(folder)
        assert bytes_of(folder) == bytes_of(tmp_path / "whole")
        shutil.rmtree(folder.parent)
        at += 5
    assert stages >= {0, 1, 2}
    assert at > 100


@pytest.mark.parametrize("largest", [100, 1100, 1600, 2500, 4000])
def test_files_that_the_system_refuses_are_one_clear_error_and_the_run_resumes(tmp_path, largest):
    """A process may write no file of more than so many bytes after round 2, which stands for a full disk."""

    def limit(row, tree):
        if row["round"] == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))

    def work():
        with pytest.raises(
            RunError, match=rf"cannot write the .* {tmp_path / 'run'}.*File too large"
        ):
            tiny_run(tmp_path / "run", on_round=limit)

    assert signalled(forked(work)) is None
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.toml", "checkpoints"}
    tiny_run(tmp_path / "run")
    tiny_run(tmp_path / "whole")
    assert bytes_of(tmp_path / "run") == bytes_of(tmp_path / "whole")


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("sent", SIGNALS)
def test_the_command_line_saves_on_an_interrupt_and_resumes(long, tmp_path, sent):
    (tmp_path / "digits.toml").write_text(LONG)

    def fedclade(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "fedclade", *arguments]
        return subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    run = fedclade("run", "digits.toml", "--out", "run", "-q")
    while not (tmp_path / "run/checkpoints/round-000002").exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.001)
    run.send_signal(sent)
    out, err = run.communicate()
    assert run.returncode == 130, err
    newest = max(int(path.name[-6:]) for path in (tmp_path / "run/checkpoints").iterdir())
    assert out == f"interrupted after round {newest}; continue with: fedclade resume run\n"
    assert "stopping after this round; Ctrl-C again stops at once" in err
    resumed = fedclade("resume", "run")
    out, err = resumed.communicate()
    assert resumed.returncode == 0, err
    assert "run folder: run" in out
    assert (tmp_path / "run/figures/accuracy.png").is_file()
    shutil.rmtree(tmp_path / "run/figures")
    assert bytes_of(tmp_path / "run") == bytes_of(long)
