"""Engines by name: what can be forced, what is chosen, and what an engine that cannot train a module falls back to."""

from __future__ import annotations

import io
import os
import re
import sys
import threading

import pytest
import torch
from rich.console import Console
from torch import nn

from fedclade import ConfigError, Run, load_federation, simulate
from fedclade.core import rng
from fedclade.report import show_run
from fedclade.report.page import RunView, run_page
from fedclade.training import auto, threads
from fedclade.training.auto import ENGINES, TOGETHER, build_engine, check_engine, objection
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import StackedEngine
from fedclade.training.vmap import VmapEngine
from fedclade.training.workers import WorkersEngine
from tests.training.worlds import (
    LABELS,
    SPECS,
    Counts,
    Mixes,
    Scaled,
    Tied,
    features,
    perceptron,
    task_of,
)


def task(module: nn.Module, spec: str = "plain"):
    return task_of(module, features(), LABELS, SPECS[spec])


@pytest.fixture
def batched_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no measurement decide: the engines come with the one that trains clients together first."""
    monkeypatch.setattr(auto, "fastest", lambda engines, task: next(iter(engines)))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("module", "spec"),
    [*((perceptron, spec) for spec in SPECS), (Tied, "plain"), (Tied, "everything")],
)
def test_every_engine_gives_the_same_updates(name, spec, module):
    expected, losses = LoopEngine().train(task(module(), spec))
    got, mean_losses = build_engine(name).train(task(module(), spec))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mean_losses, losses, rtol=1e-5, atol=1e-6)


def test_an_unknown_engine_is_refused():
    with pytest.raises(
        ConfigError, match=re.escape("unknown engine 'staked'; did you mean 'stacked'?")
    ):
        check_engine("staked")
    with pytest.raises(ConfigError, match="unknown engine 'lop'"):
        build_engine("lop")


def test_auto_tells_what_it_has_taken(batched_is_fastest):
    engine = build_engine("auto")
    assert engine.name == "auto"
    engine.train(task(perceptron()))
    assert engine.name == "stacked"


@pytest.mark.parametrize(
    ("taken", "kind"),
    [
        ("stacked", StackedEngine),
        ("vmap", VmapEngine),
        ("loop", LoopEngine),
        ("workers, stacked", WorkersEngine),
        ("workers, channels last", WorkersEngine),
    ],
)
def test_what_was_taken_before_is_taken_again_without_a_look(taken, kind, monkeypatch):
    """A run that is resumed has other models than at its start, and perhaps no remembered choice."""
    for look in ("_choose_engine", "_find_engine", "objection", "fastest"):
        monkeypatch.setattr(auto, look, lambda *_, **__: pytest.fail("it was looked at again"))
    engine = build_engine("auto", taken)
    assert (engine.name, engine.resolved) == (taken.split(",")[0], taken)
    assert type(engine._engine) is kind
    if kind is WorkersEngine:
        assert f"workers, {engine._engine.inside}" == taken
    else:
        engine.train(task(perceptron()))


def test_auto_measures_by_itself():
    engine = build_engine("auto")
    engine.train(task(perceptron()))
    assert engine.name in ("stacked", "loop")


def test_what_cannot_be_stacked_goes_to_vmap_and_the_log_says_so(batched_is_fastest, caplog):
    engine = build_engine("auto")
    module = perceptron(Mixes())
    engine.train(task(module))
    assert engine.name == "vmap"
    assert (engine.fallback or "").startswith("vmap, because stacked: ")
    (line,) = [
        record.message for record in caplog.records if record.name == "fedclade.training.auto"
    ]
    assert re.match(r"engine: vmap, because stacked: .*", line)


@pytest.mark.parametrize("layer", [Counts, lambda: nn.Sequential(Mixes(), nn.BatchNorm1d(8))])
def test_what_cannot_be_mapped_either_goes_to_the_loop(batched_is_fastest, caplog, layer):
    engine = build_engine("auto")
    same = [
        task_of(perceptron(layer()), features((24, 12)), LABELS, SPECS["plain"], (24, 12))
        for _ in range(2)
    ]
    expected, _ = LoopEngine().train(same[0])
    got, _ = engine.train(same[1])
    assert engine.name == "loop"
    assert torch.equal(got, expected)
    (line,) = [
        record.message for record in caplog.records if record.name == "fedclade.training.auto"
    ]
    assert re.match(
        r"engine: loop, because stacked: .*; vmap: .*changes its buffers in training, which .*",
        line,
    )


class AsWithTF32(StackedEngine):
    """Stacked engine whose products are as coarse as TF32 where TF32 is allowed."""

    def train(self, work, out=None):
        updates, losses = super().train(work, out)
        if threads.allows_tf32() == (True, True):
            updates *= 1.05
        return updates, losses


def test_an_engine_is_checked_without_tf32_and_then_trains_with_it(batched_is_fastest, monkeypatch):
    monkeypatch.setitem(auto.TOGETHER, "stacked", AsWithTF32)
    engine, clients = build_engine("auto"), task(perceptron())
    exact, _ = StackedEngine().train(clients.redrawn())
    with threads.float32_products(tf32=True):
        got, _ = engine.train(clients)
        assert threads.allows_tf32() == (True, True)
    assert (engine.name, engine.fallback) == ("stacked", None)
    torch.testing.assert_close(got, 1.05 * exact)


class CountsDigits(nn.Module):
    """A module that no engine can train for several clients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.output = Counts(), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.counts(x.flatten(1)[:, :8]).repeat(1, 8))


