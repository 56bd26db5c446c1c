"""LSTM and GRU, stacked: a loop over time whose backward is written out, so that each weight is used once a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fedclade.training.stacking.active import Active
from fedclade.training.stacking.functions import linear
from fedclade.training.stacking.layers import Find, Refused, Stacked
from fedclade.training.stacking.stacked_parameter import StackedParameter

sigmoid_backward: Callable[[Tensor, Tensor], Tensor] = torch.ops.aten.sigmoid_backward
tanh_backward: Callable[[Tensor, Tensor], Tensor] = torch.ops.aten.tanh_backward


class _Recurrent(Stacked):
    """What LSTM and GRU share: layers over layers, each of an input product for all times and a loop over time."""

    def __init__(self, layer: nn.RNNBase, find: Find, active: Active) -> None:
        super().__init__()
        if layer.bidirectional:
            raise Refused("bidirectional")
        if layer.proj_size:
            raise Refused("proj_size")
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self._leaves = [
            [find(getattr(layer, f"{kind}_l{depth}", None)) for kind in kinds] for depth in range(layer.num_layers)
        ]
        self._hidden, self._batch_first, self._dropout = layer.hidden_size, layer.batch_first, layer.dropout
        self._active = active
        self.padding_shows = layer.dropout > 0

    def _run(self, x: Tensor, first: list[Tensor | None]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Return the states of the last layer, and the last ones of every layer.

        Parameters
        ----------
        x
            ``[k·B, T, inputs]``, or with the first two swapped.
        first
            The states before time 0 ``[layers, k·B, hidden]``: h, and c of an LSTM. None for zeros.
        """
        x = x if self._batch_first else x.transpose(0, 1)
        k, ends = self._active.count, list[tuple[Tensor, ...]]()
        for depth, (weight, recurrent, bias, recurrent_bias) in enumerate(self._leaves):
            if depth and self._dropout and self.training:
                by_time = x.view(k, -1, *x.shape[1:]).transpose(1, 2)  # the order in which torch draws
                x = self._active.dropout(by_time, self._dropout).transpose(1, 2).reshape(x.shape)
            gates = linear(x, cast(StackedParameter, weight), bias)
            before = [self._before(states, depth, x, k) for states in first]
            x, *end = self._over_time(
                gates.view(k, -1, *gates.shape[1:]), before, cast(StackedParameter, recurrent), recurrent_bias
            )
            ends.append(tuple(end))
        return (x if self._batch_first else x.transpose(0, 1)), ends

    def _before(self, states: Tensor | None, depth: int, x: Tensor, k: int) -> Tensor:
        if states is None:
            return x.new_zeros(k, len(x) // k, self._hidden)
        return states[depth].reshape(k, -1, self._hidden)

    def _over_time(
        self, gates: Tensor, before: list[Tensor], weight: StackedParameter, bias: StackedParameter | None
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError


class StackedLSTM(_Recurrent):
    """LSTM."""

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the states of the last layer, and the last (h, c) ``[layers, k·B, hidden]``."""
        y, ends = self._run(x, list(states or (None, None)))
        h, c = (torch.stack(end).flatten(1, 2) for end in zip(*ends, strict=True))
        return y, (h, c)

    def _over_time(
        self, gates: Tensor, before: list[Tensor], weight: StackedParameter, bias: StackedParameter | None
    ) -> tuple[Tensor, ...]:
        shift = None if bias is None else bias.use()
        return _LSTM.apply(gates, *before, weight.use(), shift, weight, bias)


class StackedGRU(_Recurrent):
    """GRU."""

    def forward(self, x: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the states of the last layer, and the last ones ``[layers, k·B, hidden]``."""
        y, ends = self._run(x, [states])
        return y, torch.stack([end for (end,) in ends]).flatten(1, 2)

    def _over_time(
        self, gates: Tensor, before: list[Tensor], weight: StackedParameter, bias: StackedParameter | None
    ) -> tuple[Tensor, ...]:
        shift = None if bias is None else bias.use()
        return _GRU.apply(gates, *before, weight.use(), shift, weight, bias)


def _receive(
    ctx: Any, at: int, grad_gates: Tensor, earlier: Tensor, leaves: tuple[StackedParameter, StackedParameter | None]
) -> None:
    """Hand over the gradients of weight and bias, the inputs ``at`` and ``at + 1``, summed over time.

    Gate gradients ``[k, B, T, gates]``, and the states before each time ``[k, B, T, hidden]``.
    """
    if ctx.needs_input_grad[at]:
        leaves[0].add_product(grad_gates.flatten(1, 2).mT, earlier.flatten(1, 2))
    if ctx.needs_input_grad[at + 1] and leaves[1] is not None:
        leaves[1].add(grad_gates.sum((1, 2)))


class _LSTM(Function):
    """c_t = f·c_{t−1} + i·g, h_t = o·tanh(c_t); gates ``[k, B, T, 4·hidden]`` in the order i, f, g, o."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None, *leaves: StackedParameter | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        (k, b, times, _), width, kept = x.shape, weight.shape[2], []
        states, earlier = x.new_empty(k * b, times, width), x.new_empty(k, b, times, width)
        by_client = states.view(earlier.shape)
        for t in range(times):
            earlier[:, :, t] = h
            z = torch.baddbmm(x[:, :, t], h, weight.mT)
            if bias is not None:
                z += bias.unsqueeze(1)
            z[..., : 2 * width].sigmoid_()
            i, f, g, o = z.split(width, -1)
            g.tanh_()
            o.sigmoid_()
            previous, c = c, torch.addcmul(f * c, i, g)
            squashed = c.tanh()
            h = o * squashed
            by_client[:, :, t] = h
            kept.append((z, previous, squashed))
        ctx.save_for_backward(weight, earlier)
        ctx.kept, ctx.leaves = kept, leaves
        return states, h, c

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        weight, earlier = ctx.saved_tensors
        k, b, times, width = earlier.shape
        by_time, dh, dc = grads[0].reshape(k, b, times, width), grads[1], grads[2]
        grad_gates = earlier.new_empty(k, b, times, 4 * width)
        for t in reversed(range(times)):
            z, previous, squashed = ctx.kept[t]
            i, f, g, o = z.split(width, -1)
            dh = dh + by_time[:, :, t]
            dc = dc + tanh_backward(dh * o, squashed)
            ahead = (dc * g, dc * previous, dc * i, dh * squashed)
            dz = torch.cat(ahead, -1)
            # One call for the three gates with a sigmoid; that of tanh is written over.
            dg = tanh_backward(ahead[2], g)
            dz = sigmoid_backward(dz, z)
            dz[..., 2 * width : 3 * width] = dg
            grad_gates[:, :, t] = dz
            dc = dc * f
            dh = torch.bmm(dz, weight)
        _receive(ctx, 3, grad_gates, earlier, ctx.leaves)
        return grad_gates, dh, dc, None, None, None, None


class _GRU(Function):
    """h_t = n + z·(h_{t−1} − n), n = tanh(x_n + r·(W h_{t−1} + b)); gates ``[k, B, T, 3·hidden]``: r, z, n."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, *leaves: StackedParameter | None
    ) -> tuple[Tensor, Tensor]:
        (k, b, times, _), width, kept = x.shape, weight.shape[2], []
        states, earlier = x.new_empty(k * b, times, width), x.new_empty(k, b, times, width)
        by_client = states.view(earlier.shape)
        for t in range(times):
            earlier[:, :, t] = h
            y = torch.bmm(h, weight.mT)
            if bias is not None:
                y += bias.unsqueeze(1)
            rz = (x[:, :, t, : 2 * width] + y[..., : 2 * width]).sigmoid_()
            r, z = rz.split(width, -1)
            y_n = y[..., 2 * width :]
            n = torch.addcmul(x[:, :, t, 2 * width :], r, y_n).tanh_()
            kept.append((rz, n, y_n))
            h = torch.addcmul(n, z, h - n)
            by_client[:, :, t] = h
        ctx.save_for_backward(weight, earlier)
        ctx.kept, ctx.leaves = kept, leaves
        return states, h

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        weight, earlier = ctx.saved_tensors
        k, b, times, width = earlier.shape
        by_time, dh = grads[0].reshape(k, b, times, width), grads[1]
        grad_x = earlier.new_empty(k, b, times, 3 * width)
        grad_y = torch.empty_like(grad_x)
        for t in reversed(range(times)):
            rz, n, y_n = ctx.kept[t]
            r, z = rz.split(width, -1)
            dh = dh + by_time[:, :, t]
            dn = tanh_backward(dh * (1 - z), n)
            drz = sigmoid_backward(torch.cat((dn * y_n, dh * (earlier[:, :, t] - n)), -1), rz)
            grad_x[:, :, t] = torch.cat((drz, dn), -1)
            dy = torch.cat((drz, dn * r), -1)
            grad_y[:, :, t] = dy
            dh = torch.baddbmm(dh * z, dy, weight)
        _receive(ctx, 2, grad_y, earlier, ctx.leaves)
        return grad_x, dh, None, None, None, None
