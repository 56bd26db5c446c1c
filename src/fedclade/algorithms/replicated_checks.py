"""What a check of replicated clustering finds in the updates of parts, and whether the clusters change by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.algorithms.regrouping import clusters_of
from fedclade.clustering import (
    Labels,
    Replicates,
    client_similarity,
    find_by_parts,
    find_clusters,
    gain,
    gain_by_parts,
    gammas_of,
    noise_of,
    part_similarity,
    same_partition,
)
from fedclade.core import Check, Postponed, Round, Updates

CHANGED = 0.01
"""Cosines of parts that differ by more than this are those of other data: rounding changes them by less."""

CHANCE = 0.05
"""Share of shuffles inside the present clusters that may gain more than clusters beyond those that there are."""

FOR_PEOPLE = 0.01
"""Level at which p-values are resolved that decide nothing."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """The clusters to go on with, and what that was decided by."""

    labels: Labels  # [n]
    p_value: float  # 1 where there was nothing to test
    gain: float  # of the clusters found, per client
    gain_before: float  # of those that there were
    gamma: float | None  # median of γ_i (CFL eq. 39); None if it is infinite
    tested: bool = True  # False where parts are as they were

    @property
    def criteria(self) -> dict[str, float]:
        """The numbers, as the tree keeps them and events tell them."""
        return {"p_value": self.p_value, "gain": self.gain, "gain_before": self.gain_before}

    def event(self, kind: type[Check], node: int, ids: Sequence[int], level: float) -> Check:
        """Tell it of the clients ``[n]`` of a node."""
        clusters = clusters_of(ids, self.labels)
        return kind(node, **self.criteria, level=level, gamma=self.gamma, clusters=clusters)


def signatures_of_parts(updates: Updates) -> Tensor:
    """Return the signatures of all parts, ``[n, m, R]``."""
    assert updates.parts is not None  # they were asked for
    return updates.parts


def cosines_of(updates: Updates) -> Tensor:
    """Return the cosines of all parts, ``[n·m, n·m]``, as a checkpoint keeps them."""
    return torch.from_numpy(part_similarity(signatures_of_parts(updates))).float()


def too_few(node: int, answers: int, this_round: Round) -> Postponed | None:
    """Return the event that a check waits, if too few of a node's clients answered for one."""
    needed = max(2, this_round.min_clients)
    return Postponed(node, answers, needed) if answers < needed else None


def of_cluster(
    node: int, made: Updates, parts: int, level: float, this_round: Round, *, level_inside: float
) -> Verdict:
    """Test whether a cluster's members, who made updates of equal parts at its model, are of one distribution."""
    draw, together = this_round.generator(f"shuffles {node}"), np.zeros(len(made.ids), dtype=np.int64)
    return by_parts(cosines_of(made), parts, together, level, draw, level_inside=level_inside)


def by_parts(
    cosines: Tensor,
    parts: int,
    now: Labels,
    level: float,
    draw: np.random.Generator,
    *,
    level_inside: float,
    known: Tensor | None = None,
) -> Verdict:
    """Cluster by equal parts; if they are as known already, whatever they tell was decided before."""
    of_parts = cosines.double().numpy()
    similarity = client_similarity(of_parts, parts)
    gamma = _median(gammas_of(similarity, parts))
    if known is not None and known.shape == cosines.shape and bool((known - cosines).abs().max() <= CHANGED):
        gained = gain_by_parts(similarity, now, noise_of(similarity, parts))
        return Verdict(now, 1.0, gained, gained, gamma, tested=False)
    found = find_by_parts(of_parts, parts, level, draw, level_inside)
    kept, gained = found.gains(now), found.gains(found.labels)[found.view]
    changes = gained > kept[found.view]
    labels = found.labels if changes else now if max(kept) > 0 else np.zeros_like(now)
    return Verdict(labels, found.p_value, gained, kept[found.view], gamma)


def by_halves(updates: Updates, now: Labels, level: float, draw: np.random.Generator) -> Verdict:
    """Cluster by two halves of the data of each client."""
    replicates = Replicates(*signatures_of_parts(updates).unbind(1))
    found = find_clusters(replicates)
    kept = gain(found.similarity, now, found.noise, found.own)
    more = now.any() and found.labels.max() > now.max() and found.gain > kept
    if more and found.exceeded(now, draw) > CHANCE:
        found = found.at_most(int(now.max()) + 1)
    changes = found.gain > max(kept, 0.0) and not same_partition(found.labels, now)
    # Where nothing depends on it, the p-value is for people, and may be less exact.
    p_value = found.p_value(level if changes else max(level, FOR_PEOPLE), draw)
    labels = found.labels if changes and p_value <= level else now if kept > 0 else np.zeros_like(now)
    return Verdict(labels, p_value, found.gain, kept, _median(replicates.gammas))


def _median(gammas: NDArray[np.float64]) -> float | None:
    gamma = float(np.median(gammas))
    return gamma if np.isfinite(gamma) else None
