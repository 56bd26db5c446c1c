"""The partitions that flwr-datasets has: pathological, dirichlet, shards."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fedclade.core import DataError, import_extra, require, rng
from fedclade.data.parts import Parts, check_groups, labels_of, require_labels, shuffled
from fedclade.data.pool import Pool


class _NotDrawnError(DataError):
    """The partitioner of flwr-datasets gave up."""


def pathological(pool: Pool, clients: int, seed: int, *, labels_per_client: int = 2) -> Parts:
    """Give each client examples of a few labels only (McMahan et al. 2017; Li et al. 2021, arXiv:2102.02079)."""
    require_labels(labels_per_client, labels_of(pool), pool)
    mode = "first-deterministic"  # so that every label is used once there are enough clients
    options = {"num_classes_per_partition": labels_per_client, "class_assignment_mode": mode}
    return _partition("PathologicalPartitioner", pool, clients, seed, **options)


def check_dirichlet(alpha: float, min_samples: int) -> None:
    """Check the range of :func:`dirichlet`'s numbers."""
    require(
        ("alpha", alpha, 0 < alpha < math.inf, "above 0"), ("min_samples", min_samples, min_samples >= 0, "at least 0")
    )


def check_shards(shards_per_client: int) -> None:
    """Check that clients get a shard."""
    require(("shards_per_client", shards_per_client, shards_per_client >= 1, "at least 1"))


def dirichlet(
    pool: Pool,
    clients: int,
    seed: int,
    *,
    alpha: float = 0.5,
    min_samples: int = 10,
    balanced: bool = False,
    tests: Literal["matched", "own"] = "matched",
) -> Parts:
    """Draw for each label how it is spread over the clients: Dirichlet(alpha) (Yurochkin et al. 2019).

    With ``balanced``, as in the authors' code and in PFLlib's, a client that has more than its even share gets no
    further labels. Clients are tested on ``matched`` examples of the source's test split; or that is shared out as
    well, as in PFLlib, and each client holds back some of its ``own`` examples.
    """
    check_dirichlet(alpha, min_samples)
    options = {"alpha": float(alpha), "min_partition_size": min_samples, "self_balancing": balanced}
    if tests == "own":
        pool = replace(pool, train=np.concatenate([pool.train, pool.test]))
    check_groups(pool)
    there = len(pool.train)
    if clients * min_samples > there:
        raise DataError(
            f"{clients} clients with at least min_samples = {min_samples} examples each need {clients * min_samples}, "
            f"but {pool.name} has {there}; set a smaller min_samples, or fewer clients"
        )
    try:
        parts = _partition("DirichletPartitioner", pool, clients, seed, **options)
    except _NotDrawnError as error:
        raise DataError(
            f"no draw of Dirichlet(alpha = {alpha:g}) gave each of {clients} clients at least min_samples = "
            f"{min_samples} of the {there} examples in {pool.name}; set a smaller min_samples, fewer clients, or a "
            "larger alpha"
        ) from error
    return replace(parts, test=tests)


def shards(pool: Pool, clients: int, seed: int, *, shards_per_client: int = 2) -> Parts:
    """Sort by label, cut into equal shards, and deal each client a few of them (McMahan et al. 2017)."""
    check_shards(shards_per_client)
    shards = clients * shards_per_client
    if shards > len(pool.train):
        raise DataError(
            f"{clients} clients with {shards_per_client} shards each need {shards} training examples, but "
            f"{pool.name} has {len(pool.train)}"
        )
    return _partition("ShardPartitioner", pool, clients, seed, num_shards_per_partition=shards_per_client)


def _partition(name: str, pool: Pool, clients: int, seed: int, **options: Any) -> Parts:
    """Partition a pool by its groups with one of flwr-datasets' classes, quietly."""
    check_groups(pool)
    flower = import_extra("flwr_datasets.partitioner", "flwr-datasets", "data", "this partition")
    datasets = import_extra("datasets", "datasets", "data", "this partition")
    drawn = int(rng.generator(seed, "flwr-datasets").integers(2**31))
    partitioner = getattr(flower, name)(num_partitions=clients, partition_by="group", seed=drawn, **options)
    indices = shuffled(pool, seed)
    partitioner.dataset = datasets.Dataset.from_dict({"index": indices, "group": pool.groups[indices]})
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # progress bars go to stderr
        warnings.simplefilter("ignore")
        try:
            parts = [partitioner.load_partition(client).with_format("numpy")["index"][:] for client in range(clients)]
        except ValueError as error:
            raise _NotDrawnError(f"flwr-datasets cannot partition {pool.name} like that: {error}") from error
    return Parts([part.astype(np.int64) for part in parts])
