"""In bfloat16, an engine may differ from float32 only as much as the loop does in bfloat16."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedclade import LocalTraining
from fedclade.training.auto import TIMES_ROUNDING, objection
from fedclade.training.jobs import Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import StackedEngine
from fedclade.training.stacking import functions
from fedclade.training.stacking.replay import Replay
from fedclade.training.vmap import VmapEngine
from tests.training.stacking.test_replay import Recorder
from tests.training.worlds import FEATURES, LABELS, TOKENS, features, task_of

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.1, precision="bfloat16")


class Words(nn.Module):
    """Embedded tokens, and a recurrent layer or a transformer over them."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.table, self.body, self.output = nn.Embedding(TOKENS, 8), body, nn.Linear(8, LABELS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(self.table(tokens))
        return self.output((x[0] if isinstance(x, tuple) else x)[:, -1])


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0, batch_first=True)


MODULES = {
    "dense": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, LABELS)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 8, 2, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, LABELS),
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, LABELS)
    ),
    "lstm": lambda: Words(nn.LSTM(8, 8, batch_first=True)),
    "gru": lambda: Words(nn.GRU(8, 8, batch_first=True)),
    "transformer": lambda: Words(attention()),
}

SOME = (24, 31, 7, 2, 40)
"""Sizes of clients; the smallest has two examples, as BatchNorm needs."""


def task(name: str, spec: LocalTraining = SPEC) -> Workload:
    torch.manual_seed(0)
    module = MODULES[name]()
    inputs = features(SOME)
    if isinstance(module, Words):
        inputs = torch.randint(TOKENS, (sum(SOME), 4), generator=torch.Generator().manual_seed(1))
    return task_of(module, inputs, LABELS, replace(spec, smallest_batch=2), SOME)


def errors(updates: Tensor, exact: Tensor) -> Tensor:
    return torch.linalg.vector_norm(updates - exact, dim=1) / torch.linalg.vector_norm(exact, dim=1)


@pytest.mark.parametrize("change", [{}, {"momentum": 0.9, "mu": 0.1, "clip_norm": 0.5}])
@pytest.mark.parametrize("name", MODULES)
def test_stacked_clients_are_rounded_as_the_loop_rounds(name: str, change: dict[str, float]):
    spec = replace(SPEC, **change)
    exact, _ = LoopEngine().train(task(name, replace(spec, precision="float32")))
    by_loop, _ = LoopEngine().train(task(name, spec))
    got, _ = StackedEngine().train(task(name, spec))
    assert got.dtype == torch.float32
    limit = TIMES_ROUNDING * errors(by_loop, exact).max()
    assert 0 < errors(got, exact).max() <= limit < 0.5
    whole, _ = StackedEngine().train(task(name, replace(spec, precision="float32")))
    torch.testing.assert_close(whole, exact, rtol=1e-4, atol=1e-5)


def test_one_engine_trains_in_either_precision_by_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(functions, "TINY", 0)  # the recorder does not see NumPy's products
    recorder = Recorder()
    engine = StackedEngine(Replay(recorder))
    module = MODULES["dense"]()
    precisions = SPEC, replace(SPEC, precision="float32")
    tasks = [task_of(module, features((60, 60)), LABELS, spec, (60, 60)) for spec in precisions]
    alone = [StackedEngine().train(one.redrawn())[0].clone() for one in tasks]
    for _ in range(3):
        for one, expected in zip(tasks, alone, strict=True):
            got, _ = engine.train(one.redrawn())
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-3)
    assert not torch.equal(*alone)
    assert recorder.launched > recorder.recorded > 0


@pytest.mark.parametrize("name", ["dense", "convolutions", "transformer"])
def test_the_check_of_an_engine_covers_the_precision(name: str):
    assert objection(StackedEngine(), task(name)) is None


def test_the_check_of_vmap_covers_the_precision():
    assert objection(VmapEngine(), task("dense")) is None


class Coarse(StackedEngine):
    """Agrees with the loop in float32, and is far off in bfloat16."""

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        updates, losses = super().train(work, out)
        if work.spec.precision == "bfloat16":
            updates *= 1.5
        return updates, losses


def test_an_engine_that_is_too_coarse_in_the_precision_is_refused():
    reason = objection(Coarse(), task("dense")) or ""
    assert reason.startswith("in bfloat16, Sequential differs more from float32 if several clients")
    assert re.search(r"relative error [456]\.\de-01\) than if one client is trained", reason)
    assert objection(Coarse(), task("dense", replace(SPEC, precision="float32"))) is None
