"""Middleware for rounds that stream: the server adds up updates as they arrive.

A round that streams stores only sums and signatures of updates, in place of all updates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import Ask, Sums, TrainQuery, Updates


@dataclass(frozen=True)
class Streaming(Middleware):
    """Middleware that replaces updates by their sums and signatures, with few updates in memory.

    With n clients, S entries of a model and R entries of a signature, memory grows with (clients at
    a time) × S + models × S + n × R, instead of n × S. Full signatures (as long as an update) would
    lose this advantage.

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

    queries = (TrainQuery,)

    sizes: Mapping[int, int] | None = None
    at_once: int = 1

    def around(self, query: TrainQuery, ask: Ask) -> Updates:
        """Query a few clients at a time, and return sums and signatures of their updates."""
        slices = self._slices(query)
        # Without updates there is nothing to sum.
        if not query.work.sends_update:
            return reduce(Updates.concat, [ask(some) for some in slices]).select(query.ids)
        tally = Tally(query)
        for some in slices:
            tally.add(ask(some, tally.add))
        return tally.total()

    def _slices(self, query: TrainQuery) -> list[TrainQuery]:
        """Divide a query into queries to at most ``at_once`` clients each.

        Clients are sorted by their number of training examples, the largest number first.
        """
        if (sizes := self.sizes) is None:
            return [query]
        by_size = sorted(query.ids, key=lambda client: (-sizes[client], client))
        slices = np.array_split(by_size, -(-len(query.ids) // self.at_once))
        return [query.select(some.tolist()) for some in slices]


class Tally:
    """Sums and signatures of the updates of a query, to which clients are added in groups.

    Parameters
    ----------
    query
        The query to which all clients reply.
    """

    def __init__(self, query: TrainQuery) -> None:
        self._ids = query.ids
        self._row_of = dict(zip(query.ids, query.models.start, strict=True))
        self._place_of = {client: place for place, client in enumerate(query.ids)}
        # A query for a mixture names only one row, which refers to all models of the mixture.
        self._rows = len(query.models.vectors)
        self._group = torch.full((len(query.ids),), -1)
        self._sums: Tensor | None = None
        self._components: Tensor | None = None
        self._kept: Updates | None = None
        self._left_out: dict[int, str] = {}
        self._limited: dict[int, str] = {}

    def add(self, updates: Updates) -> None:
        """Add the updates of some clients to the sums.

        The order in which updates are added determines the rounding of the sums.
        """
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
            *(["weights"] if updates.has_weights else []),
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
            self._sums[row] += mine.weights.to(mine.required_deltas) @ mine.required_deltas

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
        whole = self._kept.with_columns(components=self._components).with_common(sums=sums)
        return replace(whole.select(answered), left_out=self._left_out, limited=self._limited)

    def _room_like(self, some: Updates) -> Updates:
        """Allocate empty updates for all clients of the query, with the shapes of ``some`` updates.

        All tensors are allocated once, before further updates arrive and are freed. Small tensors
        allocated in between would fragment the memory that updates free, so that the next updates
        could not use this memory.
        """
        sizes, losses, norms = torch.zeros(3, len(self._ids), dtype=torch.float64)
        sketches = some.signatures.new_zeros(len(self._ids), some.signatures.shape[1])
        return Updates.of(
            ids=tuple(self._ids),
            sizes=sizes,
            losses=losses,
            norms=norms,
            n_parameters=some.n_parameters,
            sketches=sketches,
            parts=None
            if some.parts is None
            else some.parts.new_zeros(len(self._ids), *some.parts.shape[1:]),
            weights=torch.zeros_like(sizes) if some.has_weights else None,
        )
