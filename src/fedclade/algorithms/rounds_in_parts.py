"""Rounds in which clients train on equal parts of their data one by one, which tells whether there are clusters.

A client's update is then the mean of its parts' updates. So a model that such rounds led to owes no part more than
another, and shuffling parts (:mod:`fedclade.clustering.part_test`) is exact there, as it is at the initial model. A
model that clients trained on all of their data has learnt examples by heart, and the parts of a client have that in
common: there the test would part clients of one distribution.

A part has an r-th of the data, and would move the model by an r-th of what all of it does. So it is trained in smaller
batches, and takes as many steps (:meth:`~fedclade.core.LocalTraining.on_part`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedclade.clustering import VIEWS, lowest_p_value, parts_for
from fedclade.core import Clients, ParameterTree, Round, Updates

SMALLEST_PART = 10
"""Examples that a part should have, where a client has enough for two."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parting:
    """How clients part their data: r parts of s examples each; what is left over is in none.

    With s = 0 parts are as large as they can be, and drawn anew each time.
    """

    parts: int
    size: int

    @classmethod
    def of(cls, sizes: Mapping[int, int], level: float) -> Parting | None:
        """Choose r and s for these clients; None if their data cannot be parted.

        Parts are of one size, or they would not be exchangeable. A few clients that have much less than the others do
        not decide: those with less than half of what nine in ten have are left out, and those with less than a quarter
        of what half of them have, since sizes are only claimed, and few examples would leave nothing to test.
        """
        every = np.fromiter(sizes.values(), dtype=np.int64, count=len(sizes))
        most = every[2 * every >= max(np.quantile(every, 0.1), np.median(every) / 2)]
        return cls._of(len(most), int(most.min()), level)

    @classmethod
    def of_cohorts(cls, sizes: Mapping[int, int], level: float, sample: int) -> Parting | None:
        """Choose r and s for tests on samples of cohorts; None if their data cannot be parted.

        There are others to draw from, so that the half of the clients that has less is not tested.
        """
        every = np.fromiter(sizes.values(), dtype=np.int64, count=len(sizes))
        return cls._of(sample, int(np.quantile(every, 0.5, method="lower")), level)

    @classmethod
    def _of(cls, clients: int, least: int, level: float) -> Parting | None:
        if clients < 2 or least < 2:
            return None
        parts = parts_for(clients, least, level, SMALLEST_PART)
        return cls(parts, least // parts)

    @classmethod
    def to_test(cls, method: str, clients: Clients, level: float) -> Parting | None:
        """Choose r and s; say in the log if a test at half of the level cannot find anything."""
        parting, needed = cls.of(clients.sizes, level), level / 2 / VIEWS
        if parting is None:
            _log.warning("%s cannot part the data of these clients: fewer than two have two training examples", method)
            return None
        able = parting.able(clients.sizes, clients.ids)
        if (lowest := lowest_p_value(len(able), parting.parts)) > needed:
            _log.warning(
                "%s finds no clusters at algorithm.level = %g in the first rounds: from %d parts of the data of %d "
                "clients no p-value is below %.2g, and %.2g is needed; raise the level, or take more clients or data",
                *(method, level, parting.parts, len(able), lowest, needed),
            )
        return parting

    @property
    def examples(self) -> int:
        """How many a client needs."""
        return self.parts * max(1, self.size)

    def able(self, sizes: Mapping[int, int], clients: Iterable[int]) -> list[int]:
        """Return which of some clients have enough examples, ascending."""
        return [client for client in sorted(clients) if sizes[client] >= self.examples]

    def ask(
        self,
        clients: Clients,
        ids: list[int],
        models: Tensor,
        this_round: Round,
        *,
        rows: Sequence[int] | None = None,
        compares: bool = True,
    ) -> Updates:
        """Let clients train on their parts, and send signatures of these if they are compared.

        They start from ``models [K, S]``, each from that in its row; from the first, if no rows are given.
        """
        in_parts = replace(this_round, replicates=self.parts, part_size=self.size, require_all=True)
        in_parts = replace(in_parts, compares_parts=compares)
        return clients.train(ids, models, rows or [0] * len(ids), in_parts).select(ids)

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
        """Train clusters' models in parts; return the updates by which they move, and those of them made in parts.

        All of ``members`` that are able to are asked, one at least. Others of the cohort train on all that they have.
        """
        able = self.able(clients.sizes, members)
        models, rows = tree.models([tree.leaf_of[client] for client in able])
        in_parts = updates = self.ask(clients, able, models, this_round, rows=rows, compares=compares)
        if others := sorted(set(cohort).difference(able)):
            models, rows = tree.models([tree.leaf_of[client] for client in others])
            alone = replace(this_round, purpose="train the smallest")
            updates = updates.concat(clients.train(others, models, rows, alone))
            updates = updates.select(sorted([*able, *others]))
        return updates, in_parts


HALVES = Parting(2, 0)
"""Two parts of all data."""
