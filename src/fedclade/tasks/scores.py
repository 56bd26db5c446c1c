"""Scores of a run: what clients get, whether the clusters are the true ones, and what it took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fedclade.core import ArrayMapping

QUANTILES = (5, 10, 25, 50, 75, 90)
NUMBERS = ("mean", "std", "min", "max", *(f"p{q}" for q in QUANTILES), "worst10_mean")
COUNTS = ("clients", "without_score")
SPREAD = (*NUMBERS, *COUNTS)
"""What :func:`spread` returns."""


def spread(values: Iterable[float | None], *, lower_is_better: bool = False) -> dict[str, Any]:
    """Return how a score is spread over the clients that have one.

    Parameters
    ----------
    values
        The score of each client; NaN or None if the metric is undefined for its data.
    lower_is_better
        Whether the worst clients are those with the largest scores, as of perplexity.

    Returns
    -------
    dict
        ``mean``, ``std`` (ddof 0), ``min``, ``max``, percentiles ``p5`` to ``p90`` and
        ``worst10_mean``, the mean of the worst tenth, rounded up to whole clients; each None if no
        client has a score. Then how many ``clients`` have one, and how many are ``without_score``.
    """
    given = np.asarray([math.nan if value is None else value for value in values], dtype=np.float64)
    ordered = np.sort(given[~np.isnan(given)])
    counts = {"clients": len(ordered), "without_score": len(given) - len(ordered)}
    if len(ordered) == 0:
        return {**dict.fromkeys(NUMBERS), **counts}
    tenth = math.ceil(len(ordered) / 10)
    worst = ordered[-tenth:] if lower_is_better else ordered[:tenth]
    with np.errstate(invalid="ignore"):  # of scores that are infinite, as models have diverged
        numbers = [
            *(ordered.mean(), ordered.std(), ordered[0], ordered[-1]),
            *np.percentile(ordered, QUANTILES),
            worst.mean(),
        ]
    known = [None if math.isnan(number) else float(number) for number in numbers]
    return {**dict(zip(NUMBERS, known, strict=True)), **counts}


def mean_score(values: Iterable[float | None]) -> float | None:
    """Return the mean score of the clients that have one; None if none has."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return float(np.mean(known)) if known else None


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
