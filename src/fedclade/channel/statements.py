"""False statements of adversaries about models: swapped losses and scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from fedclade.core import Evaluation


def reversed_claims(found: Evaluation, adversaries: Collection[int]) -> Evaluation:
    """Return scores in which adversaries swap the reports about their models.

    An adversary reports the loss, scores and wins of the model with the largest loss for the model
    with the smallest loss, and so on in between. So all numbers are numbers that an honest client
    could report. With a single model it reports the truth.
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
    """Return the rows of scores in another order, int64 ``[n]``."""
    return replace(
        found,
        ids=tuple(found.ids[row] for row in order.tolist()),
        scores=found.scores[order],
        losses=found.losses[order],
        examples=found.examples[order],
        wins=None if found.wins is None else found.wins[order],
    )
