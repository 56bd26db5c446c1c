"""Buffer for the updates that arrive over a network one by one.

They are copied into one tensor, and checked together.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.core import Updates, empty_rows, is_in_file, release_pages
from fedclade.flower.exchange import AT_ONCE
from fedclade.flower.network import STREAM_BUFFER
from fedclade.flower.replies import UpdateReply


class ReusedMemory:
    """Memory for the updates of a round, which the updates of later rounds use again.

    The system gives a process new memory page by page, and sets each page to zeros first. For the
    updates of a whole round this takes as long as the updates take to be copied, or longer.

    The memory is only used again once no tensor lies in it any more. If an algorithm stores updates
    of a round, or a part of them, the next round therefore gets new memory.
    """

    def __init__(self) -> None:
        self._block: np.ndarray[Any, Any] | None = None
        # The part of the block that the last matrix lies in. All tensors that use the memory refer
        # to this array, directly or through other tensors.
        self._lent: weakref.ref[np.ndarray[Any, Any]] | None = None

    def rows(self, count: int, length: int, like: Tensor) -> Tensor:
        """Return a matrix ``[count, length]`` whose entries are arbitrary.

        Parameters
        ----------
        count, length
            Numbers of rows and columns.
        like
            Tensor whose type and device the matrix has. On other devices than the CPU, the matrix
            always has new memory: PyTorch reuses the memory there itself.
        """
        size = count * length * like.itemsize
        if like.device.type != "cpu" or size == 0:
            return like.new_empty(count, length)
        is_free = self._lent is None or self._lent() is None
        # A block of more than twice the size would waste memory.
        if self._block is None or not is_free or not size <= len(self._block) <= 2 * size:
            self._block = None  # frees its memory, before more memory is allocated
            self._block = np.empty(size, dtype=np.uint8)
        lent = self._block[:size]
        self._lent = weakref.ref(lent)
        return torch.from_numpy(lent).view(like.dtype).view(count, length)


class UpdateBuffer:
    """Buffer for the updates of several clients, with one row per update.

    Each update is copied into its row as soon as it arrives, so that no update is stored twice. All
    updates are checked together, which takes a fraction of the time of separate checks.

    Parameters
    ----------
    rows
        Number of updates for which the buffer has space.
    length
        Number of entries of an update.
    models
        Models that the server has sent. The buffer has the same type and device.
    largest_in_memory
        Bytes of all rows above which the buffer lies in a file.
    memory
        Memory of earlier buffers, which this one uses if it lies in no file; None for new memory.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        models: Tensor,
        largest_in_memory: float = math.inf,
        *,
        memory: ReusedMemory | None = None,
    ) -> None:
        in_file = rows * length * models.itemsize > largest_in_memory
        if in_file or memory is None:
            self._deltas = empty_rows(rows, length, models, in_file=in_file)
        else:
            self._deltas = memory.rows(rows, length, models)
        self._is_in_file = is_in_file(self._deltas)
        # client, number of training examples, and loss, by row
        self._reply_of: dict[int, tuple[int, int, float | None]] = {}
        # component of a mixture that each client chose, by client
        self._component_of: dict[int, int] = {}
        self._remembered: set[int] = set()  # clients that replied from memory

    @property
    def full(self) -> bool:
        """Whether every row of the buffer contains an update."""
        return len(self._reply_of) == len(self._deltas)

    def put(self, client: int, reply: UpdateReply, row: int | None = None) -> None:
        """Copy a client's update into a row; by default into the first free row."""
        if row is None:
            row = len(self._reply_of)
        self._deltas[row] = reply.update
        if self._is_in_file:
            release_pages()
        self._reply_of[row] = (client, reply.size, reply.loss)
        if reply.component is not None:
            self._component_of[client] = reply.component
        if reply.remembered:
            self._remembered.add(client)

    def checked(self, n_parameters: int, number: int) -> Updates:
        """Check the collected updates, and return the usable ones in the order of their rows.

        Losses that clients withhold are NaN. The buffer must not be used afterwards, since the
        result has its memory.

        Parameters
        ----------
        n_parameters
            Number of parameters of the model, without buffers.
        number
            Number of the round.
        """
        rows = sorted(self._reply_of)
        # Rows without an update are closed up in place, since a copy would take as much memory.
        for place, row in enumerate(rows):
            if place != row:
                self._deltas[place] = self._deltas[row]
        deltas = self._deltas[: len(rows)]
        replies = [self._reply_of[row] for row in rows]
        ids = [client for client, *_ in replies]
        sizes = [size for _, size, _ in replies]
        losses = torch.tensor(
            [0.0 if loss is None else loss for *_, loss in replies], dtype=torch.float64
        )
        updates = Updates.received(
            ids, sizes, deltas, n_parameters=n_parameters, losses=losses, number=number
        )
        if self._component_of:
            updates = updates.with_columns(
                components=torch.tensor([self._component_of[client] for client in updates.ids])
            )
        if self._remembered:
            remembered = [client in self._remembered for client in updates.ids]
            updates = updates.with_columns(remembered=torch.tensor(remembered, dtype=torch.bool))
        withheld = {client for client, _, loss in replies if loss is None}
        if not withheld:
            return updates
        hidden = torch.tensor([client in withheld for client in updates.ids], dtype=torch.bool)
        return updates.with_columns(losses=updates.losses.masked_fill(hidden, torch.nan))


def streamed_at_once(size: int, buffer: int = STREAM_BUFFER) -> int:
    """Return the number of updates that a server which streams collects before it adds them up.

    Parameters
    ----------
    size
        Bytes of an update.
    buffer
        Bytes of the collected updates; a single update may be larger.
    """
    return max(1, min(AT_ONCE, buffer // max(1, size)))
