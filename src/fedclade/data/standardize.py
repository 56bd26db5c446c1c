"""Statistics of training examples, and standardization of numeric columns by them."""

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
"""Examples that determine the scaling of numbers: none, each client's own, or all together."""

AT_A_TIME = 2**14
"""Number of clients of a table whose labels are counted together."""


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
    own = [_summarize_inputs(x[_list_rows(client)], len(client.train)) for client in everyone]
    numbers = torch.stack([each.numbers for each in own]).any(0)
    together = replace(reduce(Statistics.plus, own[: len(clients)]), numbers=numbers)
    scaled = x.clone()
    for client, statistics in zip(everyone, own, strict=True):
        by = replace(statistics, numbers=numbers) if how == "client" else together
        rows = _list_rows(client)
        scaled[rows] = ((x[rows] - by.mean) / by.std).to(x.dtype)
    if columns is None:
        columns = Columns(tuple(f"x{place}" for place in range(x.shape[1])))
    if how == "federated":
        return scaled, _record_scaling(columns, together)
    return scaled, replace(columns, scaled_by_client=True)


def compute_statistics(federation: Federation, query: StatisticsQuery) -> Statistics:
    """Return statistics of the training examples of the queried clients, before any scaling."""
    table = federation.clients
    if isinstance(table, ClientTable) and not query.inputs:
        return _count_labels(federation, table, query)
    pool = federation.pool

    def summarize(client: ClientData) -> Statistics:
        """Return the statistics of one client."""
        statistics = Statistics(len(client.train))
        if query.inputs:
            x = _undo_scaling(pool.x[_list_rows(client)], pool.columns)
            statistics = _summarize_inputs(x, len(client.train))
        if query.labels:
            y = client.labels(pool.y[torch.from_numpy(client.train)]).long()
            labels = torch.bincount(y[y != IGNORED], minlength=query.labels)
            statistics = replace(statistics, labels=labels)
        return statistics

    return reduce(Statistics.plus, (summarize(federation.by_id[client]) for client in query.ids))


def _count_labels(federation: Federation, table: ClientTable, query: StatisticsQuery) -> Statistics:
    """Return the number of training examples, and of their labels, of clients in a table.

    Many clients are counted together, since a table may have millions.
    """
    places = table.positions.of(query.ids)
    count = int(table.train.counts[places].sum())
    if not query.labels:
        return Statistics(count)
    labels = torch.zeros(query.labels, dtype=torch.int64)
    blocks = -(-len(places) // AT_A_TIME)
    for block in np.array_split(places, blocks):
        y = federation.pool.y[torch.from_numpy(table.train.rows(block))].long()
        if table.label_maps is not None and table.view is not None:
            view = torch.from_numpy(table.view[block].repeat(table.train.counts[block]))
            view = view.view(-1, *(1,) * (y.dim() - 1))
            mapped = table.label_maps[view.clamp(min=0), y.clamp(min=0)]
            y = torch.where((view >= 0) & (y != IGNORED), mapped, y)
        labels += torch.bincount(y[y != IGNORED], minlength=query.labels)
    return Statistics(count, labels=labels)


def rescale_federation(federation: Federation, by: Statistics) -> Federation:
    """Return a federation that was standardized by its own examples, standardized by others."""
    pool = federation.pool
    assert pool.columns is not None
    x = ((_undo_scaling(pool.x, pool.columns) - by.mean) / by.std).to(pool.x.dtype)
    pool = replace(pool, x=x, columns=_record_scaling(pool.columns, by))
    return replace(federation, pool=pool)


def _summarize_inputs(x: Tensor, count: int) -> Statistics:
    """Return statistics of one client's inputs ``[n, F]``.

    Only the first ``count`` rows are training data.
    """
    numbers = ~((x == 0) | (x == 1)).all(0)
    training = x[:count].to(torch.float64)
    mean = training.mean(0)
    return Statistics(count, mean, (training - mean).square().sum(0), numbers)


def _list_rows(client: ClientData) -> Tensor:
    """Return the rows of a client's examples, the training examples first."""
    return torch.from_numpy(np.concatenate([client.train, client.validation, client.test]))


def _undo_scaling(x: Tensor, columns: Columns | None) -> Tensor:
    """Return inputs as they were before they were scaled."""
    if columns is None or columns.mean is None or columns.std is None:
        return x
    mean = torch.tensor(columns.mean, dtype=torch.float64)
    std = torch.tensor(columns.std, dtype=torch.float64)
    return x.double() * std + mean


def _record_scaling(columns: Columns, by: Statistics) -> Columns:
    """Return the columns with the mean and standard deviation that they were scaled by."""
    return replace(columns, mean=tuple(by.mean.tolist()), std=tuple(by.std.tolist()))
