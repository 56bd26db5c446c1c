"""What every partition gives out, and what they all go by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedclade.core import require, rng
from fedclade.data.federation import Indices, Pool

TestRule = Literal["pool", "matched", "own"]
"""What to test clients on: the whole test split, its examples in proportion to the client's labels, or their own."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What a partition gives out.

    Parameters
    ----------
    indices
        For each client, indices into the pool, all of them in ``pool.train``, or in ``pool.test`` where clients are
        tested on their own; no index is given out twice.
    names
        Names of the clients, where the partition knows them.
    test
        What the clients are to be tested on, so that it has the distribution of their training data.
    own_test_fraction
        Part of its own examples that a client holds back for testing, where it is tested on these.
    """

    indices: list[Indices]
    names: list[str] | None = None
    test: TestRule = "matched"
    own_test_fraction: float = 0.2


def shuffled(pool: Pool, seed: int) -> Indices:
    """Return the training examples in random order."""
    return rng.generator(seed, "partition").permutation(pool.train)


def labels_of(pool: Pool) -> Indices:
    """Return what a partition by label goes by: the groups that occur in the training data, in order."""
    return np.unique(pool.groups[pool.train])


def require_labels(labels_per_client: int, labels: Indices, pool: Pool) -> None:
    """Check that clients can have so many labels each.

    Raises
    ------
    ConfigError
        If it is not between 1 and the number of labels.
    """
    rule = f"from 1 to the number of labels ({len(labels)}) in {pool.name}"
    require(("labels_per_client", labels_per_client, 1 <= labels_per_client <= len(labels), rule))
