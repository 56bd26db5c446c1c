"""The right part of figure 3 of CFL's workshop paper: how alike the updates of every pair of clients are, by round."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedclade.algorithms import (
    CFL,
    CFLState,
    RoundLog,
)
from fedclade.core import (
    Clients,
    Event,
    Round,
)
from fedclade.report import style
from fedclade.runs import Run, events_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIGITS = 3
"""Decimals of a similarity that are kept."""

KINDS = {"same": "one distribution", "other": "two distributions", "clustered": "already clustered"}
"""Pairs of clients within one cluster: blue, orange and grey in the paper."""

Pairs = dict[str, list[list[float]]]
"""By kind of pair: ``[round, lowest, mean, highest]`` for every round that has such pairs."""


@dataclass(frozen=True)
class Pairwise(Event):
    """The similarities of a cluster's clients in a round."""

    kind = "similarities"

    clients: tuple[int, ...]
    alpha: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class WatchedCFL(CFL):
    """CFL that tells the similarities of its clients as events, so that the run keeps them for every round."""

    def step(
        self, state: CFLState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[CFLState, RoundLog]:
        """Run one round."""
        state, log = super().step(state, cohort, clients, this_round)
        told = [
            Pairwise(node, each.members, np.round(each.similarity, DIGITS).tolist())
            for node, each in log.criteria.items()
            if each.similarity is not None and len(each.members) > 1
        ]
        return state, replace(log, events=(*log.events, *told))


def pairs_of(run: Run, truth: Mapping[int, int]) -> Pairs:
    """Return how alike pairs of clients were in a run of :class:`WatchedCFL`.

    Parameters
    ----------
    run
        The run.
    truth
        True cluster of each client. A cluster that is a true one is clustered already.
    """
    sizes = Counter(truth.values())
    found: dict[str, dict[int, list[float]]] = {kind: defaultdict(list) for kind in KINDS}
    for number, event in events_of(run.events, Pairwise):
        clients, alpha = event.clients, event.alpha
        kinds = {truth[client] for client in clients}
        done = len(kinds) == 1 and len(clients) == sizes[min(kinds)]
        for a, b in combinations(range(len(clients)), 2):
            alike = "same" if truth[clients[a]] == truth[clients[b]] else "other"
            found["clustered" if done else alike][number].append(alpha[a][b])
    return {
        kind: [
            [number, *(round(float(value), DIGITS) for value in (min(values), np.mean(values), max(values)))]
            for number, values in sorted(rounds.items())
        ]
        for kind, rounds in found.items()
    }


def draw_pairs(axes: Axes, pairs: Pairs) -> None:
    """Draw the mean of every kind of pair, and a band from the lowest to the highest."""
    colors = dict(zip(KINDS, (style.CLUSTERS[0], style.CLUSTERS[1], style.MUTED), strict=True))
    for kind, rows in pairs.items():
        if rows:
            number, low, mean, high = _with_gaps(np.asarray(rows)).T
            axes.fill_between(number, low, high, color=colors[kind], alpha=0.25, linewidth=0)
            axes.plot(number, mean, color=colors[kind], label=KINDS[kind])
    axes.axhline(0, color=style.MUTED, linewidth=0.9)


def _with_gaps(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Put a row of NaN where rounds are missing, so that no line is drawn across."""
    gaps = 1 + np.flatnonzero(np.diff(rows[:, 0]) > 1)
    return np.insert(rows, gaps, np.nan, axis=0)
