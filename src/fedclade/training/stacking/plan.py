"""Which examples of which clients make up each step of local training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedclade.core import count_batches


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
    """The steps of an epoch, the same in every one; or of as many epochs as a number of steps takes.

    ``kinds`` counts steps that are alike, and clients between two of the ``edges`` take part in the same ones.

    The clients come with the largest first. So those that still train are always the first ones; a client's last,
    ragged batch is padded to the width of the others with copies of one of its examples, which are not counted. Where
    padding would show (BatchNorm, dropout), ragged batches are steps of their own instead, one for each run of clients
    with one size of them.
    """

    @staticmethod
    @lru_cache(maxsize=16)
    def of(
        sizes: tuple[int, ...], batch_size: int, padding: bool, steps: int | None = None, smallest_batch: int = 1
    ) -> Plan:
        """Return the plan of these clients, which is kept: rounds are often alike."""
        return Plan(sizes, batch_size, padding, steps, smallest_batch)

    def __init__(
        self, sizes: Sequence[int], batch_size: int, padding: bool, steps: int | None = None, smallest_batch: int = 1
    ) -> None:
        counts = np.asarray(sizes)
        batches = [count_batches(size, batch_size, smallest_batch) for size in sizes]
        of_epoch = np.array(batches, dtype=counts.dtype)
        taken = of_epoch if steps is None else np.full_like(counts, steps)
        self.epochs = -(-taken // of_epoch)
        """How many times each client's examples are put in order, int ``[n]``."""
        drawn = counts * self.epochs
        self._client = torch.from_numpy(np.arange(len(counts)).repeat(drawn))
        begins = drawn.cumsum() - drawn
        planned: list[Step] = []
        places: list[np.ndarray] = []
        real: list[np.ndarray] = []
        owners: list[np.ndarray] = []
        for number in range(int(taken.max(initial=0))):
            train = int((taken > number).sum())
            epoch, batch = np.divmod(number, of_epoch[:train])
            rest = counts[:train] - batch * batch_size
            left = np.where(batch == of_epoch[:train] - 1, rest, batch_size)
            edges = [0, train] if padding else [0, *(np.flatnonzero(np.diff(left)) + 1), train]
            for start, stop in pairwise(edges):
                here, rows = slice(start, stop), left[start:stop]
                width = int(rows.max())
                first = (begins[here] + epoch[here] * counts[here] + batch[here] * batch_size)[:, None]
                column = np.arange(width)[None]
                is_real = column < rows[:, None]
                own = None if rows.min() == width else torch.from_numpy(rows)
                planned.append(Step(int(start), int(stop), width, own))
                places.append(np.where(is_real, first + column, first).ravel())
                real.append(is_real.ravel())
                owners.append(np.arange(start, stop).repeat(width))
        self.steps: tuple[Step, ...] = tuple(planned)
        self.edges = sorted({edge for step in planned for edge in (step.start, step.stop)})
        self.kinds = Counter(step.kind for step in planned)
        self._places = torch.from_numpy(np.concatenate(places))
        self._owners = np.concatenate(owners)
        is_padding = ~np.concatenate(real)
        self._padding = torch.from_numpy(is_padding)
        self._padded = bool(is_padding.any())
        self._passed = np.bincount(self._owners[~is_padding], minlength=len(counts))

    def of_examples(self, of_clients: Sequence[int]) -> Tensor:
        """Return for each of the clients' examples, one client after another, the number of its client."""
        return torch.tensor(of_clients).index_select(0, self._client)

    def rows(self, examples: Tensor) -> Tensor:
        """Return which example each row of the plan is, of those in the orders drawn, one client after another."""
        return examples.index_select(0, self._places)

    def means(self, losses: Tensor) -> Tensor:
        """Return each client's mean over its examples of the losses of the rows of all its turns, float64 ``[n]``."""
        epochs = losses.cpu().double().numpy().reshape(-1, len(self._owners))
        sums = np.bincount(self._owners, epochs.sum(0), len(self._passed))
        return torch.from_numpy(sums / (len(epochs) * self._passed))

    def masked(self, targets: Tensor, ignored: int) -> Tensor:
        """Return the targets of all rows, without those of padding."""
        if not self._padded:
            return targets
        mask = self._padding.to(targets.device).view(-1, *(1,) * (targets.dim() - 1))
        return targets.masked_fill(mask, ignored)