def test_a_fall_back_is_a_line_of_the_summary_of_the_terminal_and_of_the_report(
    batched_is_fastest, tmp_path
):
    federation = load_federation("digits", clients=5, seed=11)
    run = simulate("fedavg", CountsDigits(), federation, rounds=1, references=False)
    fallback = run.summary["engine_fallback"]
    assert re.match(r"loop, because stacked: .*; vmap: .*", fallback)
    terminal = io.StringIO()
    show_run(run, Console(file=terminal, width=2000))
    assert re.search(r"engine +loop, because stacked: ", terminal.getvalue())
    cards = run_page(RunView(run)).cards
    assert [card for card in cards if card.label == "Engine"]
    run.save(tmp_path / "run")
    assert Run.load(tmp_path / "run").summary["engine_fallback"] == fallback


@pytest.mark.parametrize("name", TOGETHER)
def test_an_engine_that_is_by_name_and_cannot_is_refused(name):
    text = rf"engine '{name}' cannot train this model: .*; use --engine auto"
    with pytest.raises(ConfigError, match=text):
        build_engine(name).train(task(perceptron(Counts())))


class MixesInTraining(Mixes):
    """Shows in training only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else x


@pytest.mark.parametrize("layer", [Mixes, MixesInTraining])
def test_a_forward_pass_that_mixes_clients_is_found_out(layer):
    """The stacked engine knows every layer of it, and would mix the clients' examples all the same."""
    with pytest.raises(ConfigError, match="engine 'stacked' cannot train this model: "):
        build_engine("stacked").train(task(perceptron(layer())))


def test_updates_that_differ_are_told_with_their_error():
    text = r"Sequential gives different updates when several clients .* \(relative error \d\.\de[+-]\d+\)"
    assert re.match(text, objection(StackedEngine(), task(perceptron(MixesInTraining()))) or "")


class Off(LoopEngine):
    """The loop, but its updates are 1 % off for some types of numbers, in the order first tried or in all."""

    def __init__(self, types: tuple[torch.dtype, ...], always: bool) -> None:
        super().__init__()
        self._types, self._always = types, always

    def train(self, task, out=None):
        first = [job.generator.initial_seed() for job in task.jobs] == [
            rng.torch_seed(3, "test", k) for k in range(3)
        ]
        updates, losses = super().train(task, out)
        return updates * (
            1.01 if task.models.dtype in self._types and (first or self._always) else 1
        ), losses


class OnlyFloat32(nn.Module):
    def forward(self, x):
        return x @ torch.eye(8)


SINGLE, BOTH = (torch.float32,), (torch.float32, torch.float64)
REFUSED = "Sequential gives different updates when several clients are trained together (relative error 9.9e-03)"


@pytest.mark.parametrize(
    ("engine", "layers", "told"),
    [
        (Off(SINGLE, always=False), (), None),
        (Off(SINGLE, always=True), (), REFUSED),
        (Off(BOTH, always=False), (), REFUSED),
        (Off(SINGLE, always=False), (OnlyFloat32(),), REFUSED),
    ],
    ids=[
        "once and only in float32",
        "for every order",
        "in float64 too",
        "and float64 cannot be tried",
    ],
)
def test_what_rounding_explains_is_no_disagreement(engine, layers, told):
    reason = objection(engine, task(perceptron(*layers)))
    assert (reason and reason.split(":")[0]) == told


def test_an_input_of_a_relu_that_is_all_but_0_is_no_disagreement():
    """With this seed the stacked engine and the loop round it to different sides: their updates are 0.6 % apart."""
    federation = load_federation("digits", clients=5, seed=11)
    run = simulate("fedavg", "mlp", federation, rounds=1, seed=11, engine="stacked")
    assert run.summary["engine"] == "stacked"


