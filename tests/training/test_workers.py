"""Worker processes give the updates of the loop, and neither outlive nor hang those who use them."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedclade import ConfigError, EngineError
from fedclade.training import auto, autotune, workers
from fedclade.training.auto import build_engine
from fedclade.training.jobs import CannotTrainTogether, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.workers import INSIDE, WorkersEngine, cannot_fork
from tests.training.worlds import LABELS, SPECS, Counts, Tied, features, perceptron, task_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are forked on Linux only"
)


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Two threads, so two processes; and nothing is remembered from other tests."""
    monkeypatch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "_of_this_process", {})
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def task(module: nn.Module | None = None, spec: str = "plain") -> Workload:
    return task_of(module or perceptron(), features(), LABELS, SPECS[spec])


def convolutional(flat: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 8, 2, padding=1),
        nn.ReLU(),
        flat,
        nn.Linear(8 * 3 * 4, LABELS),
    )


class View(nn.Module):
    """Flattens as many published models do, which needs memory in the usual order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def processes(engine: WorkersEngine) -> list[int]:
    assert engine._pool is not None
    return sorted(engine._pool._processes.values())


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("module", [perceptron, Tied, lambda: convolutional(nn.Flatten())])
def test_updates_are_those_of_the_loop(inside, spec, module):
    expected, losses = LoopEngine().train(task(module(), spec))
    got, mean_losses = WorkersEngine(inside).train(task(module(), spec))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mean_losses, losses, rtol=1e-5, atol=1e-6)


def test_one_after_another_they_are_the_loop_to_the_last_bit_dropout_included():
    expected, losses = LoopEngine().train(task(perceptron(nn.Dropout(0.4))))
    got, mean_losses = WorkersEngine("loop").train(task(perceptron(nn.Dropout(0.4))))
    assert torch.equal(got, expected)
    assert torch.equal(mean_losses, losses)


def test_anchors_reach_the_processes():
    pulled = task(spec="proximal")
    pulled = replace(pulled, jobs=[replace(job, anchor=1 - job.row) for job in pulled.jobs])
    again = task(spec="proximal")
    again = replace(again, jobs=[replace(job, anchor=1 - job.row) for job in again.jobs])
    expected, _ = LoopEngine().train(pulled)
    assert torch.equal(WorkersEngine("loop").train(again)[0], expected)


def test_processes_are_kept_as_long_as_module_and_data_are_the_same():
    engine = WorkersEngine("loop")
    first = task()
    expected, _ = LoopEngine().train(task())
    updates, _ = engine.train(first)
    before = processes(engine)
    assert len(before) == 2
    fresh = [
        replace(job, generator=torch.Generator().manual_seed(job.generator.initial_seed()))
        for job in first.jobs
    ]
    some, _ = engine.train(replace(first, jobs=fresh[1:4]))
    assert processes(engine) == before
    assert torch.equal(updates, expected), "what was given out stays as it was"
    assert torch.equal(some, expected[1:4])
    engine.train(task(Tied()))
    assert not set(processes(engine)) & set(before)
    assert not any(map(is_alive, before))


def test_more_clients_than_before_find_room():
    engine = WorkersEngine("loop")
    large = task_of(perceptron(), features((3,) * 30), LABELS, SPECS["plain"], (3,) * 30)
    draws = [torch.Generator().manual_seed(job.generator.initial_seed()) for job in large.jobs]
    expected, _ = LoopEngine().train(large)
    fresh = [replace(job, generator=draw) for job, draw in zip(large.jobs, draws, strict=True)]
    engine.train(replace(large, jobs=large.jobs[:2]))
    assert torch.equal(engine.train(replace(large, jobs=fresh))[0], expected)


def test_processes_end_with_their_engine():
    engine = WorkersEngine("loop")
    engine.train(task())
    before = processes(engine)
    del engine
    assert not any(map(is_alive, before))


class Dies(LoopEngine):
    """As torch does where it has overwritten its memory; only ever trained with in a forked process."""

    def train(self, *arguments):
        os.abort()


class Kills(nn.Module):
    """As the kernel does to a process that takes too much memory."""

    def forward(self, x: Tensor) -> Tensor:
        if os.getpid() != int(os.environ["PARENT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_a_process_that_dies_is_told_and_the_next_call_works(monkeypatch):
    monkeypatch.setenv("PARENT", str(os.getpid()))
    engine = WorkersEngine("loop")
    with pytest.raises(
        EngineError,
        match=r"a worker process died \(signal SIGKILL\) while it trained 1 clients; if",
    ):
        engine.train(task(perceptron(Kills())))
    expected, _ = LoopEngine().train(task())
    assert torch.equal(engine.train(task())[0], expected)


@pytest.mark.parametrize(("asked", "instead"), [("auto", "loop"), ("workers", "workers, loop")])
def test_a_process_that_dies_costs_the_way_that_it_trained_not_the_run(
    monkeypatch, caplog, asked, instead
):
    monkeypatch.setitem(INSIDE, "stacked", Dies)
    engine = build_engine(asked, "workers, stacked")
    expected, _ = LoopEngine().train(task())
    assert torch.equal(engine.train(task())[0], expected)
    assert engine.resolved == instead
    (line,) = [record.message for record in caplog.records]
    assert re.match(
        r"a worker process died \(signal SIGABRT\) .*; training with engine " + instead, line
    )
    caplog.clear()
    assert torch.equal(engine.train(task())[0], expected)
    assert not caplog.records


def test_auto_does_not_take_workers_that_die_while_they_are_measured(monkeypatch, caplog):
    monkeypatch.setitem(INSIDE, "stacked", Dies)
    monkeypatch.setitem(INSIDE, "loop", Dies)
    engine = build_engine("auto")
    expected, _ = LoopEngine().train(task())
    torch.testing.assert_close(engine.train(task())[0], expected, rtol=1e-4, atol=1e-6)
    assert engine.name in ("stacked", "loop")
    for way in ("stacked", "loop"):
        assert (
            f"engine workers, {way} is left out: a worker process died (signal SIGABRT)"
            in caplog.text
        )


def test_workers_that_were_asked_for_and_die_whatever_they_do_are_told(monkeypatch):
    monkeypatch.setitem(INSIDE, "loop", Dies)
    with pytest.raises(EngineError, match=r"a worker process died \(signal SIGABRT\)"):
        build_engine("workers", "workers, loop").train(task())


def test_channels_last_that_kills_its_process_is_not_taken(monkeypatch, caplog):
    """Some convolutions do where their channels come last. What is tried is what workers do: with one thread."""
    monkeypatch.setattr(auto, "ChannelsLastLoop", Dies)
    monkeypatch.setattr(auto, "fastest", lambda engines, task: list(engines)[-1])
    engine = build_engine("workers")
    with caplog.at_level(logging.INFO):
        engine.train(task(convolutional(nn.Flatten())))
    assert engine.resolved == "workers, loop"
    assert (
        "convolutions are not trained in the channels-last memory format: the trial process died (signal SIGABRT)"
        in caplog.text
    )
    assert torch.get_num_threads() == 2


def test_the_processes_say_how_long_they_compute(monkeypatch):
    """As if each of the five clients' orders took a second: of two processes one carries out three."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(workers, "thread_time", lambda: float(next(seconds)))
    engine = WorkersEngine("loop")
    for cores, expected in ((2, 3.0), (1, 3.0 + 5.0), (64, 3.0 + 5.0 + 3.0)):
        monkeypatch.setattr(workers, "cores", lambda cores=cores: cores)
        engine.train(task())
        assert engine.busy == expected


