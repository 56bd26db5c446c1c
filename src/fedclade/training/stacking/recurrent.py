"""LSTM and GRU, stacked: one product for the inputs of all times, then a loop over time.

On one thread of a CPU, 1.5 to 2 times as fast as the loop with 16 hidden units, as fast with 32 to 64, and 0.6 times
with the papers' 128, for which ``auto`` takes the loop or workers (``benchmarks/gains.py --only recurrent``). It is
here for small ones, and for GPUs, where a step of one client launches as many kernels as one of all.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fedclade.training.stacking.active import Active
from fedclade.training.stacking.functions import delivered, linear
from fedclade.training.stacking.layers import Find, Refused, Stacked
from fedclade.training.stacking.stacked_parameter import StackedParameter

States = tuple[Tensor, ...]
"""Of one layer: h, and c of an LSTM."""


class StackedRecurrent(Stacked):
    """What LSTM and GRU share: layers over layers."""

    def __init__(self, layer: nn.RNNBase, find: Find, active: Active) -> None:
        super().__init__()
        if layer.bidirectional:
            raise Refused("bidirectional")
        if layer.proj_size:
            raise Refused("proj_size")
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self._layers = [
            [find(getattr(layer, f"{kind}_l{depth}", None)) for kind in kinds] for depth in range(layer.num_layers)
        ]
        self._hidden, self._batch_first, self._dropout = layer.hidden_size, layer.batch_first, layer.dropout
        self._active = active
        self.padding_shows = layer.dropout > 0

    def _run(self, x: Tensor, first: list[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """Return the states of the last layer at all times, and the last states of every layer.

        ``first`` are the states before time 0, ``[layers, k·B, hidden]``; None for zeros.
        """
        x = x if self._batch_first else x.transpose(0, 1)
        k, ends = self._active.count, list[States]()
        for depth, (weight, recurrent, bias, recurrent_bias) in enumerate(self._layers):
            if depth and self._dropout and self.training:
                by_time = x.view(k, -1, *x.shape[1:]).transpose(1, 2)  # the order in which torch draws
                x = self._active.dropout(by_time, self._dropout).transpose(1, 2).reshape(x.shape)
            gates = linear(x, cast(StackedParameter, weight), bias)
            turned = delivered(cast(StackedParameter, recurrent)).mT
            shift = 0 if recurrent_bias is None else delivered(recurrent_bias).unsqueeze(1)
            states = tuple(
                x.new_zeros(k, len(x) // k, self._hidden) if each is None else each[depth].reshape(k, -1, self._hidden)
                for each in first
            )
            outputs: list[Tensor] = []
            for of_input in gates.view(k, -1, *gates.shape[1:]).unbind(2):
                states = self._cell(of_input, torch.matmul(states[0], turned) + shift, states)
                outputs.append(states[0])
            x = torch.stack(outputs, 2).flatten(0, 1)
            ends.append(states)
        last = [torch.stack(each).flatten(1, 2) for each in zip(*ends, strict=True)]
        return (x if self._batch_first else x.transpose(0, 1)), last

    def _cell(self, of_input: Tensor, of_state: Tensor, states: States) -> States:
        """Return the next states, from what input and state ``[k, B, ...]`` give the gates."""
        raise NotImplementedError


class StackedLSTM(StackedRecurrent):
    """LSTM."""

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the states of the last layer, and the last (h, c) ``[layers, k·B, hidden]``."""
        y, last = self._run(x, list(states or (None, None)))
        return y, tuple(last)

    def _cell(self, of_input: Tensor, of_state: Tensor, states: States) -> States:
        z = of_input + of_state
        i, f, _, o = z.sigmoid().split(self._hidden, -1)
        g = z[..., 2 * self._hidden : 3 * self._hidden].tanh()
        c = torch.addcmul(f * states[1], i, g)
        return o * c.tanh(), c


class StackedGRU(StackedRecurrent):
    """GRU."""

    def forward(self, x: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the states of the last layer, and the last ones ``[layers, k·B, hidden]``."""
        y, (last,) = self._run(x, [states])
        return y, last

    def _cell(self, of_input: Tensor, of_state: Tensor, states: States) -> States:
        (x_rz, x_n), (y_rz, y_n) = (each.tensor_split([2 * self._hidden], -1) for each in (of_input, of_state))
        r, z = (x_rz + y_rz).sigmoid().split(self._hidden, -1)
        n = torch.addcmul(x_n, r, y_n).tanh()
        return (torch.addcmul(n, z, states[0] - n),)
