"""Stacked layers: each applies the layers of k clients to the clients' rows ``[k·B, ...]``.

The batches of k clients, with B rows (examples) each, are concatenated in dimension 0. Layers
without parameters need no stacked form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.training.stacking.functions import delivered, embedding, linear, linear_by_autograd
from fedclade.training.stacking.stacked_parameter import Active, StackedParameter

Find = Callable[[Tensor | None], StackedParameter | None]
"""Function that returns the stacked form of a parameter or buffer; None for None.

A parameter that several layers share has one stacked form.
"""


class Refused(Exception):  # noqa: N818  (not an error of the user's)
    """Error for a layer with an option that stacked layers do not support.

    The message names the option and the values that are supported, as in ``the layer has the
    option add_zero_attn=True, but the stacked engine supports only False``.
    """


class Stacked(nn.Module):
    """Base class of stacked layers, which apply the layers of k clients at once."""

    padding_shows = False
    """Whether the result for a row depends on the number of other rows, and so on padding."""
    by_example = False
    """Whether the layer can compute a separate gradient for each example."""


class Described(NamedTuple):
    """Stand-in for a weight that has only the weight's data type and device.

    A forward method of another library, such as peft, may read data type and device. A forward
    method that computes with this object fails, so its module is not stacked.
    """

    dtype: torch.dtype
    device: torch.device


class StackedLinear(Stacked):
    """Linear layers of k clients, computed by batched matrix products."""

    by_example = True

    def __init__(self, layer: nn.Linear, find: Find, active: Active) -> None:
        super().__init__()
        self.weight = Described(layer.weight.dtype, layer.weight.device)
        self.weight_and_bias = cast(StackedParameter, find(layer.weight)), find(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the linear layers, ``[k·B, ..., outputs]``."""
        return linear(x, *self.weight_and_bias)


class StackedConv1D(Stacked):
    """Dense layers of k clients whose weights are stored as ``[inputs, outputs]``.

    The package transformers has such layers in GPT-2, under the name ``Conv1D``.
    """

    by_example = True

    def __init__(self, layer: Any, find: Find, active: Active) -> None:
        super().__init__()
        self._weight = cast(StackedParameter, find(layer.weight))
        self._bias = cast(StackedParameter, find(layer.bias))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the dense layers, ``[k·B, ..., outputs]``."""
        weight = delivered(self._weight)
        bias = delivered(self._bias).unsqueeze(1)
        y = torch.baddbmm(bias, x.reshape(len(weight), -1, weight.shape[1]), weight)
        return y.view(*x.shape[:-1], -1)


class StackedEmbedding(Stacked):
    """Embeddings of k clients, in one table.

    Tokens of one row, such as positions ``[1, T]``, are those of all rows, as they would be where
    the embedded tokens are broadcast to the batch.
    """

    def __init__(self, layer: nn.Embedding, find: Find, active: Active) -> None:
        super().__init__()
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise Refused(
                    f"the layer has the option {option}, which engine loop supports, but the stacked "
                    "engine does not"
                )
        self._weight = cast(StackedParameter, find(layer.weight))
        self._padding = layer.padding_idx
        self._active = active

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embedded tokens, ``[k·B, ..., width]``."""
        if len(tokens) == 1 and tokens.dim() > 1:
            tokens = tokens.expand(self._active.rows, *tokens.shape[1:])
        return embedding(tokens, self._weight, self._padding)


class StackedConv(Stacked):
    """Convolutions of k clients, as one convolution with k times as many groups.

    The class stacks convolutions and transposed convolutions in 1, 2 and 3 dimensions.
    """

    by_example = True

    def __init__(self, layer: nn.Conv2d, find: Find, active: Active) -> None:
        super().__init__()
        if layer.padding_mode != "zeros":
            raise Refused(
                f"the layer has the option padding_mode={layer.padding_mode!r}, but the stacked "
                "engine supports only 'zeros' (engine loop supports all modes)"
            )
        self._weight = cast(StackedParameter, find(layer.weight))
        self._bias = find(layer.bias)
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
        """Return the outputs of the convolutions, ``[k·B, outputs, ...]``."""
        weight = delivered(self._weight)
        k = len(weight)
        y = self._convolve(
            beside(x, k),
            weight.flatten(0, 1),
            _concatenated(self._bias),
            groups=k * self._groups,
            **self._options,
        )
        return folded(y, k)


