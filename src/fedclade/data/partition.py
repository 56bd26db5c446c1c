"""Partitions: which training examples each client gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from fedclade.core import DataError, call_own, check_arguments, function_named, require, rng, shown
from fedclade.data.arrays import as_indices
from fedclade.data.flower_partitions import check_dirichlet, check_shards, dirichlet, pathological, shards
from fedclade.data.own_partitions import iid, label_groups, natural, power_law, quantity_skew
from fedclade.data.parts import Parts
from fedclade.data.pool import Pool


@dataclass(frozen=True)
class Partition:
    """One way to partition: ``split(pool, clients, seed, **arguments)``, whose keyword-only parameters are options."""

    split: Callable[..., Parts]
    description: str  # for ``fedclade ls partitions``
    whole: bool = False  # whether the source's test split is shared out as well, or it is where tests = "own"
    even: bool = False  # whether all clients get equally many examples, so that each must have samples_per_client
    by_place: bool = False  # whether clients differ by their place, so that newcomers are drawn from among all
    check: Callable[..., None] | None = None  # of the range of some arguments, by name, before there is any data


def partition_pool(
    pool: Pool,
    name: str,
    *,
    clients: int | None,
    samples_per_client: int | None = None,
    other_samples: Mapping[int, int] | None = None,
    seed: int = 0,
    **arguments: Any,
) -> Parts:
    """Partition a pool's training examples among clients, by a name that :func:`partition_named` knows.

    Of each client at most ``samples_per_client`` examples are kept, drawn at random; ``other_samples`` has other limits
    for some of the clients, by their number. ``clients`` is None for all that the data knows (``natural`` only).
    """
    kind = partition_named(name)
    check_arguments(f"partition {name!r}", kind.split, arguments)
    everyone, other = clients is None and name == "natural", other_samples or {}
    require(
        ("clients", clients, everyone or (clients is not None and clients >= 1), "at least 1"),
        ("samples_per_client", samples_per_client, samples_per_client is None or samples_per_client >= 1, "at least 1"),
    )
    if clients is not None and name != "natural":
        needed = (clients - len(other)) * (samples_per_client or 1) + sum(samples or 1 for samples in other.values())
        whole = kind.whole or arguments.get("tests") == "own"
        there = len(pool.train) + (len(pool.test) if whole else 0)
        if needed > there:
            raise DataError(
                f"{clients} clients with {samples_per_client or 1} training examples each need {needed}, but "
                f"{pool.name} has {there}; ask for fewer clients or a smaller samples_per_client"
            )
    given = pool, clients, seed
    if name in PARTITIONS:
        parts = kind.split(*given, **arguments)
    else:
        parts = _checked(call_own(f"partition {name!r}", kind.split, *given, **arguments), pool, clients, name)
    limits = [other.get(client, samples_per_client) for client in range(len(parts.indices))]
    kept = list(parts.indices)
    for client, (indices, limit) in enumerate(zip(parts.indices, limits, strict=True)):
        if limit is None:
            continue
        if kind.even and len(indices) < limit:
            raise DataError(
                f"samples_per_client={limit} is more than partition {name!r} has for client {client}: {len(indices)}; "
                f"ask for fewer clients (now {len(limits)}) or a smaller samples_per_client"
            )
        kept[client] = rng.generator(seed, "samples_per_client", client).permutation(indices)[:limit]
    return replace(parts, indices=kept)


PARTITIONS: Mapping[str, Partition] = MappingProxyType(
    {
        "iid": Partition(iid, "shuffled, then cut into equal parts", even=True),
        "pathological": Partition(pathological, "each client has examples of labels_per_client=2 labels only"),
        "dirichlet": Partition(
            dirichlet, "each label is spread over the clients by Dirichlet(alpha=0.5)", check=check_dirichlet
        ),
        "shards": Partition(
            shards, "sorted by label and cut into shards; shards_per_client=2 each", even=True, check=check_shards
        ),
        "natural": Partition(
            natural, 'by owner: writer, speaker, user; owners="largest" or "random" ones', by_place=True
        ),
        "quantity_skew": Partition(quantity_skew, "iid, but for sizes from a power law"),
        "power_law": Partition(
            power_law,
            "overlapping runs of labels_per_client=2 labels in log-normal sizes (FedProx)",
            whole=True,
            by_place=True,
        ),
        "label_groups": Partition(
            label_groups, "runs of labels, one for each of the true clusters", even=True, by_place=True
        ),
    }
)


def partition_named(name: object) -> Partition:
    """Return a partition by its name: one of :data:`PARTITIONS`, a package's, or ``module:function``.

    A user's own is a function ``split(pool, clients, seed, *, ...)``; what it takes by name is an option in ``[data]``.
    It returns, for each client, indices into the pool, all of them in ``pool.train``: a list of arrays, or
    :class:`Parts`. Newcomers are drawn from among all of its clients.

    Raises
    ------
    ConfigError
        If the name is unknown, cannot be imported, or stands for something else.
    """
    given = "the indices of each client's examples", ("pool", "clients", "seed")
    return function_named("partitions", name, PARTITIONS, partial(Partition, by_place=True), *given)


def _checked(parts: Any, pool: Pool, clients: int | None, name: str) -> Parts:
    """Check what a user's own partition returned: it gives every client examples, and no example twice."""
    what = f"partition {name!r}"
    if not isinstance(parts, Parts | list | tuple | np.ndarray):
        raise DataError(f"{what} should return the indices of each client's examples, got {shown(parts)}")
    parts = parts if isinstance(parts, Parts) else Parts([*parts])
    held = [as_indices(indices, f"the indices of client {i} by {what}") for i, indices in enumerate(parts.indices)]
    if clients is not None and len(held) != clients:
        raise DataError(f"{what} should give each of {clients} clients its examples, got those of {len(held)}")
    if empty := [i for i, indices in enumerate(held) if len(indices) == 0]:
        raise DataError(f"{what} should give every client examples, and gives client {empty[0]} none")
    given = np.concatenate(held)
    own = np.concatenate([pool.train, pool.test]) if parts.test == "own" else pool.train
    if len(odd := np.setdiff1d(given, own)):
        raise DataError(f"{what} should give indices in pool.train, got {odd[0]}, which is not among them")
    if len(given) > len(np.unique(given)):
        raise DataError(f"{what} should give every example to one client alone, and gives some to several")
    return replace(parts, indices=held)
