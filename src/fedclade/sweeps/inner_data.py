"""Splits of the clients' training data, on which methods are compared without any test data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import ConfigError, DataError, Indices, rng
from fedclade.data import ClientData, Federation

HELD_OUT = 0.2
"""Share of a client's training examples on which models are compared, and that choose nothing."""

LEAST_ROWS = 3
"""Least number of a client's examples: to train on, to choose a model, and to compare models."""


@dataclass(frozen=True, eq=False)
class InnerData:
    """Data for one repetition of a comparison of methods, made of training data only.

    The test data of both federations are the held-out examples, on which models are compared.

    Parameters
    ----------
    with_validation
        Clients that have validation data, for a method that chooses models by it.
    without_validation
        The same clients without validation data, for all other methods. Clients train on these
        examples too, as they would in a run of such a method, unless the split is fixed.
    """

    with_validation: Federation
    without_validation: Federation


def check_inner(federation: Federation, least_rows: int = LEAST_ROWS) -> Sequence[str]:
    """Check that the clients' training data can be split, and return the clients to leave out.

    Parameters
    ----------
    federation
        All clients.
    least_rows
        Least number of examples of a client, without its test data.

    Returns
    -------
    Sequence
        Names of the clients that have fewer examples.

    Raises
    ------
    ConfigError
        If the data changes during a run.
    DataError
        If fewer than two clients have enough examples.
    """
    if federation.stages:
        raise ConfigError(
            "advise needs data that does not change during a run, got data with "
            f"{len(federation.stages) + 1} stages; leave out the drift"
        )
    clients = [federation.by_id[client] for client in federation.ids]
    small = [client.name for client in clients if _count_rows(client) < least_rows]
    count = len(clients) - len(small)
    if count < 2:
        few = f", and {len(small)} with fewer" if small else ""
        raise DataError(
            f"advise needs at least 2 clients with {least_rows} or more examples besides their "
            f"test data, got {count}{few}; name the column with the client of a row (--client, "
            "or client in the section [data]), or add the data of other clients"
        )
    return small


def split_training(
    federation: Federation, repetition: int, fraction: float, *, is_fixed: bool = False
) -> InnerData:
    """Split the training data of all clients into data to train, to choose and to compare models.

    Examples that have labels are split so that each part has about the same share of each label.
    The held-out parts of up to five successive repetitions do not overlap.

    Parameters
    ----------
    federation
        Clients whose training and validation data are split. Their test data are not used. Clients
        with too few examples are left out, see :func:`check_inner`.
    repetition
        Number of the split, from 0.
    fraction
        Share of a client's examples for validation, in (0, 1 - :data:`HELD_OUT`).
    is_fixed
        Whether clients compare and choose models on their validation data, half of it for each of
        both, and train on all of their training data. The data then remains as a rule of the user
        has divided it, such as by groups of rows or by time.
    """
    least = 2 if is_fixed else LEAST_ROWS
    clients: list[ClientData] = []
    plain: list[ClientData] = []
    for number in federation.ids:
        client = federation.by_id[number]
        if _count_rows(client) < least or (is_fixed and len(client.validation) < least):
            continue
        if is_fixed:
            order = _put_in_order(federation.pool.y, client, client.validation, repetition, 2)
            half = len(order) // 2
            train, choosing, held = client.train, order[half:], order[:half]
        else:
            rows = np.concatenate([client.train, client.validation])
            order = _put_in_order(federation.pool.y, client, rows, repetition, round(1 / HELD_OUT))
            n_held = max(1, round(HELD_OUT * len(rows)))
            n_choosing = min(max(1, round(fraction * len(rows))), len(rows) - n_held - 1)
            held = order[:n_held]
            choosing = order[n_held : n_held + n_choosing]
            train = order[n_held + n_choosing :]
        clients.append(replace(client, train=train, validation=choosing, test=held))
        # Choosing and held-out examples may be of the same group, which training must not see.
        both = train if is_fixed else np.concatenate([train, choosing])
        plain.append(replace(client, train=both, validation=both[:0], test=held))
    return InnerData(_with_clients(federation, clients), _with_clients(federation, plain))


def _with_clients(federation: Federation, clients: Sequence[ClientData]) -> Federation:
    truth = federation.true_clusters
    if truth is not None:
        truth = {client.id: truth[client.id] for client in clients}
    return replace(
        federation, clients=tuple(clients), true_clusters=truth, newcomers=None, attributes=None
    )


def _count_rows(client: ClientData) -> int:
    """Return the number of a client's examples without its test data."""
    return len(client.train) + len(client.validation)


def _put_in_order(
    targets: Tensor, client: ClientData, rows: Indices, repetition: int, parts: int
) -> Indices:
    """Return a client's examples in a random order whose beginning differs with the repetition.

    The order is drawn once for ``parts`` repetitions. In each of them it begins at another place,
    so that its first ``1 / parts`` differ.
    """
    generator = rng.generator(client.key, "advice", repetition // parts)
    order = generator.permutation(np.sort(rows))
    if targets.ndim == 1 and (not targets.is_floating_point() or _are_binary(targets)):
        order = _spread_labels(order, targets.numpy()[order], generator)
    start = (repetition % parts) * len(order) / parts
    return np.roll(order, -round(start))


def _are_binary(targets: Tensor) -> bool:
    return bool(((targets == 0) | (targets == 1)).all())


def _spread_labels(order: Indices, labels: NDArray[Any], generator: np.random.Generator) -> Indices:
    """Sort examples so that any part of the order has about the same share of each label."""
    places = np.empty(len(order))
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        places[rows] = (np.arange(len(rows)) + generator.random()) / len(rows)
    return order[np.argsort(places, kind="stable")]
