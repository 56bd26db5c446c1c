"""One tensor of the model, for all clients; and how its gradient becomes a step of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedclade.core import Slot
from fedclade.training.optimizer import LocalOptimizer, per_client

FEW_ROWS = 32
"""Up to how many rows a product is added to parameters as it is formed.

Each row's share is then rounded as the parameter is, which is coarser than the gradient; and with
many rows, writing the gradient is little beside computing it.
"""


class StackedParameter:
    """A parameter or buffer of n clients, ``[n, *shape]`` in one piece of memory.

    A layer gets its value in forward from :meth:`use`. In backward, :meth:`receive` says where the
    gradient goes: to a buffer that is kept from step to step, or, where the optimizer can fuse its
    step, straight into the parameters. Fusing holds if the parameter is used once in forward: a
    second use ends it, in time, as no backward has begun by then.
    """

    def __init__(self, slot: Slot, trained: bool) -> None:
        self.slot = slot
        self.trained = trained
        # whether it stays as it is in this training, though it is trained in others
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
        """Where the gradient goes in place of :meth:`receive`, as one of each example; None: it is summed at once."""

    def allocate(self, memory: Tensor) -> None:
        """Take the memory ``[n, *shape]`` to live in."""
        # .data here and in bind: a fused step changes a parameter behind autograd's back, after its
        # last use in backward, and should not look like a change of the others, which lie in the
        # same memory.
        self.everyone = memory.data
        self._gradients = self._velocity = self._anchor = None

    def begin(self, optimizer: LocalOptimizer, anchor: Tensor | None) -> None:
        """Start local training from what is in the memory now, pulled towards the anchors ``[n, entries]`` if any."""
        self._optimizer = optimizer
        # noise comes after the last gradient
        fused = optimizer.can_fuse and self.by_example is None
        self._fused = fused
        self._used = False
        self._touched = False
        self._anchor = None if anchor is None else anchor.reshape(self.everyone.shape)
        if self._gradients is not None:
            self._gradients.zero_()
        self._velocity = torch.zeros_like(self.everyone) if optimizer.keeps_velocity else None

    def addresses(self) -> tuple[int, ...]:
        """Return where parameters, gradients, momentum and anchors lie; 0 for what is not there."""
        tensors = self.everyone, self._gradients, self._velocity, self._anchor
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)

    def bind(self, start: int, stop: int) -> None:
        """Let the clients ``start`` to ``stop`` be those that train."""
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
        """Whether steps are taken with its gradient."""
        return self.trained and not self.held

    def receive(self) -> tuple[Tensor, float, float]:
        """Return (target, β, α): the gradient g is to be taken in by target ← β·target + α·g."""
        if self.held:
            return self._gradient(), 0.0, 1.0  # which no step is taken with
        if self._fused:
            self._used = False
            return self.state, *self._optimizer.fused
        beta = 1.0 if self._touched else self._optimizer.carried
        self._touched = True
        return self._gradient(), beta, 1.0

    def add(self, gradient: Tensor) -> None:
        """Take in a gradient ``[k, *shape]``."""
        target, beta, alpha = self.receive()
        scaled(target, beta).add_(gradient, alpha=alpha)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Take in a gradient that is the product of ``[k, m, rows]`` and ``[k, rows, n]``, without writing it."""
        target, beta, alpha = self.receive()
        if target is self.state and right.shape[1] > FEW_ROWS:
            scaled(target, beta).add_(torch.bmm(left, right), alpha=alpha)
        else:
            target.baddbmm_(left, right, beta=beta, alpha=alpha)

    def complete(self) -> Tensor | None:
        """Add the proximal term; return the gradient ``[k, *shape]``.

        None if the step was fused, or the loss does not reach the parameter: SGD leaves that alone,
        decay included.
        """
        if not self._touched:
            return None
        gradient = self._gradient()
        if self._anchor is not None:
            gradient.add_(self.state, alpha=self._optimizer.mu)
            gradient.add_(self._anchor[slice(*self._range)], alpha=-self._optimizer.mu)
        return gradient

    def step(self, scales: Tensor | None) -> None:
        """Take a step with the complete gradient, clipped by the factors ``[k]`` if any.

        With β of the next step, the gradient's buffer is the momentum buffer of SGD.
        """
        if self._touched:
            self._touched = False
            velocity = None if self._velocity is None else self._velocity[slice(*self._range)]
            self._optimizer.step(self.state, self._gradient(), velocity, scales)

    def view(self, start: int, stop: int) -> nn.Parameter:
        """Return the values of the clients ``start`` to ``stop`` as one parameter, for an optimizer of torch's."""
        return nn.Parameter(self.everyone[start:stop])

    def clipped(self, scales: Tensor | None) -> Tensor | None:
        """Return the gradients ``[n, *shape]``, those of the clients that train complete and clipped, for their step.

        None if the loss does not reach the parameter.
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
    """Multiply in place; by 0 even what is not finite."""
    if beta == 0:
        return target.zero_()
    return target if beta == 1 else target.mul_(beta)


# The gradients of single examples of all clients: their norms, and their sums with factors of one's
# own.
#
# Of a dense layer whose input has no further dimensions, an example's gradient is the product δxᵀ
# of two vectors. Its norm is ‖δ‖·‖x‖, and the sum with factors c is Σ c·δxᵀ, the product that the
# plain gradient is: so no example's gradient is ever written (Goodfellow 2015, arXiv:1510.01799; Bu
# et al. 2023, arXiv:2210.00038). Others are.


class _Dense(NamedTuple):
    """A gradient of each example, as its factors: of the outputs ``[k, B, o]``, and the inputs ``[k, B, i]``."""

    gradient: Tensor
    rows: Tensor | None  # None for a bias, whose gradient is that of the outputs

    def squares(self) -> Tensor:
        """Return the squared norms, ``[k, B]``."""
        of_outputs = self.gradient.square().sum(2)
        return of_outputs if self.rows is None else of_outputs.mul_(self.rows.square().sum(2))

    def written(self) -> Tensor:
        """Return the gradients themselves, ``[k, B, ...]``."""
        return (
            self.gradient
            if self.rows is None
            else self.gradient.unsqueeze(3) * self.rows.unsqueeze(2)
        )


class ByExample:
    """The gradients of a step: every parameter hands in its own, then all are clipped and summed."""

    def __init__(self) -> None:
        self.width = 0
        """Examples of each client in the step: B."""
        self._found: dict[StackedParameter, list[_Dense | Tensor]] = {}
        self._broken: Tensor | None = None  # which examples have no norm, [k, B, 1], if any

    def begin(self, width: int) -> None:
        """Begin a step of so many examples of each client."""
        self.width = width
        self._found = {}

    def add(self, parameter: StackedParameter, gradients: Tensor) -> None:
        """Take the gradient of each example, ``[k·B, *shape]``."""
        if parameter.learns:
            self._found.setdefault(parameter, []).append(gradients.unflatten(0, (-1, self.width)))

    def add_dense(
        self,
        gradient: Tensor,
        rows: Tensor,
        weight: StackedParameter,
        bias: StackedParameter | None,
    ) -> None:
        """Take those of a dense layer, from the gradients of its outputs, and its inputs, ``[k, B·..., ·]`` both."""
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
        """Return the squared norm of each example's gradient, of all parameters together, ``[k, B]``."""
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
        """Give every parameter the sum of its examples' gradients, each times a factor ``[k, B]``; 0 leaves one out."""
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
    """Return the sum of what several uses of a parameter have given."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(
        [part.written() if isinstance(part, _Dense) else part for part in parts]
    ).sum(0)


# Memory that is kept from use to use.


class BufferPool:
    """Memory for tensors of one kind, one after another: fresh memory would have to be mapped page by page each time.

    That can take longer than a step of a small model, as the C library gives back to the system
    what lies at the end of its heap as soon as it is freed.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def room(self, like: Tensor, *shape: int) -> Tensor:
        """Return a tensor of a shape, of the type and on the device of another; what it had held before is gone."""
        size = prod(shape)
        memory = self._memory
        if memory.numel() < size or memory.dtype != like.dtype or memory.device != like.device:
            memory = self._memory = like.new_empty(size)
        return memory[:size].view(shape)


# Which of the clients are training right now.


class Active:
    """The clients ``start`` to ``stop``, and the generator of each for its own dropout.

    Its seed is the one that the loop gives the global generator, and masks have the shape that the
    loop draws: so dropout does not depend on the other clients. On a CPU it is that of the loop,
    but for what attention gives in the loop, whose entries lie, and are drawn, in another order.
    """

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._seeds: Sequence[int] = ()
        self._device = torch.device("cpu")
        self._generators: list[torch.Generator] = []

    @property
    def count(self) -> int:
        """How many there are: k."""
        return self.stop - self.start

    def seed(self, seeds: Sequence[int], device: torch.device) -> None:
        """Give each client its generator."""
        self._seeds = seeds
        self._device = device
        self._generators = []

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Drop entries of x ``[k, ...]`` with probability p, and scale the others up."""
        kept = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not self._generators:  # made only where something is dropped
            self._generators = [
                torch.Generator(self._device).manual_seed(seed) for seed in self._seeds
            ]
        for mask, generator in zip(kept, self._generators[self.start : self.stop], strict=True):
            mask.bernoulli_(1 - p, generator=generator)
        return x * (kept.div_(1 - p) if p < 1 else kept)
