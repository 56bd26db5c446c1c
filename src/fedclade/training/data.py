"""The data of simulated clients, where they train and evaluate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedclade.core import Indices, Positions, Round, Split
from fedclade.data import ClientTable, Federation
from fedclade.training.split_inputs import SideBySide, SplitInputs, WholePool

SPLITS: tuple[Split, ...] = ("train", "test", "validation")
"""In the order in which they are given memory."""


class ClientsData:
    """What each client holds, gathered from the pool once and kept on the device as long as it fits.

    ``budget`` is the bytes it may take. Training data come first, then test and validation data; what does not fit any
    more is not kept, but fetched again whenever it is needed. Where examples are on their own (``alone``), equal ones
    are not kept together in parts: in which part one is then says nothing of the others, as its privacy needs.
    """

    def __init__(self, federation: Federation, device: torch.device, budget: int, alone: bool = False) -> None:
        self._federation, self._alone = federation, alone
        self._device = self.device = device
        self._targets: dict[int, Tensor] = {}
        self._copies: dict[int, Indices] = {}
        self.positions = federation.positions
        table = federation.clients
        one = federation.pool.y[:1]
        self.bytes_kept = wanted = 0
        self.splits: Mapping[Split, SplitInputs]
        if isinstance(table, ClientTable) and table.lies_in_order:
            whole = WholePool(federation, table, device, budget)
            self.splits = {split: SideBySide(whole, table.split(split)) for split in SPLITS}
            self.bytes_kept = whole.bytes_kept
        else:
            self.splits = {split: SplitInputs(federation, split, device) for split in SPLITS}
            for split, held in self.splits.items():
                # Targets are kept of training examples, for each client as it sees them.
                targets = int(held.sizes[held.set_of].sum()) if split == "train" else 0
                wanted += len(held) * held.bytes_each + targets * one.nbytes
                held.keeps = wanted <= budget
                self.bytes_kept = wanted if held.keeps else self.bytes_kept
        self.bytes_each = self.splits["train"].bytes_each + one.nbytes

    def places(self, ids: Sequence[int]) -> Indices:
        """Return where some clients stand in the order of the federation, int64 ``[n]``."""
        if isinstance(positions := self.positions, Positions):
            return positions.of(ids)
        return np.array([positions[client] for client in ids], dtype=np.int64)

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's training inputs and targets ``[n, ...]``, as it sees them.

        Those of all clients lie in one tensor, client behind client in the order of the federation, so that an engine
        can draw the batches of several clients in one go.
        """
        held = self.splits["train"]
        if not held.keeps:
            inputs, targets = self._federation.examples(client, "train")
            return inputs.to(self._device), targets.to(self._device)
        place = self.positions[client]
        if isinstance(held, SideBySide):  # and a million clients' targets are not gathered for the few that train
            return held.run(place), held.targets_of(place).to(self._device)
        places = held.places_of(held.set_of[place])
        if not self._targets:
            self._gather_targets()
        return held.inputs(places), self._targets[client]

    def examples(self, client: int, this_round: Round) -> tuple[Tensor, Tensor]:
        """Return what a client trains on in a round: all its training examples, or a part of them."""
        inputs, targets = self.of(client)
        if this_round.part is None:
            return inputs, targets
        copies = self._copies_of(client) if this_round.part_size and not self._alone else None
        key = self._federation.keys[client]
        part = torch.from_numpy(this_round.examples(len(targets), key, copies)).to(targets.device)
        return inputs[part], targets[part]

    def _copies_of(self, client: int) -> Indices:
        """Return numbers of a client's training examples ``[n]``: those of equal inputs and targets have the same."""
        if client not in self._copies:
            numbers: dict[bytes, int] = {}
            pairs = zip(*(each.cpu().numpy() for each in self.of(client)), strict=True)
            found = [numbers.setdefault(x.tobytes() + y.tobytes(), len(numbers)) for x, y in pairs]
            self._copies[client] = np.array(found, dtype=np.int64)
        return self._copies[client]

    def _gather_targets(self) -> None:
        clients, y = self._federation.clients, self._federation.pool.y
        whole = torch.cat([client.labels(y[torch.from_numpy(client.train)]) for client in clients]).to(self._device)
        parts = whole.split([len(client.train) for client in clients])
        self._targets = dict(zip(self._federation.ids, parts, strict=True))
