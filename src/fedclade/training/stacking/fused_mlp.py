"""Dense layers one after another, forward and backward by hand, without autograd.

With the smallest models autograd takes a good part of a step, and so does finding the memory of each operation. On one
thread ``mclr`` and ``mlp`` are 1.5 times as fast so (``benchmarks/gains.py --only fused``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedclade.training.stacking.functions import hand_over
from fedclade.training.stacking.layers import StackedLinear
from fedclade.training.stacking.products import Product
from fedclade.training.stacking.stacked_parameter import StackedParameter

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_threshold_backward = torch.ops.aten.threshold_backward.grad_input


class _Laid(NamedTuple):
    """Layers whose every operation has its memory, from the inputs ``x`` to ``out`` and back from ``gradient``."""

    x: Tensor
    out: Tensor
    gradient: Tensor
    forward: Sequence[Callable[[], object]]
    backward: Sequence[Callable[[], object]]

    def holds(self, x: Tensor) -> bool:
        """Whether these inputs lie where those lay that it was made for."""
        return x.data_ptr() == self.x.data_ptr() and x.shape == self.x.shape


class FusedMLP:
    """A sequence of Flatten, ReLU and stacked Linear layers, no two of which share a parameter."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        trained = [i for i, layer in enumerate(layers) for parameter in _parameters(layer) if parameter.trained]
        self._first_trained = min(trained, default=len(layers))
        self._laid: _Laid | None = None

    @classmethod
    def of(cls, module: nn.Module) -> FusedMLP | None:
        """Return what a module with stacked layers comes to, or None if it is no such sequence."""
        layers = [*module] if type(module) is nn.Sequential else [module]
        parameters = [parameter for layer in layers for parameter in _parameters(layer)]
        known = all(type(layer) in (nn.Flatten, nn.ReLU, StackedLinear) for layer in layers)
        hooked = any(vars(layer)[hooks] for layer in (module, *layers) for hooks in HOOKS)
        tied = len(set(parameters)) < len(parameters)
        return cls(layers) if known and not hooked and not tied else None

    def forget(self) -> None:
        """Look for the parameters' memory anew in the next forward pass."""
        self._laid = None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the module gives for inputs ``[k·B, ...]``; the next call may write there again."""
        x = x.contiguous()
        # On a GPU, a step that is recorded has to have memory of its own.
        if self._laid is None or x.is_cuda or not self._laid.holds(x):
            self._laid = self._lay(x)
        for operation in self._laid.forward:
            operation()
        return self._laid.out

    def backward(self, gradient: Tensor) -> None:
        """Hand every parameter its gradient, from that of what forward has returned."""
        assert self._laid is not None
        self._laid.gradient.copy_(gradient)
        for operation in self._laid.backward:
            operation()

    def _lay(self, x: Tensor) -> _Laid:
        passed, forward = [x], list[Callable[[], object]]()
        for layer in self._layers:
            if isinstance(layer, StackedLinear):
                weight, bias = layer.weight_and_bias
                k, outputs, inputs = weight.state.shape
                out = x.new_empty((*x.shape[:-1], outputs))
                matrices = x.view(k, -1, inputs), weight.state.mT, out.view(k, -1, outputs)
                forward.append(Product(*matrices, None if bias is None else bias.state))
            elif isinstance(layer, nn.ReLU):
                out = torch.empty_like(x)
                forward.append(partial(torch.clamp_min, x, 0, out=out))
            else:
                out = layer.forward(x)  # a view
            passed.append(x := out)
        gradient = of_out = torch.empty_like(x)
        backward = list[Callable[[], object]]()
        for place in reversed(range(self._first_trained, len(self._layers))):
            layer, x = self._layers[place], passed[place]
            if isinstance(layer, StackedLinear):
                weight, bias = layer.weight_and_bias
                k, outputs, inputs = weight.state.shape
                of_rows = gradient.view(k, -1, outputs)
                if place > self._first_trained:
                    gradient = torch.empty_like(x)
                    backward.append(Product(of_rows, weight.state, gradient.view(k, -1, inputs)))
                backward.append(partial(hand_over, of_rows, x.view(k, -1, inputs), weight, bias))
            elif isinstance(layer, nn.ReLU):
                backward.append(partial(_threshold_backward, gradient, x, 0, grad_input=gradient))
            else:
                gradient = gradient.view(x.shape)
        return _Laid(passed[0], passed[-1], of_out, forward, backward)


def _parameters(layer: nn.Module) -> Sequence[StackedParameter]:
    return [p for p in layer.weight_and_bias if p is not None] if isinstance(layer, StackedLinear) else []
