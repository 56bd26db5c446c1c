"""One tensor of the model, for all clients; and how its gradient becomes a step of SGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedclade.core import LocalSpec, Slot
from fedclade.training.clip import per_client

FEW_ROWS = 32
"""Up to how many rows a product is added to parameters as it is formed.

Each row's share is then rounded as the parameter is, which is coarser than the gradient; and with many rows, writing
the gradient is little beside computing it.
"""


@dataclass(frozen=True)
class Rule:
    """A step of SGD, with the symbols of :class:`~fedclade.core.local.LocalSpec`; ``lr`` is that of the round."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    mu: float = 0.0
    clip_norm: float | None = None

    @classmethod
    def of(cls, spec: LocalSpec, lr: float) -> Rule:
        """Return that of local training, with the step size of a round."""
        return cls(lr, spec.momentum, spec.weight_decay, spec.mu, spec.clip_norm)

    @property
    def can_fuse(self) -> bool:
        """Whether θ ← (1 − η·decay) θ − η·g is all there is, so that no gradient need be kept."""
        return self.momentum == 0 and self.mu == 0 and self.clip_norm is None


class StackedParameter:
    """A parameter or buffer of n clients, ``[n, *shape]`` in one piece of memory.

    A layer asks for its value in forward with :meth:`use`. In backward, :meth:`receive` says where the gradient goes:
    to a buffer that is kept from step to step, or, where nothing else is to be done with it, straight into the
    parameters (fused). Fusing holds if the parameter is used once in forward: a second use ends it, in time, as no
    backward has begun by then.

    Parameters
    ----------
    slot
        Its place in the flat vector of a model.
    trained
        Whether it takes gradients.
    """

    def __init__(self, slot: Slot, trained: bool) -> None:
        self.slot = slot
        self.trained = trained
        self.everyone = torch.empty(0)
        self.state = self.everyone
        self._value = self.everyone
        self._gradients: Tensor | None = None
        self._velocity: Tensor | None = None
        self._anchor: Tensor | None = None
        self._rule = Rule(0.0)
        self._range = (0, 0)
        self._fused = self._waiting = self._touched = False

    def allocate(self, memory: Tensor) -> None:
        """Take the memory ``[n, *shape]`` to live in."""
        # .data here and in bind: a fused step changes a parameter behind autograd's back, after its last use in
        # backward, and should not look like a change of the others, which lie in the same memory.
        self.everyone = memory.data
        self._gradients = self._velocity = self._anchor = None

    def begin(self, rule: Rule, anchor: Tensor | None) -> None:
        """Start local training from what is in the memory now.

        Parameters
        ----------
        rule
            What a step does.
        anchor
            What the proximal term pulls towards, ``[n, entries]``; None where there is no such term.
        """
        self._rule = rule
        self._fused, self._waiting, self._touched = rule.can_fuse, False, False
        self._anchor = None if anchor is None else anchor.reshape(self.everyone.shape)
        if self._gradients is not None:
            self._gradients.zero_()
        # A gradient that is clipped has to be known before it is added to the momentum.
        apart = rule.momentum and rule.clip_norm is not None
        self._velocity = torch.zeros_like(self.everyone) if apart else None

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
            self._fused = self._fused and not self._waiting
            self._waiting = True
        return self._value

    def receive(self) -> tuple[Tensor, float, float]:
        """Return (target, β, α): the gradient g is to be taken in by target ← β·target + α·g."""
        if self._fused:
            self._waiting = False
            return self.state, 1 - self._rule.lr * self._rule.weight_decay, -self._rule.lr
        first = 0.0 if self._velocity is not None else self._rule.momentum
        beta = 1.0 if self._touched else first
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
            gradient.add_(self.state, alpha=self._rule.mu)
            gradient.add_(self._anchor[slice(*self._range)], alpha=-self._rule.mu)
        return gradient

    def step(self, scales: Tensor | None) -> None:
        """Finish a step whose gradient is complete: with β of the next one, its buffer is the momentum buffer of SGD.

        Parameters
        ----------
        scales
            What clipping multiplies each client's gradient with, ``[k]``; None if it is not clipped.
        """
        if not self._touched:
            return
        self._touched = False
        gradient, rule = self._gradient(), self._rule
        if scales is not None:
            gradient.mul_(per_client(scales, gradient))
        if rule.weight_decay:
            gradient.add_(self.state, alpha=rule.weight_decay)
        if self._velocity is not None:
            gradient = self._velocity[slice(*self._range)].mul_(rule.momentum).add_(gradient)
        self.state.add_(gradient, alpha=-rule.lr)

    def _gradient(self) -> Tensor:
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.everyone)
        return self._gradients[slice(*self._range)]


def scaled(target: Tensor, beta: float) -> Tensor:
    """Multiply in place; by 0 even what is not finite."""
    if beta == 0:
        return target.zero_()
    return target if beta == 1 else target.mul_(beta)
