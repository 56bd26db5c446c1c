"""Clients that make several updates at once, each from a part of their data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedclade.channel.middleware import Middleware
from fedclade.channel.signature import Sketch
from fedclade.core import Ask, UpdateQuery, Updates, row_norms


@dataclass(frozen=True)
class Replicating(Middleware):
    """Answers a query for m replicates with the mean of their updates and the signatures of all, one behind the other.

    A replicate is an update made at the same model from a part of the training data. So a client is asked once, and
    sends little more than one update, if signatures are sketches. This comes after all that is done to whole updates:
    privacy and permutation.
    """

    sketch: Sketch | None

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates; of m replicates these are ``[n, S + m·R]``, or if they are not compared ``[n, S]``."""
        count = query.round.replicates
        if query.kind == "gradients" or count == 1:
            return ask(query)
        made = [ask(replace(query, round=query.round.of_part(part))) for part in range(count)]
        answered = [client for client in query.ids if all(client in updates.ids for updates in made)]
        parts = [updates.select(answered) for updates in made]
        sizes = torch.stack([updates.sizes for updates in parts])
        deltas = torch.stack([updates.required_deltas for updates in parts])
        n_parameters = parts[0].n_parameters
        mean = torch.einsum("kn,kns->ns", (sizes / sizes.sum(0)).to(deltas), deltas)
        compared = deltas[: count if query.round.compares_parts else 0, :, :n_parameters]
        signatures = self.sketch.apply(compared) if self.sketch else compared
        return Updates(
            ids=tuple(answered),
            sizes=sizes.sum(0),
            losses=torch.stack([updates.losses for updates in parts]).mean(0),
            norms=row_norms(mean[:, :n_parameters]),
            n_parameters=n_parameters,
            deltas=torch.cat([mean, *signatures], dim=1),
            left_out={client: why for updates in made for client, why in updates.left_out.items()},
        )


@dataclass(frozen=True)
class Unpacking(Middleware):
    """Takes apart what :class:`Replicating` has sent, before anything else is done to it."""

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the mean of the replicates' updates as the update, with the signatures beside it."""
        if query.kind == "gradients" or query.round.replicates == 1 or not query.round.compares_parts:
            return ask(query)
        if (sink := query.sink) is not None:
            query = replace(query, sink=lambda updates: sink(_unpacked(updates, query)))
        return _unpacked(ask(query), query)


def _unpacked(updates: Updates, query: UpdateQuery) -> Updates:
    size, count = query.models.shape[1], query.round.replicates
    deltas = updates.required_deltas
    signatures = deltas[:, size:].reshape(len(deltas), count, (deltas.shape[1] - size) // count)
    return replace(updates, deltas=deltas[:, :size], parts=signatures)
