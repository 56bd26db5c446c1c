"""What training examples come to, and columns of numbers, scaled by it to mean 0 and deviation 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedclade.core import IGNORED, Statistics, StatisticsQuery, require
from fedclade.data.client_data import ClientData
from fedclade.data.client_table import ClientTable
from fedclade.data.federation import Federation
from fedclade.data.pool import Columns

Standardize = Literal["none", "client", "federated"]
"""Whose training examples numbers are scaled by: nobody's, each client's own, or those of all together."""

AT_A_TIME = 2**14
"""Clients of a table whose labels are counted in one go."""


def standardize_inputs(
    x: Tensor,
    columns: Columns | None,
    clients: Sequence[ClientData],
    newcomers: Sequence[ClientData],
    how: Literal["client", "federated"],
) -> tuple[Tensor, Columns]:
    """Return inputs that each belong to one client with their numbers scaled, and what that was by.

    Columns that are 0 or 1 everywhere, as those encoded by category are, stay as they are.
    Newcomers do not count in what all clients are scaled by.
    """
    fits, look = (
        x.dim() == 2 and x.is_floating_point(),
        f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}",
    )
    require(
        (
            "standardize",
            how,
            fits,
            f"'none' for inputs {look}: only columns of numbers [N, F] are scaled",
        )
    )
    everyone = [*clients, *newcomers]
    own = [_of_inputs(x[_rows(client)], len(client.train)) for client in everyone]
    numbers = torch.stack([each.numbers for each in own]).any(0)
    together = replace(reduce(Statistics.plus, own[: len(clients)]), numbers=numbers)
    scaled = x.clone()
    for client, mine in zip(everyone, own, strict=True):
        by = replace(mine, numbers=numbers) if how == "client" else together
        rows = _rows(client)
        scaled[rows] = ((x[rows] - by.mean) / by.std).to(x.dtype)
    columns = columns or Columns(tuple(f"x{place}" for place in range(x.shape[1])))
    return scaled, _scaled_by(columns, together) if how == "federated" else replace(
        columns, scaled_by_client=True
    )


def compute_statistics(federation: Federation, query: StatisticsQuery) -> Statistics:
    """Return what the training examples of the queried clients come to, with inputs as they were before scaling."""
    pool = federation.pool

    def of(data: ClientData) -> Statistics:
        found = Statistics(len(data.train))
        if query.inputs:
            found = _of_inputs(_unscaled(pool.x[_rows(data)], pool.columns), len(data.train))
        if query.labels:
            seen = data.labels(pool.y[torch.from_numpy(data.train)]).long()
            found = replace(
                found, labels=torch.bincount(seen[seen != IGNORED], minlength=query.labels)
            )
        return found

    if isinstance(federation.clients, ClientTable) and not query.inputs:
        return _counted(federation, federation.clients, query)
    return reduce(Statistics.plus, (of(federation.by_id[client]) for client in query.ids))


def _counted(federation: Federation, table: ClientTable, query: StatisticsQuery) -> Statistics:
    """Return how many training examples, and of which labels, clients in a table have: many of them in one go."""
    places, y = table.positions.of(query.ids), federation.pool.y
    counted, labels = (
        int(table.train.counts[places].sum()),
        torch.zeros(query.labels, dtype=torch.int64),
    )
    for some in np.array_split(places, -(-len(places) // AT_A_TIME)) if query.labels else ():
        seen = y[torch.from_numpy(table.train.rows(some))].long()
        if table.label_maps is not None and table.view is not None:
            view = torch.from_numpy(table.view[some].repeat(table.train.counts[some]))
            view = view.view(-1, *(1,) * (seen.dim() - 1))
            mapped = table.label_maps[view.clamp(min=0), seen.clamp(min=0)]
            seen = torch.where((view >= 0) & (seen != IGNORED), mapped, seen)
        labels += torch.bincount(seen[seen != IGNORED], minlength=query.labels)
    return Statistics(counted, labels=labels) if query.labels else Statistics(counted)


def rescale_federation(federation: Federation, by: Statistics) -> Federation:
    """Return a federation that was standardized by its own examples, standardized by those of more clients."""
    pool = federation.pool
    assert pool.columns is not None
    x = ((_unscaled(pool.x, pool.columns) - by.mean) / by.std).to(pool.x.dtype)
    return replace(federation, pool=replace(pool, x=x, columns=_scaled_by(pool.columns, by)))


def _of_inputs(x: Tensor, count: int) -> Statistics:
    """Return those of a client's inputs ``[n, F]``, of which the first ``count`` are for training."""
    numbers, x = ~((x == 0) | (x == 1)).all(0), x[:count].to(torch.float64)
    mean = x.mean(0)
    return Statistics(count, mean, (x - mean).square().sum(0), numbers)


def _rows(client: ClientData) -> Tensor:
    return torch.from_numpy(np.concatenate([client.train, client.validation, client.test]))


def _unscaled(x: Tensor, columns: Columns | None) -> Tensor:
    if columns is None or columns.mean is None or columns.std is None:
        return x
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (columns.mean, columns.std))
    return x.double() * std + mean


def _scaled_by(columns: Columns, by: Statistics) -> Columns:
    return replace(columns, mean=tuple(by.mean.tolist()), std=tuple(by.std.tolist()))
