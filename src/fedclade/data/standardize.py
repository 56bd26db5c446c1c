"""Columns of numbers, scaled to mean 0 and deviation 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from fedclade.core import require
from fedclade.data.client_data import ClientData
from fedclade.data.client_statistics import Statistics, all_rows, of_inputs, unscaled
from fedclade.data.federation import Federation
from fedclade.data.pool import Columns

Standardize = Literal["none", "client", "federated"]
"""Whose training examples numbers are scaled by: nobody's, each client's own, or those of all together."""


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
    everyone = [*clients, *newcomers]
    own = [of_inputs(x[all_rows(client)], len(client.train)) for client in everyone]
    numbers = torch.stack([each.numbers for each in own]).any(0)
    together = replace(reduce(Statistics.plus, own[: len(clients)]), numbers=numbers)
    scaled = x.clone()
    for client, mine in zip(everyone, own, strict=True):
        by = replace(mine, numbers=numbers) if how == "client" else together
        rows = all_rows(client)
        scaled[rows] = ((x[rows] - by.mean) / by.std).to(x.dtype)
    columns = columns or Columns(tuple(f"x{place}" for place in range(x.shape[1])))
    return scaled, _scaled_by(columns, together) if how == "federated" else replace(columns, scaled_by_client=True)


def rescaled(federation: Federation, by: Statistics) -> Federation:
    """Return a federation that was standardized by its own examples, standardized by those of more clients."""
    pool = federation.pool
    assert pool.columns is not None
    x = ((unscaled(pool.x, pool.columns) - by.mean) / by.std).to(pool.x.dtype)
    return replace(federation, pool=replace(pool, x=x, columns=_scaled_by(pool.columns, by)))


def _scaled_by(columns: Columns, by: Statistics) -> Columns:
    return replace(columns, mean=tuple(by.mean.tolist()), std=tuple(by.std.tolist()))
