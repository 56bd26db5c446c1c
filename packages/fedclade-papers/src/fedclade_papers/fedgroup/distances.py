"""Figure 5 of the FedGroup paper: two distances between clients, compared for all pairs.

FedGroup describes each client by its *ternary similarities*: the similarities of its update to a
few main directions of the clients' updates (matrix M). The paper compares distances in M with
distances between the clients' rows of the matrix M' of all cosine similarities.
"""

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
"""Smallest correlation of two distances at which their relation counts as about linear.

The paper shows a picture and prints no number.
"""

SHOWN = 300
"""Number of pairs of clients that the figure shows."""


def measure_distances(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 5: distances by ternary similarities (M) and by all cosines (M')."""
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
    because = ""
    if bent:
        because = f"{', '.join(bent)}: m directions hold too little of how the clients differ."
    sentence = f"Correlation of the distances of all pairs: {correlations}."
    remarks = [paper.texts["shared_out"], *absent(cache, settings)]
    return paper.outcome(rows, claims, series, sentence, because=because, remarks=remarks)


def _compared(cache: ResultCache, settings: Settings, task: Task, seed: int) -> Found:
    """Measure for one seed how well distances in M (ternary) and in M' (all cosines) agree.

    Returns
    -------
    dict
        ``correlation``: Pearson's correlation of the two distances over all pairs of clients;
        ``ari``: agreement of the groups that k-means finds with either distance; ``sample``: the
        distances of some pairs in M' (``full``) and in M (``ternary``).
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
