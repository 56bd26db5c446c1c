"""Data of simulated clients in each stage of a federation whose data changes during a run.

A stage is a range of rounds in which the clients' data stays the same. A federation whose data does
not change has a single stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedclade.core import Indices, OfRounds, TrainQuery
from fedclade.data import ClientData, Federation
from fedclade.training.data import ClientsData
from fedclade.training.evaluation import Evaluator

Trained = tuple[int, Tensor, Tensor]
"""Id of a client, and the inputs and targets ``[n, ...]`` of the n examples on which it trains.

The client's rotation of inputs and its label map have been applied.
"""


@dataclass(frozen=True, eq=False)
class Held:
    """Data of all clients in one stage, on the device, and the evaluator for this data."""

    federation: Federation
    data: ClientsData
    evaluator: Evaluator


class Stages:
    """Data of all clients in each stage of a run, gathered when a query needs the stage.

    A stage is a number of rounds in which the clients' data does not change (see
    :class:`~fedclade.data.Drift`). The newest stage of which a query has asked so far takes at most
    ``budget`` bytes. When a query asks for a still newer stage, the data of all other stages is
    released. Queries may ask for an earlier stage again; its data is then gathered again, and takes
    at most what the newest stage leaves of the budget.

    Parameters
    ----------
    federation
        The clients.
    device
        Device for the data.
    budget
        Bytes that the data may take.
    judge
        Function that creates an evaluator, given a federation and its :class:`ClientsData`.
    alone
        Whether examples are assigned to parts of a client's data independently of each other, see
        :class:`~fedclade.training.data.ClientsData`.
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
        """Upper bound on the number of bytes of all data that has been gathered."""
        return self._bytes_joined + sum(held.data.bytes_kept for held in self._held.values())

    def in_round(self, number: int) -> Held:
        """Return the clients' data in a round, given the number of the round.

        The number 0 stands for the latest stage that a query has used so far. A negative number
        ``-r`` stands for the data in round r of simulated adversaries, which poison their data.
        """
        if not number:
            return self.now
        return self.at(self._federation.stage_in(number))

    def at(self, stage: int) -> Held:
        """Return the clients' data in a stage, given the number of the stage.

        If the stage is later than all stages that were requested before, data that was gathered
        before is released. Numbers above the last stage of the federation stand for the data of
        simulated adversaries, which poison their data (see
        :class:`~fedclade.data.poisoned.PoisonedFederation`); they do not count as later stages.
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

    def of(self, query: TrainQuery) -> Held:
        """Return the clients' data in the round of a training query."""
        return self.in_round(query.data_round or query.round.number)

    def trained(self, query: TrainQuery, places: Sequence[int], held: Held) -> list[Trained]:
        """Return the clients at some positions in a query, each with its training examples."""
        ids = [query.ids[place] for place in places]
        data = query.work.data
        if isinstance(data, OfRounds):
            return [(client, *self._of_rounds(client, held, data)) for client in ids]
        return [(client, *held.data.examples(client, query)) for client in ids]

    def _of_rounds(self, client: int, held: Held, data: OfRounds) -> tuple[Tensor, Tensor]:
        """Return a client's training examples of several rounds, concatenated.

        If the examples of one of these rounds are contained in those of another of these rounds,
        they occur once.
        """
        stages = self._find_stages(client, data.rounds[client])
        if len(stages) < 2:
            if stages:
                held = self.at(stages[0])
            return held.data.of(client)
        key = client, stages
        if key in self._joined:
            return self._joined[key]
        parts = [self.at(stage).data.of(client) for stage in stages]
        inputs = torch.cat([of_stage for of_stage, _ in parts])
        targets = torch.cat([of_stage for _, of_stage in parts])
        needed = inputs.nbytes + targets.nbytes
        if self.bytes_kept + needed <= self._budget:
            # Stored, so that later rounds use the same tensors: worker processes share the tensors
            # that existed when they were forked.
            self._joined[key] = inputs, targets
            self._bytes_joined += needed
        return inputs, targets

    def sizes(self, query: TrainQuery, held: Held) -> Indices:
        """Return the number of training examples of each client of a query, int64 ``[n]``."""
        data = query.work.data
        if not isinstance(data, OfRounds):
            of_split = held.data.splits["train"]
            return of_split.sizes[of_split.set_of[held.data.places(query.ids)]]
        sizes: list[int] = []
        for client in query.ids:
            stages = self._find_stages(client, data.rounds[client])
            sizes.append(sum(self._size(client, stage) for stage in stages))
        return np.array(sizes)

    def _size(self, client: int, stage: int) -> int:
        """Return the number of a client's training examples in a stage."""
        return self._federation.each_stage[stage].sizes[client]

    def _find_stages(self, client: int, rounds: Sequence[int]) -> tuple[int, ...]:
        """Return the stages of some rounds that together contain a client's data in these rounds.

        A stage whose data is contained in the data of another of these stages is left out.
        """
        stages = tuple(sorted({self._federation.stage_in(number) for number in rounds}))
        if (client, stages) not in self._apart:
            held = {stage: self._federation.each_stage[stage].by_id[client] for stage in stages}
            apart: list[int] = []
            for stage in stages:
                if not any(_is_contained(held[stage], held[other]) for other in apart):
                    apart = [
                        *(other for other in apart if not _is_contained(held[other], held[stage])),
                        stage,
                    ]
            self._apart[client, stages] = tuple(apart)
        return self._apart[client, stages]


def _is_contained(one: ClientData, other: ClientData) -> bool:
    """Return whether a client's training data in ``one`` is contained in its data in ``other``."""
    alike = one.label_map is other.label_map and one.quarter_turns == other.quarter_turns
    return one is other or (alike and bool(np.isin(one.train, other.train).all()))