class StackedBatchNorm(Stacked):
    """Batch normalisation layers of k clients, each with the statistics of its own client's rows.

    The class stacks BatchNorm1d, BatchNorm2d and BatchNorm3d.
    """

    padding_shows = True

    def __init__(self, layer: nn.BatchNorm2d, find: Find, active: Active) -> None:
        super().__init__()
        if layer.momentum is None:
            raise Refused(
                "the layer has the option momentum=None, but the stacked engine supports only "
                "numbers as momentum (engine loop supports None, too)"
            )
        self._weight = find(layer.weight)
        self._bias = find(layer.bias)
        self._mean = find(layer.running_mean)
        self._var = find(layer.running_var)
        self._count = find(layer.num_batches_tracked)
        self._momentum = layer.momentum
        self._eps = layer.eps
        self._active = active

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs ``[k·B, ...]``, normalised by the statistics of each client's rows."""
        if self.training and self._count is not None:
            self._count.state.add_(1)
        # Running statistics have no gradient, so their values are used and updated in place.
        mean = None if self._mean is None else self._mean.state.reshape(-1)
        var = None if self._var is None else self._var.state.reshape(-1)
        k = self._active.count
        y = functional.batch_norm(
            beside(x, k),
            mean,
            var,
            weight=_concatenated(self._weight),
            bias=_concatenated(self._bias),
            training=self.training or mean is None,
            momentum=self._momentum,
            eps=self._eps,
        )
        return folded(y, k)


class StackedLayerNorm(Stacked):
    """LayerNorm or GroupNorm layers of k clients.

    Statistics are computed for each example, and each client has its own scale and shift.
    """

    by_example = True

    def __init__(self, layer: nn.LayerNorm | nn.GroupNorm, find: Find, active: Active) -> None:
        super().__init__()
        self._weight = find(layer.weight)
        self._bias = find(layer.bias)
        self._layer_shape = layer.normalized_shape if isinstance(layer, nn.LayerNorm) else None
        self._groups = layer.num_groups if isinstance(layer, nn.GroupNorm) else 0
        self._eps = layer.eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs ``[k·B, ...]``, normalised, scaled and shifted."""
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
    """Dropout layers of k clients, with a random generator for each client."""

    by_example = True

    def __init__(self, layer: nn.Dropout, find: Find, active: Active) -> None:
        super().__init__()
        self._p = layer.p
        self._active = active
        self.padding_shows = layer.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to the inputs in training mode; otherwise return them unchanged."""
        if not self.training or self._p == 0:
            return x
        return self._active.dropout(x.reshape(self._active.count, -1, *x.shape[1:]), self._p).view(
            x.shape
        )


def _concatenated(parameter: StackedParameter | None) -> Tensor | None:
    """Return the vectors ``[n]`` of k clients, concatenated, ``[k·n]``; None if there are none."""
    if parameter is None:
        return None
    return delivered(parameter).flatten()


def beside(x: Tensor, k: int) -> Tensor:
    """Move the clients from dimension 0 to the channels: ``[k·B, C, ...]`` to ``[B, k·C, ...]``."""
    return x.reshape(k, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def folded(x: Tensor, k: int) -> Tensor:
    """Move the clients from the channels to dimension 0: ``[B, k·C, ...]`` to ``[k·B, C, ...]``."""
    return x.unflatten(1, (k, -1)).transpose(0, 1).flatten(0, 1)


# Multi-head attention, stacked: its projections use the parameters of each client. The operations
# between the projections have no parameters, and treat each example separately.
#
# On one thread, a transformer of width 16 trains 2.4 times as fast as by the loop, and one of width
# 64 trains 1.7 times as fast (``benchmarks/gains.py --only attention``).


class StackedAttention(Stacked):
    """Multi-head attention layers of k clients, with the batch in dimension 0.

    The layers may be self-attention or cross-attention.
    """

    by_example = True

    def __init__(self, layer: nn.MultiheadAttention, find: Find, active: Active) -> None:
        super().__init__()
        if not layer.batch_first:
            raise Refused(
                "the layer has the option batch_first=False, but the stacked engine supports only "
                "True (engine loop supports both)"
            )
        if layer.bias_k is not None:
            raise Refused(
                "the layer has the option add_bias_kv=True, but the stacked engine supports only "
                "False (engine loop supports both)"
            )
        if layer.add_zero_attn:
            raise Refused(
                "the layer has the option add_zero_attn=True, but the stacked engine supports only "
                "False (engine loop supports both)"
            )
        apart = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        self._packed = find(layer.in_proj_weight)
        self._apart = [find(weight) for weight in apart]
        self._bias = find(layer.in_proj_bias)
        self._out = cast(StackedParameter, find(layer.out_proj.weight))
        self._out_bias = find(layer.out_proj.bias)
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
        """Return the outputs ``[k·B, L, width]`` for L queries, and the attention weights or None.

        Weights are returned only with ``need_weights``. They are ``[k·B, L, S]`` for S keys if they
        are averaged over heads, and ``[k·B, heads, L, S]`` otherwise. The parameters are those of
        ``torch.nn.MultiheadAttention``.

        Raises
        ------
        ValueError
            If the query does not have the shape ``[batch, length, width]``.
        """
        if query.dim() != 3:
            raise ValueError(
                "the query of MultiheadAttention should have shape [batch, length, width], got "
                f"shape {tuple(query.shape)}"
            )
        q, k, v = (
            x.unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for x in self._projected(query, key, value)
        )
        mask = _merge_masks(key_padding_mask, attn_mask, q)
        weights = None
        if need_weights or (self._p and self.training):
            weights = self._dropped(_weights(q, k, mask, dead_are_nan=need_weights))
            y = weights @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, mask)
        y = linear(y.transpose(1, 2).flatten(2), self._out, self._out_bias)
        if weights is None or not need_weights:
            return y, None
        if average_attn_weights:
            weights = weights.mean(1)
        return y, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return the projections of query, key and value by each client's weights."""
        if self._packed is not None and query is key and key is value:
            return linear(query, self._packed, self._bias).chunk(3, -1)
        if self._packed is not None:
            weights = delivered(self._packed).chunk(3, 1)
        else:
            weights = tuple(delivered(cast(StackedParameter, weight)) for weight in self._apart)
        biases: Sequence[Tensor | None] = (None, None, None)
        if self._bias is not None:
            biases = delivered(self._bias).chunk(3, 1)
        return tuple(map(linear_by_autograd, (query, key, value), weights, biases))

    def _dropped(self, weights: Tensor) -> Tensor:
        """Apply dropout to attention weights in training mode; otherwise return them unchanged.

        Dropout masks are drawn by each client's generator.
        """
        if not self.training or self._p == 0:
            return weights
        by_client = weights.view(self._active.count, -1, *weights.shape[1:])
        return self._active.dropout(by_client, self._p).view(weights.shape)


