"""Stacked layers with parameters: each applies every client's layer to its rows ``[k·B, ...]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.training.stacking.functions import delivered, embedding, linear
from fedclade.training.stacking.stacked_parameter import Active, StackedParameter

Find = Callable[[Tensor | None], StackedParameter | None]
"""Returns the stacked form of a parameter or buffer, and None for None.

Tied parameters have the same stacked form.
"""


class Refused(Exception):  # noqa: N818  (not an error of the user's)
    """Option of a layer that has no stacked form; the message names the option."""


class Stacked(nn.Module):
    """Base class of stacked layers."""

    padding_shows = False
    """Whether the result for one row depends on the number of other rows, and so on padding."""
    by_example = False
    """Whether the layer can compute a separate gradient for each example."""


class Described(NamedTuple):
    """Attributes of a weight that a forward pass, such as peft's, may read.

    A forward pass that computes with such a weight fails, so its module is not stacked.
    """

    dtype: torch.dtype
    device: torch.device


class StackedLinear(Stacked):
    """Linear layers of all clients, by batched matrix products."""

    by_example = True

    def __init__(self, layer: nn.Linear, find: Find, active: Active) -> None:
        super().__init__()
        self.weight = Described(layer.weight.dtype, layer.weight.device)
        self.weight_and_bias = cast(StackedParameter, find(layer.weight)), find(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, ``[k·B, ..., outputs]``."""
        return linear(x, *self.weight_and_bias)


class StackedEmbedding(Stacked):
    """Embeddings of all clients, in one table."""

    def __init__(self, layer: nn.Embedding, find: Find, active: Active) -> None:
        super().__init__()
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise Refused(option)
        self._weight = cast(StackedParameter, find(layer.weight))
        self._padding = layer.padding_idx

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embedded tokens, ``[k·B, ..., width]``."""
        return embedding(tokens, self._weight, self._padding)


class StackedConv(Stacked):
    """Conv1d, 2d, 3d and their transposes, as one convolution with k times as many groups."""

    by_example = True

    def __init__(self, layer: nn.Conv2d, find: Find, active: Active) -> None:
        super().__init__()
        if layer.padding_mode != "zeros":
            raise Refused(f"padding_mode {layer.padding_mode!r}")
        self._weight, self._bias = cast(StackedParameter, find(layer.weight)), find(layer.bias)
        options: dict[str, Any] = {
            "stride": layer.stride,
            "padding": layer.padding,
            "dilation": layer.dilation,
        }
        if layer.transposed:
            options["output_padding"] = layer.output_padding
        kind = "conv_transpose" if layer.transposed else "conv"
        self._convolve = getattr(functional, f"{kind}{layer.weight.dim() - 2}d")
        self._options = options
        self._groups = layer.groups

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, ``[k·B, outputs, ...]``."""
        weight = delivered(self._weight)
        bias = None if self._bias is None else delivered(self._bias).flatten()
        k = len(weight)
        y = self._convolve(
            beside(x, k), weight.flatten(0, 1), bias, groups=k * self._groups, **self._options
        )
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
        self._momentum = layer.momentum
        self._eps = layer.eps
        self._active = active

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized inputs."""
        if self.training and self._count is not None:
            self._count.state.add_(1)
        mean, var = (None if p is None else p.state.reshape(-1) for p in (self._mean, self._var))
        weight, bias = (
            None if p is None else delivered(p).flatten() for p in (self._weight, self._bias)
        )
        k = self._active.count
        own = self.training or mean is None
        return folded(
            functional.batch_norm(
                beside(x, k), mean, var, weight, bias, own, self._momentum, self._eps
            ),
            k,
        )


class StackedLayerNorm(Stacked):
    """LayerNorm and GroupNorm: statistics per example, scale and shift per client."""

    by_example = True

    def __init__(self, layer: nn.LayerNorm | nn.GroupNorm, find: Find, active: Active) -> None:
        super().__init__()
        self._weight, self._bias = find(layer.weight), find(layer.bias)
        self._layer_shape = layer.normalized_shape if isinstance(layer, nn.LayerNorm) else None
        self._groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else 0
        self._eps = layer.eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized inputs."""
        if self._layer_shape is None:
            y = functional.group_norm(x, self._groups, eps=self._eps)
            behind = x.dim() - 2
        else:
            y = functional.layer_norm(x, self._layer_shape, eps=self._eps)
            behind = 0
        if self._weight is None:
            return y
        weight = delivered(self._weight)
        rows = y.view(len(weight), -1, *y.shape[1:])

        def broadcast(parameter: Tensor) -> Tensor:
            between = (1,) * (rows.dim() - parameter.dim() - behind)
            return parameter.view(len(parameter), *between, *parameter.shape[1:], *(1,) * behind)

        if self._bias is None:
            return (rows * broadcast(weight)).view(x.shape)
        return torch.addcmul(broadcast(delivered(self._bias)), rows, broadcast(weight)).view(
            x.shape
        )


