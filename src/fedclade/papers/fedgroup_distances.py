"""Figure 5 of FedGroup: clients' distances in the ternary similarities against those in all cosines."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import numpy as np
from scipy.spatial.distance import pdist

from fedclade.clustering import (
    cosine_similarity,
    k_means,
    ternary_similarity,
)
from fedclade.core import rng
from fedclade.papers.experiment import ResultCache, Settings
from fedclade.papers.fedgroup_runs import SHARES_OUT, Found, Task, absent, pretrained, there
from fedclade.papers.outcome import Claim, Outcome, Row, Summary
from fedclade.tasks import cluster_scores

ABOUT_LINEAR = 0.9
"""A correlation from which on we call it so: the paper has a picture, and no number."""

SHOWN = 300
"""Pairs of clients that a figure shows."""


def measure_distances(tasks: Mapping[str, Task], bench: ResultCache, settings: Settings) -> Outcome:
    """Compare the distances of clients in M, the ternary similarities, with those in M', all cosines."""
    rows, claims, series = list[Row](), list[Claim](), dict[str, Found]()
    for name in there(tasks, bench, settings):
        found = [_compared(bench, settings, name, tasks[name], seed) for seed in settings["seeds"]]
        straight, groups = (tuple(run[key] for run in found) for key in ("correlation", "ari"))
        rows += [
            Row(f"{name} · correlation of the distances", None, fmean(straight), "", straight),
            Row(f"{name} · agreement of the groups (ARI)", None, fmean(groups), "", groups),
        ]
        text = f"{name}: the mapping from distances in M′ to those in M is about linear (section IV-C)"
        measured = f"correlation {fmean(straight):.3f}; about linear is called {ABOUT_LINEAR} and more"
        claims.append(Claim(text, fmean(straight) >= ABOUT_LINEAR, measured))
        series[name] = found[0]["sample"]
    groups = (
        "M′ has the cosines of all n clients, and M their ternary similarities, along the base directions of αm of "
        "them. The groups are those of k-means on M and on M′; the paper shows neither."
    )
    straight = ", ".join(f"{row.ours:.2f} ({row.what.partition(' · ')[0]})" for row in rows[::2])
    bent = [name for claim, name in zip(claims, series, strict=True) if not claim.holds]
    summary = Summary(
        "Distances in M follow those in M′ about linearly, on all six tasks.",
        f"Correlation of the distances of all pairs: {straight}.",
        f"{', '.join(bent)}: m directions hold too little of how the clients differ." if bent else "",
    )
    remarks = (groups, SHARES_OUT, *absent(tasks, bench, settings))
    return Outcome(tuple(rows), tuple(claims), series, remarks, summary)


def _compared(bench: ResultCache, settings: Settings, name: str, task: Task, seed: int) -> Found:
    """Return how distances in M follow those in M'.

    Returns
    -------
    dict
        ``correlation`` of the distances of all pairs (Pearson's); ``ari``, how far k-means finds the same groups in
        both; and ``sample``, some pairs: distances in M' (``full``) and in M (``ternary``).
    """

    def make() -> Found:
        updates, chosen = pretrained(bench, settings, task, seed)
        points = {
            "full": cosine_similarity(updates.signatures),
            "ternary": ternary_similarity(updates.signatures[chosen], others=updates.signatures),
        }
        apart = {key: pdist(each) for key, each in points.items()}
        shown = rng.generator(seed, "pairs of figure 5").permutation(len(apart["full"]))[:SHOWN]
        groups = {
            key: dict(enumerate(k_means(each, task.groups, rng.generator(seed, "centers")).tolist()))
            for key, each in points.items()
        }
        return {
            "correlation": float(np.corrcoef(apart["full"], apart["ternary"])[0, 1]),
            "ari": cluster_scores(groups["ternary"], groups["full"])["ari"],
            "sample": {key: np.round(values[shown], 4).tolist() for key, values in apart.items()},
        }

    return bench.piece(f"{name}, seed {seed}", make)