def test_where_no_process_can_be_started_that_is_told(monkeypatch):
    def none_left() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", none_left)
    with pytest.raises(
        EngineError, match=r"worker processes cannot be started: .* unavailable; use --engine loop"
    ):
        WorkersEngine("loop").train(task())


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 7:
            raise KeyError("seven")
        return x


def test_what_a_client_fails_of_comes_back():
    engine = WorkersEngine("loop")
    with pytest.raises(RuntimeError, match="KeyError: 'seven'"):
        engine.train(task(perceptron(Fails())))
    engine.train(task())


def test_what_cannot_be_stacked_inside_is_told_as_the_stacked_engine_tells_it():
    with pytest.raises(CannotTrainTogether, match=r"'1.calls' .* is a buffer that"):
        WorkersEngine("stacked").train(task(perceptron(Counts())))


def test_the_user_can_ask_for_workers():
    engine = build_engine("workers")
    expected, _ = LoopEngine().train(task())
    torch.testing.assert_close(engine.train(task())[0], expected, rtol=1e-4, atol=1e-6)
    assert engine.name == "workers"


def test_auto_takes_them_where_they_are_fastest(monkeypatch):
    monkeypatch.setattr(auto, "fastest", lambda engines, task: "workers, loop")
    engine = build_engine("auto")
    engine.train(task())
    assert engine.name == "workers"


