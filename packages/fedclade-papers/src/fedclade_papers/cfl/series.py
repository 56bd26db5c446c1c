"""Results that CFL's figures 8 and 9 store of a run: scores, and similarities of clients' pairs.

The similarities are those of the right part of figure 3 of the workshop paper.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from fedclade import CFL, Clients, Event, Round, RoundLog, Run
from fedclade.algorithms import CFLState
from fedclade.runs import events_of
from fedclade.tasks import perplexity
from fedclade_papers.cache import Settings

Series = dict[str, Any]
"""Stored results of a run, see :func:`series_of`."""


def series_of(run: Run, settings: Settings) -> Series:
    """Return the results of a run; scores are in per cent, or perplexities.

    Returns
    -------
    dict
        ``rounds`` that were evaluated, ``[e]``; ``scores``, the mean over clients ``[e]``, and
        ``by_cluster``, the mean score of each true cluster ``[clusters][e]``; ``ari`` by round;
        ``gaps`` by node, ``[[round, gap], ...]``; ``splits``, the rounds of splits; ``jump``,
        ``gap_at_split``, ``gap_at_end``, ``norms`` and ``settled``, see the functions;
        ``examples``, the number of training examples.
    """
    truth = {row["client"]: row["true_cluster"] for row in run.client_rows}
    language = "perplexity" in run.summary
    table = defaultdict[tuple[int, int], list[float]](list)
    for row in run.client_rows:
        value = perplexity(row["loss"]) if language else 100 * row["accuracy"]
        table[row["round"], row["true_cluster"]].append(value)
    rounds, clusters = (sorted(set(each)) for each in zip(*table, strict=True))
    gaps = defaultdict[str, list[list[float]]](list)
    for row in run.cluster_rows:
        if row["separation_gap"] is not None:
            gaps[str(row["node"])].append([row["round"], round(row["separation_gap"], 3)])
    ari = [row["ari"] for row in run.metric_rows]
    return {
        "rounds": rounds,
        "scores": [
            float(np.mean([v for c in clusters for v in table[number, c]])) for number in rounds
        ],
        "by_cluster": [
            [round(float(np.mean(table[number, c])), 2) for number in rounds] for c in clusters
        ],
        "ari": ari,
        "gaps": gaps,
        "splits": [
            event["round"] for event in run.events if event["kind"] in ("split", "regrouped")
        ],
        "jump": _jump(run, settings, truth),
        "gap_at_split": next(
            (gap for number, gap in gaps.get("0", []) if number == settings["split_rounds"][0]),
            None,
        ),
        "norms": _norms(run, settings, truth),
        "gap_at_end": max(
            (last[-1][1] for last in gaps.values() if last[-1][0] == len(run.metric_rows)),
            default=-1.0,
        ),
        "settled": _settled(ari),
        "examples": sum({row["client"]: row["n_train"] for row in run.client_rows}.values()),
    }


def _jump(run: Run, settings: Settings, truth: Mapping[int, int]) -> float:
    """Return the rise in accuracy, in points, of the cluster that the first split isolates.

    It is the rise until the next evaluation, for clients of a child that contains only one true
    cluster; 0 if there is no such child.
    """
    first = settings["split_rounds"][0]
    children = [node.members for node in run.tree.nodes if node.born == first]
    pure = [members for members in children if len({truth[client] for client in members}) == 1]

    def accuracy(number: int) -> float:
        return float(
            np.mean(
                [
                    r["accuracy"]
                    for r in run.client_rows
                    if r["round"] == number and r["client"] in pure[0]
                ]
            )
        )

    return 100 * (accuracy(first + settings["evaluate_every"]) - accuracy(first)) if pure else 0.0


def _norms(run: Run, settings: Settings, truth: Mapping[int, int]) -> dict[str, list[float]]:
    """Return the largest norms (eq. 33) in the rounds of splits, of mixed and of pure clusters.

    Pure clusters contain clients of one true cluster only.
    """
    found: dict[str, list[float]] = {"mixed": [], "pure": []}
    for row in run.cluster_rows:
        if row["round"] in settings["split_rounds"] and row["max_norm"] is not None:
            distributions = {truth[client] for client in run.tree.nodes[row["node"]].members}
            found["mixed" if len(distributions) > 1 else "pure"].append(round(row["max_norm"], 3))
    return found


def _settled(ari: Sequence[float]) -> int:
    """Return the round from which on the clusters are the true ones; 0 if they finally are not."""
    last = max((number for number, value in enumerate(ari, start=1) if value != 1), default=0)
    return 0 if last == len(ari) else last + 1


DIGITS = 3
"""Number of decimals of a stored similarity."""

KINDS = {"same": "one distribution", "other": "two distributions", "clustered": "already clustered"}
"""Kinds of pairs of clients within one cluster: blue, orange and grey in the paper."""

Pairs = dict[str, list[list[float]]]
"""By kind of pair: ``[round, lowest, mean, highest]`` for every round with such pairs."""


@dataclass(frozen=True)
class Pairwise(Event):
    """The pairwise similarities of a cluster's clients in a round."""

    kind = "similarities"

    clients: tuple[int, ...]
    alpha: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class WatchedCFL(CFL):
    """CFL that reports the similarities of its clients as events, which the run stores."""

    def step(
        self, state: CFLState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[CFLState, RoundLog]:
        """Run one round."""
        state, log = super().step(state, cohort, clients, this_round)
        events = [
            Pairwise(node, each.members, np.round(each.similarity, DIGITS).tolist())
            for node, each in log.criteria.items()
            if each.similarity is not None and len(each.members) > 1
        ]
        return state, replace(log, events=(*log.events, *events))


def pairs_of(run: Run, truth: Mapping[int, int]) -> Pairs:
    """Return the similarities of pairs of clients in a run of :class:`WatchedCFL`.

    A pair counts as already clustered if its cluster is one of the true clusters ``truth``.
    """
    sizes = Counter(truth.values())
    found: dict[str, dict[int, list[float]]] = {kind: defaultdict(list) for kind in KINDS}
    for number, event in events_of(run.events, Pairwise):
        clients = event.clients
        alpha = event.alpha
        kinds = {truth[client] for client in clients}
        done = len(kinds) == 1 and len(clients) == sizes[min(kinds)]
        for a, b in combinations(range(len(clients)), 2):
            alike = "same" if truth[clients[a]] == truth[clients[b]] else "other"
            found["clustered" if done else alike][number].append(alpha[a][b])
    return {
        kind: [
            [
                number,
                *(
                    round(float(value), DIGITS)
                    for value in (min(values), np.mean(values), max(values))
                ),
            ]
            for number, values in sorted(rounds.items())
        ]
        for kind, rounds in found.items()
    }
