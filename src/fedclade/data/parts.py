"""The result of a partition, and what all partitions use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedclade.core import ConfigError, Indices, require, rng
from fedclade.data.pool import Pool

TestRule = Literal["pool", "parts", "matched", "own"]
"""What to test clients on.

The whole test split; an equal part of it; its examples in proportion to the client's labels; or examples of their own.
"""


@dataclass(frozen=True, eq=False)
class Parts:
    """What each client gets: indices into the pool, all in ``pool.train``, or in ``pool.test`` for tests of its own."""

    indices: list[Indices]  # of each client; no index is given out twice
    names: list[str] | None = None  # of the clients, where the partition knows them
    test: TestRule = "matched"  # so that a client's test data has the distribution of its training data
    own_test_fraction: float = 0.2  # of its own examples, that a client holds back where it is tested on these


def shuffled(pool: Pool, seed: int) -> Indices:
    """Return the training examples in random order."""
    return rng.generator(seed, "partition").permutation(pool.train)


def labels_of(pool: Pool) -> Indices:
    """Return the groups that occur in the training data, in order; a partition by label goes by these."""
    check_groups(pool)
    return np.unique(pool.groups[pool.train])


def check_groups(pool: Pool) -> None:
    """Check that a partition can go by labels."""
    if pool.task in ("multilabel", "regression") and not pool.groups.any():
        raise ConfigError(
            f"a partition by label needs labels, but {pool.name} has {pool.task} targets and no groups; take 'iid', "
            "'quantity_skew' or 'natural'"
        )


def require_labels(labels_per_client: int, labels: Indices, pool: Pool) -> None:
    """Check that there are so many labels for a client."""
    rule = f"from 1 to the number of labels ({len(labels)}) in {pool.name}"
    require(("labels_per_client", labels_per_client, 1 <= labels_per_client <= len(labels), rule))