def test_auto_does_not_fork_for_one_thread_or_one_client(monkeypatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(auto, "fastest", lambda engines, task: seen.append(list(engines)) or "loop")
    build_engine("auto").train(task())
    alone = task()
    build_engine("auto").train(replace(alone, jobs=alone.jobs[:1]))
    torch.set_num_threads(1)
    build_engine("auto").train(task())
    assert seen == [
        ["stacked", "workers, stacked", "workers, loop", "loop"],
        *[["stacked", "loop"]] * 2,
    ]


@pytest.mark.parametrize(("flat", "inside"), [(nn.Flatten, "channels last"), (View, "loop")])
def test_convolutions_keep_their_channels_last_unless_the_module_cannot(monkeypatch, flat, inside):
    seen: list[str] = []
    monkeypatch.setattr(auto, "fastest", lambda engines, task: seen.extend(engines) or seen[-1])
    expected, _ = LoopEngine().train(task(convolutional(flat())))
    got, _ = build_engine("workers").train(task(convolutional(flat())))
    assert seen == ["workers, stacked", f"workers, {inside}"]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_where_processes_cannot_be_forked_safely_there_are_none(monkeypatch):
    assert (
        cannot_fork(torch.device("cuda"))
        == "worker processes train on the CPU only, not on device cuda"
    )
    assert cannot_fork(torch.device("cpu")) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert "torch has started threads for an accelerator" in (
        cannot_fork(torch.device("cpu")) or ""
    )
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        ConfigError,
        match=re.escape(
            "engine 'workers' cannot train this model: worker processes must be forked"
        ),
    ):
        build_engine("workers").train(task())
    engine = build_engine("auto")
    engine.train(task())
    assert engine.name in ("stacked", "loop")


SCRIPT = """
import os, sys, time, torch
torch.set_num_threads(2)
from tests.training.test_workers import task
from fedclade.training.workers import WorkersEngine
engine = WorkersEngine("loop")
engine.train(task())
print(*engine._pool._processes.values(), flush=True)
if "wait" in sys.argv:
    time.sleep(60)
"""
"""Without a main guard, as people write them."""


def started(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = [str(Path(__file__).parents[2]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.slow
def test_a_script_without_a_main_guard_works_and_leaves_nobody_behind(tmp_path):
    script = started(tmp_path)
    output, _ = script.communicate(timeout=120)
    assert script.returncode == 0
    assert len(output.split()) == 2
    assert not any(is_alive(int(process)) for process in output.split())


@pytest.mark.slow
def test_processes_end_with_a_parent_that_was_killed(tmp_path):
    script = started(tmp_path, "wait")
    assert script.stdout is not None
    left = [int(process) for process in script.stdout.readline().split()]
    assert all(map(is_alive, left))
    script.kill()
    script.communicate()
    for _ in range(200):
        if not any(map(is_alive, left)):
            break
        time.sleep(0.05)
    assert not any(map(is_alive, left))


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sent_to_everybody_is_left_to_the_parent(sent):
    """By a terminal or a scheduler: the parent finishes the round, for which it needs the processes."""
    engine, work = WorkersEngine("loop"), task()
    engine.train(work)
    before = processes(engine)
    for process in before:
        os.kill(process, sent)
    engine.train(work)
    assert processes(engine) == before
    engine.stop()
