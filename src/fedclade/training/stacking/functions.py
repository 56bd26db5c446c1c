"""Operations of stacked layers that pass gradients to their parameters without autograd.

In the backward pass, such an operation adds the gradient to a :class:`StackedParameter` directly,
so that it can be written to reused memory or fused with the optimizer's step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.overrides import has_torch_function_unary

from fedclade.training.stacking.stacked_parameter import ByExample, StackedParameter

# Batched matrix products; small products are computed by NumPy's BLAS.
#
# On one thread this makes the stacked engine 1.3 times as fast for ``mclr``, and not slower for
# ``mlp`` (``benchmarks/gains.py --only NumPy``; ``benchmarks/products.py`` compares only the
# products).

TINY = 2**18
"""Largest number of multiplications per client for which NumPy's BLAS (OpenBLAS) is used.

For small products it is faster than torch's BLAS. For larger products, OpenBLAS starts its own
threads, which interfere with torch's threads.
"""

TYPES = (torch.float32, torch.float64)
"""Data types for which NumPy uses a BLAS."""

FEW_THREADS = 2
"""Largest number of torch's threads for which NumPy with a single thread is at least as fast."""


class Product:
    """Callable that computes k matrix products in given memory, invisible to autograd.

    The object is created once, and can be called in every step in which the matrices are in the
    same memory.

    Parameters
    ----------
    left, right
        The factors of k products, ``[k, m, i]`` and ``[k, i, n]``.
    out
        Memory for the results, ``[k, m, n]``.
    plus
        Terms that are added to every row of a product, ``[k, n]``; None for no terms.
    """

    def __init__(
        self, left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None = None
    ) -> None:
        _, m, i = left.shape
        self._left = left
        self._right = right
        self._out = out
        self._plus: Tensor | None = None
        if plus is not None:
            self._plus = plus.unsqueeze(1)
        # For a tiny product, the call of torch takes longer than the call of NumPy.
        self._arrays: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None = None
        tiny = m * i * right.shape[2] <= TINY and torch.get_num_threads() <= FEW_THREADS
        if tiny and left.is_cpu and left.dtype in TYPES:
            self._arrays = (left.numpy(), right.numpy(), out.numpy())

    @np.errstate(all="ignore")  # like torch: clients that diverge are detected by their updates
    def __call__(self) -> None:
        """Compute the products of the current values of the matrices, and write them to ``out``."""
        if self._arrays is not None:
            left, right, out = self._arrays
            np.matmul(left, right, out=out)
            if self._plus is not None:
                self._out.add_(self._plus)
        elif self._plus is None:
            torch.bmm(self._left, self._right, out=self._out)
        else:
            torch.baddbmm(self._plus, self._left, self._right, out=self._out)


def linear(x: Tensor, weight: StackedParameter, bias: StackedParameter | None) -> Tensor:
    """Apply each client's own dense layer to its rows of ``x``, ``[k·B, ..., inputs]``."""
    if has_torch_function_unary(x):
        return x.__torch_function__(linear, (type(x),), (x, weight, bias))
    if torch.is_autocast_enabled(x.device.type):
        return linear_by_autograd(x, delivered(weight), None if bias is None else delivered(bias))
    weight_value = weight.use()
    bias_value = None if bias is None else bias.use()
    return _Linear.apply(x, weight_value, bias_value, weight, bias)


def linear_by_autograd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the linear maps of k clients to rows ``[k·B, ..., i]``, by operations of torch.

    The clients' weights are ``[k, o, i]``, and the biases ``[k, o]``, for o outputs and i inputs.
    """
    rows = x.reshape(len(weight), -1, x.shape[-1])
    if bias is None:
        y = torch.bmm(rows, weight.mT)
    else:
        y = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return y.view(*x.shape[:-1], -1)


def embedding(tokens: Tensor, weight: StackedParameter, padding: int | None) -> Tensor:
    """Look up tokens ``[k·B, ...]`` in each client's own embedding table.

    The row number ``padding`` of the table gets no gradient; None for no such row.
    """
    return _Embedding.apply(tokens, weight.use(), weight, padding)


def delivered(parameter: StackedParameter) -> Tensor:
    """Return the value ``[k, *shape]`` of a stacked parameter as a tensor tracked by autograd.

    A layer can apply any differentiable operation to this tensor. In the backward pass, the
    tensor's gradient is added to the stacked parameter. If gradients of single examples are needed,
    the value is repeated for each of B examples, ``[k·B, *shape]``.
    """
    if (by_example := parameter.by_example) is not None:
        return _DeliveredToEach.apply(parameter.use(), parameter, by_example)
    return _Delivered.apply(parameter.use(), parameter)


class _Delivered(Function):
    """Identity whose backward pass adds the gradient to a stacked parameter."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter: StackedParameter) -> Tensor:
        ctx.parameter = parameter
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        ctx.parameter.add(grads[0])
        return None, None


