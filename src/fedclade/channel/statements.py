"""False reports of adversaries (malicious simulated clients) about losses and scores of models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedclade.core import Evaluation

if TYPE_CHECKING:
    from torch import Tensor


def reversed_claims(found: Evaluation, adversaries: Collection[int]) -> Evaluation:
    """Return an evaluation in which each adversary swaps its reports about several models.

    An adversary reports the loss, scores and wins of the model with the largest loss for the model
    with the smallest loss, the second largest for the second smallest, and so on. So an honest
    client could report the same numbers. An adversary that evaluates a single model reports the
    truth.

    Parameters
    ----------
    found
        True evaluation, with one row for each pair of a client and a model.
    adversaries
        Ids of the clients that report falsely.
    """
    rows = defaultdict[int, list[int]](list)
    for row, client in enumerate(found.ids):
        if client in adversaries:
            rows[client].append(row)
    order = torch.arange(len(found.ids))
    for of_client in rows.values():
        ranked = [of_client[k] for k in found.losses[of_client].argsort(stable=True).tolist()]
        order[ranked] = torch.tensor(ranked[::-1])
    return in_order(found, order)


def in_order(found: Evaluation, order: Tensor) -> Evaluation:
    """Return an evaluation with its n rows in another order.

    Parameters
    ----------
    found
        The evaluation.
    order
        Numbers of the rows in their new order, int64 ``[n]``.
    """
    return replace(
        found,
        ids=tuple(found.ids[row] for row in order.tolist()),
        scores=found.scores[order],
        losses=found.losses[order],
        examples=found.examples[order],
        wins=None if found.wins is None else found.wins[order],
    )
