"""Which clients train at the same time: as many as the memory holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from fedclade.core import Indices, Layout, LocalTraining, Round
from fedclade.data import Federation
from fedclade.training.memory import bytes_per_client
from fedclade.training.stages import Held, Stages


class Blocks:
    """Cuts clients into blocks that fit the memory, in bytes; what they hold and the module are on one device."""

    def __init__(self, federation: Federation, module: nn.Module, layout: Layout, stages: Stages, memory: int) -> None:
        self._federation, self._module, self._layout = federation, module, layout
        self._stages, self._memory = stages, memory
        self._bytes_by_spec: dict[LocalTraining, int] = {}

    def of(self, sizes: Indices, this_round: Round, held: Held, models: int = 1) -> Sequence[Sequence[int]]:
        """Return the places of clients with so many examples ``[n]`` by blocks; clients of one size side by side.

        Each has so many ``models``, which train one after the other, and whose updates are kept until all have.
        """
        spec, rule = this_round.spec, this_round.rule
        by_size = sorted(range(len(sizes)), key=lambda place: -sizes[place])
        if spec not in self._bytes_by_spec:
            largest = int(held.data.splits["train"].sizes.max())
            some = np.resize(self._federation.clients[0].train, min(spec.batch_size, largest))
            batch = self._federation.pool.inputs(some).to(held.data.device)
            self._bytes_by_spec[spec] = bytes_per_client(self._module, self._layout, batch, spec)
        own_data = 0 if held.data.bytes_kept else held.data.bytes_each * int(max(sizes))
        vectors = (models - 1) + (0 if rule is None else rule.vectors)
        each = self._bytes_by_spec[spec] + own_data + vectors * self._layout.size * self._layout.dtype.itemsize
        at_once = max(1, (self._memory - self._stages.bytes_kept) // each)
        return [block.tolist() for block in np.array_split(by_size, -(-len(sizes) // at_once))]
