"""The data of simulated clients, where they train and evaluate."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedclade.core import Indices, Round, Split
from fedclade.data import Federation

SPLITS: tuple[Split, ...] = ("train", "test", "validation")
"""In the order in which they are given memory."""

FETCHED_AT_A_TIME = 1024
"""Inputs that are fetched from the pool in one go when a split is gathered."""


class ClientsData:
    """What each client holds, gathered from the pool once and kept on the device as long as it fits.

    ``budget`` is the bytes it may take. Training data come first, then test and validation data; what does not fit any
    more is not kept, but fetched again whenever it is needed.
    """

    def __init__(self, federation: Federation, device: torch.device, budget: int) -> None:
        self._federation = federation
        self._device = device
        self._targets: dict[int, Tensor] = {}
        self._copies: dict[int, Indices] = {}
        self.positions = {client: k for k, client in enumerate(federation.ids)}
        self.splits = {split: SplitInputs(federation, split, device) for split in SPLITS}
        one = federation.pool.y[:1]
        self.bytes_each = self.splits["train"].bytes_each + one.nbytes
        self.bytes_kept = wanted = 0
        for split, held in self.splits.items():
            # Targets are kept of training examples, for each client as it sees them.
            targets = sum(len(client.train) for client in federation.clients) if split == "train" else 0
            wanted += len(held) * held.bytes_each + targets * one.nbytes
            held.keeps = wanted <= budget
            self.bytes_kept = wanted if held.keeps else self.bytes_kept

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's training inputs and targets ``[n, ...]``, as it sees them.

        Those of all clients lie in one tensor, client behind client in the order of the federation, so that an engine
        can draw the batches of several clients in one go.
        """
        held = self.splits["train"]
        if not held.keeps:
            inputs, targets = self._federation.examples(client, "train")
            return inputs.to(self._device), targets.to(self._device)
        if not self._targets:
            self._gather_targets()
        return held.inputs(held.places_of(held.set_of[self.positions[client]])), self._targets[client]

    def examples(self, client: int, this_round: Round) -> tuple[Tensor, Tensor]:
        """Return what a client trains on in a round: all its training examples, or a part of them."""
        inputs, targets = self.of(client)
        if this_round.part is None:
            return inputs, targets
        copies = self._copies_of(client) if this_round.part_size else None
        key = self._federation.by_id[client].key
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


class SplitInputs:
    """The distinct inputs of a split, and which of them each client holds.

    An input is an example of the pool, turned. Each has a place: they are numbered in the order in which the clients
    hold them, so that an input that several hold is there once, and what one client alone holds lies side by side.
    Clients with the same indices and turns share a set of places.

    ``set_of`` is the set of each client, int64 ``[n]`` in the order of the federation; ``sizes`` and ``starts`` say how
    many places each set has in ``places``, and from where on. All inputs stay on the device, once they were needed, if
    ``keeps`` is set; each has ``bytes_each``.
    """

    def __init__(self, federation: Federation, split: Split, device: torch.device) -> None:
        self._pool, self._device = federation.pool, device
        examples = len(self._pool.x)
        numbers: dict[tuple[int, int], int] = {}
        sets: list[Indices] = []
        set_of: list[int] = []
        for client in federation.clients:
            indices: Indices = getattr(client, split)
            turns = client.quarter_turns % 4
            set_of.append(numbers.setdefault((id(indices), turns), len(sets)))
            if set_of[-1] == len(sets):
                sets.append(turns * examples + indices)
        self.set_of = np.array(set_of)
        self.sizes = np.array([len(members) for members in sets])
        self.starts = self.sizes.cumsum() - self.sizes
        held = np.concatenate(sets)
        at = np.arange(len(held))
        first = np.full(4 * examples, len(held))
        np.minimum.at(first, held, at)
        first = first[held]
        is_first = first == at
        self.places = (is_first.cumsum() - 1)[first]
        self._turns, self._indices = np.divmod(held[is_first], max(1, examples))
        self._kept: Tensor | None = None
        self._like = self._pool.inputs(self._indices[:1])
        self.bytes_each = self._like[:1].nbytes
        self.keeps = False

    def __len__(self) -> int:
        return len(self._indices)

    def places_of(self, number: int) -> Indices:
        """Return the places of a set."""
        start = self.starts[number]
        return self.places[start : start + self.sizes[number]]

    def inputs(self, places: Indices) -> Tensor:
        """Return the inputs at these places as a model takes them, ``[n, ...]``; a view if they lie side by side."""
        if not self.keeps:
            return self._fetched(places)
        if self._kept is None:
            self._kept = self._gathered()
        if bool((np.diff(places) == 1).all()):
            return self._kept[places[0] : places[0] + len(places)]
        return self._kept.index_select(0, torch.from_numpy(places).to(self._device))

    def targets(self, places: Indices) -> Tensor:
        """Return the pool's targets at these places, ``[n]`` or ``[n, T]``, on the CPU."""
        return self._pool.y[torch.from_numpy(self._indices[places])]

    @torch.inference_mode(False)  # clients may train on what an evaluation gathers
    def _gathered(self) -> Tensor:
        whole = self._empty(len(self))
        for start in range(0, len(self), FETCHED_AT_A_TIME):
            places = np.arange(start, min(start + FETCHED_AT_A_TIME, len(self)))
            whole[start : start + len(places)] = self._fetched(places)
        return whole

    def _fetched(self, places: Indices) -> Tensor:
        indices, turns = self._indices[places], self._turns[places]
        kinds = np.unique(turns).tolist()
        if len(kinds) == 1:
            return self._pool.inputs(indices, kinds[0]).to(self._device)
        fetched = self._empty(len(places))
        for kind in kinds:
            fetched[torch.from_numpy(turns == kind)] = self._pool.inputs(indices[turns == kind], kind).to(self._device)
        return fetched

    def _empty(self, inputs: int) -> Tensor:
        return torch.empty(inputs, *self._like.shape[1:], dtype=self._like.dtype, device=self._device)
