"""Columns of numbers, scaled to mean 0 and deviation 1 over training examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedclade.core import require
from fedclade.data.federation import ClientData
from fedclade.data.pool import Columns

Standardize = Literal["none", "client", "federated"]
"""Whose training examples numbers are scaled by: nobody's, each client's own, or those of all together."""

CONSTANT = 1e-12
"""A column whose deviation is at most this part of its mean is constant."""


@dataclass(frozen=True, eq=False)
class Moments:
    """How many examples, the mean of each column, and the sum of squared differences from it; float64 ``[F]``."""

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor, is_number: Tensor) -> Moments:
        """Return those of inputs ``[n, F]``, as one client would; mean 0 and deviation 1 of what is no number."""
        x = x.to(torch.float64)
        mean = x.mean(0).where(is_number, 0.0)
        return cls(len(x), mean, (x - mean).square().sum(0).where(is_number, float(len(x))))

    def plus(self, other: Moments) -> Moments:
        """Return those of both clients' examples together (Chan, Golub, LeVeque 1983), which no difference spoils."""
        count, apart = self.count + other.count, other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        return Moments(count, mean, self.squares + other.squares + apart.square() * (self.count * other.count / count))

    @property
    def std(self) -> Tensor:
        """The deviation of each column, 1 where it is constant but for rounding."""
        std = (self.squares / self.count).sqrt()
        return std.where(std > CONSTANT * self.mean.abs(), 1.0)


def standardized(
    x: Tensor,
    columns: Columns | None,
    clients: Sequence[ClientData],
    newcomers: Sequence[ClientData],
    how: Literal["client", "federated"],
) -> tuple[Tensor, Columns]:
    """Return inputs that each belong to one client with their numbers scaled, and what that was by.

    Columns that are 0 or 1 everywhere, as those encoded by category are, stay as they are. Newcomers do not count in
    what all clients are scaled by.
    """
    fits, look = x.dim() == 2 and x.is_floating_point(), f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    require(("standardize", how, fits, f"'none' for inputs {look}: only columns of numbers [N, F] are scaled"))
    is_number = ~((x == 0) | (x == 1)).all(0)
    everyone = [*clients, *newcomers]
    own = [Moments.of(x[torch.from_numpy(client.train)], is_number) for client in everyone]
    together = reduce(Moments.plus, own[: len(clients)])
    scaled = x.clone()
    for client, moments in zip(everyone, own, strict=True):
        rows = torch.from_numpy(np.concatenate([client.train, client.validation, client.test]))
        by = moments if how == "client" else together
        scaled[rows] = ((x[rows] - by.mean) / by.std).to(x.dtype)
    columns = columns or Columns(tuple(f"x{place}" for place in range(x.shape[1])))
    if how == "federated":
        columns = replace(columns, mean=tuple(together.mean.tolist()), std=tuple(together.std.tolist()))
    return scaled, columns
