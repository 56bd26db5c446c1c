"""Splits of clients' data: disjoint parts of equal size, on each of which a client trains.

A client trains from the same model on one split after the other, and its update is the mean of the
splits' updates. A model that results from such rounds depends on all splits alike. Shuffling the
splits between clients (:mod:`fedclade.clustering.part_test`) is therefore an exact test at this
model, as it is at the initial model. A model that clients trained on all of their data has
memorized examples, which makes the splits of one client similar: at such a model the test would
separate clients of one distribution.

With r splits, each has an r-th of the data, and in batches of the usual size its training would
have an r-th of the steps. So a split is trained in smaller batches, with as many steps as all data
(:meth:`~fedclade.core.LocalTraining.on_part`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering import VIEWS, choose_part_count, compute_lowest_p_value
from fedclade.core import (
    LEAST_DIVIDED,
    Clients,
    ClientWork,
    Nothing,
    ParameterTree,
    Round,
    RoundPlan,
    Splits,
    Updates,
    ascending_ids,
    id_array,
    numbers_of,
)

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_SPLIT = 10
"""Number of examples that a split should have, if clients have enough for two such splits."""

SMALLEST_CHECK_SPLIT = 20
"""Number of examples that each of three or more splits should have in a check at a trained model.

With fewer, a client in a network that limits what its sums reveal would refuse the splits, since it
has already replied for the first round's splits and for several halves.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSplits:
    """Number and size of the splits into which every client divides its training data.

    Both are the same for all clients, since splits of different sizes would not be exchangeable
    under the null hypothesis of one distribution. Examples that are left over are not used.

    Parameters
    ----------
    count
        Number r of splits of a client, at least 2.
    size
        Number s of examples in a split. 0: splits are as large as a client's data allows, and are
        drawn again each time.
    """

    count: int
    size: int

    @classmethod
    def choose(cls, sizes: Mapping[int, int], level: float) -> DataSplits | None:
        """Choose the number and size of splits for a federation; None if data cannot be split.

        The client with the fewest examples determines the size, but a few clients with much less
        data than the others are left out. Otherwise a single client that reports a small number
        would leave too few examples to test. A client is left out if its number of examples is less
        than half of the tenth percentile of all clients' numbers, or less than a quarter of their
        median.

        Parameters
        ----------
        sizes
            Number of training examples of each client.
        level
            Level of the test, which determines how many splits are needed.
        """
        considered = _leave_smallest_out(sizes)
        return cls._choose(len(considered), int(considered.min()), level)

    @classmethod
    def choose_for_checks(cls, sizes: Mapping[int, int], most: int) -> tuple[DataSplits, list[int]]:
        """Choose splits of all data of each client, for a check at a trained model.

        There are up to ``most`` splits of at least :data:`SMALLEST_CHECK_SPLIT` examples each, or
        two splits of any size. Clients with much less data than the others do not count, as in
        :meth:`choose`.

        Returns
        -------
        tuple
            The splits, and the ids of the clients with enough examples for them.
        """
        smallest = int(_leave_smallest_out(sizes).min())
        count = max(HALVES.count, min(most, smallest // SMALLEST_CHECK_SPLIT))
        splits = cls(count, 0)
        if count == HALVES.count:
            return splits, splits.select_able(sizes, sizes)
        needed = count * SMALLEST_CHECK_SPLIT
        return splits, [client for client in sorted(sizes) if sizes[client] >= needed]

    @classmethod
    def choose_for_cohorts(
        cls, sizes: Mapping[int, int], level: float, sample: int
    ) -> DataSplits | None:
        """Choose the number and size of splits for tests on a sample of clients of a cohort.

        There are enough clients to draw from. So splits are as large as the median client's data
        allows, and the half of the clients with less data is not tested. The result is None if data
        cannot be split.

        Parameters
        ----------
        sizes
            Number of training examples of each client.
        level
            Level of the tests.
        sample
            Number of clients that are tested.
        """
        counts = _to_array(sizes)
        if counts.any():
            counts = counts[counts > 0]  # clients whose data cannot be divided are not tested
        median = np.quantile(counts, 0.5, method="lower")
        return cls._choose(sample, int(median), level)

    @classmethod
    def _choose(cls, clients: int, smallest: int, level: float) -> DataSplits | None:
        """Choose the number and size of splits, given the number of clients and of examples.

        Each of the ``clients`` clients has at least ``smallest`` examples. The result is None with
        fewer than two clients, or fewer than two examples.
        """
        if clients < 2 or smallest < 2:
            return None
        count = choose_part_count(clients, smallest, level, SMALLEST_SPLIT)
        return cls(count, smallest // count)

    @classmethod
    def choose_for_test(cls, method: str, clients: Clients, level: float) -> DataSplits | None:
        """Choose the splits for a run, and log a warning if its first test cannot find clusters.

        The first test has half of ``level``. The warning is logged if no p-value of this test can
        be small enough.

        Parameters
        ----------
        method
            Name of the method, for the warning.
        clients
            All clients of the run.
        level
            Level of all tests of the run.

        Returns
        -------
        DataSplits or None
            None if the data cannot be split.
        """
        sizes = divisible_sizes(clients)
        splits = cls.choose(sizes, level)
        if splits is None:
            _log.warning(
                "%s cannot split the data of these clients, since fewer than two clients have two "
                "training examples, or %d groups of dependent examples; use more clients or data",
                method,
                LEAST_DIVIDED,
            )
            return None
        able = splits.select_able(sizes, clients.ids)
        lowest = compute_lowest_p_value(len(able), splits.count)
        needed = level / 2 / VIEWS
        if lowest > needed:
            _log.warning(
                "%s cannot find clusters at algorithm.level = %g in the first rounds: from %d "
                "splits of the data of %d clients no p-value is below %.2g, but %.2g is needed; "
                "raise algorithm.level, or use more clients or data",
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
        """Smallest number of training examples with which a client can make these splits."""
        return self.count * max(1, self.size)

    def select_able(self, sizes: Mapping[int, int], clients: Collection[int]) -> list[int]:
        """Return the clients that have enough examples for these splits, in ascending order."""
        ids = ascending_ids(clients)
        able = numbers_of(sizes, ids) >= self.min_examples
        return id_array(ids)[able].tolist()

    def request_updates(
        self,
        clients: Clients,
        ids: list[int],
        models: Tensor,
        this_round: Round,
        *,
        rows: Sequence[int] | None = None,
        compares: bool = True,
        sent_before: bool = False,
    ) -> Updates:
        """Query clients for updates from their splits, without moving any model.

        Clients that do not reply at first are queried again.

        Parameters
        ----------
        clients
            All clients of the run.
        ids
            Ids of the clients that train.
        models
            Models ``[K, S]``, one parameter vector in each row.
        this_round
            Number, seed and local training of the round.
        rows
            Row of ``models`` from which each client starts; by default the first.
        compares
            Whether clients send a signature (a short vector for comparison) of each split's update,
            and not only of the mean update.
        sent_before
            Whether clients have received the models earlier in this round.
        """
        splits = Splits(self.count, self.size, compared=compares)
        updates = clients.train(
            ids,
            models,
            rows or [0] * len(ids),
            this_round,
            work=ClientWork(data=splits, store=Nothing()),
            sent_before=sent_before,
            require_all=True,
        )
        return updates.select(ids)

    def train(
        self,
        tree: ParameterTree,
        members: Collection[int],
        cohort: Iterable[int],
        clients: Clients,
        this_round: RoundPlan,
        *,
        compares: bool,
        sent_before: bool = False,
    ) -> tuple[Updates, Updates]:
        """Train clusters' models for a round, in splits where clients have enough examples.

        All of ``members`` with enough examples train in splits, sampled for the round or not; at
        least one must have enough. The other clients of the cohort train on all their data.

        Parameters
        ----------
        tree
            The tree with the clusters' models.
        members
            Ids of the clients that train in splits.
        cohort
            Ids of the clients sampled for this round.
        clients
            All clients of the run.
        this_round
            Number, seed and local training of the round.
        compares
            Whether clients send a signature of each split's update.
        sent_before
            Whether clients have received the models earlier in this round.

        Returns
        -------
        tuple of Updates
            The updates of all clients that trained, and the updates that were made in splits.
        """
        able = self.select_able(divisible_sizes(clients), members)
        models, rows = tree.models([tree.leaf_of[client] for client in able])
        in_splits = self.request_updates(
            clients, able, models, this_round, rows=rows, compares=compares, sent_before=sent_before
        )
        others = sorted(set(cohort).difference(able))
        if not others:
            return in_splits, in_splits
        models, rows = tree.models([tree.leaf_of[client] for client in others])
        whole = replace(this_round, purpose="train the smallest")
        on_all_data = clients.train(
            others, models, rows, whole, work=ClientWork(store=Nothing()), sent_before=sent_before
        )
        updates = in_splits.concat(on_all_data)
        return updates.select(sorted([*able, *others])), in_splits


def all_take_part(tree: ParameterTree, cohort: Iterable[int], clients: Clients) -> bool:
    """Return whether a round trains all clients of a tree that are available, and not a sample.

    A client that is unavailable in a round does not turn the round into a sample.
    """
    in_round = set(cohort)
    # With a sample of many clients, the search ends at one of the first.
    return all(client in in_round for client in clients.reachable if client in tree.leaf_of)


def divisible_sizes(clients: Clients) -> Mapping[int, int]:
    """Return the number of training examples of each client that can be divided into splits.

    The number is 0 for a client whose examples form too few groups of dependent examples: splits
    contain whole groups, and such a client is not tested.
    """
    undivided = clients.undivided
    if not undivided:
        return clients.sizes
    return {client: 0 if client in undivided else size for client, size in clients.sizes.items()}


HALVES = DataSplits(2, 0)
"""Splits of all data of a client into two halves, which are drawn again each time."""


def _leave_smallest_out(sizes: Mapping[int, int]) -> NDArray[np.int64]:
    """Return the numbers of examples of clients, without clients with much less data than most.

    A client is left out if its number of examples is less than half of the tenth percentile of all
    clients' numbers, or less than a quarter of their median.
    """
    counts = _to_array(sizes)
    if counts.any():
        counts = counts[counts > 0]  # clients whose data cannot be divided are not tested
    enough = max(np.quantile(counts, 0.1), np.median(counts) / 2)
    return counts[2 * counts >= enough]


def _to_array(sizes: Mapping[int, int]) -> NDArray[np.int64]:
    """Convert clients' numbers of examples to an array, in the order of the mapping."""
    return np.fromiter(sizes.values(), dtype=np.int64, count=len(sizes))
