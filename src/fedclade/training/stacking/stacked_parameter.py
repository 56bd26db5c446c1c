"""Stacked parameters: one tensor of the model for all clients, its gradient, and its SGD step."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedclade.core import Slot
from fedclade.training.optimizer import LocalOptimizer, per_client

FEW_ROWS = 32
"""Largest number of rows for which a product is added to parameters directly.

The share of each row is then rounded to the precision of the parameter, which is coarser than the
precision of the gradient. With many rows, the time for writing the gradient is small compared with
the time for computing it.
"""


class StackedParameter:
    """A parameter or buffer of n clients, ``[n, *shape]`` in contiguous memory.

    In the forward pass, a layer gets the value from :meth:`use`. In the backward pass,
    :meth:`receive` returns the destination of the gradient: a buffer that is reused in every step,
    or, if the optimizer can fuse its step, the parameters themselves. A step is fused only if the
    parameter is used once in the forward pass. A second use ends fusing in time, since no backward
    pass has begun by then.
    """

    def __init__(self, slot: Slot, trained: bool) -> None:
        self.slot = slot
        self.trained = trained
        # Whether this local training leaves the parameter unchanged, though others train it.
        self.held = False
        self.everyone = torch.empty(0)
        self.state = self.everyone
        self._value = self.everyone
        self._gradients: Tensor | None = None
        self._velocity: Tensor | None = None
        self._anchor: Tensor | None = None
        self._optimizer = LocalOptimizer(0.0)
        self._range = (0, 0)
        self._fused = self._used = self._touched = False
        self.by_example: ByExample | None = None
        """Collector of the gradients of single examples; None if gradients are summed at once.

        It replaces :meth:`receive` as the destination of the gradient.
        """

    def allocate(self, memory: Tensor) -> None:
        """Use ``memory``, ``[n, *shape]``, for the values."""
        # .data here and in bind: a fused step changes a parameter without autograd's knowledge,
        # after its last use in the backward pass. Autograd must not take that for a change of the
        # other parameters, which share the memory.
        self.everyone = memory.data
        self._gradients = self._velocity = self._anchor = None

    def begin(self, optimizer: LocalOptimizer, anchor: Tensor | None) -> None:
        """Start local training from the current values, with optional anchors ``[n, entries]``."""
        self._optimizer = optimizer
        # DP-SGD adds noise after the last gradient, so its gradient cannot be fused into the step.
        fused = optimizer.can_fuse and self.by_example is None
        self._fused = fused
        self._used = False
        self._touched = False
        self._anchor = None if anchor is None else anchor.reshape(self.everyone.shape)
        if self._gradients is not None:
            self._gradients.zero_()
        self._velocity = torch.zeros_like(self.everyone) if optimizer.keeps_velocity else None

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of parameters, gradients, momentum and anchors; 0 if unset."""
        tensors = self.everyone, self._gradients, self._velocity, self._anchor
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)

    def bind(self, start: int, stop: int) -> None:
        """Select the clients ``start`` to ``stop`` as those that train."""
        self._range = start, stop
        self.state = self.everyone[start:stop]
        self._value = self.state.data.requires_grad_(self.trained)

    def use(self) -> Tensor:
        """Return the value ``[k, *shape]`` of the clients that train, for one use in forward."""
        if self.trained and torch.is_grad_enabled():
            self._fused = self._fused and not self._used
            self._used = True
        return self._value

    @property
    def learns(self) -> bool:
        """Whether the optimizer takes steps with the gradient of this parameter."""
        return self.trained and not self.held

    def receive(self) -> tuple[Tensor, float, float]:
        """Return (target, β, α): add the gradient g by target ← β·target + α·g."""
        if self.held:
            return self._gradient(), 0.0, 1.0  # this gradient is never used in a step
        if self._fused:
            self._used = False
            return self.state, *self._optimizer.fused
        beta = 1.0 if self._touched else self._optimizer.carried
        self._touched = True
        return self._gradient(), beta, 1.0

    def add(self, gradient: Tensor) -> None:
        """Add a gradient ``[k, *shape]``."""
        target, beta, alpha = self.receive()
        scaled(target, beta).add_(gradient, alpha=alpha)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add the product of ``[k, m, rows]`` and ``[k, rows, n]`` as a gradient.

        With few rows, or a gradient buffer as the destination, the product is not written
        separately.
        """
        target, beta, alpha = self.receive()
        if target is self.state and right.shape[1] > FEW_ROWS:
            scaled(target, beta).add_(torch.bmm(left, right), alpha=alpha)
        else:
            target.baddbmm_(left, right, beta=beta, alpha=alpha)

    def complete(self) -> Tensor | None:
        """Add the proximal term; return the gradient ``[k, *shape]``, or None.

        It is None if the step was fused, or if the loss does not depend on the parameter: SGD
        leaves such a parameter unchanged, and does not decay it.
        """
        if not self._touched:
            return None
        gradient = self._gradient()
        if self._anchor is not None:
            gradient.add_(self.state, alpha=self._optimizer.mu)
            gradient.add_(self._anchor[slice(*self._range)], alpha=-self._optimizer.mu)
        return gradient

    def step(self, scales: Tensor | None) -> None:
        """Take a step with the complete gradient, scaled by factors ``[k]`` of clipping if given.

        The buffer of the gradient is multiplied by β at the next step, which makes it the momentum
        buffer of SGD.
        """
        if self._touched:
            self._touched = False
            velocity = None if self._velocity is None else self._velocity[slice(*self._range)]
            self._optimizer.step(self.state, self._gradient(), velocity, scales)

    def view(self, start: int, stop: int) -> nn.Parameter:
        """Return the values of clients ``start`` to ``stop`` as a parameter for an optimizer."""
        return nn.Parameter(self.everyone[start:stop])

    def clipped(self, scales: Tensor | None) -> Tensor | None:
        """Return the gradients ``[n, *shape]`` for a step of the clients that train, or None.

        Their gradients are complete, and scaled by the factors ``[k]`` of clipping if given. The
        result is None if the loss does not depend on the parameter.
        """
        if not self._touched:
            return None
        self._touched = False
        if scales is not None:
            self._gradient().mul_(per_client(scales, self._gradient()))
        return self._gradients

    def _gradient(self) -> Tensor:
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.everyone)
        return self._gradients[slice(*self._range)]


def scaled(target: Tensor, beta: float) -> Tensor:
    """Multiply a tensor in place; a factor of 0 also sets entries that are not finite to 0."""
    if beta == 0:
        return target.zero_()
    return target if beta == 1 else target.mul_(beta)


# Gradients of single examples of all clients: their norms, and their sums weighted by factors.
#
# In a dense layer whose input has no further dimensions, the gradient of an example is the product
# δxᵀ of two vectors. Its norm is ‖δ‖·‖x‖. The weighted sum with factors c is Σ c·δxᵀ, a product of
# the same form as the plain gradient. So the gradients of single examples are never written to
# memory (Goodfellow 2015, arXiv:1510.01799; Bu et al. 2023, arXiv:2210.00038). Gradients of other
# layers are.


class _Dense(NamedTuple):
    """Each example's gradient as factors: of outputs ``[k, B, o]``, and inputs ``[k, B, i]``."""

    gradient: Tensor
    rows: Tensor | None  # None for a bias: its gradient equals the gradient of the outputs

    def squares(self) -> Tensor:
        """Return the squared norms of the gradients, ``[k, B]``."""
        of_outputs = self.gradient.square().sum(2)
        return of_outputs if self.rows is None else of_outputs.mul_(self.rows.square().sum(2))

    def written(self) -> Tensor:
        """Return the gradients in full, ``[k, B, ...]``."""
        return (
            self.gradient
            if self.rows is None
            else self.gradient.unsqueeze(3) * self.rows.unsqueeze(2)
        )


