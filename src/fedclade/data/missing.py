"""Values that fill the empty cells of input columns, equal for all clients.

Clients agree on these values without sending rows: each client summarizes the values of a column in
its training rows, and the summaries of all clients determine the value that fills the column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedclade.data.schema import InputColumn

Missing = Literal["mean", "median", "indicator", "drop"]
"""Treatment of empty cells of inputs.

``mean`` and ``median`` fill an empty cell of a column of numbers by a value that is equal for all
clients. ``indicator`` fills like ``mean``, and adds a column that is 1 where the cell was empty.
``drop`` leaves out the row.
"""

MISSING: Missing = "mean"
"""Default treatment of empty cells."""


@dataclass(frozen=True)
class ColumnSummary:
    """Summary of the values of one column in one client's rows.

    Parameters
    ----------
    count
        Number of the client's training rows with a value.
    empty
        Number of the client's training, validation and test rows with an empty cell.
    value
        Mean or median of the values in the client's training rows; 0 without values or for
        categories.
    """

    count: int
    empty: int
    value: float = 0.0


Summaries = Mapping[str, ColumnSummary]
"""Summaries of one client's columns, by the names of the columns."""


def summarize_column(
    values: NDArray[np.float64], is_training: NDArray[np.bool_], how: Missing
) -> ColumnSummary:
    """Summarize the values of a column in one client's n rows.

    Parameters
    ----------
    values
        Values of the column ``[n]``, NaN where a cell is empty.
    is_training
        Mask ``[n]`` of the training rows.
    how
        Treatment of empty cells, which selects the median or the mean.
    """
    is_empty = np.isnan(values)
    present = values[is_training & ~is_empty]
    empty = int(is_empty.sum())
    if len(present) == 0:
        return ColumnSummary(0, empty)
    if how == "median":
        value = np.median(present)
    else:
        value = present.mean()
    return ColumnSummary(len(present), empty, float(value))


def fill_columns(
    columns: Sequence[InputColumn], summaries: Sequence[Summaries], how: Missing
) -> tuple[InputColumn, ...]:
    """Add to input columns the values that fill their empty cells, from the clients' summaries.

    No value is added to a column that has no values at any client, or whose filling value the user
    declared.

    Parameters
    ----------
    columns
        The input columns.
    summaries
        The summaries of all clients that report summaries, in a fixed order.
    how
        Treatment of empty cells. With ``mean`` and ``indicator`` a column is filled by the mean of
        all training rows with a value. With ``median`` a column is filled by the weighted median
        of the clients' medians: the weight of a client is its number of training rows with a value.
    """
    return tuple(_fill_column(column, summaries, how) for column in columns)


def _fill_column(column: InputColumn, summaries: Sequence[Summaries], how: Missing) -> InputColumn:
    if column.kind not in ("number", "category"):
        return column
    found = [each[column.name] for each in summaries if column.name in each]
    has_indicator = how == "indicator" and any(summary.empty for summary in found)
    if has_indicator:
        column = replace(column, indicator=True)
    with_values = [summary for summary in found if summary.count > 0]
    if column.kind == "category" or column.fill is not None or not with_values:
        return column
    values = np.array([summary.value for summary in with_values])
    counts = np.array([summary.count for summary in with_values], dtype=np.float64)
    if how == "median":
        return replace(column, fill=_weighted_median(values, counts))
    return replace(column, fill=float(np.average(values, weights=counts)))


def _weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the weighted median of values.

    This is the smallest value v such that values up to v have at least half of the total weight.
    """
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][int(np.argmax(2 * reached >= reached[-1]))])
