"""Which examples of which clients make up each step of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the clients ``start`` to ``stop``, with ``width`` rows for each."""

    start: int
    stop: int
    width: int
    own: Tensor | None
    """How many of its rows are a client's own, int64 ``[k]``; None if all are, and none is padding."""

    @property
    def kind(self) -> tuple[int, int, int]:
        """What steps that are alike have in common."""
        return self.start, self.stop, self.width

    @property
    def clients(self) -> int:
        """How many train: k."""
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """Rows of all its clients."""
        return self.clients * self.width


class Plan:
    """The steps of an epoch, the same in every one; ``kinds`` counts those that are alike.

    The clients come with the largest first. So those that still train are always the first ones; a client's last,
    ragged batch is padded to the width of the others with copies of one of its examples, which are not counted. Where
    padding would show (BatchNorm, dropout), ragged batches are steps of their own instead, one for each size.
    """

    @staticmethod
    @lru_cache(maxsize=16)
    def of(sizes: tuple[int, ...], batch_size: int, padding: bool) -> Plan:
        """Return the plan of these clients, which is kept: rounds are often alike."""
        return Plan(sizes, batch_size, padding)

    def __init__(self, sizes: Sequence[int], batch_size: int, padding: bool) -> None:
        counts = np.asarray(sizes)
        self._counts = counts
        self._client = torch.from_numpy(np.arange(len(counts)).repeat(counts))
        ends = counts.cumsum()
        steps: list[Step] = []
        places: list[np.ndarray] = []
        real: list[np.ndarray] = []
        owners: list[np.ndarray] = []
        for drawn in range(0, int(counts.max(initial=0)), batch_size):
            left = np.minimum(counts[counts > drawn] - drawn, batch_size)
            edges = [0, len(left)] if padding else [0, *(np.flatnonzero(np.diff(left)) + 1), len(left)]
            for start, stop in pairwise(edges):
                width = int(left[start])
                first = (ends[start:stop] - counts[start:stop] + drawn)[:, None]
                column = np.arange(width)[None]
                is_real = column < left[start:stop, None]
                own = None if left[stop - 1] == width else torch.from_numpy(left[start:stop])
                steps.append(Step(int(start), int(stop), width, own))
                places.append(np.where(is_real, first + column, first).ravel())
                real.append(is_real.ravel())
                owners.append(np.arange(start, stop).repeat(width))
        self.steps: tuple[Step, ...] = tuple(steps)
        self.kinds = Counter(step.kind for step in steps)
        self._places = torch.from_numpy(np.concatenate(places))
        self._owners = np.concatenate(owners)
        self._padding = torch.from_numpy(~np.concatenate(real))
        self._padded = bool(self._padding.any())

    def of_examples(self, of_clients: Sequence[int]) -> Tensor:
        """Return for each of the clients' examples, one client after another, the number of its client."""
        return torch.tensor(of_clients).index_select(0, self._client)

    def rows(self, examples: Tensor) -> Tensor:
        """Return which example each row of the epoch is, of those in the orders drawn, one client after another."""
        return examples.index_select(0, self._places)

    def means(self, losses: Tensor) -> Tensor:
        """Return each client's mean over its examples of the losses of the rows of some epochs, float64 ``[n]``."""
        epochs = losses.cpu().double().numpy().reshape(-1, len(self._owners))
        sums = np.bincount(self._owners, epochs.sum(0), len(self._counts))
        return torch.from_numpy(sums / (len(epochs) * self._counts))

    def masked(self, targets: Tensor, ignored: int) -> Tensor:
        """Return the targets of all rows, without those of padding."""
        if not self._padded:
            return targets
        mask = self._padding.to(targets.device).view(-1, *(1,) * (targets.dim() - 1))
        return targets.masked_fill(mask, ignored)
