"""A model with normalisation layers, which fedclade does not have."""

from __future__ import annotations

from math import prod

from torch import nn


def normalised(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Build a small network with BatchNorm, whose running statistics are buffers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(input_shape), 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, outputs),
    )
