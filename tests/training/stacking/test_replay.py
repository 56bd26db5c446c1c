"""Steps that are recorded and launched again give what steps give.

There is no GPU here. So a recorder of torch's operations stands for CUDA graphs: it repeats them on the very tensors
that they had, as a graph does, and runs no line of Python in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedclade import LocalTraining
from fedclade.training import auto
from fedclade.training.auto import build_engine, objection
from fedclade.training.jobs import Engine, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import StackedEngine
from fedclade.training.stacking import functions, replay
from fedclade.training.stacking.replay import Replay
from fedclade.training.threads import float32_products
from tests.training.worlds import (
    FEATURES,
    LABELS,
    SPECS,
    TOKENS,
    Tied,
    features,
    perceptron,
    task_of,
)

SIZES = (60, 60, 50, 23)
"""Of clients, with batches of 10: two full steps of all, a ragged one, two of three clients, one of two."""


class Words(nn.Module):
    """Embedded tokens, and a recurrent layer or a transformer over them."""

    def __init__(self, body: nn.Module, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 8, padding_idx=padding)
        self.body = body
        self.output = nn.Linear(8, LABELS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.table(tokens))
        return self.output((x[0] if isinstance(x, tuple) else x)[:, -1])


def modules() -> dict[str, nn.Module]:
    dense = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, LABELS))
    found = {
        "by hand": dense,
        "by autograd": perceptron(nn.Linear(8, 8), nn.Sigmoid(), nn.LayerNorm(8)),
        "batch norm": perceptron(nn.BatchNorm1d(8)),
        "tied": Tied(),
        "lstm": Words(nn.LSTM(8, 8, num_layers=2, batch_first=True), padding=0),
        "gru": Words(nn.GRU(8, 8, batch_first=True)),
        "transformer": Words(
            nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0, batch_first=True)
        ),
    }
    return {name: module.double() for name, module in found.items()}


WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")
"""Operations whose result the CPU waits for, so that a graph cannot contain them; like unique."""


class Tape(TorchDispatchMode):
    """Writes down every operation with its tensors; refuses what no graph can contain."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in WAITS or name.startswith("_unique"):
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def again(self) -> None:
        """Repeat everything."""
        for func, args, kwargs, result in self.operations:
            new = func(*args, **kwargs)
            for before, now in zip(tree_leaves(result), tree_leaves(new), strict=True):
                if isinstance(before, Tensor) and before.data_ptr() != now.data_ptr():
                    before.detach().copy_(now)


class Recorder:
    """Records on tapes, and counts."""

    def __init__(self) -> None:
        self.recorded = self.launched = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        tape = Tape()
        with tape:
            seen = run()
        self.recorded += 1
        fresh = True

        def launch() -> None:
            nonlocal fresh
            self.launched += 1
            if not fresh:  # a graph only records; the tape has already had the effect
                tape.again()
            fresh = False

        return launch, seen


def refuses(run: object) -> NoReturn:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture(autouse=True)
def _no_product_unseen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(functions, "TINY", 0)  # NumPy's do not go through torch


def task_for(name: str, spec: LocalTraining) -> Workload:
    module = modules()[name]
    inputs = features(SIZES, torch.float64)
    if isinstance(module, Words):
        draw = torch.Generator().manual_seed(2)
        inputs = torch.randint(TOKENS, (sum(SIZES), 3), generator=draw)
    return task_of(module, inputs, LABELS, spec, SIZES)


def train(engine: Engine, task: Workload) -> tuple[Tensor, Tensor]:
    """Train with the draws that the task began with."""
    return engine.train(task.redrawn())


