"""Chains of dense layers that are differentiated by hand give what autograd gives; all else is left to autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade import LocalTraining
from fedclade.core.params import Layout
from fedclade.training.jobs import Job, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stacked import StackedEngine
from fedclade.training.stacking.stacked_module import StackedModule
from fedclade.training.stacking.tape import NotOnTape, Tape


def dense(*, bias: bool = True, inplace: bool = False) -> nn.Sequential:
    layers = [
        nn.Linear(6, 5, bias=bias),
        nn.ReLU(inplace),
        nn.Linear(5, 5, bias=bias),
        nn.ReLU(inplace),
    ]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(5, 3, bias=bias))


def activated(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(*dense()[:4], activation, nn.Linear(5, 3))


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


def hooked(hook: Callable[..., Any], *, backward: bool = False) -> nn.Sequential:
    module = dense()
    (module[2].register_full_backward_hook if backward else module[2].register_forward_hook)(hook)
    return module


class Own(nn.Module):
    """A user's own network; ``way`` is its forward, which gets the network and the batch."""

    def __init__(self, way: Callable[[Own, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def written(write: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Return a network with something done between its layers."""
    return lambda: Own(
        lambda net, x: net.third(write(net.second(functional.relu(net.first(x.flatten(1))))))
    )


def reshaped(reshape: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Return a network that gives its inputs another shape."""
    return lambda: Own(lambda net, x: net.third(torch.relu(net.first(reshape(x)))))


class Drops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, training=self.training)


def twice(net: Own, x: Tensor) -> Tensor:
    return net.third(net.second(net.second(net.first(x.flatten(1))).relu()))


def cut_off(net: Own, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = net.first(x.flatten(1))
    return net.third(torch.relu(net.second(x)))


def aliased(net: Own, x: Tensor) -> Tensor:
    x = net.first(x.flatten(1))
    x.view(-1, 5).relu_()
    return net.third(x)


def overwritten(net: Own, x: Tensor) -> Tensor:
    x = net.first(x.flatten(1))
    x.relu_()
    return net.third(x)


SAME_FOR_ALL = torch.ones(5, 5).double()


def same_for_all(net: Own, x: Tensor) -> Tensor:
    x = functional.linear(net.first(x.flatten(1)), SAME_FOR_ALL)
    return net.third(x)


def used_before(net: Own, x: Tensor) -> Tensor:
    x = net.first(x.flatten(1))
    net.second(x)
    x.relu_()
    return net.third(x)


def aside(net: Own, x: Tensor) -> Tensor:
    x = net.first(x.flatten(1))
    net.second(x)
    return net.third(torch.relu(x))


def caught(net: Own, x: Tensor) -> Tensor:
    x = net.first(x.flatten(1))
    try:
        x = x.sin()
    except Exception:
        x = x.tanh()
    return net.third(x)


class Reversed(torch.autograd.Function):
    """Turns gradients round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


class Subclass(nn.Sequential):
    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*inputs) + 1


BY_HAND: dict[str, Callable[[], nn.Module]] = {
    "dense": dense,
    "without biases": lambda: dense(bias=False),
    "in place": lambda: dense(inplace=True),
    "first layer frozen": lambda: frozen(1),
    "layer between frozen": lambda: frozen(3),
    "last layer frozen": lambda: frozen(5),
    "all but the last frozen": lambda: frozen(1, 3),
    "only biases": only_biases,
    "flattened late": flattened_late,
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)),
    "a layer alone": lambda: nn.Linear(3, 3),
    "nested": lambda: nn.Sequential(dense()[:3], nn.Identity(), nn.Dropout(0.0), nn.Linear(5, 3)),
    "Tanh": lambda: activated(nn.Tanh()),
    "Sigmoid": lambda: activated(nn.Sigmoid()),
    "GELU": lambda: activated(nn.GELU("tanh")),
    "SiLU": lambda: activated(nn.SiLU()),
    "F.relu": written(functional.relu),
    "F.relu in place": written(partial(functional.relu, inplace=True)),
    "torch.relu": written(torch.relu),
    "x.relu()": written(Tensor.relu),
    "x.relu_()": written(lambda x: x.relu_()),
    "relu_ of what is used on": lambda: Own(overwritten),
    "F.tanh": written(functional.tanh),
    "F.sigmoid": written(functional.sigmoid),
    "F.gelu": written(functional.gelu),
    "F.silu": written(functional.silu),
    "dropout of nothing": written(partial(functional.dropout, p=0.0)),
    "dropout at rest": lambda: activated(Drops().eval()),
    "torch.flatten": reshaped(lambda x: torch.flatten(x, 1)),
    "view": reshaped(lambda x: x.view(x.size(0), -1)),
    "reshape": reshaped(lambda x: x.reshape((len(x), -1)).double()),
    "reshape by shape": reshaped(lambda x: torch.reshape(x, (x.shape[0], 6)) if x.dim() > 2 else x),
    "a layer that is the same for all": lambda: Own(same_for_all),
    "a hook that looks": lambda: hooked(lambda layer, inputs, output: None),
    "a layer aside": lambda: Own(aside),
}
BY_AUTOGRAD: dict[str, Callable[[], nn.Module]] = {
    "tied": tied,
    "a layer twice": lambda: Own(twice),
    "a hook that changes": lambda: hooked(lambda layer, inputs, output: 2 * output),
    "a hook on gradients": lambda: hooked(
        lambda layer, gradients, _: (2 * gradients[0],), backward=True
    ),
    "a subclass": lambda: Subclass(*dense()),
    "another activation": lambda: activated(nn.Softplus()),
    "residual": written(lambda x: x + torch.relu(x)),
    "a loss of its own kind": written(Reversed.apply),
    "detached": written(Tensor.detach),
    "without gradients": lambda: Own(cut_off),
    "in place of an alias": lambda: Own(aliased),
    "what depends on data": written(lambda x: x.relu() if x.isfinite().all() else x.tanh()),
    "in place of what was used": lambda: Own(used_before),
    "errors that are caught": lambda: Own(caught),
    "other axes": reshaped(lambda x: x.transpose(1, 2).reshape(len(x), -1)),
    "in other order": reshaped(lambda x: x.flatten(1).flip(1)),
}


def work_of(module: nn.Module, **spec: Any) -> Callable[[], Workload]:
    layout = Layout.of(module)
    models = layout.flatten(module)[None]
    shape = (3,) if isinstance(module, nn.Linear) else (2, 3)
    data = [(torch.randn(n, *shape).double(), torch.randint(3, (n,))) for n in (9, 14, 8)]

    def work() -> Workload:
        jobs = [Job(k, 0, x, y, torch.Generator().manual_seed(k)) for k, (x, y) in enumerate(data)]
        return Workload(
            module, layout, models, jobs, LocalTraining(epochs=2, batch_size=4, **spec), 0.2
        )

    return work


@pytest.fixture
def steps(monkeypatch) -> list[str]:
    """Return how each step that is taken from now on goes backward."""
    taken: list[str] = []

    def spied(way: str, original: Callable[..., None]) -> Callable[..., None]:
        def backward(*args: Any, **kwargs: Any) -> None:
            taken.append(way)
            original(*args, **kwargs)

        return backward

    monkeypatch.setattr(Tape, "backward", spied("by hand", Tape.backward))
    monkeypatch.setattr(torch.autograd, "backward", spied("by autograd", torch.autograd.backward))
    return taken


@pytest.mark.parametrize("name", [*BY_HAND, *BY_AUTOGRAD])
@pytest.mark.parametrize(
    "spec", [{}, {"momentum": 0.9, "mu": 0.3, "weight_decay": 0.01}], ids=["plain", "general"]
)
def test_updates_are_those_of_the_loop(steps, name, spec):
    torch.manual_seed(0)
    work = work_of({**BY_HAND, **BY_AUTOGRAD}[name]().double(), **spec)
    expected, losses = LoopEngine().train(work())
    steps.clear()
    got, got_losses = StackedEngine().train(work())
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got_losses, losses, rtol=1e-10, atol=0)
    assert set(steps) == {"by hand" if name in BY_HAND else "by autograd"}


def stacked(module: nn.Module, models: Tensor, rows: list[int]) -> StackedModule:
    fold = StackedModule(module, Layout.of(module))
    fold.load(models, rows)
    fold.bind(0, len(rows))
    return fold


def test_forward_may_do_something_else_in_each_step(steps, monkeypatch):
    torch.manual_seed(0)
    module = Own(lambda net, x: net.third(net.mood(net.first(x.flatten(1))))).double()
    models = Layout.of(module).flatten(module)[None]
    pair = [stacked(module, models, [0, 0]) for _ in "12"]
    monkeypatch.setattr(pair[1], "_tape", None)
    for fold in pair:
        fold.begin(LocalOptimizer(0.1), [1, 2], None, [0, 2])
    x, gradient = torch.randn(2 * 4, 2, 3).double(), torch.randn(2 * 4, 3).double()
    for mood in (
        torch.tanh,
        torch.relu,
        torch.tanh,
        torch.tanh,
        lambda x: x,
        torch.cos,
        torch.tanh,
    ):
        results = []
        for fold in pair:
            fold.module.mood = mood
            logits = fold.forward(x)
            results.append(logits.detach().clone())
            fold.backward(logits, gradient)
            fold.step()
        torch.testing.assert_close(*results)
    assert steps[::2] == ["by hand"] * 5 + ["by autograd"] * 2


def test_what_was_kept_from_an_earlier_step_is_not_taken_for_new():
    module = Own(lambda net, x: net.third(net.first(x.flatten(1)))).double()
    fold = stacked(module, Layout.of(module).flatten(module)[None], [0, 0])
    x = torch.randn(2 * 4, 2, 3).double()
    kept = []
    fold.module.way = lambda net, x: kept.append(net.third(net.first(x.flatten(1)))) or kept[0]
    fold.forward(x)
    fold.module.way = lambda net, x: kept[0]
    with pytest.raises(NotOnTape):
        Tape.forward(fold._tape, x)


def test_inputs_may_lie_anywhere_and_models_may_change():
    torch.manual_seed(0)
    module = dense()
    models = torch.randn(3, Layout.of(module).size)
    fold = stacked(module, models, [0, 1])
    everyone = torch.randn(5, 2 * 4, 2, 3)
    spread = torch.randn(2 * 4, 3, 2).mT
    for rows in ([0, 1], [2, 1]):
        fold.load(models, rows)
        fold.bind(0, 2)
        for x in (*everyone, everyone[0], spread):
            torch.testing.assert_close(fold.forward(x), fold.module(x).detach())


def test_steps_alike_have_the_same_memory():
    module = dense()
    fold = stacked(module, Layout.of(module).flatten(module)[None], [0, 0])
    x = torch.randn(2 * 4, 2, 3)
    first = fold.forward(x)
    assert fold.forward(x.normal_()).data_ptr() == first.data_ptr()
    fold.bind(0, 1)
    torch.testing.assert_close(fold.forward(x[:4]), fold.module(x[:4]).detach())