class _DeliveredToEach(Function):
    """Autograd function that repeats a parameter for each example, to get the examples' gradients."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, parameter: StackedParameter, by_example: ByExample
    ) -> Tensor:
        ctx.parameter = parameter
        ctx.by_example = by_example
        return (
            value.unsqueeze(1).expand(len(value), by_example.width, *value.shape[1:]).flatten(0, 1)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        ctx.by_example.add(ctx.parameter, grads[0])
        return None, None, None


class _Linear(Function):
    """Dense layers of k clients, whose backward pass adds the gradients to stacked parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        bias_value: Tensor | None,
        weight: StackedParameter,
        bias: StackedParameter | None,
    ) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.parameters = weight, bias
        k, outputs, inputs = value.shape
        # Not a view of a result of bmm: autograd would refuse activations that change a view in
        # place.
        out = x.new_empty((*x.shape[:-1], outputs))
        rows = x.detach().reshape(k, -1, inputs)
        Product(rows, value.detach().mT, out.view(k, -1, outputs), bias_value)()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None, None]:
        x, value = ctx.saved_tensors
        k, outputs, inputs = value.shape
        gradient = grads[0].reshape(k, -1, outputs)
        rows = x.reshape(k, -1, inputs)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = x.new_empty(x.shape)
            # Computed first, since a fused step in hand_over may change the weights.
            Product(gradient, value.detach(), of_x.view(k, -1, inputs))()
        hand_over(gradient, rows, *ctx.parameters)
        return of_x, None, None, None, None


def hand_over(
    gradient: Tensor, rows: Tensor, weight: StackedParameter, bias: StackedParameter | None
) -> None:
    """Add the gradients of k clients' dense layers to the layers' stacked parameters.

    Parameters
    ----------
    gradient
        Gradients of the outputs of k clients' layers, ``[k, B, outputs]``.
    rows
        Inputs of the layers, ``[k, B, inputs]``.
    weight, bias
        Stacked parameters of the layers; no bias if None.
    """
    if (by_example := weight.by_example) is not None:
        by_example.add_dense(gradient, rows, weight, bias)
        return
    if weight.trained:
        weight.add_product(gradient.mT, rows)
    if bias is not None and bias.trained:
        bias.add(gradient.sum(1))


class _Embedding(Function):
    """Embeddings of k clients, whose backward pass adds the gradient to a stacked parameter."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, table: StackedParameter, padding: int | None
    ) -> Tensor:
        k, words, width = weight.shape
        # A token out of range would silently read the table of the next client.
        torch.ops.aten._assert_async.msg(
            ((tokens >= 0) & (tokens < words)).all(), "index out of range in self"
        )
        first = torch.arange(k, device=tokens.device).unsqueeze(1) * words
        index = (tokens.reshape(k, -1) + first).flatten()
        ctx.save_for_backward(index, tokens)
        ctx.table = table
        ctx.padding = padding
        out = weight.new_empty((*tokens.shape, width))
        torch.index_select(weight.view(k * words, width), 0, index, out=out.view(-1, width))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None, None]:
        index, tokens = ctx.saved_tensors
        grad = grads[0].reshape(len(index), -1)
        if ctx.padding is not None:
            grad = grad.masked_fill((tokens == ctx.padding).view(-1, 1), 0)
        ctx.table.add_rows(index, grad)
        return None, None, None, None