class Fails(LoopEngine):
    def train(self, *arguments):
        raise RuntimeError("out of memory")


def test_an_engine_that_fails_is_told_with_its_error():
    assert (
        objection(Fails(), task(perceptron()))
        == "Sequential fails when several clients are trained together: out of memory"
    )


forked = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


class Aborts(LoopEngine):
    """Ends its process as torch does where it has overwritten its memory; in the thread that the trial has."""

    def train(self, *arguments):
        os.abort()


@forked
def test_an_engine_that_kills_its_process_in_the_trial_is_not_taken_and_we_live_on(capfd):
    reason = objection(Aborts(), task(perceptron()))
    assert reason == "the trial process died (signal SIGABRT)"
    assert capfd.readouterr() == ("", ""), "nor does it write anything"


@forked
def test_auto_trains_with_another_engine_where_one_kills_its_process(monkeypatch, caplog):
    monkeypatch.setattr(auto, "TOGETHER", {"stacked": Aborts, "vmap": Aborts})
    engine = build_engine("auto")
    got, _ = engine.train(task(perceptron()))
    assert engine.name == "loop"
    assert torch.equal(got, LoopEngine().train(task(perceptron()))[0])
    died = "the trial process died (signal SIGABRT)"
    assert f"engine: loop, because stacked: {died}; vmap: {died}" in caplog.text
    with pytest.raises(
        ConfigError,
        match=re.escape(f"engine 'vmap' cannot train this model: {died}; use --engine auto"),
    ):
        build_engine("vmap").train(task(perceptron()))


class Hangs(LoopEngine):
    def train(self, *arguments):
        threading.Event().wait()


@forked
def test_an_engine_that_hangs_in_the_trial_is_not_taken(monkeypatch):
    monkeypatch.setattr(auto, "LONGEST", 0.01)
    monkeypatch.setattr(auto, "TIMES_THE_LOOP", 0)
    assert objection(Hangs(), task(perceptron())) == "the trial process did not end within 0 s"


@forked
def test_a_trial_has_as_many_threads_as_torch_has_here():
    """OpenMP's own threads are not forked: a process that computes with several of them waits for ever."""

    class Counts(LoopEngine):
        def train(self, task, out=None):
            large = torch.ones(2**20)
            assert float((large + large).sum()) == 2**21
            raise RuntimeError(f"{torch.get_num_threads()} threads")

    torch.set_num_threads(2)
    try:
        large = torch.ones(2**20)
        assert float((large + large).sum()) == 2**21
        assert (
            objection(Counts(), task(perceptron()))
            == "Sequential fails when several clients are trained together: 2 threads"
        )
    finally:
        torch.set_num_threads(1)


@forked
def test_where_no_process_can_be_started_nothing_is_tried(monkeypatch):
    def none_left() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", none_left)
    reason = objection(Aborts(), task(perceptron())) or ""
    assert reason.startswith("the trial process cannot be started: ")


def test_where_processes_cannot_be_forked_safely_engines_are_tried_here(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    assert objection(StackedEngine(), task(perceptron())) is None
    assert (
        objection(Fails(), task(perceptron()))
        == "Sequential fails when several clients are trained together: out of memory"
    )


def test_dropout_is_no_disagreement(batched_is_fastest):
    engine = build_engine("auto")
    engine.train(task(perceptron(nn.Dropout(0.3))))
    assert engine.name == "stacked"


def test_a_parameter_of_the_users_own_trains(batched_is_fastest):
    engine = build_engine("auto")
    got, _ = engine.train(task(perceptron(Scaled())))
    expected, _ = LoopEngine().train(task(perceptron(Scaled())))
    assert engine.name in TOGETHER
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_one_thread_may_train_convolutions_with_their_channels_last(monkeypatch):
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, LABELS)
        )

    offered = []
    monkeypatch.setattr(
        auto, "fastest", lambda engines, _: offered.append(list(engines)) or list(engines)[-2]
    )
    engine = build_engine("auto")
    got, _ = engine.train(task(network()))
    assert offered == [["stacked", "loop, channels last", "loop"]]
    assert (engine.name, engine.resolved) == ("loop", "loop, channels last")
    torch.testing.assert_close(got, LoopEngine().train(task(network()))[0], rtol=1e-4, atol=1e-6)
    again, _ = build_engine("auto", engine.resolved).train(task(network()))
    assert torch.equal(again, got)
    offered.clear()
    build_engine("auto").train(task(perceptron()))
    assert offered == [["stacked", "loop"]], "there is nothing to keep last"
