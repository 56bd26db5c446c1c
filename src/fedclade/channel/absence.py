"""Clients that are not there for a while: nobody asks them, and a round does without."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    NOT_ASKED,
    Ask,
    DescriptorQuery,
    Evaluation,
    EvaluationQuery,
    ShiftQuery,
    SubspaceQuery,
    UpdateQuery,
    Updates,
)

AWAY = f"{NOT_ASKED}, as it is away"
"""Why a client is left out that is not there in the round."""


class Absence(Middleware):
    """Leaves clients out that are ``away``, which may change between rounds; they are sent nothing.

    That holds for all that a method is made of: updates, gradients, losses on training data, subspaces, descriptors. An
    evaluation on test data measures a simulation from outside, and has all clients.
    """

    def __init__(self, n_parameters: int) -> None:
        self.away: frozenset[int] = frozenset()
        self._n_parameters = n_parameters

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates of those that are there."""
        if not (away := self._left_out(query.ids)):
            return ask(query)
        there = [client for client in query.ids if client not in away]
        if not there:
            return Updates.of_nobody(away, query.models, self._n_parameters)
        updates = ask(query.select(there))
        return replace(updates, left_out={**away, **updates.left_out})

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return the scores of those that are there; on test data, of all."""
        if query.split == "test" or not (away := self._left_out(query.ids)):
            return ask(query)
        places = [place for place, client in enumerate(query.ids) if client not in away]
        if not places:
            none = torch.zeros(0, dtype=torch.float64)
            return Evaluation((), none[:, None], none, none.to(torch.int64), away)
        ids, rows = [query.ids[place] for place in places], [query.assignment[place] for place in places]
        found = ask(replace(query, ids=ids, assignment=rows))
        return replace(found, left_out={**away, **found.left_out})

    def subspaces(self, query: SubspaceQuery, ask: Ask) -> Tensor:
        """Return the singular vectors ``[n, L, d, p]`` of those that are there, and zeros for the others."""
        return self._of_those_there(query, ask)

    def descriptors(self, query: DescriptorQuery, ask: Ask) -> Tensor:
        """Return the descriptors ``[n, 2 + B, C]`` of those that are there, and zeros for the others."""
        return self._of_those_there(query, ask)

    def _of_those_there(self, query: SubspaceQuery | DescriptorQuery, ask: Ask) -> Tensor:
        if not (away := self._left_out(query.ids)):
            return ask(query)
        places = [place for place, client in enumerate(query.ids) if client not in away]
        asked = [query.ids[place] for place in places] or query.ids[:1]  # one tells the shape
        found = ask(replace(query, ids=asked))
        vectors = found.new_zeros(len(query.ids), *found.shape[1:])
        vectors[places] = found[: len(places)]
        return vectors

    def shifts(self, query: ShiftQuery, ask: Ask) -> Tensor:
        """Return who has shifted of those that are there."""
        if not (away := self._left_out(query.ids)):
            return ask(query)
        places = [place for place, client in enumerate(query.ids) if client not in away]
        shifted = torch.zeros(len(query.ids), dtype=torch.bool)
        if places:
            shifted[places] = ask(replace(query, ids=[query.ids[place] for place in places]))
        return shifted

    def _left_out(self, ids: Collection[int]) -> dict[int, str]:
        return {client: AWAY for client in ids if client in self.away} if self.away else {}
