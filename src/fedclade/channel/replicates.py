"""Clients that are asked for several updates at once, each from a part of their data, and send their signatures."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedclade.channel.signature import CountSketch
from fedclade.core import (
    Clients,
    ClientsWrapper,
    Round,
    Updates,
    row_norms,
)


class ReplicatingClients(ClientsWrapper):
    """Clients that answer a round of several replicates with as many signatures, one behind the other.

    A replicate is an update made at the same model from a part of the training data. What leaves a client of it is what
    clients are compared by: the parameters, or the run's sketch of them; so it is asked once, and sends little.

    Parameters
    ----------
    clients
        Those who do the work, as they would send whole updates: private and permuted, if they are.
    sketch
        The run's projection of the parameters of an update; None for whole ones.
    """

    def __init__(self, clients: Clients, sketch: CountSketch | None) -> None:
        super().__init__(clients)
        self._sketch = sketch

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        anchors: Sequence[int] | None = None,
    ) -> Updates:
        """Let each client train from its model; of m replicates the updates are ``[n, m·R]``."""
        if this_round.replicates == 1:
            return self._clients.train(ids, models, assignment, this_round, anchors)
        made = [
            self._clients.train(ids, models, assignment, this_round.of_part(part), anchors)
            for part in range(this_round.replicates)
        ]
        answered = [client for client in ids if all(client in updates.ids for updates in made)]
        parts = [updates.of(answered) for updates in made]
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
        whole = updates.each[:, : updates.n_parameters]
        return self._sketch.apply(whole) if self._sketch else whole