def assert_alike(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


CASES = [
    *((name, kind) for name in ("by hand", "by autograd", "batch norm", "tied") for kind in SPECS),
    *((name, kind) for name in ("lstm", "gru", "transformer") for kind in ("plain", "everything")),
]
"""Modules and specs; those that take longer are only with the two extremes."""


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_launched_steps_give_what_steps_give(name: str, kind: str):
    task, recorder = task_for(name, SPECS[kind]), Recorder()
    engine, expected = StackedEngine(Replay(recorder)), train(StackedEngine(), task)
    for _ in range(4):
        assert_alike(train(engine, task), expected)
    assert recorder.launched > 2 * recorder.recorded > 0


def test_the_first_round_meets_steps_the_second_records_and_others_only_launch():
    task, recorder = task_for("by hand", SPECS["plain"]), Recorder()
    engine, seen = StackedEngine(Replay(recorder)), list[tuple[int, int]]()
    for _ in range(4):
        train(engine, task)
        seen.append((recorder.recorded, recorder.launched))
    # Of two epochs, but for the very first step: those of four clients and of three. One alone is not worth it.
    assert seen == [(0, 0), (2, 7), (2, 14), (2, 21)]


def test_a_recording_is_of_one_kind_of_steps_and_one_cohort():
    task, recorder = task_for("by hand", SPECS["plain"]), Recorder()
    engine = StackedEngine(Replay(recorder))
    decayed = replace(SPECS["plain"], weight_decay=0.1)
    recorded = list[int]()
    for other in (
        task,
        replace(task, spec=decayed),
        replace(task, spec=replace(decayed, momentum=0.9)),
        replace(task, jobs=task.jobs[:2]),
        task,
    ):
        for _ in range(2):
            assert_alike(train(engine, other), train(StackedEngine(), other))
        recorded.append(recorder.recorded)
    assert all(before < now for before, now in pairwise(recorded[:4]))
    assert recorded[3] == recorded[4]


@pytest.mark.parametrize(
    ("name", "kind"), [*(("by hand", kind) for kind in SPECS), ("lstm", "everything")]
)
def test_one_recording_serves_all_step_sizes_momenta_and_proximal_weights(name: str, kind: str):
    spec = SPECS[kind]
    task, recorder = task_for(name, spec), Recorder()
    engine = StackedEngine(Replay(recorder))
    recorded = list[int]()
    for number, lr in enumerate((0.4, 0.2, 0.1, 0.05)):
        part = 1 - number / 8
        changed = replace(
            spec, lr=lr, mu=part * spec.mu, momentum=spec.momentum and part * spec.momentum
        )
        other = replace(task, spec=changed, lr=lr)
        assert_alike(train(engine, other), train(LoopEngine(), other))
        recorded.append(recorder.recorded)
    assert recorded[0] == 0 < recorded[1] == recorded[3]
    assert recorder.launched > 2 * recorder.recorded


def test_a_recording_is_of_one_precision_of_products():
    task, recorder = task_for("by hand", SPECS["plain"]), Recorder()
    engine = StackedEngine(Replay(recorder))
    recorded = list[int]()
    for tf32 in (False, True):
        with float32_products(tf32):
            for _ in range(3):
                train(engine, task)
        recorded.append(recorder.recorded)
    assert recorded == [2, 4]


def test_blocks_of_clients_that_take_turns_are_recorded_each():
    task, recorder = task_for("by hand", SPECS["plain"]), Recorder()
    engine = StackedEngine(Replay(recorder))
    blocks = [replace(task, jobs=task.jobs[:2]), replace(task, jobs=task.jobs[1:])]
    expected = [train(StackedEngine(), block) for block in blocks]
    for _ in range(3):
        for block, alone in zip(blocks, expected, strict=True):
            assert_alike(train(engine, block), alone)
    assert recorder.launched > recorder.recorded >= 2


def test_of_steps_that_are_met_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "MOST_MET", 1)
    task, recorder = task_for("by hand", SPECS["plain"]), Recorder()
    engine = StackedEngine(Replay(recorder))
    for _ in range(2):
        for decay in (0.1, 0.2):
            train(engine, replace(task, spec=replace(task.spec, weight_decay=decay)))
    assert recorder.recorded == 0


def test_only_so_many_recordings_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "MOST_RECORDINGS", 1)
    task, recorder = task_for("by hand", SPECS["plain"]), Recorder()
    engine, expected = StackedEngine(Replay(recorder)), train(StackedEngine(), task)
    for _ in range(3):
        assert_alike(train(engine, task), expected)
    assert recorder.recorded > 2


def test_kinds_that_a_round_has_few_of_are_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "MOST_KINDS", 1)
    task, recorder = task_for("by hand", SPECS["plain"]), Recorder()
    engine = StackedEngine(Replay(recorder))
    for _ in range(3):
        train(engine, task)
    assert recorder.recorded == 1


def test_what_cannot_be_recorded_is_told():
    task = task_for("by hand", SPECS["plain"])
    told = objection(StackedEngine(Replay(refuses)), task, rounds=3)
    assert (
        told == "Sequential fails when several clients are trained together: "
        "operation not permitted when stream is capturing"
    )
    assert objection(StackedEngine(Replay(Recorder())), task, rounds=3) is None


def test_a_recording_that_gives_something_else_is_found():
    def lazy(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        # the first launch seems right, as the step has been run; later ones do nothing
        return (lambda: None, run())

    told = objection(StackedEngine(Replay(lazy)), task_for("by hand", SPECS["plain"]), rounds=3)
    assert (told or "").startswith("Sequential gives different updates when several clients")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let steps be recorded here, and the recording engine be the fastest; return what was to be chosen from."""
    candidates: list[str] = []

    def first(engines: Mapping[str, Engine], task: Workload) -> str:
        candidates.extend(engines)
        return auto.REPLAYED if auto.REPLAYED in engines else next(iter(engines))

    monkeypatch.setattr(auto, "can_record", lambda device: True)
    monkeypatch.setattr(auto, "fastest", first)
    monkeypatch.setattr(replay, "CudaGraphs", Recorder)
    return candidates


@pytest.mark.parametrize("asked_for", ["auto", "stacked"])
def test_where_steps_can_be_recorded_that_is_tried_and_taken_if_it_is_faster(
    asked_for: str, as_on_a_gpu: list[str]
):
    task = task_for("by hand", SPECS["plain"])
    engine, expected = build_engine(asked_for), train(StackedEngine(), task)
    for _ in range(3):
        assert_alike(train(engine, task), expected)
    assert (engine.name, engine.resolved) == ("stacked", "stacked, replayed")
    assert as_on_a_gpu[:2] == ["stacked", "stacked, replayed"]
    assert_alike(train(build_engine(asked_for, engine.resolved), task), expected)


@pytest.mark.parametrize("asked_for", ["auto", "stacked"])
def test_steps_that_resist_are_run(
    asked_for: str,
    as_on_a_gpu: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(replay, "CudaGraphs", lambda: refuses)
    engine, task = build_engine(asked_for), task_for("by hand", SPECS["plain"])
    with caplog.at_level("INFO"):
        assert_alike(train(engine, task), train(StackedEngine(), task))
    assert engine.resolved == "stacked"
    assert (
        "engine: stacked, because steps are not recorded as CUDA graphs: Sequential fails when "
        "several clients" in caplog.text
    )
    assert (engine.fallback or "").startswith("stacked, because steps are not recorded")
