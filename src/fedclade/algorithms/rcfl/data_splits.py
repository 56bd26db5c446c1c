"""Splits of clients' data: clients train on equal splits of their data, one by one.

A client's update is then the mean of the updates of its splits. So a model that such rounds led to
depends on all splits alike, and shuffling the splits (:mod:`fedclade.clustering.part_test`) is an
exact test there, as it is at the initial model. A model that clients trained on all of their data
has memorized examples, which the splits of one client have in common: there the test would separate
clients of one distribution.

One of r splits has an r-th of the data, and would move the model by an r-th of what all data does.
So it is trained in smaller batches, and takes as many steps as all data
(:meth:`~fedclade.core.LocalTraining.on_part`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering import VIEWS, choose_part_count, compute_lowest_p_value
from fedclade.core import Clients, ParameterTree, Round, Updates

SMALLEST_SPLIT = 10
"""Number of examples that a split should have, where a client has enough for two such splits."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSplits:
    """Division of every client's data into r splits of s examples, the same for all clients.

    Examples that are left over are not used. Splits of different sizes would not be exchangeable
    under the null hypothesis.

    Parameters
    ----------
    count
        r, at least 2.
    size
        s. With 0, splits are as large as a client's data allows, and are drawn again each time.
    """

    count: int
    size: int

    @classmethod
    def choose(cls, sizes: Mapping[int, int], level: float) -> DataSplits | None:
        """Choose r and s for these clients; None if their data cannot be split.

        A few clients with much less data than the others do not decide: clients with less than half
        of what nine in ten have are left out, and those with less than a quarter of the median,
        since sizes are only claimed, and few examples would leave nothing to test.
        """
        counts = _to_array(sizes)
        enough = max(np.quantile(counts, 0.1), np.median(counts) / 2)
        considered = counts[2 * counts >= enough]
        return cls._choose(len(considered), int(considered.min()), level)

    @classmethod
    def choose_for_cohorts(
        cls, sizes: Mapping[int, int], level: float, sample: int
    ) -> DataSplits | None:
        """Choose r and s for tests on ``sample`` clients of a cohort; None if data cannot be split.

        There are enough clients to draw from, so that the half with less data is not tested.
        """
        median = np.quantile(_to_array(sizes), 0.5, method="lower")
        return cls._choose(sample, int(median), level)

    @classmethod
    def _choose(cls, clients: int, smallest: int, level: float) -> DataSplits | None:
        """Choose r and s for a number of clients that have at least ``smallest`` examples each."""
        if clients < 2 or smallest < 2:
            return None
        count = choose_part_count(clients, smallest, level, SMALLEST_SPLIT)
        return cls(count, smallest // count)

    @classmethod
    def choose_for_test(cls, method: str, clients: Clients, level: float) -> DataSplits | None:
        """Choose r and s, and warn in the log if a test at half of the level finds nothing."""
        splits = cls.choose(clients.sizes, level)
        if splits is None:
            _log.warning(
                "%s cannot part the data of these clients: fewer than two have two training "
                "examples",
                method,
            )
            return None
        able = splits.select_able(clients.sizes, clients.ids)
        lowest = compute_lowest_p_value(len(able), splits.count)
        needed = level / 2 / VIEWS
        if lowest > needed:
            _log.warning(
                "%s finds no clusters at algorithm.level = %g in the first rounds: from %d parts "
                "of the data of %d clients no p-value is below %.2g, and %.2g is needed; raise "
                "the level, or take more clients or data",
                method,
                level,
                splits.count,
                len(able),
                lowest,
                needed,
            )
        return splits

    @property
    def min_examples(self) -> int:
        """Number of examples that a client needs."""
        return self.count * max(1, self.size)

    def select_able(self, sizes: Mapping[int, int], clients: Iterable[int]) -> list[int]:
        """Return the clients that have enough examples, in ascending order."""
        return [client for client in sorted(clients) if sizes[client] >= self.min_examples]

    def request_updates(
        self,
        clients: Clients,
        ids: list[int],
        models: Tensor,
        this_round: Round,
        *,
        rows: Sequence[int] | None = None,
        compares: bool = True,
    ) -> Updates:
        """Let clients train on their splits.

        Parameters
        ----------
        clients
            All clients.
        ids
            Those that train.
        models
            ``[K, S]``.
        this_round
            The round; also clients that do not reply at first are queried again.
        rows
            Row of ``models`` from which each client starts; by default the first.
        compares
            Whether clients send a signature of each split's update, and not only of their mean.
        """
        in_splits = replace(
            this_round,
            replicates=self.count,
            part_size=self.size,
            require_all=True,
            compares_parts=compares,
        )
        return clients.train(ids, models, rows or [0] * len(ids), in_splits).select(ids)

    def train(
        self,
        tree: ParameterTree,
        members: Iterable[int],
        cohort: Iterable[int],
        clients: Clients,
        this_round: Round,
        *,
        compares: bool,
    ) -> tuple[Updates, Updates]:
        """Train clusters' models in splits.

        All of ``members`` with enough examples train, whether or not they are in the cohort; there
        must be one at least. Others of the cohort train on all their data.

        Returns
        -------
        tuple of Updates
            The updates by which the clusters move, and those of them that were made in splits.
        """
        able = self.select_able(clients.sizes, members)
        models, rows = tree.models([tree.leaf_of[client] for client in able])
        in_splits = self.request_updates(
            clients, able, models, this_round, rows=rows, compares=compares
        )
        others = sorted(set(cohort).difference(able))
        if not others:
            return in_splits, in_splits
        models, rows = tree.models([tree.leaf_of[client] for client in others])
        whole = replace(this_round, purpose="train the smallest")
        updates = in_splits.concat(clients.train(others, models, rows, whole))
        return updates.select(sorted([*able, *others])), in_splits


HALVES = DataSplits(2, 0)
"""Two halves of all data of a client."""


def _to_array(sizes: Mapping[int, int]) -> NDArray[np.int64]:
    return np.fromiter(sizes.values(), dtype=np.int64, count=len(sizes))
