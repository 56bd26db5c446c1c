"""Scores of a run: what clients get, whether the clusters are the true ones, and what it took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from fedclade.core import ArrayMapping

QUANTILES = (5, 10, 25, 50, 75, 90)
SPREAD = ("mean", "std", "min", "max", *(f"p{q}" for q in QUANTILES), "worst10_mean")
"""What :func:`spread` returns."""


def spread(values: Sequence[float], *, lower_is_better: bool = False) -> dict[str, float]:
    """Return how a score is spread over clients: mean, std, extremes, quantiles, and the mean of the worst tenth.

    ``std`` has ddof 0; the worst tenth, with the largest values if ``lower_is_better`` (perplexity), is rounded up to
    whole clients. All are NaN if there are no values.
    """
    if len(values) == 0:
        return dict.fromkeys(SPREAD, math.nan)
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    tenth = math.ceil(len(ordered) / 10)
    worst = ordered[-tenth:] if lower_is_better else ordered[:tenth]
    numbers = (
        *(ordered.mean(), ordered.std(), ordered[0], ordered[-1]),
        *np.percentile(ordered, QUANTILES),
        worst.mean(),
    )
    return dict(zip(SPREAD, map(float, numbers), strict=True))


def perplexity(loss: float) -> float:
    """Return the exponential of a cross-entropy in nats; of one that has exploded, the largest there is."""
    return math.exp(min(loss, 700.0))


def cluster_scores(found: Mapping[int, int], truth: Mapping[int, int] | None) -> dict[str, float | None]:
    """Return the adjusted Rand index and the normalised mutual information of found clusters against the true ones.

    ``found`` and ``truth`` have the cluster of each client by id. Without a truth both scores are None.
    """
    if truth is None:
        return {"ari": None, "nmi": None}
    true_labels = truth.of([*found]) if isinstance(truth, ArrayMapping) else [truth[client] for client in found]
    labels = (np.array(each, dtype=np.int64).tobytes() for each in (true_labels, [*found.values()]))
    ari, nmi = _agreement(*labels)
    return {"ari": ari, "nmi": nmi}


@lru_cache(maxsize=2)  # in most rounds clusters are those of the round before
def _agreement(true_labels: bytes, found_labels: bytes) -> tuple[float, float]:
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score  # slow to import: only where used

    labels = [np.frombuffer(each, dtype=np.int64) for each in (true_labels, found_labels)]
    return float(adjusted_rand_score(*labels)), float(normalized_mutual_info_score(*labels))


RIGHT = "assignment_accuracy"
"""What the share of newcomers is called, in files, that came to a leaf of their true cluster."""


def gap_closed(accuracy: float, fedavg: float, oracle: float) -> float | None:
    """Return (method − FedAvg) / (oracle − FedAvg): 0 is no better than one model for all, 1 as good as the oracle.

    None if the oracle is not better than FedAvg: then there is no gap to close.
    """
    return (accuracy - fedavg) / (oracle - fedavg) if oracle > fedavg else None


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the half width of its 95 % interval by Student's t; None for fewer than two values."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return mean, half
