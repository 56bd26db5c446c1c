"""Scores of examples by what models give for them, and of clients by all of their examples."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedclade.core import IGNORED, Indices
from fedclade.tasks import FittedTask, Metric, counted

_log = logging.getLogger(__name__)


class Whole:
    """Metrics, and a loss, of all outputs of a client together: keeps the outputs until it has them all.

    Parameters
    ----------
    task
        The metrics, and the loss if it is one over a whole batch.
    warned
        Names of metrics of whose errors users have been warned; more are added.
    """

    def __init__(self, task: FittedTask, warned: set[str]) -> None:
        self._task, self._warned = task, warned
        self._metrics = {row: metric for row, metric in enumerate(task.metrics) if metric.whole is not None}
        self._examples: list[Indices] = []
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._device = torch.device("cpu")

    @property
    def _is_needed(self) -> bool:
        return bool(self._metrics) or self._task.over_batch

    def keep(self, examples: Indices, outputs: Tensor, at: Tensor, seen: Tensor) -> None:
        """Keep the outputs for some examples; see :func:`score`."""
        if self._is_needed:
            self._examples.append(examples)
            self._device = outputs.device
            self._outputs.append(outputs[at.to(outputs.device)].cpu())
            self._targets.append(seen.cpu())

    def of_queries(self, query: Indices, clients: Sequence[int]) -> Iterator[tuple[int, dict[int, float]]]:
        """Yield the numbers of each query, by the rows of the metrics; ``query`` is of each example.

        A loss over the batch is in the row behind the metrics, times the number of targets.
        """
        if not self._is_needed:
            return
        order = np.argsort(np.concatenate(self._examples))
        outputs, targets = torch.cat(self._outputs)[order], torch.cat(self._targets)[order]
        outputs = like_targets(self._task, outputs, targets)
        counts = np.bincount(query, minlength=len(clients)).tolist()
        for k, (mine, seen) in enumerate(zip(outputs.split(counts), targets.split(counts), strict=True)):
            numbers = {row: self._number(metric, mine, seen, clients[k]) for row, metric in self._metrics.items()}
            if self._task.over_batch:
                there = mine.to(self._device), seen.to(self._device)
                numbers[len(self._task.metrics)] = float(self._task.total_loss(*there))
            yield k, numbers

    def _number(self, metric: Metric, outputs: Tensor, targets: Tensor, client: int) -> float:
        """Return the score of a client; NaN if it has none."""
        assert metric.whole is not None  # of those that are kept
        if not bool(outputs.isfinite().all()):
            return metric.worst
        try:
            # Copies, since a user's own metric may work in place, and the next one gets the same.
            score = metric.whole(outputs.clone(), targets.clone())
            return math.nan if score is None else float(score)  # pyright: ignore[reportUnnecessaryComparison]  (of users)
        except Exception as error:  # whatever a metric of the user's raises: it ends no run
            if metric.name not in self._warned:
                _log.warning(
                    "client %d, and perhaps others, have no score by %s: %s: %s",
                    *(client, metric.name, type(error).__name__, error),
                )
            self._warned.add(metric.name)
            return math.nan


def like_targets(task: FittedTask, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs ``[n, ...]`` in the shape of the targets of one example, if targets are numbers, or 0 and 1."""
    if task.kind in ("binary", "multilabel", "regression"):
        return outputs.reshape(len(outputs), *targets.shape[1:])
    return outputs


def score(task: FittedTask, outputs: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Score examples by the outputs ``[b, ...]`` of the distinct inputs.

    ``at`` is which of these is the input of each example, int64 ``[m]``, and ``seen`` its targets ``[m, ...]``, as its
    client sees them. Returns for each example the terms of each metric (0 for those of all outputs together), its loss,
    and how many of its targets count, float64 ``[M + 2, m]``.
    """
    at, seen = at.to(outputs.device), seen.to(outputs.device)
    counts, outputs = counted(seen).double(), like_targets(task, outputs, seen)
    if task.is_plain:
        losses = _nats(outputs, at, seen)
    elif task.over_batch:  # of a client's examples together, see Whole
        losses = torch.zeros_like(counts)
    else:
        losses = task.losses(outputs[at], seen).double() * counts
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
