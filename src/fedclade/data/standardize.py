"""Standardization of numeric columns by statistics of training examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from fedclade.core import require
from fedclade.data.client_data import ClientData
from fedclade.data.client_statistics import Statistics, list_rows, summarize_inputs, undo_scaling
from fedclade.data.federation import Federation
from fedclade.data.pool import Columns

Standardize = Literal["none", "client", "federated"]
"""Examples that determine the scaling of numbers: none, each client's own, or all together."""


def standardize_inputs(
    x: Tensor,
    columns: Columns | None,
    clients: Sequence[ClientData],
    newcomers: Sequence[ClientData],
    *,
    how: Literal["client", "federated"],
) -> tuple[Tensor, Columns]:
    """Scale columns of numbers to mean 0 and standard deviation 1.

    Columns that are 0 or 1 everywhere, such as those encoded by category, stay as they are.

    Parameters
    ----------
    x
        Inputs ``[N, F]`` of all clients.
    columns
        Names of the columns, if known.
    clients
        The clients whose training examples determine the scaling.
    newcomers
        Clients that are scaled, too, but do not contribute to the scaling of all clients.
    how
        ``client``: each client by its own training examples. ``federated``: by those of all.

    Returns
    -------
    tuple
        The scaled inputs, and the columns with the scaling.

    Raises
    ------
    ConfigError
        If inputs are not columns of numbers.
    """
    is_table = x.dim() == 2 and x.is_floating_point()
    look = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    rule = f"'none' for inputs {look}: only columns of numbers [N, F] are scaled"
    require(("standardize", how, is_table, rule))
    everyone = [*clients, *newcomers]
    own = [summarize_inputs(x[list_rows(client)], len(client.train)) for client in everyone]
    numbers = torch.stack([each.numbers for each in own]).any(0)
    together = replace(reduce(Statistics.plus, own[: len(clients)]), numbers=numbers)
    scaled = x.clone()
    for client, statistics in zip(everyone, own, strict=True):
        by = replace(statistics, numbers=numbers) if how == "client" else together
        rows = list_rows(client)
        scaled[rows] = ((x[rows] - by.mean) / by.std).to(x.dtype)
    if columns is None:
        columns = Columns(tuple(f"x{place}" for place in range(x.shape[1])))
    if how == "federated":
        return scaled, _record_scaling(columns, together)
    return scaled, replace(columns, scaled_by_client=True)


def rescale_federation(federation: Federation, by: Statistics) -> Federation:
    """Return a federation that was standardized by its own examples, standardized by others."""
    pool = federation.pool
    assert pool.columns is not None
    x = ((undo_scaling(pool.x, pool.columns) - by.mean) / by.std).to(pool.x.dtype)
    pool = replace(pool, x=x, columns=_record_scaling(pool.columns, by))
    return replace(federation, pool=pool)


def _record_scaling(columns: Columns, by: Statistics) -> Columns:
    """Return the columns with the mean and standard deviation that they were scaled by."""
    return replace(columns, mean=tuple(by.mean.tolist()), std=tuple(by.std.tolist()))
