"""Statistics of all clients' training examples: means, deviations and label counts.

Clients report these statistics to the server, which combines them. Inputs and targets are scaled by
the combined means and deviations, and labels are weighted by the combined label counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from statistics import median_low
from typing import Any

import numpy as np
import torch

from fedclade.core import IGNORED, DataQuery, LocalClients
from fedclade.data.client_data import ClientData
from fedclade.data.client_table import ClientTable
from fedclade.data.federation import Federation
from fedclade.data.pool import Pool

FAR = 10.0
"""Limit of a client's deviation, and of the distance of its mean from the median mean.

Both limits are in units of the typical deviation of the column; see :func:`bounded`.
"""

CONSTANT = 1e-12
"""Largest ratio of standard deviation to absolute mean at which a column counts as constant."""

FAR_OFF = 1000.0
"""Distance between the false mean that an adversary reports and the true mean, in deviations."""

CLIENTS_AT_A_TIME = 2**14
"""Number of clients of a table whose labels are counted at once, to limit memory."""


def _empty(dtype: str) -> Callable[[], torch.Tensor]:
    """Return a function that makes an empty tensor, for a default value of a field."""
    return lambda: torch.empty(0, dtype=getattr(torch, dtype))


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of the training examples of one or more clients.

    The columns are the inputs followed by the targets of a regression. Statistics that were not
    requested are empty.

    Parameters
    ----------
    count
        Number of training examples.
    means, squares
        Mean of each column, and sum of squared deviations from the mean, float64 ``[columns]``.
    numbers
        Whether each column has a value other than 0 and 1, bool ``[columns]``. Other columns are
        not scaled.
    labels
        Number of training examples with each label, int64 ``[labels]``.
    """

    count: int
    means: torch.Tensor = field(default_factory=_empty("float64"))
    squares: torch.Tensor = field(default_factory=_empty("float64"))
    numbers: torch.Tensor = field(default_factory=_empty("bool"))
    labels: torch.Tensor = field(default_factory=_empty("int64"))

    def plus(self, other: Statistics) -> Statistics:
        """Combine the statistics of two disjoint sets of examples.

        The formula is that of Chan, Golub and LeVeque (1983), which avoids the loss of digits in
        the difference of two large sums.
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

    def columns(self, start: int, stop: int) -> Statistics:
        """Return the statistics of columns ``start`` to ``stop - 1``, without labels."""
        return Statistics(
            self.count,
            self.means[start:stop],
            squares=self.squares[start:stop],
            numbers=self.numbers[start:stop],
        )

    def with_count(self, count: int) -> Statistics:
        """Scale the statistics to another number of examples, with equal means and deviations."""
        share = count / self.count
        labels = (self.labels * share).long()
        return replace(self, count=count, squares=self.squares * share, labels=labels)

    @property
    def mean(self) -> torch.Tensor:
        """Number to subtract from each column when scaling, float64 ``[columns]``.

        It is the mean of the column, or 0 if all values of the column are 0 or 1.
        """
        return self.means.where(self.numbers, 0.0)

    @property
    def std(self) -> torch.Tensor:
        """Number by which to divide each column when scaling, float64 ``[columns]``.

        It is the standard deviation of the column, or 1 if all values of the column are 0 or 1, or
        if the column is constant up to rounding.
        """
        std = (self.squares / self.count).sqrt()
        return std.where(self.numbers & (std > CONSTANT * self.means.abs()), 1.0)


def bounded(replies: Sequence[Statistics], largest_weight: float) -> list[Statistics]:
    """Limit clients' reported statistics, so that no single client can determine the scaling.

    The number of examples of a client, which is its weight, is limited to ``largest_weight`` times
    the median number of examples of all clients.

    The mean and the standard deviation are limited separately for each column. Let d_i be the
    distance of client i's mean from the median of all clients' means, and σ_i its standard
    deviation. Both d_i and σ_i are limited to :data:`FAR` · s, where the scale s is the median of
    all σ_i plus the median of all d_i. If this sum of medians is 0, s is the second largest value
    of d_i + σ_i among the clients.

    The replies of fewer than three clients are not limited.
    """
    if len(replies) < 3:
        return list(replies)
    most = largest_weight * median_low([found.count for found in replies])
    replies = [_limit_count(found, most) for found in replies]
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
    limited: list[Statistics] = []
    for found, mean, capped, std in zip(replies, within, squares, stds, strict=True):
        # A reply within the limits is not changed, to the last bit.
        if torch.equal(mean, found.means) and torch.equal(capped, std.square()):
            limited.append(found)
        else:
            limited.append(replace(found, means=mean, squares=capped * found.count))
    return limited


def _limit_count(found: Statistics, most: float) -> Statistics:
    """Scale one client's statistics down to at most ``most`` examples, to limit their weight."""
    if found.count > most:
        return found.with_count(math.floor(most))
    return found


