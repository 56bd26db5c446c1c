"""What figures 8 and 9 of CFL keep of a run: how it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedclade.papers.experiment import Settings
from fedclade.runs import Run
from fedclade.tasks import perplexity

Series = dict[str, Any]
"""What is kept of a run, see :func:`course_of`."""


def course_of(run: Run, settings: Settings) -> Series:
    """Return how a run went: scores in per cent, or as perplexity.

    Returns
    -------
    dict
        ``rounds`` evaluated ``[e]``; ``scores``, the mean of the clients ``[e]``, and ``by_cluster``, of each true
        cluster ``[clusters][e]``; ``ari`` by round; ``gaps`` by node, ``[[round, gap], ...]``; ``splits``, their
        rounds; ``jump``, ``gap_at_split``, ``gap_at_end``, ``norms`` and ``settled``, see the functions; ``examples``
        to train on.
    """
    truth = {row["client"]: row["true_cluster"] for row in run.clients}
    score = perplexity if "perplexity" in run.summary else None
    table: dict[tuple[int, int], list[float]] = {}
    for row in run.clients:
        value = 100 * row["accuracy"] if score is None else score(row["loss"])
        table.setdefault((row["round"], row["true_cluster"]), []).append(value)
    rounds = sorted({number for number, _ in table})
    clusters = sorted({cluster for _, cluster in table})
    by_cluster = [[round(float(np.mean(table[number, cluster])), 2) for number in rounds] for cluster in clusters]
    scores = [float(np.mean([v for c in clusters for v in table[number, c]])) for number in rounds]
    gaps: dict[str, list[list[float]]] = {}
    for row in run.clusters:
        if row["separation_gap"] is not None:
            gaps.setdefault(str(row["node"]), []).append([row["round"], round(row["separation_gap"], 3)])
    splits = [event["round"] for event in run.events if event["kind"] in ("split", "regrouped")]
    return {
        "rounds": rounds,
        "scores": scores,
        "by_cluster": by_cluster,
        "ari": [row["ari"] for row in run.metrics],
        "gaps": gaps,
        "splits": splits,
        "jump": _jump(run, settings, truth),
        "gap_at_split": next((gap for number, gap in gaps.get("0", []) if number == settings["split_rounds"][0]), None),
        "norms": _norms(run, settings, truth),
        "gap_at_end": max((last[-1][1] for last in gaps.values() if last[-1][0] == len(run.metrics)), default=-1.0),
        "settled": _settled([row["ari"] for row in run.metrics]),
        "examples": sum({row["client"]: row["n_train"] for row in run.clients}.values()),
    }


def _jump(run: Run, settings: Settings, truth: Mapping[int, int]) -> float:
    """Return by how many points those rise that the first split parts from everybody else, till the next evaluation.

    Those of a child that holds one true cluster alone; 0 if there is none.
    """
    first = settings["split_rounds"][0]
    pure = [
        node.members
        for node in run.tree.nodes
        if node.born == first and len({truth[client] for client in node.members}) == 1
    ]

    def accuracy(number: int) -> float:
        return float(np.mean([r["accuracy"] for r in run.clients if r["round"] == number and r["client"] in pure[0]]))

    return 100 * (accuracy(first + settings["evaluate_every"]) - accuracy(first)) if pure else 0.0


def _norms(run: Run, settings: Settings, truth: Mapping[int, int]) -> dict[str, list[float]]:
    """Return the largest norms (eq. 33) in the rounds of the splits, of clusters that are ``mixed`` and ``pure``."""
    found: dict[str, list[float]] = {"mixed": [], "pure": []}
    for row in run.clusters:
        if row["round"] in settings["split_rounds"] and row["max_norm"] is not None:
            distributions = {truth[client] for client in run.tree.nodes[row["node"]].members}
            found["mixed" if len(distributions) > 1 else "pure"].append(round(row["max_norm"], 3))
    return found


def _settled(ari: Sequence[float]) -> int:
    """Return the round from which on the clusters are the true ones to the end; 0 if they are not in the end."""
    others = [number for number, value in enumerate(ari, start=1) if value != 1]
    last = max(others, default=0)
    return 0 if last == len(ari) else last + 1
