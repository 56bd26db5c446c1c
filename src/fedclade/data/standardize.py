"""Standardization of numeric inputs and regression targets to mean 0 and standard deviation 1.

Means and standard deviations are computed from training examples, of each client or of all clients.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import torch

from fedclade.core import require
from fedclade.data.client_data import ClientData
from fedclade.data.client_statistics import (
    Statistics,
    list_rows,
    summarize_inputs,
    summarize_targets,
    unscaled_inputs,
)
from fedclade.data.federation import Federation
from fedclade.data.pool import Columns, Pool

Standardize = Literal["auto", "none", "client", "federated"]
"""Examples that determine the scaling of inputs: none, each client's own, or all clients'.

``auto`` is ``federated`` for tables, and ``none`` for other data.
"""

StandardizeTarget = Literal["auto", "none", "federated"]
"""Examples that determine the scaling of a regression's targets: none, or all clients'.

``auto`` is ``federated`` for tables, and ``none`` for other data.
"""

FAR_APART = 1e3
"""Ratio of the scales of two columns from which on a warning is logged."""

MOST_ROWS = 100_000
"""Largest number of rows from which the scales of columns are computed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScalingChoice:
    """User's settings of the scaling of inputs and targets, with a method that applies them.

    Parameters
    ----------
    inputs, targets
        The settings ``standardize`` and ``standardize_target``.
    is_table
        Whether the data is a table, whose numbers are scaled by default.
    """

    inputs: Standardize = "auto"
    targets: StandardizeTarget = "auto"
    is_table: bool = False

    def scale(
        self, table: TableData, clients: Sequence[ClientData], newcomers: Sequence[ClientData]
    ) -> TableData:
        """Scale the inputs, and record the mean and standard deviation of the targets.

        Parameters
        ----------
        table
            The data of all clients before scaling.
        clients
            The clients whose training examples determine the scaling.
        newcomers
            Clients whose inputs are also scaled, but do not contribute to the means and standard
            deviations of all clients.

        Raises
        ------
        ConfigError
            If the user chose to scale inputs that are not columns of numbers.
        """
        how = self.inputs
        if how == "auto":
            how = "federated" if self.is_table and _are_columns(table.x) else "none"
        if how == "none":
            warn_of_scales(table.x, table.columns, clients)
        else:
            raw = table.x if self.inputs == "auto" else None
            x, columns = standardize_inputs(table.x, table.columns, clients, newcomers, how=how)
            columns = replace(columns, by_default=self.inputs == "auto")
            table = replace(table, x=x, columns=columns, raw=raw)
        is_scaled = self.targets == "federated" or (self.targets == "auto" and self.is_table)
        if not is_scaled:
            return table
        return replace(table, columns=self._scale_targets(table, clients))

    def _scale_targets(self, table: TableData, clients: Sequence[ClientData]) -> Columns:
        """Return columns that record the mean and standard deviation of all training targets."""
        each = [summarize_targets(table.y[torch.from_numpy(client.train)]) for client in clients]
        columns = record_target_scale(table.columns or Columns(()), reduce(Statistics.plus, each))
        # One flag covers inputs and targets, as a private run refuses all scaling if the user chose
        # a part of the scaling.
        are_inputs_default = columns.mean is None or columns.by_default
        return replace(columns, by_default=self.targets == "auto" and are_inputs_default)


@dataclass(frozen=True, eq=False)
class TableData:
    """Inputs and targets of all clients, before or after scaling.

    Parameters
    ----------
    x, y
        Inputs ``[N, ...]`` and targets.
    columns
        Names and scaling of the columns; None if unknown.
    raw
        Inputs before default scaling; None if inputs are not scaled by default.
    """

    x: torch.Tensor
    y: torch.Tensor
    columns: Columns | None
    raw: torch.Tensor | None = None


