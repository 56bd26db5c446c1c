"""Dense layers that are differentiated by hand give what autograd gives; anything else is left to autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedclade import LocalTraining
from fedclade.core.params import Layout
from fedclade.training.jobs import Job, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import StackedEngine
from fedclade.training.stacking.fused_mlp import FusedMLP
from fedclade.training.stacking.stacked_module import StackedModule


def dense(*, bias: bool = True, inplace: bool = False) -> nn.Sequential:
    layers = [nn.Linear(6, 5, bias=bias), nn.ReLU(inplace), nn.Linear(5, 5, bias=bias), nn.ReLU(inplace)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(5, 3, bias=bias))


def frozen(*places: int) -> nn.Sequential:
    module = dense()
    for place in places:
        module[place].requires_grad_(False)
    return module


def only_biases() -> nn.Sequential:
    module = dense()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("bias" in name)
    return module


def flattened_late() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def tied() -> nn.Sequential:
    module = dense()
    module[3].weight = nn.Parameter(torch.randn(5, 5))
    return nn.Sequential(*module[:4], nn.ReLU(), module[3], *module[4:])


def hooked() -> nn.Sequential:
    module = dense()
    module[2].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return module


class Subclass(nn.Sequential):
    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*inputs) + 1


BY_HAND: dict[str, Callable[[], nn.Module]] = {
    "dense": dense,
    "without biases": lambda: dense(bias=False),
    "in place": lambda: dense(inplace=True),
    "only biases": only_biases,
    "flattened late": flattened_late,
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)),
    "a layer alone": lambda: nn.Linear(3, 3),
}
BY_AUTOGRAD: dict[str, Callable[[], nn.Module]] = {
    "first layer frozen": lambda: frozen(1),
    "layer between frozen": lambda: frozen(3),
    "last layer frozen": lambda: frozen(5),
    "all but the last frozen": lambda: frozen(1, 3),
    "tied": tied,
    "hooked": hooked,
    "a subclass": lambda: Subclass(*dense()),
    "another activation": lambda: nn.Sequential(*dense()[:4], nn.Tanh(), nn.Linear(5, 3)),
    "nested": lambda: nn.Sequential(dense()[:3], nn.Linear(5, 3)),
}


@pytest.mark.parametrize("name", [*BY_HAND, *BY_AUTOGRAD])
@pytest.mark.parametrize("spec", [{}, {"momentum": 0.9, "mu": 0.3, "weight_decay": 0.01}], ids=["plain", "general"])
def test_updates_are_those_of_the_loop(name, spec):
    torch.manual_seed(0)
    module = {**BY_HAND, **BY_AUTOGRAD}[name]().double()
    shape = (3,) if name == "a layer alone" else (2, 3)
    layout = Layout.of(module)
    models = layout.flatten(module)[None]
    data = [(torch.randn(n, *shape).double(), torch.randint(3, (n,))) for n in (7, 10, 4)]

    def task() -> Workload:
        jobs = [Job(k, 0, x, y, torch.Generator().manual_seed(k)) for k, (x, y) in enumerate(data)]
        return Workload(module, layout, models, jobs, LocalTraining(epochs=2, batch_size=4, **spec), 0.2)

    expected, losses = LoopEngine().train(task())
    got, got_losses = StackedEngine().train(task())
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got_losses, losses, rtol=1e-10, atol=0)
    assert (FusedMLP.of(StackedModule(module, layout).module) is not None) == (name in BY_HAND)


@torch.no_grad()
def test_inputs_may_lie_anywhere_and_models_may_change():
    torch.manual_seed(0)
    module = dense()
    layout = Layout.of(module)
    fold = StackedModule(module, layout)
    models = torch.randn(3, layout.size)
    everyone = torch.randn(5, 2 * 4, 2, 3)
    spread = torch.randn(2 * 4, 3, 2).mT
    for rows in ([0, 1], [2, 1]):
        fold.load(models, rows)
        fold.bind(0, 2)
        for x in (*everyone, everyone[0], spread):
            torch.testing.assert_close(fold.forward(x), fold.module(x))


@torch.no_grad()
def test_steps_alike_have_the_same_memory():
    module = dense()
    layout = Layout.of(module)
    fold = StackedModule(module, layout)
    fold.load(layout.flatten(module)[None], [0, 0])
    fold.bind(0, 2)
    x = torch.randn(2 * 4, 2, 3)
    first = fold.forward(x)
    assert fold.forward(x.normal_()).data_ptr() == first.data_ptr()
    fold.bind(0, 1)
    torch.testing.assert_close(fold.forward(x[:4]), fold.module(x[:4]))
