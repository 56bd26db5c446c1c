"""Rounds that stream: the server stores sums and signatures of updates instead of all updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import Ask, Sums, UpdateQuery, Updates


@dataclass(frozen=True)
class Streaming(Middleware):
    """Middleware that replaces updates by sums and signatures, with few updates in memory.

    Memory grows with (clients at a time) × S + models × S + n × R, instead of n × S. Full
    signatures (R = D) would lose this advantage.

    Parameters
    ----------
    sizes
        Number of training examples of each client. Clients with training sets of the same size are
        queried together, since they train together. None, as over a network: all clients are
        queried at once, and updates are summed as they arrive.
    at_once
        Largest number of clients that are queried together. It changes only the rounding of the
        sums.
    """

    sizes: Mapping[int, int] | None = None
    at_once: int = 1

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return sums of the updates."""
        # The replies to a secret query are empty.
        if query.is_secret:
            return reduce(Updates.concat, map(ask, self._slices(query))).select(query.ids)
        tally = Tally(query)
        for some in self._slices(query):
            tally.add(ask(replace(some, sink=tally.add)))
        return tally.total()

    def _slices(self, query: UpdateQuery) -> list[UpdateQuery]:
        if (sizes := self.sizes) is None:
            return [query]
        by_size = sorted(query.ids, key=lambda client: (-sizes[client], client))
        slices = np.array_split(by_size, -(-len(query.ids) // self.at_once))
        return [query.select(some.tolist()) for some in slices]


class Tally:
    """Sums and signatures of the updates of a query, added a few clients at a time."""

    def __init__(self, query: UpdateQuery) -> None:
        self._ids = query.ids
        self._row_of = dict(zip(query.ids, query.assignment, strict=True))
        self._place_of = {client: place for place, client in enumerate(query.ids)}
        # A query for a mixture names only one row, which stands for all its models together.
        self._rows = len(query.models)
        self._group = torch.full((len(query.ids),), -1)
        self._sums: Tensor | None = None
        self._components: Tensor | None = None
        self._kept: Updates | None = None
        self._left_out: dict[int, str] = {}
        self._limited: dict[int, str] = {}

    def add(self, updates: Updates) -> None:
        """Add the updates of some clients; the order of calls determines the rounding of sums."""
        self._kept = self._kept or self._room_like(updates)
        self._left_out |= updates.left_out
        self._limited |= updates.limited
        places = [self._place_of[client] for client in updates.ids]
        for name in (
            "sizes",
            "losses",
            "norms",
            "signatures",
            *(["parts"] if updates.parts is not None else []),
        ):
            whole: Tensor = getattr(self._kept, "sketches" if name == "signatures" else name)
            whole[places] = getattr(updates, name).to(whole)
        if updates.components is not None:
            self._components = (
                torch.zeros_like(self._group) if self._components is None else self._components
            )
            self._components[places] = updates.components
        if updates.ids and self._sums is None:
            self._sums = updates.required_deltas.new_zeros(
                self._rows, updates.required_deltas.shape[1]
            )
        members: dict[int, list[int]] = defaultdict(list)
        for client, place in zip(updates.ids, places, strict=True):
            self._group[place] = self._row_of[client]
            members[self._row_of[client]].append(client)
        for row, clients in members.items():
            # At least one client has replied.
            assert self._sums is not None
            mine = updates.select(clients)
            self._sums[row] += mine.sizes.to(mine.required_deltas) @ mine.required_deltas

    def total(self) -> Updates:
        """Return the sums and signatures of all clients that replied.

        :meth:`add` must have been called at least once.
        """
        # A query names at least one client.
        assert self._kept is not None
        answered = [
            client
            for client, group in zip(self._ids, self._group.tolist(), strict=True)
            if group >= 0
        ]
        sums = Sums(
            self._kept.norms.new_zeros(0, 0) if self._sums is None else self._sums, self._group
        )
        whole = replace(self._kept, sums=sums, components=self._components)
        return replace(whole.select(answered), left_out=self._left_out, limited=self._limited)

    def _room_like(self, some: Updates) -> Updates:
        """Return empty updates for all clients of the query, with the shapes of ``some``.

        They are allocated in one piece, before further slices arrive and are freed. Small tensors
        allocated in between would fragment the memory that the slices free, so that the next slice
        could not use it.
        """
        sizes, losses, norms = torch.zeros(3, len(self._ids), dtype=torch.float64)
        sketches = some.signatures.new_zeros(len(self._ids), some.signatures.shape[1])
        return Updates(
            ids=tuple(self._ids),
            sizes=sizes,
            losses=losses,
            norms=norms,
            n_parameters=some.n_parameters,
            sketches=sketches,
            parts=None
            if some.parts is None
            else some.parts.new_zeros(len(self._ids), *some.parts.shape[1:]),
        )
