"""Training of one model on several devices, which are twice the CPU here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import LocalTraining
from fedclade.core import ConfigError, Layout, ModelError, rng
from fedclade.tasks import FittedTask
from fedclade.training import choose_devices, loop, split_batches
from tests.tiny import perceptron

TWICE = ("cpu", "cpu")


def data(n: int = 21, inputs: int = 6) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(n, inputs, generator=draw), torch.randint(2, (n,), generator=draw)


def trained(module: nn.Module, **spec: Any) -> Tensor:
    """Return the update of three epochs of batches of 5 examples, of which the last has one."""
    settings = LocalTraining(epochs=3, batch_size=5, lr=0.1, **spec)
    layout = Layout.of(module)
    start = torch.linspace(-0.3, 0.3, layout.size)
    draws = rng.torch_generator(0, "t")
    update, _ = loop.train(
        module, layout, start, data(), settings, settings.lr, FittedTask(), draws
    )
    return update


class Watched(nn.Module):
    """A model that notes the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.sizes: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.append(len(inputs))
        return self.layer(inputs)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("spec", [{}, {"mu": 0.5}, {"optimizer": "adam"}])
def test_the_update_is_that_of_one_device(count: int, spec: dict[str, Any]):
    expected = trained(perceptron(), **spec)
    split = trained(split_batches(perceptron(), ("cpu",) * count), **spec)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(split, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_one_device():
    """In float64, where rounding is far below every error that a wrong mean would make."""
    inputs, targets = data(7)
    gradients: list[list[Tensor]] = []
    for devices in (("cpu",), TWICE):
        module = split_batches(perceptron().double(), devices)
        nn.functional.cross_entropy(module(inputs.double()), targets).backward()
        gradients.append([each.grad for each in module.parameters() if each.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == 4
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-14)


def test_each_device_gets_a_part_of_every_batch():
    module = Watched()
    split_batches(module, TWICE)
    of_second = module.split_among[1][0].sizes
    module(torch.ones(5, 2))
    module(torch.ones(1, 2))
    assert (module.sizes, of_second) == ([3, 1], [2])


def test_evaluation_is_on_the_first_device_alone():
    module = Watched()
    split_batches(module, TWICE)
    module.eval()(torch.ones(5, 2))
    with torch.no_grad():
        module.train()(torch.ones(5, 2))
    assert module.sizes == [5, 5]


def test_names_and_the_class_look_the_same_and_a_copy_is_separate():
    module = split_batches(perceptron(), TWICE)
    names = list(perceptron().state_dict())
    assert list(module.state_dict()) == names
    assert type(module).__name__ == type(perceptron()).__name__
    copied = copy.deepcopy(module)
    with torch.no_grad():
        next(copied.parameters()).zero_()
    inputs, _ = data()
    torch.testing.assert_close(module(inputs), perceptron()(inputs))
    assert not torch.equal(copied(inputs), module(inputs))


def test_a_single_device_changes_nothing():
    module = perceptron()
    kind = type(module)
    assert split_batches(module, ["cpu"]) is module
    assert type(module) is kind


class Nested(nn.Module):
    """A model that takes and returns several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: dict[str, Tensor], *, scale: Tensor, shift: float) -> dict[str, Any]:
        return {"out": (scale * self.layer(x["a"]) + shift, x["b"]), "none": None}


def test_nested_inputs_and_outputs_are_split_and_joined():
    module = Nested()
    inputs = {"a": torch.randn(5, 2), "b": torch.arange(5)}
    arguments = {"scale": torch.tensor(2.0), "shift": 0.5}
    expected = module(inputs, **arguments)
    found = split_batches(module, TWICE)(inputs, **arguments)
    torch.testing.assert_close(found["out"][0], expected["out"][0])
    assert torch.equal(found["out"][1], torch.arange(5))
    assert found["none"] is None


def test_an_output_of_the_whole_batch_is_refused():
    class WithMean(nn.Linear):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            outputs = super().forward(inputs)
            return outputs, outputs.mean()

    module = split_batches(WithMean(2, 2), TWICE)
    with pytest.raises(ModelError, match=r"WithMean returns Tensor tensor.* name one device"):
        module(torch.ones(4, 2))


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)]
)
def test_a_layer_that_mixes_examples_is_refused(layer: nn.Module):
    module = nn.Sequential(nn.Linear(2, 2), layer)
    with pytest.raises(
        ConfigError, match=r"device = cuda:0, cuda:1: .* layer '1' .* mixes .* GroupNorm"
    ):
        split_batches(module, ("cuda:0", "cuda:1"))


def test_dropout_depends_on_the_seed_alone():
    module = split_batches(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2)), TWICE)
    updates = [trained(module) for _ in range(2)]
    assert torch.equal(*updates)


def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize("device", ["cuda:1,cuda:0", "cuda:1, cuda:0", ["cuda:1", "cuda:0"]])
def test_several_gpus_are_named_in_order(device: Any, monkeypatch: pytest.MonkeyPatch):
    current = two_gpus(monkeypatch)
    assert choose_devices(device) == ("cuda:1", "cuda:0")
    assert current[-1] == 1  # the first is torch's current one


def test_a_single_device_is_named_as_before(monkeypatch: pytest.MonkeyPatch):
    assert choose_devices("cpu") == choose_devices(["cpu"]) == ("cpu",)
    two_gpus(monkeypatch)
    assert choose_devices("auto") == ("cuda",)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (
            "cuda:0,cuda:2",
            "device 'cuda:2' was requested, but this machine has the devices cpu, cuda",
        ),
        (
            "cuda:0,cpu",
            "should be numbered GPUs such as cuda:0,cuda:1, got 'cpu' among cuda:0, cpu",
        ),
        ("cuda:0,", "got '' among cuda:0, ; name one device"),
        ("cuda:0,cuda:one", "got 'cuda:one'"),
        ("cuda:1,cuda:1", "device 'cuda:1' is named twice among cuda:1, cuda:1; name it once"),
        ([], "got an empty list"),
    ],
)
def test_wrong_devices_are_refused(device: Any, why: str, monkeypatch: pytest.MonkeyPatch):
    two_gpus(monkeypatch)
    with pytest.raises(ConfigError, match=why):
        choose_devices(device)
