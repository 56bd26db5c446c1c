"""The partitions of our own: iid, natural, quantity_skew, power_law, label_groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from fedclade.core import DataError, Indices, require, rng
from fedclade.data.parts import Parts, labels_of, require_labels, shuffled
from fedclade.data.pool import Pool


def iid(pool: Pool, clients: int, seed: int, *, tests: Literal["all", "parts"] = "all") -> Parts:
    """Shuffle, and cut into parts that differ in size by one at most.

    Clients are tested on ``all`` of the source's test split, or it is cut into ``parts`` as well.
    """
    require(("tests", tests, tests in ("all", "parts"), "'all' or 'parts'"))
    return Parts(np.array_split(shuffled(pool, seed), clients), test="pool" if tests == "all" else "parts")


def natural(
    pool: Pool,
    clients: int | None,
    seed: int,
    *,
    min_samples: int = 2,
    owners: Literal["largest", "random"] = "largest",
) -> Parts:
    """Make each owner (writer, speaker, user) a client, of those with at least ``min_samples`` examples.

    They are the ``largest``, those with the most examples, most first; or ``random`` ones, as FL+HC takes 367 writers
    of FEMNIST (Briggs et al. 2020, section II-A). Fewer clients of a seed are then the first of more.
    """
    if pool.natural is None:
        raise DataError(f"partition 'natural' needs data that says who owns each example; {pool.name} does not")
    # An owner needs two examples: one to train on, one to be tested on.
    require(("min_samples", min_samples, min_samples >= 2, "at least 2"))
    order = shuffled(pool, seed)
    names, owner, counts = np.unique(pool.natural[order], return_inverse=True, return_counts=True)
    if owners == "random":
        in_order = rng.generator(seed, "owners").permutation(len(names))
    else:
        in_order = np.argsort(-counts, kind="stable")
    chosen = in_order[counts[in_order] >= min_samples][:clients]
    if len(chosen) < (clients or 1):
        raise DataError(
            f"{clients or 1} clients need as many owners with at least {min_samples} examples, but of the "
            f"{len(names)} owners in {pool.name} only {len(chosen)} have that many"
        )
    of_owner = np.split(order[np.argsort(owner, kind="stable")], np.cumsum(counts)[:-1])
    return Parts([of_owner[i] for i in chosen], names=names[chosen].tolist(), test="own")


def quantity_skew(pool: Pool, clients: int, seed: int, *, exponent: float = 2.5, min_samples: int = 10) -> Parts:
    """Shuffle, and cut into parts whose sizes are drawn from a power law, density ``size^-exponent``."""
    require(
        ("exponent", exponent, exponent > 1, "above 1"), ("min_samples", min_samples, min_samples >= 1, "at least 1")
    )
    draw = rng.generator(seed, "power_law")
    weights = (1 - draw.random(clients)) ** (-1 / (exponent - 1))  # by inversion of P(size > s) = s^-(exponent - 1)
    spare = _spare(len(pool.train), clients, min_samples, "examples", pool)
    before = np.cumsum(weights)[:-1] / weights.sum()  # what share of the spare goes to the clients before each cut
    cuts = np.floor(spare * before).astype(np.int64) + min_samples * np.arange(1, clients)
    return Parts(np.split(shuffled(pool, seed), cuts), test="pool")


def power_law(
    pool: Pool, clients: int, seed: int, *, labels_per_client: int = 2, sigma: float = 2.0, min_samples: int = 10
) -> Parts:
    """Give client ``i`` label ``i mod C`` and the next ones, in log-normal sizes (Li et al. 2018, for MNIST).

    Every client begins with ``min_samples`` examples, as many of each of its labels. What a label has left is shared
    among its clients in proportion to weights from LogNormal(0, ``sigma``), rounded down, so that a few examples are
    left over. The source's test split is shared out too: a client is tested on a tenth of its own examples.
    """
    everything = replace(pool, train=np.concatenate([pool.train, pool.test]))
    labels = labels_of(everything)
    require(
        ("sigma", sigma, 0 <= sigma < math.inf, "at least 0"),
        ("min_samples", min_samples, min_samples >= 1, "at least 1"),
    )
    require_labels(labels_per_client, labels, pool)
    first = -(-min_samples // labels_per_client)
    held = (np.arange(clients)[:, None] + np.arange(labels_per_client)) % len(labels)  # [clients, labels_per_client]
    weights = rng.generator(seed, "log-normal").lognormal(0, sigma, held.shape)
    indices = shuffled(everything, seed)
    of_client: list[list[Indices]] = [[] for _ in held]
    for place, label in enumerate(labels):
        holders, slots = np.nonzero(held == place)
        mine, shares = indices[pool.groups[indices] == label], weights[holders, slots]
        spare = _spare(len(mine), len(holders), first, f"examples of label {label}", pool)
        counts = first + np.floor(spare * shares / shares.sum()).astype(np.int64)
        for client, part in zip(holders, np.split(mine, np.cumsum(counts)), strict=False):  # the last part is left over
            of_client[client].append(part)
    return Parts([np.concatenate(parts) for parts in of_client], test="own", own_test_fraction=0.1)


def label_groups(pool: Pool, clients: int, seed: int, *, clusters: int = 2) -> Parts:
    """Cut the labels into ``clusters`` runs; client ``i`` gets an equal share of what run ``i mod clusters`` has."""
    labels = labels_of(pool)
    enough = clusters <= len(labels), f"at most the number of labels ({len(labels)}) for label_groups"
    require(
        ("clusters", clusters, 1 <= clusters <= clients, f"from 1 to the number of clients ({clients})"),
        ("clusters", clusters, *enough),
    )
    indices = shuffled(pool, seed)
    parts: list[Indices] = [indices] * clients
    for cluster, run in enumerate(np.array_split(labels, clusters)):
        members = range(cluster, clients, clusters)
        shares = np.array_split(indices[np.isin(pool.groups[indices], run)], len(members))
        for client, share in zip(members, shares, strict=True):
            parts[client] = share
    return Parts(parts)


def _spare(there: int, clients: int, least: int, what: str, pool: Pool) -> int:
    """Return how many examples are left after each client got its least."""
    if there < least * clients:
        raise DataError(
            f"{clients} clients with at least {least} {what} each need {least * clients}, but there are {there} in "
            f"{pool.name} to share; ask for fewer clients or a smaller min_samples"
        )
    return there - least * clients
