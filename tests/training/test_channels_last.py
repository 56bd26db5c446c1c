"""The loop gives the same updates on a module that is fitted to a CPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedclade import LocalTraining
from fedclade.training import channels_last
from fedclade.training.auto import objection
from fedclade.training.channels_last import ChannelsLastLoop, fitted
from fedclade.training.jobs import Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.optimizer import PlainSGD
from fedclade.training.stacking.stacked_parameter import FEW_ROWS
from tests.training.worlds import FEATURES, LABELS, SPECS, features, task_of

RULES = {**SPECS, "decay": LocalTraining(epochs=2, batch_size=10, lr=0.2, weight_decay=0.1)}


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channels_last, "LARGE", 1)


def convolutional(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(8 * 3 * 4, 9, bias=bias), nn.ReLU(), nn.Linear(9, LABELS, bias=bias)),
    )


def frozen() -> nn.Module:
    module = convolutional()
    module[4].requires_grad_(False)
    return module


def without_a_gradient_of_x() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, LABELS))


class Places(nn.Module):
    """Gives a dense layer several rows of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = nn.Linear(FEATURES // 2, 4), nn.Linear(8, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dense(x.view(len(x), 2, -1)).flatten(1))


class Twice(nn.Module):
    """Uses a dense layer twice, always or for some batches."""

    def __init__(self, *, now_and_then: bool = False) -> None:
        super().__init__()
        self.now_and_then = now_and_then
        self.dense, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        once = torch.tanh(self.dense(x))
        if self.now_and_then and x[0, 0] > 0:
            return self.out(once)
        return self.out(torch.tanh(self.dense(once)))


class Penalised(nn.Module):
    """Reads the weight of a dense layer besides using it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(FEATURES, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        # whose backward comes after that of what follows
        penalty = self.dense.weight.square().sum()
        return self.dense(x) * penalty


def task(module: nn.Module, spec: str = "plain") -> Workload:
    return task_of(module, features(dtype=torch.float64), LABELS, RULES[spec])


MODULES = {
    "convolutional": convolutional,
    "without biases": lambda: convolutional(bias=False),
    "frozen": frozen,
    "one layer": without_a_gradient_of_x,
    "places": Places,
    "twice": Twice,
    "now and then twice": lambda: Twice(now_and_then=True),
}


@pytest.mark.parametrize("spec", RULES)
@pytest.mark.parametrize("name", MODULES)
def test_updates_are_those_of_the_loop(name: str, spec: str):
    module = MODULES[name]().double()
    clients = task(module, spec)
    expected, losses = LoopEngine().train(clients)
    got, got_losses = ChannelsLastLoop().train(clients.redrawn())
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got_losses, losses, rtol=1e-9, atol=0)


@contextmanager
def gradients_noted() -> Generator[dict[nn.Parameter, bool]]:
    """Note which parameters have a gradient whenever an optimizer frees gradients."""
    noted: dict[nn.Parameter, bool] = {}
    free = PlainSGD.zero_grad

    def note(optimizer: PlainSGD) -> None:
        noted.update({each: each.grad is not None for each in optimizer._parameters})
        free(optimizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainSGD, "zero_grad", lambda optimizer, set_to_none=True: note(optimizer))
        yield noted


@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("spec", RULES)
def test_the_gradient_of_a_large_layer_is_written_only_where_it_has_to_be(spec: str, rows: int):
    module, engine = convolutional(), ChannelsLastLoop()
    alone = task_of(
        module, features((rows,)), LABELS, replace(RULES[spec], batch_size=rows), (rows,)
    )
    with gradients_noted() as has_gradient:
        engine.train(alone)
    dense = engine._copies[module].get_submodule("4")
    fused = spec in ("plain", "decay") and rows == FEW_ROWS
    assert has_gradient[dense.weight] is not fused
    assert has_gradient[dense.bias]


def test_a_weight_that_is_needed_as_it_was_is_not_changed_unseen():
    reason = objection(ChannelsLastLoop(), task(Penalised().double()))
    assert reason is not None
    assert "modified by an inplace operation" in reason


def test_a_step_that_was_broken_off_is_forgotten():
    module, engine = convolutional(), ChannelsLastLoop()
    clients = task_of(module, features(), LABELS, RULES["plain"])
    engine.train(clients)
    copied = engine._copies[module]
    copied(features((2,)))
    with gradients_noted() as has_gradient:
        engine.train(clients.redrawn())
    assert not has_gradient[copied.get_submodule("4").weight]
    assert has_gradient[copied.get_submodule("4").bias]


def test_small_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    module = convolutional()
    monkeypatch.setattr(channels_last, "LARGE", module[4].weight.numel())
    changed = fitted(module)
    assert type(changed.get_submodule("4")) is not nn.Linear
    assert type(changed.get_submodule("6")) is nn.Linear


def test_channels_come_last_in_memory_even_where_there_is_one():
    weight = fitted(convolutional()).get_parameter("1.weight")
    assert weight.stride() == (4, 1, 2, 1), (
        "not as contiguous() leaves it, for which one channel is in any order"
    )


def test_the_users_module_stays_as_it_was():
    module = convolutional()
    before = module.state_dict()
    ChannelsLastLoop().train(task_of(module, features(), LABELS, RULES["plain"]))
    assert module[1].weight.is_contiguous()
    assert type(module[4]) is nn.Linear
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
