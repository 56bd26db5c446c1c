"""Scores of examples by what models give for them, and of clients by all of their examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedclade.core import IGNORED, DataError, Indices
from fedclade.tasks import FittedTask, Metric, counted


class Whole:
    """Metrics of all outputs of a client together: keeps the outputs until it has them all."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = {row: metric.whole for row, metric in enumerate(metrics) if metric.whole is not None}
        self._examples: list[Indices] = []
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def keep(self, examples: Indices, outputs: Tensor, at: Tensor, seen: Tensor) -> None:
        """Keep the outputs for some examples; see :func:`score`."""
        if self._metrics:
            self._examples.append(examples)
            self._outputs.append(outputs[at.to(outputs.device)].cpu())
            self._targets.append(seen.cpu())

    def of_queries(self, query: Indices, clients: Sequence[int]) -> Iterator[tuple[int, dict[int, float]]]:
        """Yield the numbers of each query, by the rows of the metrics; ``query`` is of each example."""
        if not self._metrics:
            return
        order = np.argsort(np.concatenate(self._examples))
        outputs, targets = torch.cat(self._outputs)[order], torch.cat(self._targets)[order]
        counts = np.bincount(query, minlength=len(clients)).tolist()
        for k, (mine, seen) in enumerate(zip(outputs.split(counts), targets.split(counts), strict=True)):
            try:
                # Copies, since a user's own metric may work in place, and the next one gets the same.
                yield k, {row: whole(mine.clone(), seen.clone()) for row, whole in self._metrics.items()}
            except DataError as error:
                raise DataError(f"client {clients[k]}: {error}") from None


def score(task: FittedTask, outputs: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Score examples by the outputs ``[b, ...]`` of the distinct inputs.

    ``at`` is which of these is the input of each example, int64 ``[m]``, and ``seen`` its targets ``[m, ...]``, as its
    client sees them. Returns for each example the terms of each metric (0 for those of all outputs together), its loss,
    and how many of its targets count, float64 ``[M + 2, m]``.
    """
    at, seen = at.to(outputs.device), seen.to(outputs.device)
    counts = counted(seen).double()
    losses = _nats(outputs, at, seen) if task.is_plain else task.losses(outputs[at], seen).double() * counts
    terms = [_terms(metric, outputs, at, seen, losses) for metric in task.metrics]
    return torch.stack([*terms, losses, counts])


def _nats(logits: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Return the summed cross-entropy of each example, without a copy of the logits for each."""
    at, seen = at.unsqueeze(1), seen.view(len(seen), -1)
    logits = logits.view(len(logits), seen.shape[1], -1)
    counts, place = seen != IGNORED, torch.arange(seen.shape[1], device=seen.device)
    nats = -functional.log_softmax(logits, -1)[at, place, seen.where(counts, 0)]
    return nats.where(counts, 0).sum(1, dtype=torch.float64)


def _terms(metric: Metric, outputs: Tensor, at: Tensor, seen: Tensor, losses: Tensor) -> Tensor:
    if metric.whole is not None:
        return torch.zeros_like(losses)
    if metric.terms is None:
        return losses
    predicted = outputs if metric.predict is None else metric.predict(outputs)
    return metric.terms(predicted[at], seen)


def wins_of(ids: Sequence[int], losses: Sequence[NDArray[Any]]) -> Tensor:
    """Return of how many examples of its client each model has the least loss; those of a client stand side by side."""
    wins, first = torch.zeros(len(ids), dtype=torch.int64), 0
    while first < len(ids):
        stop = next((place for place in range(first, len(ids)) if ids[place] != ids[first]), len(ids))
        table = np.nan_to_num(np.stack(losses[first:stop]), nan=np.inf)
        wins[first:stop] = torch.from_numpy(np.bincount(table.argmin(axis=0), minlength=stop - first))
        first = stop
    return wins
