"""Check that a client's update agrees with the cluster that the client has chosen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import Ask, Evaluation, EvaluationQuery, Round, UpdateQuery, Updates, row_norms

OPPOSED = -0.1
"""Cosine of two updates below which they oppose each other."""

AGREE = 0.4
"""Mean cosine from which on updates agree with each other.

Updates with a lower mean cosine are mostly noise, as when their model has converged, and honest
updates then oppose each other.
"""

FEWEST = 3
"""Smallest cluster that is checked: of two members, either could be the false one."""

COMPARED_WITH = 100
"""Largest number of members with which each member is compared, to bound the time."""


class OpposingUpdates(Middleware):
    """Middleware that leaves out updates that oppose the other clients that chose the model.

    A client of IFCA takes the model for which it reports the lowest loss. With a false report it
    could change the model of any cluster. But a client that fits a cluster moves its model in about
    the direction of the other members. So a client is left out of the round if its update opposes
    the updates of more than half of the members, and these agree with each other: cosines below
    :data:`OPPOSED`, and a mean cosine of at least :data:`AGREE`. If all clients have taken the same
    model, there was no choice, and nothing is checked.

    If the opposing members of a cluster are more than one and more than a share ``byzantine``, they
    are probably clients of another distribution without a better model, and none is left out. So
    adversaries that are more than this share of a cluster are not detected, and neither is an
    update orthogonal to the others.

    The middleware also records in the training losses that this share of them may be false. IFCA
    uses it to choose among its restarts.

    Parameters
    ----------
    byzantine
        Share of a cluster's clients that may be adversaries; see :class:`~fedclade.Aggregation`.
    """

    def __init__(self, byzantine: float) -> None:
        self._byzantine = byzantine

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return the scores; scores on training data get the share that may be false.

        By these scores clients choose their model.
        """
        evaluation = ask(query)
        return (
            replace(evaluation, byzantine=self._byzantine) if query.split == "train" else evaluation
        )

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates that do not oppose their cluster."""
        updates = ask(query)
        if query.is_secret or updates.deltas is None or len(query.models) < 2 or not updates.ids:
            return updates
        row_of = dict(zip(query.ids, query.assignment, strict=True))
        members = defaultdict[int, list[int]](list)
        for place, client in enumerate(updates.ids):
            members[row_of[client]].append(place)
        left_out: dict[int, str] = {}
        for places in members.values():
            opposed = _opposed(updates, places, query.round)
            if len(opposed) <= max(1, math.floor(round(self._byzantine * len(places), 9))):
                left_out |= opposed
        if not left_out:
            return updates
        agreeing = updates.select([client for client in updates.ids if client not in left_out])
        return replace(agreeing, left_out={**updates.left_out, **left_out})


def _opposed(updates: Updates, places: Sequence[int], this_round: Round) -> dict[int, str]:
    """Return the members of a cluster that oppose it, with the reason."""
    n = len(places)
    if n < FEWEST:
        return {}
    others = list(range(n))
    if n > COMPARED_WITH:
        others = sorted(
            this_round.generator("compared members").permutation(n)[:COMPARED_WITH].tolist()
        )
    cosines = _cosines(updates.required_deltas[list(places), : updates.n_parameters], others)
    found: dict[int, str] = {}
    for member, place in enumerate(places):
        opposed = [
            k for k, other in enumerate(others) if other != member and cosines[member, k] < OPPOSED
        ]
        if len(opposed) < 2 or 2 * len(opposed) <= len(others):
            continue
        agreement = _mean_of_pairs(cosines[[others[k] for k in opposed]][:, opposed])
        if agreement >= AGREE:
            found[updates.ids[place]] = (
                f"opposes the cluster that it chose: {len(opposed)} of its {n} members, which have "
                f"a mean cosine of {agreement:.2f} with each other, and of "
                f"{float(cosines[member, opposed].mean()):.2f} with it"
            )
    return found


def _cosines(updates: Tensor, others: Sequence[int]) -> Tensor:
    """Return the cosines, float64 ``[n, r]`` on the CPU, of updates ``[n, D]`` with r of them."""
    norms = row_norms(updates).clamp(min=torch.finfo(torch.float64).tiny)
    products = (updates @ updates[list(others)].T).double().cpu()
    return products / norms[:, None] / norms[list(others)]


def _mean_of_pairs(cosines: Tensor) -> float:
    """Return the mean of a symmetric matrix ``[k, k]`` off its diagonal, k at least 2."""
    k = len(cosines)
    return float((cosines.sum() - cosines.diagonal().sum()) / (k * (k - 1)))
