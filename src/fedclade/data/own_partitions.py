"""The partitions of our own: iid, power_law, label_groups."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedclade import rng
from fedclade.data.federation import Indices, Pool
from fedclade.data.parts import Parts, labels_of, require_labels, shuffled
from fedclade.errors import DataError, require


def iid(pool: Pool, clients: int, seed: int) -> Parts:
    """Shuffle, and cut into parts that differ in size by one at most."""
    return Parts(np.array_split(shuffled(pool, seed), clients), test="pool")


def power_law(
    pool: Pool,
    clients: int,
    seed: int,
    *,
    exponent: float = 2.5,
    min_samples: int = 10,
    labels_per_client: int | None = None,
) -> Parts:
    """Draw clients' sizes from a power law, density ``size^-exponent``; iid, or a few labels each (Li et al. 2018)."""
    require(
        ("exponent", exponent, exponent > 1, "above 1"),
        ("min_samples", min_samples, min_samples >= 1, "at least 1"),
    )
    draw = rng.generator(seed, "power_law")
    weights = (1 - draw.random(clients)) ** (-1 / (exponent - 1))  # by inversion of P(size > s) = s^-(exponent - 1)
    if labels_per_client is None:
        return Parts(_cut(shuffled(pool, seed), weights, min_samples, pool), test="pool")
    labels = labels_of(pool)
    require_labels(labels_per_client, labels, pool)
    order = draw.permutation(labels)
    places = np.arange(clients * labels_per_client).reshape(clients, labels_per_client)
    held = order[places % len(order)]  # [clients, labels_per_client]: dealt in turn, so that labels are used evenly
    return Parts(_by_label(pool, held, weights, -(-min_samples // labels_per_client), seed))


def _by_label(pool: Pool, held: Indices, weights: NDArray[np.float64], minimum: int, seed: int) -> list[Indices]:
    """Share the examples of each label among the clients that hold it, in proportion to their weights."""
    indices = shuffled(pool, seed)
    of_client: list[list[Indices]] = [[] for _ in held]
    for label in np.unique(held):
        holders = np.flatnonzero((held == label).any(axis=1))
        cuts = _cut(indices[pool.groups[indices] == label], weights[holders], minimum, pool)
        for client, cut in zip(holders, cuts, strict=True):
            of_client[client].append(cut)
    return [np.concatenate(cuts) for cuts in of_client]


def label_groups(pool: Pool, clients: int, seed: int, *, clusters: int = 2) -> Parts:
    """Cut the labels into ``clusters`` runs; client ``i`` gets an equal share of what run ``i mod clusters`` has."""
    labels = labels_of(pool)
    require(
        ("clusters", clusters, 1 <= clusters <= clients, f"from 1 to the number of clients ({clients})"),
        (
            "clusters",
            clusters,
            clusters <= len(labels),
            f"at most the number of labels ({len(labels)}) for label_groups",
        ),
    )
    indices = shuffled(pool, seed)
    parts: list[Indices] = [indices] * clients
    for cluster, run in enumerate(np.array_split(labels, clusters)):
        members = range(cluster, clients, clusters)
        shares = np.array_split(indices[np.isin(pool.groups[indices], run)], len(members))
        for client, share in zip(members, shares, strict=True):
            parts[client] = share
    return Parts(parts)


def _cut(indices: Indices, weights: NDArray[np.float64], minimum: int, pool: Pool) -> list[Indices]:
    """Cut indices into parts: each of at least ``minimum``, and what is left in proportion to the weights."""
    spare = len(indices) - minimum * len(weights)
    if spare < 0:
        raise DataError(
            f"{len(weights)} clients with at least {minimum} examples each need {minimum * len(weights)}, but there "
            f"are {len(indices)} in {pool.name} to share; ask for fewer clients or a smaller min_samples"
        )
    before = np.cumsum(weights)[:-1] / weights.sum()  # what share of the spare goes to the clients before each cut
    cuts = np.floor(spare * before).astype(np.int64) + minimum * np.arange(1, len(weights))
    return np.split(indices, cuts)
