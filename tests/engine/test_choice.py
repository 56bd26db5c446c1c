"""The fastest engine is found by measuring, once, and kept."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedclade.engine import choice
from fedclade.engine.choice import fastest, measure
from fedclade.engine.loop import LoopEngine
from tests.engine.worlds import LABELS, SPECS, features, perceptron, task_of


class Slow(LoopEngine):
    """The loop, after a nap, and further ones the first few times; counts its calls."""

    def __init__(self, seconds: float, *at_first: float) -> None:
        super().__init__()
        self.seconds, self.at_first, self.calls = seconds, [*at_first], 0

    def train(self, *arguments):
        self.calls += 1
        time.sleep(self.seconds + (self.at_first.pop(0) if self.at_first else 0))
        return super().train(*arguments)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "_of_this_process", {})


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another process asked."""
    monkeypatch.setattr(choice, "_of_this_process", {})


def task(**settings):
    return task_of(perceptron(), features(), LABELS, SPECS["plain"], **settings)


def engines(one: float = 0.05, other: float = 0.0) -> dict[str, Slow]:
    return {"one": Slow(one), "other": Slow(other)}


def only_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache").iterdir()
    return file


def test_the_fastest_is_taken_and_remembered(tmp_path, monkeypatch, caplog):
    measured = engines()
    with caplog.at_level(logging.INFO):
        assert fastest(measured, task()) == "other"
    assert "engine other is the fastest for this model (samples/s: one " in caplog.text
    kept = json.loads(only_file(tmp_path).read_text())
    assert kept["engine"] == "other"
    assert kept["samples_per_second"]["other"] > kept["samples_per_second"]["one"]
    forget(monkeypatch)
    reversed_now = engines(0.0, 0.05)
    assert fastest(reversed_now, task()) == "other", "what is in the cache holds"
    assert [engine.calls for engine in reversed_now.values()] == [0, 0]


def test_another_batch_size_module_number_of_clients_or_threads_is_measured_anew(tmp_path, monkeypatch):
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
    before = [job.draw.get_state() for job in measured.jobs]
    measure(engines(), measured)
    assert all(torch.equal(job.draw.get_state(), state) for job, state in zip(measured.jobs, before, strict=True))


def test_slow_engines_get_the_fewest_repeats(monkeypatch):
    monkeypatch.setattr(choice, "SECONDS", 0.01)
    slow = engines(0.02, 0.02)
    measure(slow, task())
    assert [engine.calls for engine in slow.values()] == [1 + choice.FEWEST_REPEATS] * 2, "and one to warm up"


@pytest.mark.parametrize(("seconds", "repeats"), [(20, choice.SURE), (0.04, 1)], ids=["a fast model", "a slow one"])
def test_what_is_far_behind_at_first_is_not_measured_again(monkeypatch, seconds, repeats):
    monkeypatch.setattr(choice, "SECONDS", seconds)
    far_behind, *close = measured = [Slow(0.2), Slow(0.0), Slow(0.001)]
    measure({str(k): engine for k, engine in enumerate(measured)}, task())
    assert far_behind.calls == 1 + repeats
    assert all(engine.calls > choice.FEWEST_REPEATS for engine in close)


@pytest.mark.parametrize("at_first", [(0.1,), (0.0, 0.1), (0.1, 0.1)], ids=["to get ready", "once", "both"])
def test_who_takes_long_at_first_is_not_far_behind(monkeypatch, at_first):
    monkeypatch.setattr(choice, "SECONDS", 20)  # so that this is a fast model even where much else is going on
    late, other = Slow(0.0, *at_first), Slow(0.002)
    speeds = measure({"late": late, "other": other}, task())
    assert late.calls == other.calls > choice.FEWEST_REPEATS
    assert speeds["late"] > speeds["other"]


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"engine": '])
def test_a_damaged_file_is_measured_again(tmp_path, monkeypatch, caplog, content):
    fastest(engines(), task())
    file = only_file(tmp_path)
    file.write_text(content)
    forget(monkeypatch)
    assert fastest(engines(0.0, 0.05), task()) == "one"
    assert f"cannot use the choice of an engine in {file}" in caplog.text
    assert json.loads(file.read_text())["engine"] == "one"


def test_without_a_folder_the_choice_holds_for_the_process(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert fastest(engines(), task()) == "other"
    assert f"cannot keep the choice of an engine in {tmp_path / 'file' / 'cache'}" in caplog.text
    assert fastest(engines(0.0, 0.05), task()) == "other"


def test_of_two_processes_that_measure_at_once_the_first_decides(tmp_path, monkeypatch):
    """The other one writes its choice while this one measures."""
    original = choice.measure

    def meanwhile(*arguments):
        speeds = original(*arguments)
        monkeypatch.setattr(choice, "measure", original)
        forget(monkeypatch)
        assert fastest(engines(0.0, 0.05), task()) == "one"
        forget(monkeypatch)
        return speeds

    monkeypatch.setattr(choice, "measure", meanwhile)
    assert fastest(engines(), task()) == "one"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [only_file(tmp_path).name]
