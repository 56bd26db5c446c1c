"""Multi-head attention, stacked: its projections are each client's own, what lies between is each example's.

On one thread a transformer of width 16 trains 2.4 times as fast as by the loop, one of width 64 1.7 times
(``benchmarks/gains.py --only attention``).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.training.stacking.active import Active
from fedclade.training.stacking.functions import delivered, linear
from fedclade.training.stacking.layers import Find, Refused, Stacked
from fedclade.training.stacking.stacked_parameter import StackedParameter


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
        self._out, self._out_bias = cast(StackedParameter, find(layer.out_proj.weight)), find(layer.out_proj.bias)
        self._heads, self._p, self._active = layer.num_heads, layer.dropout, active
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
        is_causal: bool = False,  # a hint, of what the mask says anyway
    ) -> tuple[Tensor, Tensor | None]:
        """Return what is attended to ``[k·B, L, width]``, and on request the weights ``[k·B, (heads,) L, S]``."""
        if query.dim() != 3:
            raise ValueError(f"attention takes [batch, length, width], got shape {tuple(query.shape)}")
        q, k, v = (x.unflatten(-1, (self._heads, -1)).transpose(1, 2) for x in self._projected(query, key, value))
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
    """Apply each client's weight ``[k, outputs, inputs]`` and bias ``[k, outputs]`` to its rows of x ``[k·B, ...]``."""
    rows = x.reshape(len(weight), -1, x.shape[-1])
    y = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return y.view(*x.shape[:-1], -1)


def _merged(padding: Tensor | None, attention: Tensor | None, q: Tensor) -> Tensor | None:
    """Return what both masks add to the scores of the queries ``[k·B, heads, L, ...]``, or None.

    The mask of padding is that of the keys, ``[k·B, S]``; the other is ``[L, S]`` for all examples, or ``[k·B·heads, L,
    S]``. Both are true where nothing is to be attended to, or numbers to add.
    """
    parts: list[Tensor] = []
    if padding is not None:
        parts.append(padding[:, None, None])
    if attention is not None:
        parts.append(attention if attention.dim() == 2 else attention.view(*q.shape[:3], -1))
    added = [q.new_zeros(()).masked_fill(p, -torch.inf) if p.dtype == torch.bool else p for p in parts]
    return sum(added[1:], start=added[0]) if added else None


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dead_are_nan: bool) -> Tensor:
    """Return the weights ``[k·B, heads, L, S]`` of queries and keys ``[k·B, heads, ..., head width]``.

    Where a query may look at no key at all, they are NaN or 0: torch has both, as weights are asked for or not.
    """
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    if mask is None:
        return scores.softmax(-1)
    scores = scores + mask
    if dead_are_nan:
        return scores.softmax(-1)
    dead = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
