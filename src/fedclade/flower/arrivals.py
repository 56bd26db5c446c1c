"""Updates as they arrive over a network, one by one: kept in one piece, and checked together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedclade.core import Updates
from fedclade.flower.wire import Answer


class Arrivals:
    """Room for the updates of some clients: each is copied into its row as it comes, so that nothing is kept twice.

    They are checked together, since that takes a fraction of the time of one after the other.

    Parameters
    ----------
    rows, length
        How many there is room for, and how long each is.
    models
        What the clients were sent; updates get the type of that.
    """

    def __init__(self, rows: int, length: int, models: Tensor) -> None:
        self._deltas = models.new_empty(rows, length)
        self._told: dict[int, tuple[int, int, float | None]] = {}
        """Client, size and loss by row."""

    @property
    def full(self) -> bool:
        """Whether every row is taken."""
        return len(self._told) == len(self._deltas)

    def put(self, client: int, answer: Answer, row: int | None = None) -> None:
        """Take in an update, in the row given or the next."""
        row = len(self._told) if row is None else row
        self._deltas[row] = answer.update
        self._told[row] = (client, answer.size, answer.loss)

    def checked(self, n_parameters: int, number: int) -> Updates:
        """Check what has come in a round; return it by rows. Losses that clients keep to themselves are NaN."""
        rows = sorted(self._told)
        ids = [self._told[row][0] for row in rows]
        sizes = [self._told[row][1] for row in rows]
        losses = [self._told[row][2] for row in rows]
        told = torch.tensor([0.0 if loss is None else loss for loss in losses], dtype=torch.float64)
        deltas = self._deltas if self.full else self._deltas[rows]
        updates = Updates.received(ids, sizes, deltas, n_parameters, told, number)
        return _untold(updates, {client for client, loss in zip(ids, losses, strict=True) if loss is None})


def _untold(updates: Updates, silent: set[int]) -> Updates:
    """Return updates without the losses of some clients."""
    if not silent:
        return updates
    hidden = torch.tensor([client in silent for client in updates.ids], dtype=torch.bool)
    return replace(updates, losses=updates.losses.masked_fill(hidden, torch.nan))
