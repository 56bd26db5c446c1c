"""Models made of matrix products."""

from __future__ import annotations

from math import prod

from torch import nn


def mclr(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return multinomial logistic regression: 7,850 parameters on MNIST (FedGroup, Table II)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), outputs))


def mlp(input_shape: tuple[int, ...], outputs: int, *, hidden: int = 128) -> nn.Module:
    """Return a perceptron with one hidden layer.

    101,770 parameters on MNIST with 128 hidden units, 415,258 on FEMNIST's 26 letters with 512 (FedGroup, Table II).
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), hidden), nn.ReLU(), nn.Linear(hidden, outputs))
