"""Data of simulated clients in each stage of a federation whose data changes during a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedclade.core import Indices, Round, UpdateQuery
from fedclade.data import ClientData, Federation
from fedclade.training.data import ClientsData
from fedclade.training.evaluation import Evaluator

Trained = tuple[int, Tensor, Tensor]
"""A client, and the inputs and targets ``[n, ...]`` of the examples on which it trains.

Its own rotation and label map are applied to them.
"""


@dataclass(frozen=True, eq=False)
class Held:
    """Data of all clients in one stage, and their evaluator."""

    federation: Federation
    data: ClientsData
    evaluator: Evaluator


class Stages:
    """Data of all clients in each stage, gathered when a query first needs it.

    The data of the latest stage of any query takes at most ``budget`` bytes. Data of earlier stages
    takes at most the rest of the budget. When a later stage begins, data that was gathered before
    is released.

    Parameters
    ----------
    federation
        The clients.
    device
        Device for the data.
    budget
        Bytes that the data may take.
    judge
        Returns the evaluator for a federation and its data.
    alone
        See :class:`~fedclade.training.data.ClientsData`.
    """

    def __init__(
        self,
        federation: Federation,
        device: torch.device,
        budget: int,
        judge: Callable[..., Evaluator],
        alone: bool = False,
    ) -> None:
        self._federation = federation
        self._device = device
        self._budget = budget
        self._judge = judge
        self._alone = alone
        self._held: dict[int, Held] = {}
        self._joined: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}
        self._apart: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self._latest = self._bytes_joined = 0
        self.now = self.at(0)

    @property
    def bytes_kept(self) -> int:
        """Upper bound on the bytes of all gathered data."""
        return self._bytes_joined + sum(held.data.bytes_kept for held in self._held.values())

    def in_round(self, number: int) -> Held:
        """Return the data in a round; round 0 stands for the latest stage so far."""
        return self.at(self._federation.stage_in(number)) if number else self.now

    def at(self, stage: int) -> Held:
        """Return the data in a stage.

        Stages after the last one have poisoned data. Requests for them do not advance the latest
        stage.
        """
        if self._latest < stage <= len(self._federation.stages):
            self._latest = stage
            self._bytes_joined = 0
            self._held.clear()
            self._joined.clear()
            self.now = self.at(stage)
        if stage not in self._held:
            federation = self._federation.each_stage[stage]
            data = ClientsData(
                federation, self._device, max(0, self._budget - self.bytes_kept), self._alone
            )
            self._held[stage] = Held(federation, data, self._judge(federation, data))
        return self._held[stage]

    def of(self, query: UpdateQuery) -> Held:
        """Return the data in the round of a query."""
        return self.in_round(query.data_round or query.round.number)

    def trained(self, query: UpdateQuery, places: Sequence[int], held: Held) -> list[Trained]:
        """Return the clients at some places of a query, each with its training examples."""
        rounds = [
            None if query.data_rounds is None else query.data_rounds[place] for place in places
        ]
        ids = [query.ids[place] for place in places]
        return [
            (c, *self._examples(c, query.round, held, of))
            for c, of in zip(ids, rounds, strict=True)
        ]

    def _examples(
        self, client: int, this_round: Round, held: Held, rounds: Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return a client's training examples: of ``held``, or of several rounds, concatenated.

        Examples that are the same in several of the rounds occur once.
        """
        stages = self._different(client, rounds)
        if len(stages) < 2:
            return (self.at(stages[0]) if stages else held).data.examples(client, this_round)
        key = client, stages
        if key not in self._joined:
            parts = [self.at(stage).data.of(client) for stage in stages]
            inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
            needed = inputs.nbytes + targets.nbytes
            if self.bytes_kept + needed <= self._budget:
                # Kept, so that the same tensors are used again: worker processes have seen them.
                self._joined[key] = inputs, targets
                self._bytes_joined += needed
        else:
            inputs, targets = self._joined[key]
        if this_round.part is None:
            return inputs, targets
        part = this_round.examples(len(targets), self._federation.keys[client])
        places = torch.from_numpy(part).to(targets.device)
        return inputs[places], targets[places]

    def sizes(self, query: UpdateQuery, held: Held) -> Indices:
        """Return the number of training examples of each client of a query, ``[n]``."""
        if query.data_rounds is None:
            of_split = held.data.splits["train"]
            return of_split.sizes[of_split.set_of[held.data.places(query.ids)]]
        each = zip(query.ids, query.data_rounds, strict=True)
        return np.array(
            [sum(self._size(client, k) for k in self._different(client, of)) for client, of in each]
        )

    def _size(self, client: int, stage: int) -> int:
        return self._federation.each_stage[stage].sizes[client]

    def _different(self, client: int, rounds: Sequence[int] | None) -> tuple[int, ...]:
        """Return the stages of some rounds, without those whose data another stage contains."""
        stages = tuple(sorted({self._federation.stage_in(number) for number in rounds or ()}))
        if (client, stages) not in self._apart:
            held = {stage: self._federation.each_stage[stage].by_id[client] for stage in stages}
            apart: list[int] = []
            for stage in stages:
                if not any(_within(held[stage], held[other]) for other in apart):
                    apart = [
                        *(other for other in apart if not _within(held[other], held[stage])),
                        stage,
                    ]
            self._apart[client, stages] = tuple(apart)
        return self._apart[client, stages]


def _within(one: ClientData, other: ClientData) -> bool:
    """Return whether a client's training data in ``one`` is contained in its data in ``other``."""
    alike = one.label_map is other.label_map and one.quarter_turns == other.quarter_turns
    return one is other or (alike and bool(np.isin(one.train, other.train).all()))
