"""Statistics of all clients' training examples, by which inputs are scaled and labels weighted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.core import IGNORED, DataQuery, LocalClients
from fedclade.data.client_data import ClientData
from fedclade.data.client_table import ClientTable
from fedclade.data.federation import Federation
from fedclade.data.pool import Columns

FAR = 10.0
"""Limit of a client's deviation, and of the distance of its mean from the median mean.

The unit is the usual deviation of the column; see :func:`bounded`.
"""

CONSTANT = 1e-12
"""A column is constant if its deviation is at most this fraction of its mean."""

FAR_OFF = 1000.0
"""Distance of a false mean of inputs from the true one, in deviations."""

CLIENTS_AT_A_TIME = 2**14
"""Number of clients of a table whose labels are counted at once."""

no_numbers = partial(torch.empty, 0, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the training examples of one or more clients; empty if not requested."""

    count: int
    means: Tensor = field(default_factory=no_numbers)
    squares: Tensor = field(default_factory=no_numbers)
    numbers: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.bool))
    labels: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.int64))

    def plus(self, other: Statistics) -> Statistics:
        """Return the statistics of both clients' examples together.

        The formula of Chan, Golub and LeVeque (1983), which loses no digits to differences.
        """
        count = self.count + other.count
        difference = other.means - self.means
        means = self.means + difference * (other.count / count)
        between = difference.square() * (self.count * other.count / count)
        return Statistics(
            count,
            means,
            squares=self.squares + other.squares + between,
            numbers=self.numbers | other.numbers,
            labels=self.labels + other.labels,
        )

    def with_count(self, count: int) -> Statistics:
        """Return the statistics of fewer examples of the same distribution."""
        share = count / self.count
        labels = (self.labels * share).long()
        return replace(self, count=count, squares=self.squares * share, labels=labels)

    @property
    def mean(self) -> Tensor:
        """Number to subtract from each column, float64 ``[F]``; 0 if all values are 0 or 1."""
        return self.means.where(self.numbers, 0.0)

    @property
    def std(self) -> Tensor:
        """Number by which to divide each column, float64 ``[F]``.

        It is 1 if all values of a column are 0 or 1, or if the column is constant up to rounding.
        """
        std = (self.squares / self.count).sqrt()
        return std.where(self.numbers & (std > CONSTANT * self.means.abs()), 1.0)


