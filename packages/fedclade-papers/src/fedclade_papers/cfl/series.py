"""Results of runs that are stored for figures 8 and 9 of the CFL paper.

They include scores over the rounds and separation gaps, and for the right part of figure 3 of the
workshop paper the similarities between the updates of pairs of clients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from fedclade import CFL, Clients, Event, RoundLog, RoundPlan, Run
from fedclade.algorithms import CFLState
from fedclade.runs import events_of
from fedclade.tasks import perplexity
from fedclade_papers.cache import Settings

Series = dict[str, Any]
"""Results of a run that are stored; :func:`series_of` describes them."""


def series_of(run: Run, settings: Settings) -> Series:
    """Collect the results of a run that figures 8 and 9 need.

    Scores are accuracies in percent or, for language models, perplexities. e is the number of
    evaluated rounds.

    Returns
    -------
    dict
        ``rounds``: numbers of the evaluated rounds, ``[e]``; ``scores``: mean score over the
        clients in these rounds, ``[e]``; ``by_cluster``: mean score of each true cluster,
        ``[clusters][e]``; ``ari``: adjusted Rand index in every round; ``gaps``: separation gaps by
        node of the tree, ``[[round, gap], ...]``; ``gap_at_split`` and ``gap_at_end``: gap of the
        first cluster when it is split first, and largest gap in the last round; ``splits``: rounds
        in which clusters were split; ``jump``: see :func:`_measure_jump`; ``norms``: see
        :func:`_collect_norms`; ``settled``: see :func:`_find_settling_round`; ``examples``: number
        of training examples of all clients.
    """
    truth = {row["client"]: row["true_cluster"] for row in run.client_rows}
    language = "perplexity" in run.summary
    table = defaultdict[tuple[int, int], list[float]](list)
    for row in run.client_rows:
        if language:
            value = perplexity(row["loss"])
        else:
            value = 100 * row["accuracy"]
        table[row["round"], row["true_cluster"]].append(value)
    rounds = sorted({number for number, _ in table})
    clusters = sorted({cluster for _, cluster in table})
    gaps = defaultdict[str, list[list[float]]](list)
    for row in run.cluster_rows:
        if row["separation_gap"] is not None:
            gaps[str(row["node"])].append([row["round"], round(row["separation_gap"], 3)])
    scores: list[float] = []
    for number in rounds:
        values = [value for cluster in clusters for value in table[number, cluster]]
        scores.append(float(np.mean(values)))
    by_cluster: list[list[float]] = []
    for cluster in clusters:
        means = [float(np.mean(table[number, cluster])) for number in rounds]
        by_cluster.append([round(mean, 2) for mean in means])
    ari = [row["ari"] for row in run.metric_rows]
    first = settings["split_rounds"][0]
    return {
        "rounds": rounds,
        "scores": scores,
        "by_cluster": by_cluster,
        "ari": ari,
        "gaps": gaps,
        "splits": [
            event["round"] for event in run.events if event["kind"] in ("split", "regrouped")
        ],
        "jump": _measure_jump(run, settings, truth),
        "gap_at_split": next((gap for number, gap in gaps.get("0", []) if number == first), None),
        "norms": _collect_norms(run, settings, truth),
        "gap_at_end": max(
            (last[-1][1] for last in gaps.values() if last[-1][0] == len(run.metric_rows)),
            default=-1.0,
        ),
        "settled": _find_settling_round(ari),
        "examples": sum({row["client"]: row["n_train"] for row in run.client_rows}.values()),
    }


def _measure_jump(run: Run, settings: Settings, truth: Mapping[int, int]) -> float:
    """Return the rise in accuracy of a cluster that the first split separates from all others.

    The rise is the difference in percentage points between the evaluation in the round of the
    split and the next evaluation. It is averaged over the clients of a child cluster that contains
    only one true cluster, and is 0 if the split gives no such child.
    """
    first = settings["split_rounds"][0]
    children = [node.members for node in run.tree.nodes if node.born == first]
    pure = [members for members in children if _count_true_clusters(members, truth) == 1]

    if not pure:
        return 0.0

    def average_accuracy(number: int) -> float:
        """Return the mean accuracy of the separated cluster's clients in a round."""
        accuracies = [
            row["accuracy"]
            for row in run.client_rows
            if row["round"] == number and row["client"] in pure[0]
        ]
        return float(np.mean(accuracies))

    return 100 * (average_accuracy(first + settings["evaluate_every"]) - average_accuracy(first))


