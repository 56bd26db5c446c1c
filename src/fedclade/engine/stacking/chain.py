"""Dense layers one after another, forward and backward by hand.

With the smallest models autograd takes a good part of a step, and federated learning is tried on them most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedclade.engine.stacking.functions import linear_backward, linear_forward
from fedclade.engine.stacking.layers import StackedLinear
from fedclade.engine.stacking.leaf import Leaf

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Chain:
    """A module that is a sequence of Flatten, ReLU and stacked Linear layers.

    Parameters
    ----------
    layers
        No two of which share a parameter.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._inputs: list[Tensor] = []
        trained = [i for i, layer in enumerate(layers) for leaf in _leaves(layer) if leaf.trained]
        self._first_trained = min(trained, default=len(layers))

    @classmethod
    def of(cls, module: nn.Module) -> Chain | None:
        """Return the chain that a module with stacked layers is, or None."""
        layers = [*module] if type(module) is nn.Sequential else [module]
        leaves = [leaf for layer in layers for leaf in _leaves(layer)]
        known = all(type(layer) in (nn.Flatten, nn.ReLU, StackedLinear) for layer in layers)
        hooked = any(vars(layer)[hooks] for layer in (module, *layers) for hooks in HOOKS)
        tied = len(set(leaves)) < len(leaves)
        return cls(layers) if known and not hooked and not tied else None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the module gives for inputs ``[k·B, ...]``, and remember what backward needs."""
        self._inputs = []
        for layer in self._layers:
            self._inputs.append(x)
            if isinstance(layer, StackedLinear):
                weight, bias = layer.leaves
                x = linear_forward(x, weight.state, None if bias is None else bias.state)
            else:
                x = layer.forward(x)  # hooks there are none, and looking for them takes longer
        return x

    def backward(self, gradient: Tensor) -> None:
        """Hand every leaf its gradient, from that of the outputs."""
        for place in reversed(range(self._first_trained, len(self._layers))):
            layer, x = self._layers[place], self._inputs[place]
            if isinstance(layer, StackedLinear):
                weight, needs_x = layer.leaves[0].state, place > self._first_trained
                of_x = linear_backward(gradient, x, weight, *layer.leaves, needs_x=needs_x)
                gradient = gradient if of_x is None else of_x
            elif isinstance(layer, nn.ReLU):
                gradient = torch.ops.aten.threshold_backward(gradient, x, 0)
            else:
                gradient = gradient.view(x.shape)
        self._inputs = []


def _leaves(layer: nn.Module) -> Sequence[Leaf]:
    return [leaf for leaf in layer.leaves if leaf is not None] if isinstance(layer, StackedLinear) else []
