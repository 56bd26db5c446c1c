"""Operations on stacked parameters whose backward hands the gradient to its leaf instead of to autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedclade.engine.stacking.leaf import Leaf, scaled
from fedclade.engine.stacking.products import product


def linear(x: Tensor, weight: Leaf, bias: Leaf | None) -> Tensor:
    """Apply each client's own dense layer to its rows of x ``[k·B, ..., inputs]``."""
    return _Linear.apply(x, weight.use(), None if bias is None else bias.use(), weight, bias)


def embedding(tokens: Tensor, weight: Leaf, padding: int | None) -> Tensor:
    """Look up tokens ``[k·B, ...]`` in each client's own table; the row ``padding`` takes no gradient."""
    return _Embedding.apply(tokens, weight.use(), weight, padding)


def delivered(leaf: Leaf) -> Tensor:
    """Return a parameter ``[k, *shape]`` for any operation of autograd's; its gradient goes to the leaf."""
    return _Delivered.apply(leaf.use(), leaf)


class _Delivered(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, leaf: Leaf) -> Tensor:
        ctx.leaf = leaf
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        ctx.leaf.add(grads[0])
        return None, None


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply weights ``[k, outputs, inputs]`` and biases ``[k, outputs]`` to each client's rows of x."""
    k, outputs, inputs = weight.shape
    # Not a view of what bmm returns: autograd would refuse activations that work in place.
    out = x.new_empty((*x.shape[:-1], outputs))
    rows, products = x.reshape(k, -1, inputs), out.view(k, -1, outputs)
    product(rows, weight.mT, products, bias)
    return out


def linear_backward(
    gradient: Tensor, x: Tensor, value: Tensor, weight: Leaf, bias: Leaf | None, *, needs_x: bool
) -> Tensor | None:
    """Hand the leaves their gradients, from that of the layer's output and the weights' value; return that of x."""
    k, outputs, inputs = value.shape
    rows = gradient.reshape(k, -1, outputs)
    # Before the weights change.
    of_x = None
    if needs_x:
        of_x = x.new_empty(x.shape)
        product(rows, value, of_x.view(k, -1, inputs))
    if weight.trained:
        weight.add_product(rows.mT, x.reshape(k, -1, inputs))
    if bias is not None and bias.trained:
        bias.add(rows.sum(1))
    return of_x


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor, bias_value: Tensor | None, weight: Leaf, bias: Leaf | None
    ) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.leaves = weight, bias
        return linear_forward(x.detach(), value.detach(), bias_value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None, None]:
        x, value = ctx.saved_tensors
        of_x = linear_backward(grads[0], x, value.detach(), *ctx.leaves, needs_x=ctx.needs_input_grad[0])
        return of_x, None, None, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, leaf: Leaf, padding: int | None) -> Tensor:
        k, words, width = weight.shape
        # A token out of range would silently read the table of the next client.
        torch.ops.aten._assert_async.msg(((tokens >= 0) & (tokens < words)).all(), "index out of range in self")
        first = torch.arange(k, device=tokens.device).unsqueeze(1) * words
        index = (tokens.reshape(k, -1) + first).flatten()
        ctx.save_for_backward(index, tokens)
        ctx.leaf, ctx.padding = leaf, padding
        out = weight.new_empty((*tokens.shape, width))
        torch.index_select(weight.view(k * words, width), 0, index, out=out.view(-1, width))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None, None]:
        index, tokens = ctx.saved_tensors
        grad = grads[0].reshape(len(index), -1)
        if ctx.padding is not None:
            grad = grad.masked_fill((tokens == ctx.padding).view(-1, 1), 0)
        # First the sum of each word's gradients: added to the table one by one, each would be rounded as the table is.
        words, place = index.unique(return_inverse=True)
        sums = grad.new_zeros(len(words), grad.shape[1]).index_add_(0, place, grad)
        target, beta, alpha = ctx.leaf.receive()
        scaled(target, beta).view(-1, grad.shape[1]).index_add_(0, words, sums, alpha=alpha)
        return None, None, None, None
