"""One tensor of the model, for all clients; and how its gradient becomes a step of the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedclade.core import Slot
from fedclade.training.optimizer import LocalOptimizer, per_client

if TYPE_CHECKING:
    from fedclade.training.stacking.by_example import ByExample

FEW_ROWS = 32
"""Up to how many rows a product is added to parameters as it is formed.

Each row's share is then rounded as the parameter is, which is coarser than the gradient; and with many rows, writing
the gradient is little beside computing it.
"""


class StackedParameter:
    """A parameter or buffer of n clients, ``[n, *shape]`` in one piece of memory.

    A layer gets its value in forward from :meth:`use`. In backward, :meth:`receive` says where the gradient goes: to a
    buffer that is kept from step to step, or, where the optimizer can fuse its step, straight into the parameters.
    Fusing holds if the parameter is used once in forward: a second use ends it, in time, as no backward has begun by
    then.
    """

    def __init__(self, slot: Slot, trained: bool) -> None:
        self.slot = slot
        self.trained = trained
        self.held = False  # whether it stays as it is in this training, though it is trained in others
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
        # .data here and in bind: a fused step changes a parameter behind autograd's back, after its last use in
        # backward, and should not look like a change of the others, which lie in the same memory.
        self.everyone = memory.data
        self._gradients = self._velocity = self._anchor = None

    def begin(self, optimizer: LocalOptimizer, anchor: Tensor | None) -> None:
        """Start local training from what is in the memory now, pulled towards the anchors ``[n, entries]`` if any."""
        self._optimizer = optimizer
        fused = optimizer.can_fuse and self.by_example is None  # noise comes after the last gradient
        self._fused, self._used, self._touched = fused, False, False
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

        None if the step was fused, or the loss does not reach the parameter: SGD leaves that alone, decay included.
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
