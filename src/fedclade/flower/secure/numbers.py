"""Updates as whole numbers modulo 2³², which masks are added to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedclade.core import UpdateError
from fedclade.flower.secure.secrets import Masked

ROOM = 2**27
"""Largest magnitude of a sum: one sixteenth of what fits, so that a sum with noise in it is found out.

Of uniform numbers modulo 2³² one in sixteen is that small, so all of D are with a chance of 16⁻ᴰ.
"""


@dataclass(frozen=True)
class Numbers:
    """Entries between −``clip`` and ``clip`` in equal steps, so many that a sum over ``clients`` of them fits.

    A step is clip · clients / 2²⁷: at clip 8 and 20 clients, 1.2e-6. An entry is off by half a step at most, a sum over
    n clients by n halves.
    """

    clip: float
    clients: int

    @property
    def steps(self) -> int:
        """How many steps ``clip`` has."""
        return ROOM // self.clients

    def encode(self, update: Tensor, weight: float) -> tuple[Masked, int]:
        """Return weight · update, weight in (0, 1], as whole numbers, and how many of its entries had to be clipped."""
        entries = update.detach().cpu().double().numpy()
        if not np.isfinite(entries).all():
            raise UpdateError(f"{int((~np.isfinite(entries)).sum())} of {len(entries)} entries are NaN or infinite")
        clipped = int((np.abs(entries) > self.clip).sum())
        scaled = np.clip(entries, -self.clip, self.clip) * (weight * self.steps / self.clip)
        return np.rint(scaled).astype(np.int64).astype(np.uint32), clipped

    def decode(self, total: Masked, clients: int) -> Tensor:
        """Return the sum, float64, that so many clients' numbers come to; an UpdateError if it cannot be theirs."""
        numbers = total.view(np.int32).astype(np.int64)
        largest = clients * self.steps
        if beyond := int((np.abs(numbers) > largest).sum()):
            raise UpdateError(
                f"{beyond} of {len(numbers)} entries of the sum are larger than {clients} updates can come to: one of "
                "them was not masked as it should be"
            )
        return torch.from_numpy(numbers * (self.clip / self.steps))
