"""Detection of diverging training, by the losses of clients on held-out data.

A client counts as diverged if its loss becomes infinite or NaN, or grows to at least 1,000 times a
reference loss, which is about its smallest loss so far (see :class:`LossWatch`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.core import DataSpec, Diverged, Evaluation
from fedclade.runs.store.contents import Row
from fedclade.runs.store.event_rows import events_of
from fedclade.tasks import FittedTask

GROWTH = 1000.0
"""Factor of growth of a client's loss from which the client counts as diverged."""

SMALLEST = 0.01
"""Lower bound of the loss that growth is compared with, as a share of a constant prediction's loss.

A loss of nearly 0 can grow a thousandfold and still be small.
"""

MOST = 0.5
"""Share of diverged clients above which the whole run has diverged."""

ADVICE = "lower local.lr, and scale inputs and targets (data.standardize, data.standardize_target)"
"""Advice for a run that diverged: settings with which it may converge."""


def constant_loss(task: FittedTask, spec: DataSpec) -> float | None:
    """Return the loss of a constant prediction, if it is known without the clients' data.

    For labels, the constant prediction has equal probabilities for all labels. For standardized
    targets of a regression, it is their mean, and its loss is about 1. The result is None for a
    regression whose targets are not standardized, and for losses that may be negative.
    """
    if not task.has_nonnegative_loss:
        return None
    if task.kind == "regression":
        return None if task.target_scale is None else 1.0
    if task.kind in ("binary", "multilabel"):
        return math.log(2)
    return math.log(max(2, spec.outputs))


class LossWatch:
    """Detector of diverging clients, by their losses on held-out data after each evaluation.

    A client has diverged if its loss is NaN or infinite, or at least 1,000 times a reference loss.
    The reference is the client's smallest loss so far or the loss of a constant prediction,
    whichever is smaller, but at least 1 % of the loss of a constant prediction: a loss of nearly 0
    can grow a thousandfold and still be small. If the loss of a constant prediction is not known
    without the data, the client's first loss is used in its place. Losses that may be negative are
    only checked for NaN and infinity.

    Parameters
    ----------
    task
        Task of the run, whose loss is watched.
    spec
        Description of the inputs and outputs of examples.
    """

    def __init__(self, task: FittedTask, spec: DataSpec) -> None:
        self._is_bounded = task.has_nonnegative_loss
        constant = constant_loss(task, spec)
        self._known_constant = math.inf if constant is None else constant
        # One entry for each client so far, in the order of their ids.
        self._ids = np.empty(0, dtype=np.int64)
        self._constant = np.empty(0, dtype=np.float64)  # infinite before a client's first loss
        self._lowest = np.empty(0, dtype=np.float64)
        self._is_far = np.empty(0, dtype=np.bool_)
        self._is_reported = np.empty(0, dtype=np.bool_)

    def add_losses(self, ids: NDArray[np.int64], losses: NDArray[np.float64]) -> list[int]:
        """Record the losses of n clients, and return the ids of newly diverged clients.

        A client is newly diverged if it diverges by this loss and by none of its earlier losses.

        Parameters
        ----------
        ids
            Ids of the clients, ``[n]``.
        losses
            Loss of each client, ``[n]``; NaN or infinite if its model has diverged.
        """
        self._add_clients(ids)
        places = np.searchsorted(self._ids, ids)
        is_finite = np.isfinite(losses)
        finite_losses = np.where(is_finite, losses, math.inf)
        constant = self._constant[places]
        constant = np.where(np.isinf(constant), finite_losses, constant)
        reference = np.maximum(self._lowest[places], SMALLEST * constant)
        is_far = ~is_finite
        if self._is_bounded:
            is_far |= (losses >= GROWTH * reference) & (reference > 0)
        self._constant[places] = constant
        self._lowest[places] = np.minimum(self._lowest[places], finite_losses)
        self._is_far[places] = is_far
        is_new = is_far & ~self._is_reported[places]
        self._is_reported[places] |= is_far
        return ids[is_new].tolist()

    def _add_clients(self, ids: NDArray[np.int64]) -> None:
        """Add entries for clients without an entry, such as newcomers that join over a network."""
        if np.isin(ids, self._ids).all():
            return
        together = np.union1d(self._ids, ids)
        places = np.searchsorted(together, self._ids)

        def extend(values: NDArray[Any], fill: float | bool) -> NDArray[Any]:
            extended = np.full(len(together), fill, dtype=values.dtype)
            extended[places] = values
            return extended

        self._ids = together
        self._constant = extend(self._constant, self._known_constant)
        self._lowest = extend(self._lowest, self._known_constant)
        self._is_far = extend(self._is_far, False)
        self._is_reported = extend(self._is_reported, False)

    def add_earlier_rows(
        self, blocks: Sequence[Mapping[str, Any]], reported: Collection[int]
    ) -> None:
        """Record the losses of earlier rounds, in a run that is continued.

        Parameters
        ----------
        blocks
            Rows of the table of clients, as blocks of columns.
        reported
            Clients that earlier rounds reported as diverged. If such a client has a row without a
            loss, the loss was NaN or infinite. Rows of other clients without a loss are skipped,
            since these clients do not report their loss.
        """
        for block in blocks:
            ids = np.asarray(block["client"], dtype=np.int64)
            losses = np.asarray(block["loss"], dtype=np.float64)
            is_known = ~np.isnan(losses) | np.isin(ids, [*reported])
            self.add_losses(ids[is_known], losses[is_known])

    @property
    def counts(self) -> tuple[int, int]:
        """Number of clients that have diverged, and number of clients with a known loss."""
        return int(self._is_far.sum()), len(self._ids)

    @property
    def has_diverged(self) -> bool:
        """Whether the whole run has diverged, as more than half of the clients have."""
        far, known = self.counts
        return far > MOST * known


def diverged_clients(events: Sequence[Row]) -> dict[int, int]:
    """Return the round in which each diverged client was first reported, by client id.

    Parameters
    ----------
    events
        Rows of the events of a run, in order.
    """
    first_rounds: dict[int, int] = {}
    for number, event in events_of(events, Diverged):
        for client in event.clients:
            first_rounds.setdefault(client, number)
    return first_rounds


def known_losses(evaluation: Evaluation) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Select the clients that report a loss.

    Returns
    -------
    tuple
        The ids of these clients, and their losses, as arrays of equal length.
    """
    ids = np.asarray(evaluation.ids, dtype=np.int64)
    is_known = ~np.isin(ids, [*evaluation.without_loss])
    return ids[is_known], evaluation.losses.double().numpy()[is_known]
