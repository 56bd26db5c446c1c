"""The fastest engine is found by measuring, now and then, and kept.

No test here depends on the machine: its clocks are stand-ins, which the engines put forward.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedclade import EngineError
from fedclade.training import autotune
from fedclade.training.autotune import MOST_RUNS, RUNS, Choice, Measured, fastest, forget, measure
from fedclade.training.loop import LoopEngine
from fedclade.training.workers import WorkersEngine
from tests.training.worlds import LABELS, SPECS, features, perceptron, task_of


class Clock:
    """Passes only where an engine says so."""

    computed = computed_by_all = passed = 0.0


@pytest.fixture(autouse=True)
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "_of_this_process", {})
    clock = Clock()
    monkeypatch.setattr(Slow, "clock", clock)
    monkeypatch.setattr(autotune, "thread_time", lambda: clock.computed)
    monkeypatch.setattr(autotune, "process_time", lambda: clock.computed_by_all)
    monkeypatch.setattr(autotune, "perf_counter", lambda: clock.passed)
    return clock


class Slow(LoopEngine):
    """Takes as long as it is told, and longer the first few times; counts its calls.

    Beside other work it waits for a core ``waits`` times as long as it computes.
    """

    clock = Clock()

    def __init__(self, seconds: float, *at_first: float, waits: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.at_first, self.waits, self.calls = seconds, [*at_first], waits, 0

    def train(self, task, out=None):
        self.calls += 1
        seconds = self.seconds + (self.at_first.pop(0) if self.at_first else 0)
        self.clock.computed += seconds
        self.clock.computed_by_all += seconds
        self.clock.passed += seconds * (1 + self.waits)
        return task.room(out), torch.zeros(len(task.jobs), dtype=torch.float64)


class Dies(Slow):
    """Loses a worker process, the first time or later."""

    def __init__(self, at_call: int) -> None:
        super().__init__(0.0001)
        self.at_call = at_call

    def train(self, task, out=None):
        if self.calls + 1 == self.at_call:
            raise EngineError("a worker process died (signal SIGSEGV)")
        return super().train(task, out)


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another process asked."""
    monkeypatch.setattr(autotune, "_of_this_process", {})


def task(**settings):
    return task_of(perceptron(), features(), LABELS, SPECS["plain"], **settings)


def engines(one: float = 0.05, other: float = 0.001, waits: float = 0.0) -> dict[str, Slow]:
    return {"one": Slow(one, waits=waits), "other": Slow(other, waits=waits)}


def only_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache").iterdir()
    return file


def kept(tmp_path: Path) -> dict:
    return json.loads(only_file(tmp_path).read_text())


def test_the_fastest_is_taken_and_remembered(tmp_path, monkeypatch, caplog):
    measured = engines()
    with caplog.at_level(logging.INFO):
        assert fastest(measured, task()) == "other"
    assert "engine other is the fastest for this model (samples/s: one " in caplog.text
    assert kept(tmp_path)["engine"] == "other"
    assert (
        kept(tmp_path)["samples_per_second"]["other"] > kept(tmp_path)["samples_per_second"]["one"]
    )
    another_process(monkeypatch)
    reversed_now = engines(0.001, 0.05)
    assert fastest(reversed_now, task()) == "other", "what is in the cache holds"
    assert [engine.calls for engine in reversed_now.values()] == [0, 0]


def test_another_batch_size_module_number_of_clients_or_threads_is_measured_anew(
    tmp_path, monkeypatch
):
    first = task()
    tasks = [
        first,
        replace(first, spec=replace(first.spec, batch_size=11)),
        task_of(perceptron(torch.nn.ReLU()), features(), LABELS, SPECS["plain"]),
        replace(first, jobs=first.jobs[:2]),
    ]
    for each in tasks:
        fastest(engines(0.01), each)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    fastest(engines(0.01), first)
    assert len(list((tmp_path / "cache").iterdir())) == 5


