"""Rounds that stream: of many large updates the server keeps sums and signatures, never all of them at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fedclade.core import (
    Clients,
    ClientsWrapper,
    Round,
    Sums,
    Updates,
)

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
        row_of = dict(zip(ids, assignment, strict=True))

        def train(some: Sequence[int], models: Tensor, rows: Sequence[int], this_round: Round) -> Updates:
            pulled_to = [anchor_of[client] for client in some] if anchors else None
            return self._clients.train(some, models, rows, this_round, pulled_to)

        if this_round.replicates > 1:  # what comes is short, and kept
            each = [train(some, models, [row_of[c] for c in some], this_round) for some in self._slices(ids)]
            return reduce(Updates.joined, each).of(ids)
        return self._summed(train, ids, models, assignment, this_round)

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return sums of the negative full-batch gradients."""
        return self._summed(self._clients.gradients, ids, models, assignment, this_round)

    def _summed(
        self, ask: Ask, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round
    ) -> Updates:
        row_of = dict(zip(ids, assignment, strict=True))
        tally = Tally(ids, models, assignment)
        for some in self._slices(ids):
            tally.add(ask(some, models, [row_of[client] for client in some], this_round))
        return tally.total()

    def _slices(self, ids: Sequence[int]) -> list[list[int]]:
        """Cut the asked clients into slices; clients of one size side by side, since they train together."""
        sizes = self.sizes
        by_size = sorted(ids, key=lambda client: (-sizes[client], client))
        return [some.tolist() for some in np.array_split(by_size, -(-len(ids) // self._at_once))]


class Tally:
    """Sums and signatures of updates that come some at a time, and need not stay.

    Parameters
    ----------
    ids
        The clients that were asked, ``[n]``.
    models
        What they were sent, ``[K, S]``.
    assignment
        Which of them each was sent, ``[n]``.
    """

    def __init__(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int]) -> None:
        self._ids = ids
        self._row_of = dict(zip(ids, assignment, strict=True))
        self._place_of = {client: place for place, client in enumerate(ids)}
        self._sums = Sums(torch.zeros_like(models), torch.full((len(ids),), -1))
        self._kept: Updates | None = None
        self._left_out: dict[int, str] = {}

    def add(self, updates: Updates) -> None:
        """Add the updates of some clients, in the order in which sums should round."""
        self._kept = self._kept or self._room_like(updates)
        self._left_out |= updates.left_out
        places = [self._place_of[client] for client in updates.ids]
        for name in ("sizes", "losses", "norms", "signatures"):
            whole: Tensor = getattr(self._kept, name)
            whole[places] = getattr(updates, name).to(whole)
        members: dict[int, list[int]] = defaultdict(list)
        for client, place in zip(updates.ids, places, strict=True):
            self._sums.group[place] = self._row_of[client]
            members[self._row_of[client]].append(client)
        for row, clients in members.items():
            mine = updates.of(clients)
            self._sums.groups[row] += mine.sizes.to(mine.each) @ mine.each

    def total(self) -> Updates:
        """Return the sums and signatures of all who answered; at least one slice must have been added."""
        assert self._kept is not None  # nobody asks no one
        groups = self._sums.group.tolist()
        answered = [client for client, group in zip(self._ids, groups, strict=True) if group >= 0]
        return replace(self._kept.of(answered), left_out=self._left_out)

    def _room_like(self, some: Updates) -> Updates:
        """Return updates like some others, for all clients that were asked, to be filled in.

        In one piece before the slices come and go: small tensors made in between would scatter the memory that these
        free, so that the next could not use it.
        """
        numbers = torch.zeros(3, len(self._ids), dtype=torch.float64)
        sketches = some.signatures.new_zeros(len(self._ids), some.signatures.shape[1])
        return Updates(
            ids=tuple(self._ids),
            **dict(zip(("sizes", "losses", "norms"), numbers, strict=True)),
            n_parameters=some.n_parameters,
            sums=self._sums,
            sketches=sketches,
        )