class ByExample:
    """Collector of the gradients of single examples in a step, which clips and sums them.

    Every parameter adds its gradients. After the backward pass, :meth:`squares` returns the squared
    norms, and :meth:`deliver` gives every parameter the weighted sum.
    """

    def __init__(self) -> None:
        self.width = 0
        """Number of examples of each client in the step: B."""
        self._found: dict[StackedParameter, list[_Dense | Tensor]] = {}
        # Mask of examples whose norm is not finite, [k, B, 1]; None if there are none.
        self._broken: Tensor | None = None

    def begin(self, width: int) -> None:
        """Begin a step with ``width`` examples of each client."""
        self.width = width
        self._found = {}

    def add(self, parameter: StackedParameter, gradients: Tensor) -> None:
        """Add the gradient of each example, ``[k·B, *shape]``."""
        if parameter.learns:
            self._found.setdefault(parameter, []).append(gradients.unflatten(0, (-1, self.width)))

    def add_dense(
        self,
        gradient: Tensor,
        rows: Tensor,
        weight: StackedParameter,
        bias: StackedParameter | None,
    ) -> None:
        """Add gradients of a dense layer, given as gradients of its outputs, and its inputs.

        Parameters
        ----------
        gradient
            Gradients of the outputs, ``[k, B·..., outputs]``.
        rows
            The inputs, ``[k, B·..., inputs]``.
        weight, bias
            Parameters of the layer.
        """
        k = len(rows)
        each = rows.shape[1] // self.width
        if each == 1:
            of_weight = _Dense(gradient, rows)
            of_bias = _Dense(gradient, None)
        else:
            outputs, inputs = (t.reshape(k, self.width, each, -1) for t in (gradient, rows))
            of_weight = torch.matmul(outputs.mT, inputs) if weight.learns else outputs
            of_bias = outputs.sum(2)
        if weight.learns:
            self._found.setdefault(weight, []).append(of_weight)
        if bias is not None and bias.learns:
            self._found.setdefault(bias, []).append(of_bias)

    def squares(self) -> Tensor:
        """Return the squared norm of each example's gradient over all parameters, ``[k, B]``."""
        self._found = {parameter: [_together(parts)] for parameter, parts in self._found.items()}
        each = [parts[0] for parts in self._found.values()]
        squares = [
            e.squares() if isinstance(e, _Dense) else e.flatten(2).square().sum(2) for e in each
        ]
        found = torch.stack(squares).sum(0)
        broken = ~found.isfinite()
        self._broken = broken.unsqueeze(2) if bool(broken.any()) else None
        return found

    def deliver(self, factors: Tensor) -> None:
        """Add to every parameter the sum of its examples' gradients, with factors ``[k, B]``.

        An example with factor 0 is left out, even if its gradient is not finite.
        """
        left_out = (factors == 0).unsqueeze(2)
        weights = factors.unsqueeze(1)
        for parameter, (found,) in self._found.items():
            if isinstance(found, _Dense):
                outputs = (found.gradient * factors.unsqueeze(2)).masked_fill_(left_out, 0)
                if found.rows is None:
                    parameter.add(outputs.sum(1).view(parameter.state.shape))
                else:
                    rows = (
                        found.rows
                        if self._broken is None
                        else found.rows.masked_fill(self._broken, 0)
                    )
                    parameter.add_product(outputs.mT, rows)
            else:
                flat = found.flatten(2) if found.dim() > 2 else found.unsqueeze(2)
                parameter.add(
                    torch.bmm(weights, flat.masked_fill(left_out, 0)).view(parameter.state.shape)
                )