def standardize_inputs(
    x: torch.Tensor,
    columns: Columns | None,
    clients: Sequence[ClientData],
    newcomers: Sequence[ClientData],
    *,
    how: Literal["client", "federated"],
) -> tuple[torch.Tensor, Columns]:
    """Scale columns of numbers to mean 0 and standard deviation 1.

    Columns in which all values are 0 or 1, such as encoded categories, are not scaled.

    Parameters
    ----------
    x
        Inputs ``[N, F]`` of all clients: N examples with F columns.
    columns
        Names of the columns; None if unknown.
    clients
        The clients whose training examples determine the scaling.
    newcomers
        Clients whose inputs are also scaled, but do not contribute to the means and standard
        deviations of all clients.
    how
        ``client``: each client scales by its own training examples. ``federated``: all clients
        scale by the training examples of all clients.

    Returns
    -------
    tuple
        The scaled inputs ``[N, F]``, and the columns with the recorded scaling.

    Raises
    ------
    ConfigError
        If inputs are not columns of numbers.
    """
    look = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    rule = f"'none' for inputs {look}, as only columns of numbers [N, F] are scaled"
    require(("standardize", how, _are_columns(x), rule))
    everyone = [*clients, *newcomers]
    own = [summarize_inputs(x[list_rows(client)], len(client.train)) for client in everyone]
    numbers = torch.stack([each.numbers for each in own]).any(0)
    together = replace(reduce(Statistics.plus, own[: len(clients)]), numbers=numbers)
    scaled = x.clone()
    for client, statistics in zip(everyone, own, strict=True):
        if how == "client":
            by = replace(statistics, numbers=numbers)
        else:
            by = together
        rows = list_rows(client)
        scaled[rows] = ((x[rows] - by.mean) / by.std).to(x.dtype)
    if columns is None:
        columns = Columns(tuple(f"x{place}" for place in range(x.shape[1])))
    if how == "federated":
        return scaled, _record_scaling(columns, together)
    return scaled, replace(columns, scaled_by_client=True)


def _are_columns(x: torch.Tensor) -> bool:
    """Return whether inputs are columns of numbers ``[N, F]``."""
    return x.dim() == 2 and x.is_floating_point()


# Unscaled inputs.