def bounded(replies: Sequence[Statistics], largest_weight: float) -> list[Statistics]:
    """Limit clients' statistics, so that a single one of at least three cannot determine the scale.

    A client has at most ``largest_weight`` times the weight (number of examples) of the median
    client. In each column, the distance of a client's mean from the median client's mean is at most
    :data:`FAR` deviations, and the client's deviation is at most :data:`FAR` times that deviation.
    The deviation meant is the median client's deviation plus the median distance of the clients'
    means from the median mean. If both are 0, it is the second largest value over the clients of
    deviation plus distance.
    """
    if len(replies) < 3:
        return list(replies)
    most = largest_weight * median_low([found.count for found in replies])
    replies = [
        found.with_count(math.floor(most)) if found.count > most else found for found in replies
    ]
    means = torch.stack([found.means for found in replies])
    stds = torch.stack([(found.squares / found.count).sqrt() for found in replies])
    if not means.numel():
        return list(replies)
    centre = means.median(dim=0).values
    off = (means - centre).abs()
    usual = stds.median(dim=0).values + off.median(dim=0).values
    usual = usual.where(usual > 0, (stds + off).sort(dim=0).values[-2])
    within = means.clamp(centre - FAR * usual, centre + FAR * usual)
    squares = stds.minimum(FAR * usual).square()
    return [
        # A reply within the limits is not changed, to the last bit.
        found
        if torch.equal(mean, found.means) and torch.equal(capped, std.square())
        else replace(found, means=mean, squares=capped * found.count)
        for found, mean, capped, std in zip(replies, within, squares, stds, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class StatisticsQuery(DataQuery[Statistics]):
    """Query for the statistics of training examples; the reply is about all clients together."""

    kind = "statistics"
    mechanism = "none"
    discloses = "statistics"
    reveals = "sums of their data (standardize = 'federated', class_weights = 'balanced')"

    inputs: bool = False
    labels: int = 0
    largest_weight: float = math.inf

    def answer_all(self, clients: LocalClients) -> Statistics:
        """Return the statistics of all clients of this process that are queried."""
        return compute_statistics(clients.federation, self)

    def merge(self, parts: Sequence[tuple[Sequence[int], Statistics]]) -> Statistics:
        """Return the statistics of all parts together."""
        return reduce(Statistics.plus, [found for _, found in parts])

    def falsify(self, reply: Statistics, keys: Sequence[int]) -> Statistics:
        """Return false statistics: all examples have the rarest label, and inputs are far off.

        The number of examples is the true one.
        """
        labels = torch.zeros_like(reply.labels)
        if len(labels):
            labels[reply.labels.argmin()] = reply.labels.sum()
        deviations = (reply.squares / reply.count).sqrt()
        means = reply.means + FAR_OFF * (1 + deviations)
        return replace(reply, means=means, labels=labels)


def compute_statistics(federation: Federation, query: StatisticsQuery) -> Statistics:
    """Return the statistics of the queried clients, with inputs as they were before scaling."""
    table = federation.clients
    if isinstance(table, ClientTable) and not query.inputs:
        return _count_labels_in_table(federation, table, query)
    found = [_summarize_client(federation, federation.by_id[client], query) for client in query.ids]
    return reduce(Statistics.plus, found)


def _summarize_client(
    federation: Federation, data: ClientData, query: StatisticsQuery
) -> Statistics:
    pool = federation.pool
    found = Statistics(len(data.train))
    if query.inputs:
        found = summarize_inputs(
            undo_scaling(pool.x[list_rows(data)], pool.columns), len(data.train)
        )
    if query.labels:
        seen = data.labels(pool.y[torch.from_numpy(data.train)]).long()
        counts = torch.bincount(seen[seen != IGNORED], minlength=query.labels)
        found = replace(found, labels=counts)
    return found


def _count_labels_in_table(
    federation: Federation, table: ClientTable, query: StatisticsQuery
) -> Statistics:
    """Return the numbers of training examples, in total and by label, of clients in a table."""
    places = table.positions.of(query.ids)
    count = int(table.train.counts[places].sum())
    if not query.labels:
        return Statistics(count)
    labels = torch.zeros(query.labels, dtype=torch.int64)
    for some in np.array_split(places, -(-len(places) // CLIENTS_AT_A_TIME)):
        seen = _list_labels(federation, table, some)
        labels += torch.bincount(seen[seen != IGNORED], minlength=query.labels)
    return Statistics(count, labels=labels)


def _list_labels(federation: Federation, table: ClientTable, places: Any) -> Tensor:
    """Return the training labels of some clients of a table, as the clients see them."""
    seen = federation.pool.y[torch.from_numpy(table.train.rows(places))].long()
    if table.label_maps is None or table.view is None:
        return seen
    view = torch.from_numpy(table.view[places].repeat(table.train.counts[places]))
    view = view.view(-1, *(1,) * (seen.dim() - 1))
    mapped = table.label_maps[view.clamp(min=0), seen.clamp(min=0)]
    return torch.where((view >= 0) & (seen != IGNORED), mapped, seen)


def summarize_inputs(x: Tensor, count: int) -> Statistics:
    """Return statistics of one client's inputs ``[n, F]``.

    Only the first ``count`` rows are training data.
    """
    numbers = ~((x == 0) | (x == 1)).all(0)
    x = x[:count].to(torch.float64)
    mean = x.mean(0)
    return Statistics(count, mean, (x - mean).square().sum(0), numbers)


def list_rows(client: ClientData) -> Tensor:
    """Return the rows of a client in the pool, training examples first."""
    return torch.from_numpy(np.concatenate([client.train, client.validation, client.test]))


def undo_scaling(x: Tensor, columns: Columns | None) -> Tensor:
    """Return inputs ``[n, F]`` as they were before they were scaled."""
    if columns is None or columns.mean is None or columns.std is None:
        return x
    mean = torch.tensor(columns.mean, dtype=torch.float64)
    std = torch.tensor(columns.std, dtype=torch.float64)
    return x.double() * std + mean
