"""What several models predict together: the weighted mean of their probabilities, or of their numbers."""

from __future__ import annotations

from torch import Tensor

from fedclade.core import TaskKind
from fedclade.tasks.model_mixture import ModelMixture


def mixed(kind: TaskKind, outputs: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_k π_k p_k for a mixture of K models, in the form of one model's outputs ``[m, ...]``.

    ``outputs`` ``[K, m, ...]`` are logits, whose probabilities are mixed and become logits again; those of a regression
    are mixed as they are. ``weights`` are π of each example, ``[m, K]``.
    """
    pi = weights.t().reshape(len(outputs), -1, *(1,) * (outputs.dim() - 2))
    return ModelMixture.combine(outputs, pi, kind)