@dataclass(frozen=True, eq=False)
class StatisticsQuery(DataQuery[Statistics]):
    """Query for statistics of clients' training examples, with one combined reply.

    Parameters
    ----------
    inputs
        Whether statistics of the input columns are requested.
    labels
        Number of labels whose counts are requested; 0 for none.
    largest_weight
        Largest weight of one client relative to the median client; see :func:`bounded`.
    targets
        Number of target columns of a regression whose statistics are requested; 0 for none.
    """

    kind = "statistics"
    mechanism = "none"
    discloses = "statistics"
    reveals = "sums of their data (standardize = 'federated', class_weights = 'balanced')"

    inputs: bool = False
    labels: int = 0
    largest_weight: float = math.inf
    targets: int = 0

    def answer_all(self, clients: LocalClients) -> Statistics:
        """Compute the combined statistics of the queried clients whose data this process has."""
        return compute_statistics(clients.federation, self)

    def merge(self, parts: Sequence[tuple[Sequence[int], Statistics]]) -> Statistics:
        """Combine the replies of several processes.

        ``parts`` has the client ids and the statistics of each process.
        """
        return reduce(Statistics.plus, [found for _, found in parts])

    def falsify(self, reply: Statistics, keys: Sequence[int]) -> Statistics:
        """Return the false statistics that a simulated adversary reports.

        All examples have the rarest label, and the means of the inputs are far from the true means.
        The number of examples is not changed.
        """
        labels = torch.zeros_like(reply.labels)
        if len(labels):
            labels[reply.labels.argmin()] = reply.labels.sum()
        deviations = (reply.squares / reply.count).sqrt()
        means = reply.means + FAR_OFF * (1 + deviations)
        return replace(reply, means=means, labels=labels)


def compute_statistics(federation: Federation, query: StatisticsQuery) -> Statistics:
    """Compute the combined statistics of the clients in a query, from their unscaled inputs."""
    table = federation.clients
    if isinstance(table, ClientTable) and not query.inputs and not query.targets:
        return _count_labels_in_table(federation, table, query)
    found = [_summarize_client(federation, federation.by_id[client], query) for client in query.ids]
    return reduce(Statistics.plus, found)


def _summarize_client(
    federation: Federation, data: ClientData, query: StatisticsQuery
) -> Statistics:
    pool = federation.pool
    found = Statistics(len(data.train))
    if query.inputs:
        found = summarize_inputs(unscaled_inputs(pool, list_rows(data)), len(data.train))
    if query.targets:
        found = join_columns(found, summarize_targets(pool.y[torch.from_numpy(data.train)]))
    if query.labels:
        seen = data.labels(pool.y[torch.from_numpy(data.train)]).long()
        counts = torch.bincount(seen[seen != IGNORED], minlength=query.labels)
        found = replace(found, labels=counts)
    return found


def _count_labels_in_table(
    federation: Federation, table: ClientTable, query: StatisticsQuery
) -> Statistics:
    """Count the training examples of the clients in a query, in total and by label.

    The clients are in a client table, which is processed in blocks of clients, without an object
    for each client.
    """
    places = table.positions.of(query.ids)
    count = int(table.train.counts[places].sum())
    if not query.labels:
        return Statistics(count)
    labels = torch.zeros(query.labels, dtype=torch.int64)
    for some in np.array_split(places, -(-len(places) // CLIENTS_AT_A_TIME)):
        seen = _list_labels(federation, table, some)
        labels += torch.bincount(seen[seen != IGNORED], minlength=query.labels)
    return Statistics(count, labels=labels)


def _list_labels(federation: Federation, table: ClientTable, places: Any) -> torch.Tensor:
    """Return the concatenated training labels of some clients of a table, as the clients see them.

    A client with a label map sees the labels to which the map assigns the labels of the pool.
    ``places`` are the rows of the clients in the table.
    """
    seen = federation.pool.y[torch.from_numpy(table.train.rows(places))].long()
    if table.label_maps is None or table.view is None:
        return seen
    view = torch.from_numpy(table.view[places].repeat(table.train.counts[places]))
    view = view.view(-1, *(1,) * (seen.dim() - 1))
    mapped = table.label_maps[view.clamp(min=0), seen.clamp(min=0)]
    return torch.where((view >= 0) & (seen != IGNORED), mapped, seen)


def summarize_inputs(x: torch.Tensor, count: int) -> Statistics:
    """Compute the statistics of one client's inputs ``[n, F]`` (examples, columns).

    Only the first ``count`` rows are training data and determine means and deviations. All rows
    determine whether a column has other values than 0 and 1.
    """
    numbers = ~((x == 0) | (x == 1)).all(0)
    x = x[:count].to(torch.float64)
    mean = x.mean(0)
    return Statistics(count, mean, (x - mean).square().sum(0), numbers)


def summarize_targets(y: torch.Tensor) -> Statistics:
    """Compute the statistics of the targets ``[n]`` or ``[n, k]`` of n training examples."""
    y = y.reshape(len(y), -1).to(torch.float64)
    mean = y.mean(0)
    numbers = torch.ones(y.shape[1], dtype=torch.bool)
    return Statistics(len(y), mean, (y - mean).square().sum(0), numbers)


def join_columns(first: Statistics, second: Statistics) -> Statistics:
    """Join the statistics of the same examples for two groups of columns.

    Label counts are taken from ``first``.
    """
    return replace(
        first,
        means=torch.cat([first.means, second.means]),
        squares=torch.cat([first.squares, second.squares]),
        numbers=torch.cat([first.numbers, second.numbers]),
    )


def list_rows(client: ClientData) -> torch.Tensor:
    """Return pool indices of a client's training, validation and test examples, in this order."""
    return torch.from_numpy(np.concatenate([client.train, client.validation, client.test]))


def unscaled_inputs(pool: Pool, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return inputs of a pool as they were before scaling, ``[n, F]`` (examples, columns).

    Parameters
    ----------
    pool
        The examples of all clients.
    rows
        Indices of the examples, int64 ``[n]``; None for all examples.
    """
    columns = pool.columns
    x = pool.x if pool.raw is None else pool.raw
    if rows is not None:
        x = x[rows]
    if pool.raw is not None or columns is None or columns.mean is None or columns.std is None:
        return x
    mean = torch.tensor(columns.mean, dtype=torch.float64)
    std = torch.tensor(columns.std, dtype=torch.float64)
    return x.double() * std + mean