def test_measuring_leaves_the_draws_alone():
    measured = task()
    before = [job.generator.get_state() for job in measured.jobs]
    measure({"loop": LoopEngine(), **engines()}, measured)
    assert all(
        torch.equal(job.generator.get_state(), state)
        for job, state in zip(measured.jobs, before, strict=True)
    )


def test_slow_engines_get_the_fewest_repeats(monkeypatch):
    monkeypatch.setattr(autotune, "SECONDS", 0.01)
    slow = engines(0.02, 0.02)
    measure(slow, task())
    assert [engine.calls for engine in slow.values()] == [1 + autotune.FEWEST_REPEATS] * 2, (
        "and one to warm up"
    )


@pytest.mark.parametrize(
    ("seconds", "repeats"), [(20, autotune.SURE), (0.04, 1)], ids=["a fast model", "a slow one"]
)
def test_what_is_far_behind_at_first_is_not_measured_again(monkeypatch, seconds, repeats):
    monkeypatch.setattr(autotune, "SECONDS", seconds)
    far_behind, *close = measured = [Slow(0.2), Slow(0.002), Slow(0.003)]
    measure({str(k): engine for k, engine in enumerate(measured)}, task())
    assert far_behind.calls == 1 + repeats
    assert all(engine.calls > autotune.FEWEST_REPEATS for engine in close)


@pytest.mark.parametrize(
    "at_first", [(0.1,), (0.0, 0.1), (0.1, 0.1)], ids=["to get ready", "once", "both"]
)
def test_who_takes_long_at_first_is_not_far_behind(at_first):
    late, other = Slow(0.001, *at_first), Slow(0.002)
    speeds = measure({"late": late, "other": other}, task()).speeds
    assert late.calls == other.calls > autotune.FEWEST_REPEATS
    assert speeds["late"] > speeds["other"]


@pytest.mark.parametrize("seconds", [0.0001, 0.01, 1.0])
def test_other_work_on_the_machine_decides_nothing(seconds):
    """Neither which is the fastest nor how often each is measured: what counts is the time that engines compute."""
    quiet, busy = (
        {"one": Slow(2 * seconds), "other": Slow(seconds, waits=waits)} for waits in (0.0, 9.0)
    )
    alone, beside = measure(quiet, task()), measure(busy, task())
    assert beside.speeds == pytest.approx(alone.speeds)
    assert beside.speeds["other"] > beside.speeds["one"]
    assert [engine.calls for engine in busy.values()] == [engine.calls for engine in quiet.values()]
    assert alone.share == pytest.approx(1)
    assert beside.share < 0.5


def test_the_work_of_other_threads_and_processes_counts(clock, monkeypatch):
    """What they compute has to be shared out over the cores that there are."""
    monkeypatch.setattr(autotune, "cores", lambda: 2)

    class Threaded(Slow):
        def train(self, task, out=None):
            clock.computed_by_all += 9 * self.seconds
            return super().train(task, out)

    class Workers(WorkersEngine):
        def train(self, task, out=None):
            self.busy += 0.03
            clock.computed += 0.01
            return task.room(out), torch.zeros(len(task.jobs), dtype=torch.float64)

    one, threaded, workers = (
        autotune._measure_seconds(engine, task())[0]
        for engine in (Slow(0.1), Threaded(0.1), Workers("loop"))
    )
    assert (one, threaded, workers) == pytest.approx((0.1, 0.1 * 10 / 2, 0.01 + 0.03))


def test_a_choice_of_a_busy_machine_is_measured_again_by_the_next_run(
    tmp_path, monkeypatch, caplog
):
    with caplog.at_level(logging.INFO):
        assert fastest(engines(0.001, 0.002, waits=1.0), task()) == "one"
    assert "the cores were busy for 50% of the time" in caplog.text
    assert kept(tmp_path)["share"] == pytest.approx(0.5)
    another_process(monkeypatch)
    assert fastest(engines(0.002, 0.001), task()) == "other"
    assert kept(tmp_path)["share"] == pytest.approx(1)


