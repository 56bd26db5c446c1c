"""The partitions that flwr-datasets has: pathological, dirichlet, shards, natural."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedclade.core import DataError, import_extra, require, rng
from fedclade.data.arrays import Indices
from fedclade.data.parts import Parts, labels_of, require_labels, shuffled
from fedclade.data.pool import Pool


def pathological(pool: Pool, clients: int, seed: int, *, labels_per_client: int = 2) -> Parts:
    """Give each client examples of a few labels only (McMahan et al. 2017; Li et al. 2021, arXiv:2102.02079)."""
    labels = labels_of(pool)
    require_labels(labels_per_client, labels, pool)
    flower = _flower()
    partitioner = flower.PathologicalPartitioner(
        num_partitions=clients,
        partition_by="group",
        num_classes_per_partition=labels_per_client,
        class_assignment_mode="first-deterministic",  # so that every label is used once there are enough clients
        seed=_flower_seed(seed),
    )
    return Parts(_run(partitioner, pool, seed, range(clients)))


def dirichlet(pool: Pool, clients: int, seed: int, *, alpha: float = 0.5, min_samples: int = 10) -> Parts:
    """Draw for each label how it is spread over the clients: Dirichlet(alpha) (Yurochkin et al. 2019)."""
    require(
        ("alpha", alpha, 0 < alpha < math.inf, "above 0"), ("min_samples", min_samples, min_samples >= 0, "at least 0")
    )
    partitioner = _flower().DirichletPartitioner(
        num_partitions=clients,
        partition_by="group",
        alpha=float(alpha),
        min_partition_size=min_samples,
        self_balancing=False,
        seed=_flower_seed(seed),
    )
    return Parts(_run(partitioner, pool, seed, range(clients)))


def shards(pool: Pool, clients: int, seed: int, *, shards_per_client: int = 2) -> Parts:
    """Sort by label, cut into equal shards, and deal each client a few of them (McMahan et al. 2017)."""
    require(("shards_per_client", shards_per_client, shards_per_client >= 1, "at least 1"))
    shards = clients * shards_per_client
    if shards > len(pool.train):
        raise DataError(
            f"{clients} clients with {shards_per_client} shards each need {shards} training examples, but "
            f"{pool.name} has {len(pool.train)}"
        )
    partitioner = _flower().ShardPartitioner(
        num_partitions=clients,
        partition_by="group",
        num_shards_per_partition=shards_per_client,
        seed=_flower_seed(seed),
    )
    return Parts(_run(partitioner, pool, seed, range(clients)))


def natural(pool: Pool, clients: int | None, seed: int, *, min_samples: int = 2) -> Parts:
    """Make each owner (writer, speaker, user) a client: those with the most examples, most first."""
    if pool.natural is None:
        raise DataError(f"partition 'natural' needs data that says who owns each example; {pool.name} does not")
    # An owner needs two examples: one to train on, one to be tested on.
    require(("min_samples", min_samples, min_samples >= 2, "at least 2"))
    names, counts = np.unique(pool.natural[pool.train], return_counts=True)
    by_size = np.argsort(-counts, kind="stable")
    chosen = by_size[counts[by_size] >= min_samples]
    if len(chosen) < (clients or 1):
        raise DataError(
            f"{clients or 1} clients need as many owners with at least {min_samples} examples, but of the "
            f"{len(names)} owners in {pool.name} only {len(chosen)} have that many"
        )
    chosen = chosen[:clients]
    partitioner = _flower().NaturalIdPartitioner(partition_by="owner")
    # The partitioner numbers the owners in sorted order, as np.unique does.
    return Parts(_run(partitioner, pool, seed, chosen.tolist()), names=names[chosen].tolist(), test="own")


def _flower() -> Any:
    return import_extra("flwr_datasets.partitioner", "flwr-datasets", "data", "this partition")


def _flower_seed(seed: int) -> int:
    return int(rng.generator(seed, "flwr-datasets").integers(2**31))


def _run(partitioner: Any, pool: Pool, seed: int, numbers: Sequence[int]) -> list[Indices]:
    """Return the parts with these numbers from one of flwr-datasets' partitioners, quietly."""
    datasets = import_extra("datasets", "datasets", "data", "this partition")
    indices = shuffled(pool, seed)
    columns: dict[str, Any] = {"index": indices, "group": pool.groups[indices]}
    if pool.natural is not None:
        columns["owner"] = pool.natural[indices].tolist()
    partitioner.dataset = datasets.Dataset.from_dict(columns)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # progress bars go to stderr
        warnings.simplefilter("ignore")
        try:
            return [
                partitioner.load_partition(number).with_format("numpy")["index"][:].astype(np.int64)
                for number in numbers
            ]
        except ValueError as error:
            raise DataError(f"flwr-datasets cannot partition {pool.name} like that: {error}") from error
