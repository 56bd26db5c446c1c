"""What training examples come to: by it inputs are scaled, and labels weighed, alike for all clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

CONSTANT = 1e-12
"""A column whose deviation is at most this part of its mean is constant."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the training examples of one client, or of several. What was not asked for is empty.

    Parameters
    ----------
    count
        How many examples.
    means, squares
        The mean of each column of inputs, and the sum of squared differences from it; float64 ``[F]``.
    numbers
        Which columns are not 0 or 1 in all examples, those for testing included; bool ``[F]``.
    labels
        How many examples there are of each label, as the clients see them; int64 ``[L]``.
    """

    count: int
    means: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.float64))
    squares: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.float64))
    numbers: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.bool))
    labels: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.int64))

    def plus(self, other: Statistics) -> Statistics:
        """Return those of both clients' examples together (Chan, Golub, LeVeque 1983), which no difference spoils."""
        count, apart = self.count + other.count, other.means - self.means
        means = self.means + apart * (other.count / count)
        squares = self.squares + other.squares + apart.square() * (self.count * other.count / count)
        return Statistics(count, means, squares, self.numbers | other.numbers, self.labels + other.labels)

    @property
    def mean(self) -> Tensor:
        """What is taken off each column, float64 ``[F]``: 0 where it is 0 or 1 everywhere."""
        return self.means.where(self.numbers, 0.0)

    @property
    def std(self) -> Tensor:
        """What each column is divided by: 1 where it is 0 or 1 everywhere, or constant but for rounding."""
        std = (self.squares / self.count).sqrt()
        return std.where(self.numbers & (std > CONSTANT * self.means.abs()), 1.0)
