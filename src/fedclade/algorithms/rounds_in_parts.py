"""Rounds in which clients train on equal parts of their data one by one, which tells whether there are clusters.

A client's update is then the mean of its parts' updates. So a model that such rounds led to owes no part more than
another, and shuffling parts (:mod:`fedclade.clustering.part_test`) is exact there, as it is at the initial model. A
model that clients trained on all of their data has learnt examples by heart, and the parts of a client have that in
common: there the test would part clients of one distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedclade.clustering import parts_for
from fedclade.core import Clients, Round, Updates

SMALLEST_PART = 10
"""Examples that a part should have, where a client has enough for two."""


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
        not decide: those with less than half of what nine in ten have are left out.
        """
        most = [size for size in sizes.values() if 2 * size >= np.quantile(list(sizes.values()), 0.1)]
        if len(most) < 2 or min(most) < 2:
            return None
        parts = parts_for(len(most), min(most), level, SMALLEST_PART)
        return cls(parts, min(most) // parts)

    @property
    def examples(self) -> int:
        """How many a client needs."""
        return self.parts * max(1, self.size)

    def able(self, sizes: Mapping[int, int], clients: Iterable[int]) -> list[int]:
        """Return which of some clients have enough examples, ascending."""
        return [client for client in sorted(clients) if sizes[client] >= self.examples]

    def ask(self, clients: Clients, ids: list[int], model: Tensor, this_round: Round) -> Updates:
        """Let clients train on their parts from one model."""
        in_parts = replace(this_round, replicates=self.parts, part_size=self.size, require_all=True)
        return clients.train(ids, model[None], [0] * len(ids), in_parts).select(ids)


HALVES = Parting(2, 0)
"""Two parts of all data."""
