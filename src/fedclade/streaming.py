"""Rounds that stream: of many large updates the server keeps sums and signatures, never all of them at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedclade.clients import Clients, ClientsWrapper, Round
from fedclade.updates import Sums, Updates

Ask = Callable[[Sequence[int], Tensor, Sequence[int], Round], Updates]
"""``Clients.train`` or ``Clients.gradients``."""


class StreamedClients(ClientsWrapper):
    """Clients who are asked some at a time; of their updates only sums and signatures outlive the asking.

    Memory grows with (clients at a time) × S + models × S + n × R, not with n × S. Full signatures (R = D) would spoil
    that.

    Parameters
    ----------
    clients
        Those who do the work.
    at_once
        How many of them, at most, are asked at a time. It changes nothing but the rounding of the sums.
    """

    def __init__(self, clients: Clients, at_once: int) -> None:
        super().__init__(clients)
        self._at_once = at_once

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        anchors: Sequence[int] | None = None,
    ) -> Updates:
        """Let each client train from its model; return sums of the updates Δθ_i."""
        anchor_of = dict(zip(ids, anchors or assignment, strict=True))

        def train(some: Sequence[int], models: Tensor, rows: Sequence[int], this_round: Round) -> Updates:
            pulled_to = [anchor_of[client] for client in some] if anchors else None
            return self._clients.train(some, models, rows, this_round, pulled_to)

        return self._summed(train, ids, models, assignment, this_round)

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return sums of the negative full-batch gradients."""
        return self._summed(self._clients.gradients, ids, models, assignment, this_round)

    def _summed(
        self, ask: Ask, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round
    ) -> Updates:
        row_of = dict(zip(ids, assignment, strict=True))
        place_of = {client: place for place, client in enumerate(ids)}
        sums = Sums(torch.zeros_like(models), torch.full((len(ids),), -1))
        kept: Updates | None = None
        left_out: dict[int, str] = {}
        for some in self._slices(ids):
            updates = ask(some, models, [row_of[client] for client in some], this_round)
            kept = kept or _room_for(ids, updates, sums)
            left_out |= updates.left_out
            places = [place_of[client] for client in updates.ids]
            for name in ("sizes", "losses", "norms", "signatures"):
                whole: Tensor = getattr(kept, name)
                whole[places] = getattr(updates, name).to(whole)
            members: dict[int, list[int]] = defaultdict(list)
            for client, place in zip(updates.ids, places, strict=True):
                sums.group[place] = row_of[client]
                members[row_of[client]].append(client)
            for row, clients in members.items():
                mine = updates.of(clients)
                sums.groups[row] += mine.sizes.to(mine.each) @ mine.each
        assert kept is not None  # nobody asks no one
        answered = [client for client, group in zip(ids, sums.group.tolist(), strict=True) if group >= 0]
        return replace(kept.of(answered), left_out=left_out)

    def _slices(self, ids: Sequence[int]) -> list[list[int]]:
        """Cut the asked clients into slices; clients of one size side by side, since they train together."""
        sizes = self.sizes
        by_size = sorted(ids, key=lambda client: (-sizes[client], client))
        return [some.tolist() for some in np.array_split(by_size, -(-len(ids) // self._at_once))]


def _room_for(ids: Sequence[int], some: Updates, sums: Sums) -> Updates:
    """Return updates like some others, for all clients that were asked, to be filled in.

    In one piece before the slices come and go: small tensors made in between would scatter the memory that these free,
    so that the next could not use it.
    """
    numbers = torch.zeros(3, len(ids), dtype=torch.float64)
    sketches = some.signatures.new_zeros(len(ids), some.signatures.shape[1])
    return Updates(
        ids=tuple(ids),
        **dict(zip(("sizes", "losses", "norms"), numbers, strict=True)),
        n_parameters=some.n_parameters,
        sums=sums,
        sketches=sketches,
    )