class StackedDropout(Stacked):
    """Dropout with a generator per client."""

    by_example = True

    def __init__(self, layer: nn.Dropout, find: Find, active: Active) -> None:
        super().__init__()
        self._p = layer.p
        self._active = active
        self.padding_shows = layer.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """Return x with some entries dropped, in training mode."""
        if not self.training or self._p == 0:
            return x
        return self._active.dropout(x.reshape(self._active.count, -1, *x.shape[1:]), self._p).view(
            x.shape
        )


def beside(x: Tensor, k: int) -> Tensor:
    """Move the clients from dimension 0 to the channels: ``[k·B, C, ...]`` to ``[B, k·C, ...]``."""
    return x.reshape(k, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def folded(x: Tensor, k: int) -> Tensor:
    """Move the clients from the channels to dimension 0: ``[B, k·C, ...]`` to ``[k·B, C, ...]``."""
    return x.unflatten(1, (k, -1)).transpose(0, 1).flatten(0, 1)


# Multi-head attention, stacked: its projections are per client. The operations between them have no
# parameters and are per example.
#
# On one thread, a transformer of width 16 trains 2.4 times as fast as by the loop, and one of width
# 64 trains 1.7 times as fast (``benchmarks/gains.py --only attention``).


class StackedAttention(Stacked):
    """MultiheadAttention, self or cross, with the batch in dimension 0."""

    by_example = True

    def __init__(self, layer: nn.MultiheadAttention, find: Find, active: Active) -> None:
        super().__init__()
        if not layer.batch_first:
            raise Refused("batch_first False")
        if layer.bias_k is not None:
            raise Refused("add_bias_kv")
        if layer.add_zero_attn:
            raise Refused("add_zero_attn")
        apart = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        self._packed, self._apart = find(layer.in_proj_weight), [find(weight) for weight in apart]
        self._bias = find(layer.in_proj_bias)
        self._out, self._out_bias = (
            cast(StackedParameter, find(layer.out_proj.weight)),
            find(layer.out_proj.bias),
        )
        self._heads = layer.num_heads
        self._p = layer.dropout
        self._active = active
        self.padding_shows = layer.dropout > 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # only a hint: the mask has the same information
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs ``[k·B, L, width]``, and on request the weights.

        Weights are ``[k·B, L, S]`` if averaged over heads, and ``[k·B, heads, L, S]`` otherwise.

        Raises
        ------
        ValueError
            If the query is not ``[batch, length, width]``.
        """
        if query.dim() != 3:
            raise ValueError(
                f"attention takes [batch, length, width], got shape {tuple(query.shape)}"
            )
        q, k, v = (
            x.unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for x in self._projected(query, key, value)
        )
        mask = _merged(key_padding_mask, attn_mask, q)
        weights = None
        if need_weights or (self._p and self.training):
            weights = self._dropped(_weights(q, k, mask, dead_are_nan=need_weights))
            y = weights @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, mask)
        y = linear(y.transpose(1, 2).flatten(2), self._out, self._out_bias)
        if weights is None or not need_weights:
            return y, None
        return y, weights.mean(1) if average_attn_weights else weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self._packed is not None and query is key and key is value:
            return linear(query, self._packed, self._bias).chunk(3, -1)
        if self._packed is not None:
            weights = delivered(self._packed).chunk(3, 1)
        else:
            weights = tuple(delivered(cast(StackedParameter, weight)) for weight in self._apart)
        biases = (None,) * 3 if self._bias is None else delivered(self._bias).chunk(3, 1)
        return tuple(map(_affine, (query, key, value), weights, biases))

    def _dropped(self, weights: Tensor) -> Tensor:
        if not self.training or self._p == 0:
            return weights
        by_client = weights.view(self._active.count, -1, *weights.shape[1:])
        return self._active.dropout(by_client, self._p).view(weights.shape)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply each client's weight ``[k, o, i]`` and bias ``[k, o]`` to rows ``[k·B, ..., i]``."""
    rows = x.reshape(len(weight), -1, x.shape[-1])
    y = (
        torch.bmm(rows, weight.mT)
        if bias is None
        else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    )
    return y.view(*x.shape[:-1], -1)


def _merged(padding: Tensor | None, attention: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the sum of both masks, to be added to the scores ``[k·B, heads, L, S]``, or None.

    The mask of padding is that of the keys, ``[k·B, S]``. The mask of attention is ``[L, S]`` for
    all examples, or ``[k·B·heads, L, S]``. A boolean mask is true where a key must not be attended
    to; a mask of numbers is added as it is.
    """
    parts: list[Tensor] = []
    if padding is not None:
        parts.append(padding[:, None, None])
    if attention is not None:
        parts.append(attention if attention.dim() == 2 else attention.view(*q.shape[:3], -1))
    added = [
        q.new_zeros(()).masked_fill(p, -torch.inf) if p.dtype == torch.bool else p for p in parts
    ]
    return sum(added[1:], start=added[0]) if added else None


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dead_are_nan: bool) -> Tensor:
    """Return the attention weights ``[k·B, heads, L, S]`` of queries and keys.

    Queries and keys are ``[k·B, heads, ..., head width]``. Where the mask excludes all keys of a
    query, its weights are NaN or 0, by ``dead_are_nan``: torch gives NaN when it is asked for
    weights, and 0 otherwise.
    """
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    if mask is None:
        return scores.softmax(-1)
    scores = scores + mask
    if dead_are_nan:
        return scores.softmax(-1)
    dead = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)


# LSTM and GRU, stacked: one product for the inputs of all times, then a loop over time.
#
# On one thread of a CPU, the stacked form is 1.5 to 2 times as fast as the loop with 16 hidden
# units, equally fast with 32 to 64, and 0.6 times as fast with the papers' 128, for which ``auto``
# chooses the loop or workers (``benchmarks/gains.py --only recurrent``). It exists for small
# layers, and for GPUs, where a step of one client launches as many kernels as a step of all
# clients.

States = tuple[Tensor, ...]
"""States of one layer: h, and for an LSTM also c."""


class StackedRecurrent(Stacked):
    """Common part of stacked LSTM and GRU: a stack of recurrent layers."""

    def __init__(self, layer: nn.RNNBase, find: Find, active: Active) -> None:
        super().__init__()
        if layer.bidirectional:
            raise Refused("bidirectional")
        if layer.proj_size:
            raise Refused("proj_size")
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self._layers = [
            [find(getattr(layer, f"{kind}_l{depth}", None)) for kind in kinds]
            for depth in range(layer.num_layers)
        ]
        self._hidden = layer.hidden_size
        self._batch_first = layer.batch_first
        self._dropout = layer.dropout
        self._active = active
        self.padding_shows = layer.dropout > 0

    def _run(self, x: Tensor, first: list[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """Return the states of the last layer at all times, and the final states of every layer.

        ``first`` has the states before time 0, ``[layers, k·B, hidden]``; None stands for zeros.
        """
        x = x if self._batch_first else x.transpose(0, 1)
        k = self._active.count
        ends = list[States]()
        for depth, (weight, recurrent, bias, recurrent_bias) in enumerate(self._layers):
            if depth and self._dropout and self.training:
                # Torch's own layers draw dropout with time before batch, so the masks agree.
                by_time = x.view(k, -1, *x.shape[1:]).transpose(1, 2)
                x = self._active.dropout(by_time, self._dropout).transpose(1, 2).reshape(x.shape)
            gates = linear(x, cast(StackedParameter, weight), bias)
            turned = delivered(cast(StackedParameter, recurrent)).mT
            shift = 0 if recurrent_bias is None else delivered(recurrent_bias).unsqueeze(1)
            states = tuple(
                x.new_zeros(k, len(x) // k, self._hidden)
                if each is None
                else each[depth].reshape(k, -1, self._hidden)
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
        """Return the next states, given the gates' terms of input and state ``[k, B, ...]``."""
        raise NotImplementedError


class StackedLSTM(StackedRecurrent):
    """LSTM layers of all clients."""

    def forward(
        self, x: Tensor, states: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the states of the last layer, and the final (h, c) ``[layers, k·B, hidden]``."""
        y, last = self._run(x, list(states or (None, None)))
        return y, tuple(last)

    def _cell(self, of_input: Tensor, of_state: Tensor, states: States) -> States:
        z = of_input + of_state
        i, f, _, o = z.sigmoid().split(self._hidden, -1)
        g = z[..., 2 * self._hidden : 3 * self._hidden].tanh()
        c = torch.addcmul(f * states[1], i, g)
        return o * c.tanh(), c


class StackedGRU(StackedRecurrent):
    """GRU layers of all clients."""

    def forward(self, x: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the states of the last layer, and the final states ``[layers, k·B, hidden]``."""
        y, (last,) = self._run(x, [states])
        return y, last

    def _cell(self, of_input: Tensor, of_state: Tensor, states: States) -> States:
        (x_rz, x_n), (y_rz, y_n) = (
            each.tensor_split([2 * self._hidden], -1) for each in (of_input, of_state)
        )
        r, z = (x_rz + y_rz).sigmoid().split(self._hidden, -1)
        n = torch.addcmul(x_n, r, y_n).tanh()
        return (torch.addcmul(n, z, states[0] - n),)
