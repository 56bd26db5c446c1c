"""Figure 5 of FedGroup: distances by ternary similarities compared with those by all cosines."""

from __future__ import annotations

from functools import partial

import numpy as np
import scipy

from fedclade import k_means
from fedclade.clustering import cosine_similarity, ternary_similarity
from fedclade.core import rng
from fedclade.tasks import cluster_scores
from fedclade_papers.cache import ResultCache, Settings
from fedclade_papers.experiment import Paper
from fedclade_papers.fedgroup.runs import Found, pretrained
from fedclade_papers.fedgroup.tasks import Task, absent, tasks_at_hand
from fedclade_papers.outcome import Claim, Outcome, Row

ABOUT_LINEAR = 0.9
"""Correlation from which a relation counts as about linear.

The paper has a picture, and no number.
"""

SHOWN = 300
"""Number of pairs of clients that a figure shows."""


def measure_distances(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Compare the distances of clients in M (ternary similarities) and in M' (all cosines)."""
    rows = list[Row]()
    claims = list[Claim]()
    series = dict[str, Found]()
    for name, task in tasks_at_hand(cache, settings).items():
        found = cache.by_seed(name, settings["seeds"], partial(_compared, cache, settings, task))
        straight = Row.of(
            f"{name} · correlation of the distances",
            None,
            [run["correlation"] for run in found],
            "",
        )
        rows += [
            straight,
            Row.of(
                f"{name} · agreement of the groups (ARI)", None, [run["ari"] for run in found], ""
            ),
        ]
        measured = (
            f"correlation {straight.ours:.3f}; about linear is called {ABOUT_LINEAR} and more"
        )
        claims.append(paper.claim("linear", straight.ours >= ABOUT_LINEAR, measured, task=name))
        series[name] = found[0]["sample"]
    correlations = ", ".join(
        f"{row.ours:.2f} ({row.what.partition(' · ')[0]})" for row in rows[::2]
    )
    bent = [name for claim, name in zip(claims, series, strict=True) if not claim.holds]
    because = (
        f"{', '.join(bent)}: m directions hold too little of how the clients differ."
        if bent
        else ""
    )
    sentence = f"Correlation of the distances of all pairs: {correlations}."
    remarks = [paper.texts["shared_out"], *absent(cache, settings)]
    return paper.outcome(rows, claims, series, sentence, because=because, remarks=remarks)


def _compared(cache: ResultCache, settings: Settings, task: Task, seed: int) -> Found:
    """Return measures of the agreement of distances in M and in M'.

    Returns
    -------
    dict
        ``correlation`` of the distances of all pairs (Pearson's); ``ari``, the agreement of the
        groups that k-means finds in both; and ``sample``, some pairs: distances in M' (``full``)
        and in M (``ternary``).
    """
    updates, chosen = pretrained(cache, settings, task, seed)
    points = {
        "full": cosine_similarity(updates.signatures),
        "ternary": ternary_similarity(updates.signatures[chosen], others=updates.signatures),
    }
    apart = {key: scipy.spatial.distance.pdist(each) for key, each in points.items()}
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
