"""Combined reply of clients to an evaluation query: scores of models on the clients' own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores of n models, each evaluated by a client on one split of the client's own data.

    Usually each client evaluates one model. A client that evaluates several models has a row for
    each of them.

    Parameters
    ----------
    ids
        Id of the client of each row, ``[n]``.
    scores
        Values of the task's M metrics, float64 ``[n, M]``: a row for each evaluated model. The
        first metric is the main metric. A score is NaN if the metric is undefined for the client's
        data.
    losses
        Mean loss of each model, float64 ``[n]``; cross-entropy is in nats.
    examples
        Number of targets that each model was evaluated on, int64 ``[n]``.
    left_out
        For each queried client that is not in ``ids``, the reason, by client id.
    higher_is_better
        Whether higher values of the main metric are better.
    wins
        Number of a client's examples for which a model has the lowest loss among the models that
        the client compares, int64 ``[n]``. Among equal losses, the model that comes first in the
        query wins. If each client chooses one model instead: 1 for the chosen model, 0 for the
        client's other models. None if clients do not compare models.
    without_loss
        Ids of clients that send a score but no loss: their loss is NaN, and they count as one
        example each.
    byzantine
        Largest assumed share of clients with false replies. A decision by losses should leave out
        this share of the losses as outliers. The server sets it if clients may be malicious.
    """

    ids: tuple[int, ...]
    scores: torch.Tensor
    losses: torch.Tensor
    examples: torch.Tensor
    left_out: Mapping[int, str] = field(default_factory=dict[int, str])
    higher_is_better: bool = True
    wins: torch.Tensor | None = None
    without_loss: frozenset[int] = frozenset()
    byzantine: float = 0.0

    @property
    def known_losses(self) -> torch.Tensor:
        """Losses of the rows whose clients have sent a loss, ``[m]``."""
        told = [place for place, client in enumerate(self.ids) if client not in self.without_loss]
        return self.losses[told]

    @property
    def merit(self) -> torch.Tensor:
        """Values ``[n]`` of the main metric, with the sign changed if lower values are better.

        A higher merit is thus always better. The merit of a client without a score is NaN.
        """
        return self.scores[:, 0] if self.higher_is_better else -self.scores[:, 0]

    @classmethod
    def concat(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """Concatenate the rows of at least one evaluation into one evaluation."""
        if len(parts) == 1:
            return parts[0]
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        ids = tuple(client for part in parts for client in part.ids)
        left_out = {client: why for part in parts for client, why in part.left_out.items()}
        of_all: dict[str, Any] = {
            n: torch.cat(column)
            for n, column in columns.items()
            if isinstance(column[0], torch.Tensor)
        }
        silent = frozenset[int]().union(*(part.without_loss for part in parts))
        return replace(parts[0], ids=ids, left_out=left_out, without_loss=silent, **of_all)