def warn_of_scales(x: torch.Tensor, columns: Columns | None, clients: Sequence[ClientData]) -> None:
    """Log a warning if the scales of unscaled input columns differ by a large factor.

    The factor is at least :data:`FAR_APART`.

    The scale of a column is the root mean square of its nonzero values in up to :data:`MOST_ROWS`
    training examples. Zeros are ignored, so that sparse columns, such as pixels at an edge, do not
    seem to have a small scale.
    """
    if not _are_columns(x):
        return
    train = torch.cat([torch.from_numpy(client.train) for client in clients])
    values = x[train[:: -(-len(train) // MOST_ROWS)]].double()
    scales = (values.square().sum(0) / values.count_nonzero(0).clamp(min=1)).sqrt()
    present = scales.where(scales > 0, torch.inf)
    smallest = int(present.argmin())
    largest = int(scales.argmax())
    ratio = float(scales[largest] / present[smallest])
    if not ratio >= FAR_APART:
        return
    names = [f"x{place}" for place in range(x.shape[1])]
    if columns is not None and columns.inputs:
        names = list(columns.inputs)
    _log.warning(
        "inputs are not scaled, and their columns differ in scale by a factor of %.0f: %s is about "
        "%.3g, and %s is about %.3g; training may diverge or learn little; set standardize = "
        "'federated' or standardize = 'client'",
        *(ratio, names[largest], float(scales[largest])),
        *(names[smallest], float(scales[smallest])),
    )


def undo_default_scaling(federation: Federation, why: str) -> Federation:
    """Undo the default scaling of a federation, if any, and log the reason.

    The resulting inputs are exactly the inputs that were read, so that nothing depends on
    statistics of the data. A scaling that the user chose is not undone.

    Parameters
    ----------
    federation
        The federation, with its newcomers.
    why
        Reason for the log, such as ``"clients are private"``.
    """
    columns = federation.pool.columns
    if columns is None or not columns.by_default:
        return federation
    _log.warning(
        "the default scaling of inputs and targets is turned off, because %s; scaling that you chose "
        "is not changed; divide columns of large numbers by numbers that are known beforehand",
        why,
    )
    pool = federation.pool
    columns = replace(
        columns, mean=None, std=None, target_mean=None, target_std=None, by_default=False
    )
    x = pool.x if pool.raw is None else pool.raw
    unscaled = replace_pool(federation, replace(pool, x=x, raw=None, columns=columns))
    warn_of_scales(unscaled.pool.x, columns, list(unscaled.clients))
    return unscaled


def replace_pool(federation: Federation, pool: Pool) -> Federation:
    """Replace the pool of a federation and of its newcomers by a pool of the same examples."""
    newcomers = federation.newcomers
    if newcomers is not None:
        newcomers = replace_pool(newcomers, pool)
    return replace(federation, pool=pool, newcomers=newcomers)


# Scaling by the statistics of other clients.


def rescale_federation(federation: Federation, by: Statistics) -> Federation:
    """Standardize the data of one client of a network by the statistics of all its clients.

    Parameters
    ----------
    federation
        Federation of the one client, whose inputs are scaled by the client's own statistics, if
        they are scaled. These statistics are replaced.
    by
        Means and standard deviations over the examples of all clients: one of each for every input
        column, if inputs are scaled, and then one of each for every target, if targets are scaled.
    """
    pool = federation.pool
    columns = pool.columns
    assert columns is not None
    x = pool.x
    count = 0
    if columns.mean is not None:
        count = len(columns.mean)
        of_inputs = by.columns(0, count)
        x = ((unscaled_inputs(pool) - of_inputs.mean) / of_inputs.std).to(x.dtype)
        columns = _record_scaling(columns, of_inputs)
    of_targets = by.columns(count, len(by.means))
    if len(of_targets.means):
        columns = record_target_scale(columns, of_targets)
    return replace(federation, pool=replace(pool, x=x, columns=columns))


def scale_as_in_run(federation: Federation, inputs: Mapping[str, Any]) -> Federation:
    """Scale the data of newcomers as a finished run scaled the data of its clients.

    Newcomers are clients that join after the run. If all clients of the run were scaled by the same
    means and standard deviations, the newcomers are scaled by these too. Inputs are not changed if
    each client scales by its own examples, or if the user chose not to scale inputs.

    Parameters
    ----------
    federation
        The newcomers, as they were read.
    inputs
        Record of the inputs in the summary of the run; see :attr:`Columns.described`.
    """
    pool = federation.pool
    own = pool.columns or Columns(())
    columns = replace(
        own,
        target_mean=_as_tuple(inputs.get("target_mean")),
        target_std=_as_tuple(inputs.get("target_std")),
        by_default=False,
    )
    x = pool.x
    mean = _as_tuple(inputs.get("mean"))
    if own.mean is not None and mean is not None:
        std = tuple(inputs["std"])
        if (own.mean, own.std) != (mean, std):
            center = torch.tensor(mean, dtype=torch.float64)
            scale = torch.tensor(std, dtype=torch.float64)
            x = ((unscaled_inputs(pool) - center) / scale).to(x.dtype)
        columns = replace(columns, mean=mean, std=std)
    elif own.mean is not None and own.by_default:
        x = unscaled_inputs(pool).to(x.dtype)
        columns = replace(columns, mean=None, std=None)
    if columns == own:
        return federation
    return replace_pool(federation, replace(pool, x=x, raw=None, columns=columns))


def _as_tuple(numbers: Sequence[float] | None) -> tuple[float, ...] | None:
    if numbers is None:
        return None
    return tuple(numbers)


def record_target_scale(columns: Columns, by: Statistics) -> Columns:
    """Return a copy of ``columns`` that records the mean and standard deviation of the targets.

    ``by`` has the statistics of the targets.
    """
    return replace(columns, target_mean=tuple(by.mean.tolist()), target_std=tuple(by.std.tolist()))


def _record_scaling(columns: Columns, by: Statistics) -> Columns:
    """Return a copy of ``columns`` that records the mean and deviation by which inputs were scaled.

    ``by`` has the statistics of the inputs.
    """
    return replace(columns, mean=tuple(by.mean.tolist()), std=tuple(by.std.tolist()))
