"""Partitions: which training examples each client gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fedclade.core import ConfigError, DataError, check_arguments, require, rng, unknown
from fedclade.data.federation import Pool
from fedclade.data.flower_partitions import dirichlet, natural, pathological, shards
from fedclade.data.own_partitions import iid, label_groups, power_law, quantity_skew
from fedclade.data.parts import Parts


@dataclass(frozen=True)
class Partition:
    """One way to share out examples.

    Parameters
    ----------
    split
        Called as ``split(pool, clients, seed, **arguments)``; its keyword-only parameters are what it can be told.
    description
        One line for ``fedclade ls partitions``.
    whole
        Whether the source's test split is shared out as well.
    even
        Whether all clients get equally many examples by design, so that each must reach ``samples_per_client``.
    """

    split: Callable[..., Parts]
    description: str
    whole: bool = False
    even: bool = False


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
    """Share out a pool's training examples among clients.

    Parameters
    ----------
    pool
        The examples.
    name
        One of :data:`PARTITIONS`.
    clients
        How many. Only ``natural`` also takes None: everyone the data knows.
    samples_per_client
        Keep at most so many examples of each client, drawn at random; None keeps all.
    other_samples
        The same for some of the clients, by their number, in place of ``samples_per_client``.
    seed
        Of everything that is drawn.
    **arguments
        What the partition can be told, such as ``alpha=0.5`` of ``dirichlet``.

    Raises
    ------
    ConfigError
        If the name or an argument is unknown, or a value is out of range.
    DataError
        If there are not enough examples, labels or owners.
    MissingExtraError
        If the partition needs ``flwr-datasets`` and it is not installed.
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
    if kind.even:
        _require_enough_each(parts, limits, name)
    kept = [
        indices if limit is None else rng.generator(seed, "samples_per_client", client).permutation(indices)[:limit]
        for client, (indices, limit) in enumerate(zip(parts.indices, limits, strict=True))
    ]
    return replace(parts, indices=kept)


def _require_enough_each(parts: Parts, limits: Sequence[int | None], name: str) -> None:
    for client, (indices, limit) in enumerate(zip(parts.indices, limits, strict=True)):
        if limit is not None and len(indices) < limit:
            raise DataError(
                f"samples_per_client={limit} is more than partition {name!r} has for client {client}: {len(indices)}; "
                f"ask for fewer clients (now {len(limits)}) or a smaller samples_per_client"
            )


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
