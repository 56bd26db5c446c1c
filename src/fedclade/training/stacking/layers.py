"""Layers with parameters, stacked: each takes inputs ``[k·B, ...]`` and gives every client's rows to its own layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.training.stacking.active import Active
from fedclade.training.stacking.functions import delivered, embedding, linear
from fedclade.training.stacking.stacked_parameter import StackedParameter

Find = Callable[[Tensor | None], StackedParameter | None]
"""Gives the stacked form of a parameter or buffer, the same for tied ones; None for one that is not there."""


class Refused(Exception):  # noqa: N818  (not an error of the user's)
    """An option of a layer that is not stacked; says which."""


class Stacked(nn.Module):
    """What stacked layers have in common."""

    padding_shows = False
    """Whether a row's result depends on how many other rows there are."""
    by_example = False
    """Whether it can tell the gradient of each example, where these are wanted one by one."""


class Described(NamedTuple):
    """What forward passes ask of a weight, as peft's do; whoever computes with it fails, and is not stacked."""

    dtype: torch.dtype
    device: torch.device


class StackedLinear(Stacked):
    """Linear, by batched matrix products."""

    by_example = True

    def __init__(self, layer: nn.Linear, find: Find, active: Active) -> None:
        super().__init__()
        self.weight = Described(layer.weight.dtype, layer.weight.device)
        self.weight_and_bias = cast(StackedParameter, find(layer.weight)), find(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[k·B, ..., outputs]``."""
        return linear(x, *self.weight_and_bias)


class StackedEmbedding(Stacked):
    """Embedding, in one table of all clients."""

    def __init__(self, layer: nn.Embedding, find: Find, active: Active) -> None:
        super().__init__()
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise Refused(option)
        self._weight, self._padding = cast(StackedParameter, find(layer.weight)), layer.padding_idx

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[k·B, ..., width]``."""
        return embedding(tokens, self._weight, self._padding)


class StackedConv(Stacked):
    """Conv1d, 2d, 3d and their transposes, by a convolution with as many groups more as there are clients."""

    by_example = True

    def __init__(self, layer: nn.Conv2d, find: Find, active: Active) -> None:
        super().__init__()
        if layer.padding_mode != "zeros":
            raise Refused(f"padding_mode {layer.padding_mode!r}")
        self._weight, self._bias = cast(StackedParameter, find(layer.weight)), find(layer.bias)
        options: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
        if layer.transposed:
            options["output_padding"] = layer.output_padding
        kind = "conv_transpose" if layer.transposed else "conv"
        self._convolve = getattr(functional, f"{kind}{layer.weight.dim() - 2}d")
        self._options, self._groups = options, layer.groups

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[k·B, outputs, ...]``."""
        weight = delivered(self._weight)
        bias = None if self._bias is None else delivered(self._bias).flatten()
        k = len(weight)
        y = self._convolve(beside(x, k), weight.flatten(0, 1), bias, groups=k * self._groups, **self._options)
        return folded(y, k)


class StackedBatchNorm(Stacked):
    """BatchNorm1d, 2d and 3d, with the statistics of each client's own rows."""

    padding_shows = True

    def __init__(self, layer: nn.BatchNorm2d, find: Find, active: Active) -> None:
        super().__init__()
        if layer.momentum is None:
            raise Refused("momentum None")
        self._weight, self._bias = find(layer.weight), find(layer.bias)
        self._mean, self._var = find(layer.running_mean), find(layer.running_var)
        self._count = find(layer.num_batches_tracked)
        self._momentum, self._eps, self._active = layer.momentum, layer.eps, active

    def forward(self, x: Tensor) -> Tensor:
        """Return x, normalized."""
        if self.training and self._count is not None:
            self._count.state.add_(1)
        mean, var = (None if p is None else p.state.reshape(-1) for p in (self._mean, self._var))
        weight, bias = (None if p is None else delivered(p).flatten() for p in (self._weight, self._bias))
        k = self._active.count
        own = self.training or mean is None
        return folded(functional.batch_norm(beside(x, k), mean, var, weight, bias, own, self._momentum, self._eps), k)


class StackedLayerNorm(Stacked):
    """LayerNorm and GroupNorm: their statistics are each example's own, only scale and shift are the client's."""

    by_example = True

    def __init__(self, layer: nn.LayerNorm | nn.GroupNorm, find: Find, active: Active) -> None:
        super().__init__()
        self._weight, self._bias = find(layer.weight), find(layer.bias)
        self._layer_shape = layer.normalized_shape if isinstance(layer, nn.LayerNorm) else None
        self._groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else 0
        self._eps = layer.eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x, normalized."""
        if self._layer_shape is None:
            y, behind = functional.group_norm(x, self._groups, eps=self._eps), x.dim() - 2
        else:
            y, behind = functional.layer_norm(x, self._layer_shape, eps=self._eps), 0
        if self._weight is None:
            return y
        weight = delivered(self._weight)
        rows = y.view(len(weight), -1, *y.shape[1:])

        def broadcast(parameter: Tensor) -> Tensor:
            between = (1,) * (rows.dim() - parameter.dim() - behind)
            return parameter.view(len(parameter), *between, *parameter.shape[1:], *(1,) * behind)

        if self._bias is None:
            return (rows * broadcast(weight)).view(x.shape)
        return torch.addcmul(broadcast(delivered(self._bias)), rows, broadcast(weight)).view(x.shape)


class StackedDropout(Stacked):
    """Dropout, by each client's own generator."""

    by_example = True

    def __init__(self, layer: nn.Dropout, find: Find, active: Active) -> None:
        super().__init__()
        self._p, self._active = layer.p, active
        self.padding_shows = layer.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """Return x with some entries dropped."""
        if not self.training or self._p == 0:
            return x
        return self._active.dropout(x.reshape(self._active.count, -1, *x.shape[1:]), self._p).view(x.shape)


def beside(x: Tensor, k: int) -> Tensor:
    """Move the clients from dimension 0 to the channels: ``[k·B, C, ...]`` to ``[B, k·C, ...]``."""
    return x.reshape(k, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def folded(x: Tensor, k: int) -> Tensor:
    """Move the clients from the channels back to dimension 0: ``[B, k·C, ...]`` to ``[k·B, C, ...]``."""
    return x.unflatten(1, (k, -1)).transpose(0, 1).flatten(0, 1)
