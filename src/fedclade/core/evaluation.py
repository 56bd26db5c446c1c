"""How clients fare with their models: the reply to a query for scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

# What training examples come to: by it inputs are scaled, and labels weighed, alike for all
# clients.

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


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How n clients fare on one split of their own data.

    Parameters
    ----------
    ids
        The clients, ``[n]``.
    scores
        By each of the task's metrics, of which the first counts, float64 ``[n, M]``. NaN where a client has no score,
        as its data leaves the metric undefined.
    losses
        Mean loss, float64 ``[n]``; cross-entropy is in nats.
    examples
        Number of targets, int64 ``[n]``.
    left_out
        Why each client that was queried, and is not among ``ids``, is left out.
    higher_is_better
        The direction of the score that counts.
    wins
        Where each client compares its models: of how many of its examples each has the least loss, of equals the first
        that it was asked about; int64 ``[n]``. Where each client chooses one of its models: 1 for that, 0 for others.
    without_loss
        The clients that tell a score alone: their loss is NaN, and they count as one example each.
    byzantine
        Share of the clients whose statements may be false; the server sets it where clients may lie.
    """

    ids: tuple[int, ...]
    scores: Tensor
    losses: Tensor
    examples: Tensor
    left_out: Mapping[int, str] = field(default_factory=dict[int, str])
    higher_is_better: bool = True
    wins: Tensor | None = None
    without_loss: frozenset[int] = frozenset()
    byzantine: float = 0.0

    @property
    def known_losses(self) -> Tensor:
        """The losses of the clients that tell them, ``[m]``."""
        told = [place for place, client in enumerate(self.ids) if client not in self.without_loss]
        return self.losses[told]

    @property
    def merit(self) -> Tensor:
        """The score that counts, with a sign so that more is better, ``[n]``; NaN where a client has none."""
        return self.scores[:, 0] if self.higher_is_better else -self.scores[:, 0]

    @classmethod
    def concat(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """Return the scores of all parts, at least one, behind each other."""
        if len(parts) == 1:
            return parts[0]
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        ids = tuple(client for part in parts for client in part.ids)
        left_out = {client: why for part in parts for client, why in part.left_out.items()}
        of_all: dict[str, Any] = {
            n: torch.cat(column) for n, column in columns.items() if isinstance(column[0], Tensor)
        }
        silent = frozenset[int]().union(*(part.without_loss for part in parts))
        return replace(parts[0], ids=ids, left_out=left_out, without_loss=silent, **of_all)