def test_a_sure_choice_is_measured_again_after_some_runs(tmp_path, monkeypatch):
    def measured_in_the_next_run() -> bool:
        another_process(monkeypatch)
        asked = engines()
        assert fastest(asked, task()) == "other"
        return asked["other"].calls > 0

    assert [measured_in_the_next_run() for _ in range(RUNS + 1)] == [
        True,
        *[False] * (RUNS - 1),
        True,
    ]
    assert [measured_in_the_next_run() for _ in range(2 * RUNS)] == [
        *[False] * (2 * RUNS - 1),
        True,
    ], "was confirmed"
    assert kept(tmp_path)["confirmed"] == 2


@pytest.mark.parametrize(
    ("speeds", "share", "expected"),
    [
        ({"a": 100.0, "b": 109.0}, 1.0, "a"),
        ({"a": 100.0, "b": 112.0}, 1.0, "b"),
        ({"a": 100.0, "b": 300.0}, 0.5, "a"),
        ({"b": 50.0, "c": 60.0}, 0.5, "c"),
    ],
    ids=["not clearly beaten", "clearly beaten", "on a busy machine", "it died"],
)
def test_the_known_best_is_kept_unless_it_is_clearly_beaten(speeds, share, expected):
    known = Choice("a", {"a": 100.0, "b": 90.0}, 1.0, confirmed=1, runs=2 * RUNS)
    assert known.is_due
    after = known.after(Measured(speeds, share))
    assert after.engine == expected
    assert not after.is_due or not after.is_sure
    if share < 1 and expected == "a":
        assert after == replace(known, runs=1), "what is known of a quiet machine stays"
    else:
        assert (after.samples_per_second, after.confirmed) == (speeds, 2 if expected == "a" else 0)


def test_a_choice_is_measured_again_however_often_it_was_confirmed():
    assert Choice("a", {"a": 1.0}, 1.0, confirmed=10**6, runs=MOST_RUNS).is_due


@pytest.mark.parametrize("at_call", [1, 2, 4])
def test_an_engine_that_loses_a_process_while_it_is_measured_is_not_taken(caplog, at_call):
    assert fastest({"dies": Dies(at_call), **engines()}, task()) == "other"
    assert "engine dies is left out: a worker process died (signal SIGSEGV)" in caplog.text


def test_where_all_engines_lose_processes_that_is_the_error():
    with pytest.raises(EngineError, match="a worker process died"):
        fastest({"dies": Dies(1), "dies later": Dies(2)}, task())


def test_an_engine_that_broke_down_is_forgotten(tmp_path):
    assert fastest(engines(), task()) == "other"
    forget("one")
    only_file(tmp_path)
    forget("other")
    assert not list((tmp_path / "cache").iterdir())
    assert fastest(engines(0.001, 0.05), task()) == "one"


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"engine": ', '{"samples_per_second": 3}'])
def test_a_damaged_file_is_measured_again(tmp_path, monkeypatch, caplog, content):
    fastest(engines(), task())
    file = only_file(tmp_path)
    file.write_text(content)
    another_process(monkeypatch)
    assert fastest(engines(0.001, 0.05), task()) == "one"
    assert f"cannot read the cached choice of an engine in {file}" in caplog.text
    assert json.loads(file.read_text())["engine"] == "one"


def test_without_a_folder_the_choice_holds_for_the_process(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert fastest(engines(), task()) == "other"
    assert f"cannot write the choice of an engine to {tmp_path / 'file' / 'cache'}" in caplog.text
    assert fastest(engines(0.001, 0.05), task()) == "other"


def test_of_two_processes_that_measure_at_once_the_first_decides(tmp_path, monkeypatch):
    """The other one writes its choice while this one measures."""
    original = autotune.measure

    def meanwhile(*arguments):
        speeds = original(*arguments)
        monkeypatch.setattr(autotune, "measure", original)
        another_process(monkeypatch)
        assert fastest(engines(0.001, 0.05), task()) == "one"
        another_process(monkeypatch)
        return speeds

    monkeypatch.setattr(autotune, "measure", meanwhile)
    assert fastest(engines(), task()) == "one"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [only_file(tmp_path).name]
