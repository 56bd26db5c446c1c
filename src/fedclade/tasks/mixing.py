"""What several models predict together: the weighted mean of their probabilities, or of their numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.core import TaskKind


def mixed(kind: TaskKind, outputs: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_k π_k p_k for a mixture of K models, in the form of one model's outputs ``[m, ...]``.

    ``outputs`` ``[K, m, ...]`` are logits, whose probabilities are mixed and become logits again; those of a regression
    are mixed as they are. ``weights`` are π of each example, ``[m, K]``.
    """
    pi = weights.t().reshape(len(outputs), -1, *(1,) * (outputs.dim() - 2)).to(outputs)
    if kind == "regression":
        return (pi * outputs).sum(0)
    logs = pi.log()
    if kind in ("binary", "multilabel"):
        yes, no = (torch.logsumexp(logs + functional.logsigmoid(each), 0) for each in (outputs, -outputs))
        return yes - no
    return torch.logsumexp(logs + outputs.log_softmax(-1), 0)
