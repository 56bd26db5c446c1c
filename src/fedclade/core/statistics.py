"""What training examples come to: by it inputs are scaled, and labels weighed, alike for all clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median_low

import torch
from torch import Tensor

FAR = 10.0
"""How many times the usual deviation of a column one client's may be, and how many from the usual mean."""

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

    def with_count(self, count: int) -> Statistics:
        """Return the same of fewer examples."""
        share = count / self.count
        return replace(self, count=count, squares=self.squares * share, labels=(self.labels * share).long())

    @property
    def mean(self) -> Tensor:
        """What is taken off each column, float64 ``[F]``: 0 where it is 0 or 1 everywhere."""
        return self.means.where(self.numbers, 0.0)

    @property
    def std(self) -> Tensor:
        """What each column is divided by: 1 where it is 0 or 1 everywhere, or constant but for rounding."""
        std = (self.squares / self.count).sqrt()
        return std.where(self.numbers & (std > CONSTANT * self.means.abs()), 1.0)


def bounded(told: Sequence[Statistics], largest_weight: float) -> list[Statistics]:
    """Return what clients tell so that one of at least three cannot set what all scale or weigh by.

    Nobody counts with more than ``largest_weight`` times the examples of the median client. In each column a
    client's mean lies within :data:`FAR` deviations of the median client's, and its deviation is at most so many
    times as large. The deviation is that of the median client, and how far the median client's mean is from that;
    where both are nothing, the second largest of any client.
    """
    if len(told) < 3:
        return list(told)
    most = largest_weight * median_low([found.count for found in told])
    told = [found.with_count(math.floor(most)) if found.count > most else found for found in told]
    means = torch.stack([found.means for found in told])
    stds = torch.stack([(found.squares / found.count).sqrt() for found in told])
    if not means.numel():
        return told
    centre = means.median(dim=0).values
    off = (means - centre).abs()
    usual = stds.median(dim=0).values + off.median(dim=0).values
    usual = usual.where(usual > 0, (stds + off).sort(dim=0).values[-2])
    within = means.clamp(centre - FAR * usual, centre + FAR * usual)
    squares = stds.minimum(FAR * usual).square()
    return [
        found
        if torch.equal(mean, found.means) and torch.equal(capped, std.square())
        else replace(found, means=mean, squares=capped * found.count)
        for found, mean, capped, std in zip(told, within, squares, stds, strict=True)
    ]
