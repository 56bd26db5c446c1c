"""Which of the clients are training right now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Active:
    """The clients ``start`` to ``stop``, and the generator of each for its own dropout.

    Its seed is the one that the loop gives the global generator, and masks have the shape that the loop draws: so
    dropout does not depend on the other clients. On a CPU it is that of the loop, but for what attention gives in the
    loop, whose entries lie, and are drawn, in another order.
    """

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._seeds: Sequence[int] = ()
        self._device = torch.device("cpu")
        self._generators: list[torch.Generator] = []

    @property
    def count(self) -> int:
        """How many there are: k."""
        return self.stop - self.start

    def seed(self, seeds: Sequence[int], device: torch.device) -> None:
        """Give each client its generator."""
        self._seeds, self._device = seeds, device
        self._generators = []

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Drop entries of x ``[k, ...]`` with probability p, and scale the others up."""
        kept = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not self._generators:  # made only where something is dropped
            self._generators = [torch.Generator(self._device).manual_seed(seed) for seed in self._seeds]
        for mask, generator in zip(kept, self._generators[self.start : self.stop], strict=True):
            mask.bernoulli_(1 - p, generator=generator)
        return x * (kept.div_(1 - p) if p < 1 else kept)