def _together(parts: list[_Dense | Tensor]) -> _Dense | Tensor:
    """Return the sum of the gradients from several uses of a parameter."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(
        [part.written() if isinstance(part, _Dense) else part for part in parts]
    ).sum(0)


# Memory that is reused.


class BufferPool:
    """Memory that is reused for tensors of one kind, one after another.

    Fresh memory would have to be mapped page by page each time: the C library returns memory at the
    end of its heap to the system as soon as it is freed. That can take longer than a step of a
    small model.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def room(self, like: Tensor, *shape: int) -> Tensor:
        """Return a tensor with a shape, and the type and device of ``like``, in the pool's memory.

        Earlier contents of the memory are overwritten.
        """
        size = prod(shape)
        memory = self._memory
        if memory.numel() < size or memory.dtype != like.dtype or memory.device != like.device:
            memory = self._memory = like.new_empty(size)
        return memory[:size].view(shape)


# The clients that are training at the moment.


class Active:
    """The clients ``start`` to ``stop`` that train, with a generator for the dropout of each.

    The seed of a generator is the one that the loop gives the global generator, and masks have the
    shape that the loop draws. So the dropout of a client does not depend on other clients. On a CPU
    the masks equal those of the loop, except for those of attention: in the loop, the entries of
    attention are in another order in memory, in which they are drawn.
    """

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._seeds: Sequence[int] = ()
        self._device = torch.device("cpu")
        self._generators: list[torch.Generator] = []

    @property
    def count(self) -> int:
        """Number of clients that train: k."""
        return self.stop - self.start

    def seed(self, seeds: Sequence[int], device: torch.device) -> None:
        """Set the seed of each client's generator."""
        self._seeds = seeds
        self._device = device
        self._generators = []

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Drop entries of x ``[k, ...]`` with probability p, and scale the others by 1/(1 − p)."""
        kept = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not self._generators:  # created only if something is dropped
            self._generators = [
                torch.Generator(self._device).manual_seed(seed) for seed in self._seeds
            ]
        for mask, generator in zip(kept, self._generators[self.start : self.stop], strict=True):
            mask.bernoulli_(1 - p, generator=generator)
        return x * (kept.div_(1 - p) if p < 1 else kept)
