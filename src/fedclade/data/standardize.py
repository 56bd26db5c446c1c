"""Columns of numbers, scaled to mean 0 and deviation 1 over training examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedclade.core import require
from fedclade.data.federation import ClientData
from fedclade.data.pool import Columns, Pool

Standardize = Literal["none", "client", "federated"]
"""Whose training examples numbers are scaled by: nobody's, each client's own, or those of all together."""


@dataclass(frozen=True, eq=False)
class Moments:
    """How many examples, the mean of each column, and the sum of squared differences from it; float64 ``[F]``."""

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Moments:
        """Return those of inputs ``[n, F]``, as one client would."""
        x = x.to(torch.float64)
        mean = x.mean(0)
        return cls(len(x), mean, (x - mean).square().sum(0))

    def plus(self, other: Moments) -> Moments:
        """Return those of both clients' examples together (Chan, Golub, LeVeque 1983), which no difference spoils."""
        count, apart = self.count + other.count, other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        return Moments(count, mean, self.squares + other.squares + apart.square() * (self.count * other.count / count))

    @property
    def std(self) -> Tensor:
        """The deviation of each column, 1 where it is constant."""
        std = (self.squares / self.count).sqrt()
        return std.where(std > 0, 1.0)


def standardized(pool: Pool, clients: Sequence[ClientData], newcomers: Sequence[ClientData], how: Standardize) -> Pool:
    """Return a pool of examples that each belong to one client, with its numbers scaled.

    By category encoded columns, which are 0 or 1 everywhere, stay as they are. Newcomers do not count in what all
    clients are scaled by.
    """
    if how == "none":
        return pool
    x, what = pool.x, list(pool.x.shape[1:])
    fits = x.dim() == 2 and x.is_floating_point()
    require(
        ("standardize", how, fits, f"'none' for {pool.name}: only columns of numbers [N, F] are scaled, not {what}")
    )
    numbers = ~((x == 0) | (x == 1)).all(0)  # columns
    scaled = x.clone()

    def scale(rows: Tensor, by: Moments) -> None:
        mean, std = by.mean.where(numbers, 0.0), by.std.where(numbers, 1.0)
        scaled[rows] = ((x[rows] - mean) / std).to(x.dtype)

    moments = [Moments.of(x[torch.from_numpy(client.train)]) for client in (*clients, *newcomers)]
    together = moments[0]
    for other in moments[1 : len(clients)]:
        together = together.plus(other)
    for client, own in zip((*clients, *newcomers), moments, strict=True):
        for rows in (client.train, client.validation, client.test):
            scale(torch.from_numpy(rows), own if how == "client" else together)
    columns = pool.columns or Columns(tuple(f"x{place}" for place in range(x.shape[1])))
    if how == "federated":
        mean, std = together.mean.where(numbers, 0.0).tolist(), together.std.where(numbers, 1.0).tolist()
        columns = replace(columns, mean=tuple(mean), std=tuple(std))
    return replace(pool, x=scaled, columns=columns)
