"""Evaluation of models by clients on their own data: the reply to an evaluation query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores of n clients' models on one split of their own data.

    Parameters
    ----------
    ids
        The clients, ``[n]``.
    scores
        One column for each of the task's M metrics, float64 ``[n, M]``. The first metric is the
        main one. NaN if a client's data leaves a metric undefined.
    losses
        Mean loss, float64 ``[n]``; cross-entropy is in nats.
    examples
        Number of targets, int64 ``[n]``.
    left_out
        Reason for each queried client that is not among ``ids``.
    higher_is_better
        Whether higher values of the main metric are better.
    wins
        Set if each client compares several models, which then have one row each, int64 ``[n]``: the
        number of the client's examples for which this model has the lowest loss. Among equal losses
        the model that comes first in the query counts. If each client chooses one of its models: 1
        for the chosen model, 0 for the others.
    without_loss
        Clients that send a score only: their loss is NaN, and they count as one example each.
    byzantine
        Share of the clients whose replies may be false; set by the server if clients may be
        malicious.
    """

    ids: tuple[int, ...]
    scores: Tensor
    losses: Tensor
    examples: Tensor
    left_out: Mapping[int, str] = field(default_factory=dict[int, str])
    higher_is_better: bool = True
    wins: Tensor | None = None
    without_loss: frozenset[int] = frozenset()
    byzantine: float = 0.0

    @property
    def known_losses(self) -> Tensor:
        """Losses of the m clients that send them, ``[m]``."""
        told = [place for place, client in enumerate(self.ids) if client not in self.without_loss]
        return self.losses[told]

    @property
    def merit(self) -> Tensor:
        """Main score, negated if lower is better, so that higher is better, ``[n]``.

        NaN for clients without a score.
        """
        return self.scores[:, 0] if self.higher_is_better else -self.scores[:, 0]

    @classmethod
    def concat(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """Concatenate at least one evaluation."""
        if len(parts) == 1:
            return parts[0]
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        ids = tuple(client for part in parts for client in part.ids)
        left_out = {client: why for part in parts for client, why in part.left_out.items()}
        of_all: dict[str, Any] = {
            n: torch.cat(column) for n, column in columns.items() if isinstance(column[0], Tensor)
        }
        silent = frozenset[int]().union(*(part.without_loss for part in parts))
        return replace(parts[0], ids=ids, left_out=left_out, without_loss=silent, **of_all)
