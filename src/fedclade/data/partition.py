"""Partitions: which training examples each client gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fedclade.core import ConfigError, DataError, check_arguments, require, rng, unknown
from fedclade.data.flower_partitions import dirichlet, pathological, shards
from fedclade.data.own_partitions import iid, label_groups, natural, power_law, quantity_skew
from fedclade.data.parts import Parts
from fedclade.data.pool import Pool


@dataclass(frozen=True)
class Partition:
    """One way to partition: ``split(pool, clients, seed, **arguments)``, whose keyword-only parameters are options."""

    split: Callable[..., Parts]
    description: str  # for ``fedclade ls partitions``
    whole: bool = False  # whether the source's test split is shared out as well
    even: bool = False  # whether all clients get equally many examples, so that each must have samples_per_client


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
    """Partition a pool's training examples among clients, by one of :data:`PARTITIONS`.

    Of each client at most ``samples_per_client`` examples are kept, drawn at random; ``other_samples`` has other limits
    for some of the clients, by their number. ``clients`` is None for all that the data knows (``natural`` only).
    """
    if name not in PARTITIONS:
        raise ConfigError(unknown("partition", name, PARTITIONS))
    kind = PARTITIONS[name]
    check_arguments(f"partition {name!r}", kind.split, arguments)
    everyone, other = clients is None and name == "natural", other_samples or {}
    require(
        ("clients", clients, everyone or (clients is not None and clients >= 1), "at least 1"),
        ("samples_per_client", samples_per_client, samples_per_client is None or samples_per_client >= 1, "at least 1"),
    )
    if clients is not None and name != "natural":
        needed = (clients - len(other)) * (samples_per_client or 1) + sum(samples or 1 for samples in other.values())
        there = len(pool.train) + (len(pool.test) if kind.whole else 0)
        if needed > there:
            raise DataError(
                f"{clients} clients with {samples_per_client or 1} training examples each need {needed}, but "
                f"{pool.name} has {there}; ask for fewer clients or a smaller samples_per_client"
            )
    parts = kind.split(pool, clients, seed, **arguments)
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
        "dirichlet": Partition(dirichlet, "each label is spread over the clients by Dirichlet(alpha=0.5)"),
        "shards": Partition(shards, "sorted by label and cut into shards; shards_per_client=2 each", even=True),
        "natural": Partition(natural, "by owner: writer, speaker, user; those with the most examples"),
        "quantity_skew": Partition(quantity_skew, "iid, but for sizes from a power law"),
        "power_law": Partition(
            power_law, "overlapping runs of labels_per_client=2 labels in log-normal sizes (FedProx)", whole=True
        ),
        "label_groups": Partition(label_groups, "runs of labels, one for each of the true clusters", even=True),
    }
)
