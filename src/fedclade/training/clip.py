"""Gradient clipping for many clients at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def clipping(gradients: Iterable[Tensor], largest: float) -> Tensor:
    """Return the factor ``[k]`` that scales each client's gradient to at most this L2 norm.

    As ``torch.nn.utils.clip_grad_norm_``, to the small number that it adds to the norm.

    Parameters
    ----------
    gradients
        Of each tensor of the model, ``[k, ...]``.
    largest
        The norm.
    """
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients])
    return (largest / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1)


def per_client(factors: Tensor, values: Tensor) -> Tensor:
    """Return the factors ``[k]`` in a shape that multiplies each client's values, ``[k, ...]``."""
    return factors.view(-1, *(1,) * (values.dim() - 1))
