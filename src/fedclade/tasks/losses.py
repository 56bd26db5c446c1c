"""Losses of the examples of a batch, and the outputs of mixtures of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.core import IGNORED, TaskKind
from fedclade.tasks.model_mixture import ModelMixture

# What several models predict together: the weighted mean of their probabilities, or of their
# numbers.


def mix_outputs(kind: TaskKind, outputs: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_k π_k p_k for a mixture of K models, as outputs ``[m, ...]`` of one model.

    ``outputs`` ``[K, m, ...]`` are logits, whose probabilities are mixed and become logits again;
    those of a regression are mixed as they are. ``weights`` are π of each example, ``[m, K]``.
    """
    pi = weights.t().reshape(len(outputs), -1, *(1,) * (outputs.dim() - 2))
    return ModelMixture.combine(outputs, pi, kind)


Loss = Callable[[Tensor, Tensor], Tensor]
"""Of outputs ``[B, ...]`` and targets ``[B, ...]``: the loss of each example, ``[B]``."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits in nats, ``[B]``.

    For a text it is the mean over the places that count, or 0 if none does.
    """
    if targets.dim() == 1:
        return functional.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="none")
    nats = functional.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return nats.view(len(targets), -1).sum(1) / count_targets(targets).clamp(min=1)


def count_targets(targets: Tensor) -> Tensor:
    """Return the number of targets of each example that count, int64 ``[B]``.

    These are places of a text; a label or numbers count once.
    """
    if targets.is_floating_point():
        return torch.ones(len(targets), dtype=torch.int64, device=targets.device)
    return (targets != IGNORED).view(len(targets), -1).sum(1)


def _mean(elementwise: Callable[..., Tensor], **options: float) -> Loss:
    """Return the loss that is the mean of another over an example's outputs."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        values = elementwise(
            outputs.reshape(targets.shape), targets.to(outputs), reduction="none", **options
        )
        return values.flatten(1).mean(1) if values.dim() > 1 else values

    return loss


bce = _mean(functional.binary_cross_entropy_with_logits)

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
    "mse": _mean(functional.mse_loss),
    "mae": _mean(functional.l1_loss),
    "huber": _mean(functional.huber_loss),
    "smooth_l1": _mean(functional.smooth_l1_loss),
    "poisson_nll": _mean(functional.poisson_nll_loss),
}
"""Losses by name.

``bce`` takes logits, and ``poisson_nll`` logarithms of rates; several outputs count as their
mean.
"""

KINDS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("classification", "language"),
    "bce": ("binary", "multilabel"),
    **dict.fromkeys(("mse", "mae", "huber", "smooth_l1", "poisson_nll"), ("regression",)),
}
"""The kinds of targets that each of them is for."""

Shapes = Literal["targets", "columns", "model"]

SHAPES: Mapping[Shapes, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "targets": lambda outputs, targets: (outputs.reshape(targets.shape), targets),
    "columns": lambda outputs, targets: (
        outputs.reshape(len(targets), -1),
        targets.reshape(len(targets), -1),
    ),
    "model": lambda outputs, targets: (outputs.reshape(len(targets), -1), targets),
}
"""Shapes in which a loss of the user's own may take outputs and targets, the first that fits.

Outputs ``[B, 1]`` and targets ``[B]`` would be broadcast to ``[B, B]``. So both are ``[B]``; for a
loss that averages over the last dimension both are ``[B, 1]``; and one that indexes the outputs of
a model gets them as ``[B, 1]``. With several targets all three are the same.
"""
