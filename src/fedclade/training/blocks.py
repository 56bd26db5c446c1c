"""Which clients train at the same time: as many as the memory holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from fedclade.core import Layout, LocalTraining
from fedclade.data import Federation
from fedclade.training.data import ClientsData
from fedclade.training.memory import bytes_per_client


class Blocks:
    """Cuts clients into blocks that fit the memory, in bytes; ``data`` and module are on one device."""

    def __init__(
        self, federation: Federation, module: nn.Module, layout: Layout, data: ClientsData, memory: int
    ) -> None:
        self._federation, self._module, self._layout = federation, module, layout
        self._data, self._memory = data, memory
        self._bytes_by_spec: dict[LocalTraining, int] = {}

    def of(self, ids: Sequence[int], spec: LocalTraining, models: int = 1) -> Sequence[Sequence[int]]:
        """Return the places of the queried clients by blocks; clients of one size side by side.

        Each has so many ``models``, which train one after the other, and whose updates are kept until all have.
        """
        held = self._data.splits["train"]
        sizes = held.sizes[held.set_of[self._data.places(ids)]].tolist()
        by_size = sorted(range(len(ids)), key=lambda place: -sizes[place])
        if spec not in self._bytes_by_spec:
            largest = int(held.sizes.max())
            some = np.resize(self._federation.clients[0].train, min(spec.batch_size, largest))
            batch = self._federation.pool.inputs(some).to(self._data.device)
            self._bytes_by_spec[spec] = bytes_per_client(self._module, self._layout, batch, spec)
        own_data = 0 if self._data.bytes_kept else self._data.bytes_each * max(sizes)
        updates = (models - 1) * self._layout.size * self._layout.dtype.itemsize
        each = self._bytes_by_spec[spec] + own_data + updates
        at_once = max(1, (self._memory - self._data.bytes_kept) // each)
        return [block.tolist() for block in np.array_split(by_size, -(-len(ids) // at_once))]
