"""Newcomers: clients that are held back from training, and the data that they get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedclade.core import DataError, rng
from fedclade.data.partition import partition_named, partition_pool
from fedclade.data.parts import Parts
from fedclade.data.pool import Pool


def share_out(
    pool: Pool,
    partition: str,
    clients: int | None,
    newcomers: int,
    *,
    samples_per_client: int | None,
    newcomer_samples: int | None,
    clusters: int,
    seed: int,
    arguments: Mapping[str, Any],
) -> tuple[Parts, list[int]]:
    """Partition a pool among clients and newcomers.

    If clients keep ``samples_per_client`` examples each, newcomers get theirs from what is left, and the clients have
    the same data with newcomers as without. Otherwise the pool is partitioned among all, and newcomers are drawn from
    them. They keep ``newcomer_samples`` examples, by default as many as the clients.

    Returns
    -------
    parts
        Of the clients, then of the newcomers.
    places
        For each of them a number that modulo ``clusters`` is its true cluster; the numbers of newcomers in two clusters
        differ by one at most.
    """
    kept: dict[str, Any] = {"samples_per_client": samples_per_client, "seed": seed, **arguments}
    if clients is None or newcomers == 0:
        parts = partition_pool(pool, partition, clients=clients, **kept)
        return parts, [*range(len(parts.indices))]
    if clients + newcomers > len(pool.x):
        raise DataError(
            f"{clients} clients and {newcomers} newcomers need an example each, but {pool.name} has {len(pool.x)}; ask "
            "for fewer"
        )
    few = samples_per_client if newcomer_samples is None else newcomer_samples
    if samples_per_client is None or partition_named(partition).by_place:
        places = _newcomers_last(clients, newcomers, clusters, seed)
        other = {} if few is None else dict.fromkeys(places[clients:], few)
        parts = partition_pool(pool, partition, clients=clients + newcomers, other_samples=other, **kept)
        names = None if parts.names is None else [parts.names[place] for place in places]
        return replace(parts, indices=[parts.indices[place] for place in places], names=names), places
    parts = partition_pool(pool, partition, clients=clients, **kept)
    taken = np.concatenate(parts.indices)  # of the test split as well, where that is shared out
    left = replace(pool, train=np.setdiff1d(pool.train, taken), test=np.setdiff1d(pool.test, taken))
    if newcomers * (few or 1) > len(left.train):
        raise DataError(
            f"{newcomers} newcomers with {few} training examples each need {newcomers * (few or 1)}, but the other "
            f"clients leave {len(left.train)} of {pool.name}; ask for fewer newcomers, or for a smaller "
            "newcomers.samples_per_client or data.samples_per_client"
        )
    kept |= {"samples_per_client": few, "seed": rng.torch_seed(seed, "newcomers")}
    late = partition_pool(left, partition, clients=newcomers, **kept)
    return replace(parts, indices=[*parts.indices, *late.indices]), [*range(clients), *range(newcomers)]


def _newcomers_last(clients: int, newcomers: int, clusters: int, seed: int) -> list[int]:
    """Draw the newcomers from all clients, from each true cluster in turn; return all, the newcomers last."""
    everyone = range(clients + newcomers)
    draw = rng.generator(seed, "newcomers")
    of_cluster = [draw.permutation(everyone[cluster::clusters]).tolist() for cluster in range(clusters)]
    late = [of_cluster[i % clusters][i // clusters] for i in range(newcomers)]
    return sorted(set(everyone) - set(late)) + late
