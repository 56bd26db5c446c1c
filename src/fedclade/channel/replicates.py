"""Clients that are asked for several updates at once, each from a part of their data, and send their signatures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.channel.signature import Sketch
from fedclade.core import Ask, UpdateQuery, Updates, row_norms


@dataclass(frozen=True)
class Replicating(Middleware):
    """Answers a round of several replicates with as many signatures, one behind the other.

    A replicate is an update made at the same model from a part of the training data. A client sends only what it is
    compared by: the parameters, or the run's sketch of them. So it is asked once, and sends little. This comes after
    all that is done to whole updates: privacy and permutation.
    """

    sketch: Sketch | None

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates; of m replicates these are ``[n, m·R]``."""
        count = query.round.replicates
        if query.kind == "gradients" or count == 1:
            return ask(query)
        made = [ask(replace(query, round=query.round.of_part(part))) for part in range(count)]
        answered = [client for client in query.ids if all(client in updates.ids for updates in made)]
        parts = [updates.select(answered) for updates in made]
        signatures = torch.cat([self._signatures(updates) for updates in parts], dim=1)
        return Updates(
            ids=tuple(answered),
            sizes=torch.stack([updates.sizes for updates in parts]).sum(0),
            losses=torch.stack([updates.losses for updates in parts]).mean(0),
            norms=row_norms(signatures),
            n_parameters=signatures.shape[1],
            deltas=signatures,
            left_out={client: why for updates in made for client, why in updates.left_out.items()},
        )

    def _signatures(self, updates: Updates) -> Tensor:
        whole = updates.required_deltas[:, : updates.n_parameters]
        return self.sketch.apply(whole) if self.sketch else whole
