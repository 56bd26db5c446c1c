"""Updates as they arrive over a network, one by one: copied into one tensor, and checked together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedclade.core import Updates
from fedclade.flower.replies import UpdateReply


class UpdateBuffer:
    """Room for the updates of some clients: each is copied into its row as it arrives, so that none is kept twice.

    They are checked together, which takes a fraction of the time of one after the other. ``rows`` and ``length`` are
    how many there is room for, and how long each is; they get the type of ``models``, which the clients were sent.
    """

    def __init__(self, rows: int, length: int, models: Tensor) -> None:
        self._deltas = models.new_empty(rows, length)
        self._reply_of: dict[int, tuple[int, int, float | None]] = {}  # client, size and loss by row
        self._component_of: dict[int, int] = {}  # by client, of a mixture

    @property
    def full(self) -> bool:
        """Whether every row is filled."""
        return len(self._reply_of) == len(self._deltas)

    def put(self, client: int, reply: UpdateReply, row: int | None = None) -> None:
        """Copy an update into the row given, or the next."""
        row = len(self._reply_of) if row is None else row
        self._deltas[row] = reply.update
        self._reply_of[row] = (client, reply.size, reply.loss)
        if reply.component is not None:
            self._component_of[client] = reply.component

    def checked(self, n_parameters: int, number: int) -> Updates:
        """Return the usable updates of a round by rows. Losses that clients withhold are NaN."""
        rows = sorted(self._reply_of)
        deltas = self._deltas if self.full else self._deltas[rows]
        replies = [self._reply_of[row] for row in rows]
        ids, sizes = [client for client, *_ in replies], [size for _, size, _ in replies]
        losses = torch.tensor([0.0 if loss is None else loss for *_, loss in replies], dtype=torch.float64)
        updates = Updates.received(ids, sizes, deltas, n_parameters, losses, number)
        if self._component_of:
            updates = replace(updates, components=torch.tensor([self._component_of[client] for client in updates.ids]))
        withheld = {client for client, _, loss in replies if loss is None}
        if not withheld:
            return updates
        hidden = torch.tensor([client in withheld for client in updates.ids], dtype=torch.bool)
        return replace(updates, losses=updates.losses.masked_fill(hidden, torch.nan))
