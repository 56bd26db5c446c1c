"""Losses of the examples of a batch, and the outputs of mixtures of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch

from fedclade.core import IGNORED, TaskKind

# Outputs of a mixture of models: the weighted mean of the models' probabilities or, in a
# regression, of their numbers.


def mix_outputs(kind: TaskKind, outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a mixture of K models, in the form of one model's outputs.

    The probabilities p_k of the models are mixed to Σ_k π_k p_k, with weights π_k for each example,
    and converted to logits again. In a regression the outputs themselves are mixed.

    Parameters
    ----------
    kind
        Kind of task.
    outputs
        Outputs of the models, ``[K, m, ...]``: logits, or numbers in a regression.
    weights
        Weights π of the models for each example, ``[m, K]``.

    Returns
    -------
    torch.Tensor
        Outputs of the mixture, ``[m, ...]``.
    """
    from fedclade.tasks.model_mixture import ModelMixture  # the definition of its class needs torch

    pi = weights.t().reshape(len(outputs), -1, *(1,) * (outputs.dim() - 2))
    return ModelMixture.combine(outputs, pi, kind)


class Loss(Protocol):
    """Function of the outputs and targets of B examples that returns their losses, ``[B]``.

    Targets are a tensor, or a dict or tuple of tensors if the data has several for each example.
    """

    def __call__(self, outputs: torch.Tensor, targets: Any, /) -> torch.Tensor:
        """Return the losses of a batch."""
        ...


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each example in nats, ``[B]``, from logits.

    For a text, the result is the mean over the positions whose target is not ignored, or 0 if all
    targets are ignored.
    """
    if targets.dim() == 1:
        return torch.nn.functional.cross_entropy(
            outputs, targets, ignore_index=IGNORED, reduction="none"
        )
    nats = torch.nn.functional.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return nats.view(len(targets), -1).sum(1) / count_targets(targets).clamp(min=1)


def count_targets(targets: torch.Tensor) -> torch.Tensor:
    """Return the number of targets of each example that are not ignored, int64 ``[B]``.

    An example of a text has a target at each position. An example with a label, or with one or
    several numbers, counts as one target.
    """
    if targets.is_floating_point():
        return torch.ones(len(targets), dtype=torch.int64, device=targets.device)
    return (targets != IGNORED).view(len(targets), -1).sum(1)


def _average_outputs(elementwise: str, **options: float) -> Loss:
    """Return a loss function that averages an elementwise loss over the outputs of each example.

    Parameters
    ----------
    elementwise
        Name of a function of ``torch.nn.functional`` that supports ``reduction="none"``.
    options
        Further arguments of ``elementwise``.
    """

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        function = getattr(torch.nn.functional, elementwise)
        values = function(
            outputs.reshape(targets.shape), targets.to(outputs), reduction="none", **options
        )
        if values.dim() > 1:
            return values.flatten(1).mean(1)
        return values

    return loss


bce = _average_outputs("binary_cross_entropy_with_logits")

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
    "mse": _average_outputs("mse_loss"),
    "mae": _average_outputs("l1_loss"),
    "huber": _average_outputs("huber_loss"),
    "smooth_l1": _average_outputs("smooth_l1_loss"),
    "poisson_nll": _average_outputs("poisson_nll_loss"),
}
"""Losses by name.

``bce`` takes logits, and ``poisson_nll`` logarithms of rates; several outputs count as their
mean.
"""

KINDS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("classification", "language", "segmentation"),
    "bce": ("binary", "multilabel"),
    **dict.fromkeys(("mse", "mae", "huber", "smooth_l1", "poisson_nll"), ("regression",)),
}
"""Kinds of tasks that each named loss fits."""

Shapes = Literal["targets", "columns", "model"]

SHAPES: Mapping[
    Shapes, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
] = {
    "targets": lambda outputs, targets: (outputs.reshape(targets.shape), targets),
    "columns": lambda outputs, targets: (
        outputs.reshape(len(targets), -1),
        targets.reshape(len(targets), -1),
    ),
    "model": lambda outputs, targets: (outputs.reshape(len(targets), -1), targets),
}
"""Shapes in which a user-defined loss may take outputs and targets; the first that fits is used.

Outputs ``[B, 1]`` and targets ``[B]`` would be broadcast to ``[B, B]``. With ``targets``, both are
therefore ``[B]``. With ``columns``, for a loss that averages over the last dimension, both are
``[B, 1]``. With ``model``, for a loss that indexes the outputs of a model, only the outputs are
``[B, 1]``. With several targets for each example all three are the same.
"""