def _merge_masks(padding: Tensor | None, attention: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask to be added to attention scores ``[k·B, heads, L, S]``; None without masks.

    The result is the sum of two masks. ``padding`` is a mask of the keys, ``[k·B, S]``.
    ``attention`` is a mask ``[L, S]`` for all examples, or ``[k·B·heads, L, S]``. A boolean mask is
    True where a key must not be attended to; a mask of numbers is added unchanged.
    """
    added: Tensor | None = None
    if padding is not None:
        added = _as_numbers(padding[:, None, None], q)
    if attention is not None:
        if attention.dim() != 2:
            attention = attention.view(*q.shape[:3], -1)
        attention = _as_numbers(attention, q)
        added = attention if added is None else added + attention
    return added


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask that can be added to scores: −∞ where a boolean mask is True."""
    if mask.dtype != torch.bool:
        return mask
    return like.new_zeros(()).masked_fill(mask, -torch.inf)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dead_are_nan: bool) -> Tensor:
    """Return the attention weights ``[k·B, heads, L, S]`` of queries and keys.

    Queries and keys are ``[k·B, heads, ..., head width]``. If the mask excludes all keys of a
    query, the weights of the query are NaN with ``dead_are_nan``, and 0 otherwise: torch returns
    NaN if the caller requests weights, and computes with 0 otherwise.
    """
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    if mask is None:
        return scores.softmax(-1)
    scores = scores + mask
    if dead_are_nan:
        return scores.softmax(-1)
    dead = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)


# LSTM and GRU, stacked: one matrix product for the inputs of all time steps, then a loop over time.
#
# On one thread of a CPU, the stacked form is 1.5 to 2 times as fast as the loop with 16 hidden
# units, equally fast with 32 to 64, and 0.6 times as fast with the papers' 128, for which ``auto``
# chooses the loop or workers (``benchmarks/gains.py --only recurrent``). It exists for small
# layers, and for GPUs, where a step of one client launches as many kernels as a step of all
# clients.

States = tuple[Tensor, ...]
"""States of one recurrent layer: the hidden state h, and for an LSTM also the cell state c."""


