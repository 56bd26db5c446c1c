"""Local training of a client in a round: epochs of SGD at a step size."""

from __future__ import annotations

from dataclasses import dataclass

from fedclade.core.arguments import checked
from fedclade.core.errors import require

LARGEST = 3.4e38
"""Largest step size or weight of a penalty: float32 holds no larger number."""


@checked()
@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Local training: plain SGD, the SGD_n of eq. 1 of the CFL paper; a proximal term and clipping are options.

    Parameters
    ----------
    epochs
        Passes over the client's training data; n in CFL, E in FedAvg.
    batch_size
        Examples per step; the last batch of an epoch may be smaller. B in FedAvg.
    lr
        Step size η in round 1.
    momentum
        Of SGD, in [0, 1). It starts at zero in every round: clients keep no state.
    weight_decay
        L2 penalty, at least 0.
    lr_decay
        The step size is multiplied by this after every round, in (0, 1].
    mu
        Weight μ of the proximal term μ/2·‖θ − θ_anchor‖²; 0 leaves it out. The anchor is the model that the client
        starts from (FedProx), unless the algorithm names another (Ditto, whose λ this is).
    clip_norm
        Largest L2 norm of the gradient of a step: that of the mean loss over the batch and of the proximal term, before
        weight decay and momentum. A longer one is scaled down to it, as ``torch.nn.utils.clip_grad_norm_`` does; None
        leaves gradients as they are.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    epochs: int = 1
    batch_size: int = 20
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    mu: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        scales = ("local.lr", self.lr), ("local.weight_decay", self.weight_decay), ("local.mu", self.mu)
        require(
            ("local.epochs", self.epochs, self.epochs >= 1, "at least 1"),
            ("local.batch_size", self.batch_size, self.batch_size >= 1, "at least 1"),
            ("local.lr", self.lr, self.lr > 0, "greater than 0"),
            ("local.momentum", self.momentum, 0 <= self.momentum < 1, "in [0, 1)"),
            ("local.weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0"),
            ("local.lr_decay", self.lr_decay, 0 < self.lr_decay <= 1, "in (0, 1]"),
            ("local.mu", self.mu, self.mu >= 0, "at least 0"),
            ("local.clip_norm", self.clip_norm, self.clip_norm is None or self.clip_norm > 0, "greater than 0"),
            *((name, value, not value > LARGEST, f"at most {LARGEST:g}") for name, value in scales),
        )

    def lr_at(self, round_number: int) -> float:
        """Return the step size of a round, counted from 1."""
        return self.lr * self.lr_decay ** (round_number - 1)
