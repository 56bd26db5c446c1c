"""Memory that is kept from use to use."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class BufferPool:
    """Memory for tensors of one kind, one after another: fresh memory would have to be mapped page by page each time.

    That can take longer than a step of a small model, as the C library gives back to the system what lies at the end of
    its heap as soon as it is freed.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def room(self, like: Tensor, *shape: int) -> Tensor:
        """Return a tensor of a shape, of the type and on the device of another; what it had held before is gone."""
        size, memory = prod(shape), self._memory
        if memory.numel() < size or memory.dtype != like.dtype or memory.device != like.device:
            memory = self._memory = like.new_empty(size)
        return memory[:size].view(shape)
