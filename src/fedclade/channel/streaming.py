"""Rounds that stream: of many large updates the server keeps sums and signatures, never all of them at once."""

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
    """Keeps only sums and signatures of updates, of which no more than a few are in memory at a time.

    Memory grows with (clients at a time) × S + models × S + n × R, not with n × S. Full signatures
    (R = D) would spoil that. ``at_once`` clients, at most, are queried together, which changes
    nothing but the rounding of the sums; those with training sets of one size go side by side,
    since they train together. Without sizes, as over a network, all are queried at once, and
    updates are summed as they arrive.
    """

    sizes: Mapping[int, int] | None = None
    at_once: int = 1

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return sums of the updates."""
        if query.is_secret:  # the replies are empty
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
    """Sums and signatures of the updates that reply to a query, which come some at a time and need not stay."""

    def __init__(self, query: UpdateQuery) -> None:
        self._ids = query.ids
        self._row_of = dict(zip(query.ids, query.assignment, strict=True))
        self._place_of = {client: place for place, client in enumerate(query.ids)}
        # of a mixture one alone is named, that of all its models together
        self._rows = len(query.models)
        self._group = torch.full((len(query.ids),), -1)
        self._sums: Tensor | None = None
        self._components: Tensor | None = None
        self._kept: Updates | None = None
        self._left_out: dict[int, str] = {}
        self._limited: dict[int, str] = {}

    def add(self, updates: Updates) -> None:
        """Add the updates of some clients, in the order in which sums should round."""
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
            assert self._sums is not None  # somebody has answered
            mine = updates.select(clients)
            self._sums[row] += mine.sizes.to(mine.required_deltas) @ mine.required_deltas

    def total(self) -> Updates:
        """Return the sums and signatures of all clients that answered; at least one slice must have been added."""
        assert self._kept is not None  # as a query names at least one client
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
        """Return updates like some others, for all clients that were asked, to be filled in.

        In one piece before the slices come and go: small tensors made in between would scatter the
        memory that these free, so that the next could not use it.
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
