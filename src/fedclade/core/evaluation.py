"""How clients fare with their models: the reply to a query for scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How n clients fare on one split of their own data.

    Parameters
    ----------
    ids
        The clients, ``[n]``.
    scores
        By each of the task's metrics, of which the first counts, float64 ``[n, M]``. NaN where a
        client has no score, as its data leaves the metric undefined.
    losses
        Mean loss, float64 ``[n]``; cross-entropy is in nats.
    examples
        Number of targets, int64 ``[n]``.
    left_out
        Why each client that was queried, and is not among ``ids``, is left out.
    higher_is_better
        The direction of the score that counts.
    wins
        Where each client compares its models: of how many of its examples each has the least loss,
        of equals the first that it was asked about; int64 ``[n]``. Where each client chooses one of
        its models: 1 for that, 0 for others.
    without_loss
        The clients that tell a score alone: their loss is NaN, and they count as one example each.
    byzantine
        Share of the clients whose statements may be false; the server sets it where clients may
        lie.
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
        """The losses of the clients that tell them, ``[m]``."""
        told = [place for place, client in enumerate(self.ids) if client not in self.without_loss]
        return self.losses[told]

    @property
    def merit(self) -> Tensor:
        """The score that counts, with a sign so that more is better, ``[n]``; NaN where a client has none."""
        return self.scores[:, 0] if self.higher_is_better else -self.scores[:, 0]

    @classmethod
    def concat(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """Return the scores of all parts, at least one, behind each other."""
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