def _count_true_clusters(members: Sequence[int], truth: Mapping[int, int]) -> int:
    """Return the number of different true clusters to which some clients belong."""
    return len({truth[client] for client in members})


def _collect_norms(
    run: Run, settings: Settings, truth: Mapping[int, int]
) -> dict[str, list[float]]:
    """Return the largest update norm (eq. 33) of each cluster in the rounds of splits.

    The norms are listed separately for ``mixed`` clusters, which contain clients of several true
    clusters, and for ``pure`` clusters, which contain clients of one true cluster.
    """
    found: dict[str, list[float]] = {"mixed": [], "pure": []}
    for row in run.cluster_rows:
        if row["round"] in settings["split_rounds"] and row["max_norm"] is not None:
            members = run.tree.nodes[row["node"]].members
            kind = "mixed" if _count_true_clusters(members, truth) > 1 else "pure"
            found[kind].append(round(row["max_norm"], 3))
    return found


def _find_settling_round(ari: Sequence[float]) -> int:
    """Return the round from which on the clusters are always the true clusters.

    The result is 0 if the clusters of the last round are not the true clusters. ``ari`` has the
    adjusted Rand index of each round.
    """
    last = max((number for number, value in enumerate(ari, start=1) if value != 1), default=0)
    if last == len(ari):
        return 0
    return last + 1


DIGITS = 3
"""Number of decimals of a stored similarity."""

KINDS = {"same": "one distribution", "other": "two distributions", "clustered": "already clustered"}
"""Kinds of pairs of clients within one cluster, drawn in blue, orange and grey in the paper."""

Pairs = dict[str, list[list[float]]]
"""Similarities of pairs of clients, by the keys of :data:`KINDS`.

For every round that has pairs of a kind: ``[round, lowest, mean, highest]``.
"""


@dataclass(frozen=True)
class Pairwise(Event):
    """Event with the similarities between the updates of all pairs of a cluster's clients."""

    kind = "similarities"

    clients: tuple[int, ...]
    alpha: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class WatchedCFL(CFL):
    """CFL that also reports the similarities of clients as events, so that the run stores them."""

    def step(
        self, state: CFLState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[CFLState, RoundLog]:
        """Run one round of CFL, and add an event with the similarities of each cluster."""
        state, log = super().step(state, cohort, clients, this_round)
        events = [
            Pairwise(node, each.members, np.round(each.similarity, DIGITS).tolist())
            for node, each in log.criteria.items()
            if each.similarity is not None and len(each.members) > 1
        ]
        return state, replace(log, events=(*log.events, *events))


def pairs_of(run: Run, truth: Mapping[int, int]) -> Pairs:
    """Summarize the similarities of pairs of clients in a run of :class:`WatchedCFL`.

    ``truth`` has the true cluster of each client. A pair of clients counts as already clustered if
    the cluster of the two clients equals a true cluster.
    """
    sizes = Counter(truth.values())
    found: dict[str, dict[int, list[float]]] = {kind: defaultdict(list) for kind in KINDS}
    for number, event in events_of(run.events, Pairwise):
        clients = event.clients
        alpha = event.alpha
        inside = {truth[client] for client in clients}
        done = len(inside) == 1 and len(clients) == sizes[min(inside)]
        for a, b in combinations(range(len(clients)), 2):
            if done:
                kind = "clustered"
            elif truth[clients[a]] == truth[clients[b]]:
                kind = "same"
            else:
                kind = "other"
            found[kind][number].append(alpha[a][b])
    pairs: Pairs = {}
    for kind, by_round in found.items():
        pairs[kind] = [[number, *_summarize(by_round[number])] for number in sorted(by_round)]
    return pairs


def _summarize(values: Sequence[float]) -> list[float]:
    """Return the lowest, the mean and the highest of some values, rounded."""
    summary = (min(values), np.mean(values), max(values))
    return [round(float(value), DIGITS) for value in summary]
