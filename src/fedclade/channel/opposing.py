"""Middleware that leaves out updates that oppose the cluster that their client has chosen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import EvaluationQuery, Round, TrainQuery, Updates, row_norms

OPPOSED = -0.1
"""Cosine of two updates below which they oppose each other."""

AGREE = 0.4
"""Mean cosine of the pairs of updates of a group from which on the updates agree with each other.

Updates with a lower mean cosine are mostly noise, as when their model has converged; honest updates
may then oppose each other.
"""

FEWEST = 3
"""Number of members of the smallest cluster that is checked.

Of two members that oppose each other, either could be the adversary.
"""

COMPARED_WITH = 100
"""Largest number of members with which each member is compared, to bound the time."""


class OpposingUpdates(Middleware):
    """Middleware that leaves out updates that oppose the other members of their client's cluster.

    A client of IFCA chooses the model for which it reports the lowest loss. With a false report, an
    adversary could change the model of any cluster. But a client that fits a cluster moves the
    model in about the direction of the other members. So a member opposes its cluster if both
    conditions hold:

    - The cosines of its update with the updates of more than half of the members are below
      :data:`OPPOSED`.
    - These members agree with each other: their mean cosine is at least :data:`AGREE`.

    Opposing members are left out of the round, unless there are several of them and they are more
    than the share ``byzantine`` of the cluster. In that case they are probably clients of another
    distribution without a better model, and no member is left out. So adversaries that are more
    than this share of a cluster are not detected, and neither is an update orthogonal to the other
    updates. If all clients have chosen the same model, nothing is checked.

    The middleware also records, in evaluations on training data, the share ``byzantine`` of losses
    that may be false. IFCA uses this share to choose among its restarts.

    Parameters
    ----------
    byzantine
        Share of a cluster's clients that may be adversaries; see :class:`~fedclade.Aggregation`.
    """

    queries = (TrainQuery, EvaluationQuery)

    def __init__(self, byzantine: float) -> None:
        self._byzantine = byzantine

    def after(self, query: Any, reply: Any) -> Any:
        """Leave out opposing updates from a reply; return evaluations with all of their scores.

        Clients choose their models by evaluations on training data. To such an evaluation the
        method adds the share of clients that may be malicious, so that the algorithm can allow for
        false losses.
        """
        if isinstance(query, TrainQuery):
            return self._select_agreeing(query, reply)
        return replace(reply, byzantine=self._byzantine) if query.split == "train" else reply

    def _select_agreeing(self, query: TrainQuery, updates: Updates) -> Updates:
        """Leave out the updates that oppose the other updates of their cluster.

        A cluster is the set of clients that train the same model in this query.
        """
        has_updates = query.work.sends_update and updates.deltas is not None
        if not has_updates or len(query.models.vectors) < 2 or not updates.ids:
            return updates
        row_of = dict(zip(query.ids, query.models.start, strict=True))
        members = defaultdict[int, list[int]](list)
        for place, client in enumerate(updates.ids):
            members[row_of[client]].append(place)
        left_out: dict[int, str] = {}
        for places in members.values():
            opposed = _find_opposing(updates, places, query.round)
            if len(opposed) <= max(1, math.floor(round(self._byzantine * len(places), 9))):
                left_out |= opposed
        if not left_out:
            return updates
        agreeing = updates.select([client for client in updates.ids if client not in left_out])
        return replace(agreeing, left_out={**updates.left_out, **left_out})


def _find_opposing(updates: Updates, places: Sequence[int], this_round: Round) -> dict[int, str]:
    """Return the clients whose update opposes their cluster, each with the reason as text.

    Parameters
    ----------
    updates
        Updates of all clients.
    places
        Rows of the cluster's members in ``updates``.
    this_round
        Round, whose generator draws the members to compare with if there are many.
    """
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
                f"the update opposes the cluster that the client chose: {len(opposed)} of its {n} "
                f"members, which have a mean cosine of {agreement:.2f} with each other, and of "
                f"{float(cosines[member, opposed].mean()):.2f} with the update"
            )
    return found


def _cosines(updates: Tensor, others: Sequence[int]) -> Tensor:
    """Return the cosines of n updates with r of these updates, float64 ``[n, r]`` on the CPU.

    Parameters
    ----------
    updates
        Updates ``[n, D]`` (one row for each client, one column for each model parameter).
    others
        Rows of the r updates to compare with.
    """
    norms = row_norms(updates).clamp(min=torch.finfo(torch.float64).tiny)
    products = (updates @ updates[list(others)].T).double().cpu()
    return products / norms[:, None] / norms[list(others)]


def _mean_of_pairs(cosines: Tensor) -> float:
    """Return the mean cosine of all pairs of k updates, k at least 2.

    This is the mean of the symmetric matrix of cosines ``[k, k]`` without its diagonal.
    """
    k = len(cosines)
    return float((cosines.sum() - cosines.diagonal().sum()) / (k * (k - 1)))