class StackedRecurrent(Stacked):
    """Base class of stacked LSTM and GRU modules, each with one or more recurrent layers."""

    def __init__(self, layer: nn.RNNBase, find: Find, active: Active) -> None:
        super().__init__()
        if layer.bidirectional:
            raise Refused(
                "the layer has the option bidirectional=True, but the stacked engine supports only "
                "False (engine loop supports both)"
            )
        if layer.proj_size:
            raise Refused(
                "the layer has the option proj_size, but the stacked engine supports only "
                "proj_size=0 (engine loop supports every value)"
            )
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        self._layers: list[list[StackedParameter | None]] = []
        for depth in range(layer.num_layers):
            parameters = [getattr(layer, f"{kind}_l{depth}", None) for kind in kinds]
            self._layers.append([find(parameter) for parameter in parameters])
        self._hidden = layer.hidden_size
        self._batch_first = layer.batch_first
        self._dropout = layer.dropout
        self._active = active
        self.padding_shows = layer.dropout > 0

    def _run(self, x: Tensor, first: list[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """Apply all recurrent layers to a sequence of inputs.

        Parameters
        ----------
        x
            Inputs of k clients at T time steps: ``[k·B, T, inputs]``, or ``[T, k·B, inputs]`` if
            the layer was created with ``batch_first=False``.
        first
            States before the first time step: the hidden states h, and for an LSTM also the cell
            states c, ``[layers, k·B, hidden]`` each; None for zeros.

        Returns
        -------
        tuple
            Hidden states of the last layer at all time steps; and the final states of all layers,
            as a list of tensors like ``first``.
        """
        if not self._batch_first:
            x = x.transpose(0, 1)
        k = self._active.count
        ends = list[States]()
        for depth, (weight, recurrent, bias, recurrent_bias) in enumerate(self._layers):
            if depth and self._dropout and self.training:
                # Torch's own layers draw dropout with time before batch, so the masks agree.
                by_time = x.view(k, -1, *x.shape[1:]).transpose(1, 2)
                x = self._active.dropout(by_time, self._dropout).transpose(1, 2).reshape(x.shape)
            gates = linear(x, cast(StackedParameter, weight), bias)
            transposed = delivered(cast(StackedParameter, recurrent)).mT
            shift = 0 if recurrent_bias is None else delivered(recurrent_bias).unsqueeze(1)
            states = tuple(self._first_state(each, depth, x) for each in first)
            outputs: list[Tensor] = []
            for of_input in gates.view(k, -1, *gates.shape[1:]).unbind(2):
                states = self._cell(of_input, torch.matmul(states[0], transposed) + shift, states)
                outputs.append(states[0])
            x = torch.stack(outputs, 2).flatten(0, 1)
            ends.append(states)
        last = [torch.stack(each).flatten(1, 2) for each in zip(*ends, strict=True)]
        if not self._batch_first:
            x = x.transpose(0, 1)
        return x, last

    def _first_state(self, states: Tensor | None, depth: int, x: Tensor) -> Tensor:
        """Return the state of layer ``depth`` before the first time step, ``[k, B, hidden]``.

        ``states`` has the states of all layers, ``[layers, k·B, hidden]``; None for zeros. ``x``
        has the inputs of the layer, ``[k·B, T, inputs]``.
        """
        k = self._active.count
        if states is None:
            return x.new_zeros(k, len(x) // k, self._hidden)
        return states[depth].reshape(k, -1, self._hidden)

    def _cell(self, of_input: Tensor, of_state: Tensor, states: States) -> States:
        """Return the states after one time step.

        ``of_input`` and ``of_state`` are the terms of the gates that depend on the input and on the
        state before, ``[k, B, ...]``.
        """
        raise NotImplementedError


class StackedLSTM(StackedRecurrent):
    """LSTM modules of k clients."""

    def forward(
        self, x: Tensor, states: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the hidden states of the last layer at all time steps, and the final states.

        The final states are (h, c) of all layers, ``[layers, k·B, hidden]`` each.
        """
        y, last = self._run(x, list(states or (None, None)))
        return y, tuple(last)

    def _cell(self, of_input: Tensor, of_state: Tensor, states: States) -> States:
        z = of_input + of_state
        i, f, _, o = z.sigmoid().split(self._hidden, -1)
        g = z[..., 2 * self._hidden : 3 * self._hidden].tanh()
        c = torch.addcmul(f * states[1], i, g)
        return o * c.tanh(), c


class StackedGRU(StackedRecurrent):
    """GRU modules of k clients."""

    def forward(self, x: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the last layer at all time steps, and the final states.

        The final states of all layers are ``[layers, k·B, hidden]``.
        """
        y, (last,) = self._run(x, [states])
        return y, last

    def _cell(self, of_input: Tensor, of_state: Tensor, states: States) -> States:
        (x_rz, x_n), (y_rz, y_n) = (
            each.tensor_split([2 * self._hidden], -1) for each in (of_input, of_state)
        )
        r, z = (x_rz + y_rz).sigmoid().split(self._hidden, -1)
        n = torch.addcmul(x_n, r, y_n).tanh()
        return (torch.addcmul(n, z, states[0] - n),)
