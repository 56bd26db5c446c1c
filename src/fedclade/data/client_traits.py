"""Traits of clients' training data, by which reports explain the differences between clusters.

A *trait* is a number that describes a client, such as the share of a label or the mean of an input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import DENSE
from fedclade.data.client_statistics import unscaled_inputs
from fedclade.data.federation import Federation

MOST_LABELS = 50
MOST_INPUTS = 200
MOST_RELATIONS = 200
"""Largest number of pairs of input and target; with more pairs, no correlations are computed.

In the same way, no labels are described if there are more than ``MOST_LABELS``, and no inputs if
there are more than ``MOST_INPUTS``.
"""

LABEL = "label share"
TARGET = "target level"
INPUT = "input mean"
RELATION = "input–target correlation"
"""Kind of a trait; ``LABEL``, ``TARGET`` and ``INPUT`` are the other kinds."""


@dataclass(frozen=True)
class Trait:
    """Kind and name of a number that describes a client's training data.

    Parameters
    ----------
    kind
        ``label share``, ``target level``, ``input mean`` or ``input–target correlation``.
    name
        Name of the label, the target or the input.
    """

    kind: str
    name: str


def describe_clients(
    federation: Federation, clients: Sequence[int]
) -> tuple[tuple[Trait, ...], NDArray[np.float64]]:
    """Compute the traits of clients' training data.

    Traits are the share of each label, the mean of each numeric target, the mean of each input of a
    table before scaling, and the correlation of each input and target. Traits of inputs are
    computed only for tables of at most 200 columns. Means of inputs are left out if each client
    scaled its inputs by its own examples: the unscaled inputs are then no longer available, and the
    means of the scaled inputs are all 0.

    Parameters
    ----------
    federation
        The clients with their data.
    clients
        Ids of n clients.

    Returns
    -------
    tuple
        The traits, and their values ``[n, traits]``; NaN where a trait is undefined for a client.
    """
    targets = _name_targets(federation)
    inputs = _name_inputs(federation)
    columns = federation.pool.columns
    has_levels = columns is None or not columns.scaled_by_client
    relates = len(inputs) * len(targets) <= MOST_RELATIONS
    traits = list(targets)
    if has_levels:
        traits += [Trait(INPUT, name) for name in inputs]
    if relates:
        for target in targets:
            traits += [Trait(RELATION, _name_relation(name, target, targets)) for name in inputs]
    values = np.empty((len(clients), len(traits)))
    for place, client in enumerate(clients):
        rows = federation.by_id[client].train
        y = _number_targets(federation, client, len(targets))
        parts = [y.mean(0)]
        if inputs:
            # Traits are about the values that people know, before they were scaled.
            x = unscaled_inputs(federation.pool, torch.from_numpy(rows)).double().numpy()
            if has_levels:
                parts.append(x.mean(0))
            if relates:
                parts.append(_correlate(y, x).ravel())
        values[place] = np.concatenate(parts)
    return tuple(traits), values


def _name_targets(federation: Federation) -> list[Trait]:
    """Return the kind and the name of the traits of targets, such as the share of each label.

    The list is empty for the tasks ``language`` and ``segmentation``, and for more than
    :data:`MOST_LABELS` labels.
    """
    pool = federation.pool
    if pool.columns is None:
        names = ()
    else:
        names = pool.columns.labels
    if pool.task in DENSE:
        return []
    if pool.task == "regression":
        kind = TARGET
        default = "target"
    else:
        kind = LABEL
        default = "label"
    if pool.task == "binary":
        return [Trait(kind, _name_label(federation, names[1] if len(names) == 2 else "1"))]
    if pool.outputs > MOST_LABELS:
        return []
    if len(names) == pool.outputs:
        return [Trait(kind, name) for name in names]
    if pool.outputs == 1:
        return [Trait(kind, _name_target(federation) or default)]
    return [Trait(kind, f"{default} {number}") for number in range(pool.outputs)]


def _name_target(federation: Federation) -> str:
    """Return the name of a table's target column.

    The name is empty if the data is not a table, or if there are several target columns.
    """
    if federation.encoding is None:
        return ""
    names = federation.encoding.schema.target
    return names[0] if len(names) == 1 else ""


def _name_label(federation: Federation, label: str) -> str:
    target = _name_target(federation)
    if target:
        return f"{target} = {label}"
    return label


def _name_inputs(federation: Federation) -> list[str]:
    """Return the names of the input columns of a table.

    The list is empty for images, texts and tables of more than :data:`MOST_INPUTS` columns.
    """
    x = federation.pool.x
    if x.dim() != 2 or not x.is_floating_point() or x.shape[1] > MOST_INPUTS:
        return []
    if federation.pool.columns is not None:
        return list(federation.pool.columns.inputs)
    return [f"input {number}" for number in range(x.shape[1])]


def _name_relation(name: str, target: Trait, targets: Sequence[Trait]) -> str:
    if len(targets) == 1:
        return name
    return f"{name} and {target.name}"


def _number_targets(federation: Federation, client: int, width: int) -> NDArray[np.float64]:
    """Return the targets of a client's n training examples as numbers ``[n, width]``.

    Labels are one-hot encoded. ``width`` is the number of labels or target columns.
    """
    data = federation.by_id[client]
    y = data.labels(federation.pool.y[torch.from_numpy(data.train)])
    if width == 0:
        return np.zeros((len(y), 0))
    if federation.pool.task == "classification":
        labels = torch.arange(width)
        return (y[:, None] == labels).double().numpy()
    return y.double().reshape(len(y), width).numpy()


def _correlate(y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the correlations of T targets and F inputs, ``[T, F]``.

    A correlation is NaN if the target or the input is constant, or if there are fewer than 3
    examples.
    """
    n = len(y)
    if n < 3:
        return np.full((y.shape[1], x.shape[1]), math.nan)
    y = y - y.mean(0)
    x = x - x.mean(0)
    y_deviation = y.std(0)
    x_deviation = x.std(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (y.T @ x) / n / y_deviation[:, None] / x_deviation
    # A constant column can have a deviation just above 0 by rounding.
    found[y_deviation < 1e-12] = math.nan
    found[:, x_deviation < 1e-9 * (1 + np.abs(x).max(0, initial=0))] = math.nan
    return found
