"""What audits count with: how well scores tell members from others, and what ε an attack's success refutes.

A score is larger the more likely something was in. Bounds on ε are lower ones, at a confidence: the mechanism that was
attacked is not (ε', δ)-private for any ε' below, except with probability 1 − confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import beta, binom, rankdata

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
LARGEST_EPSILON = 60.0
"""No bound is looked for above: it would take more than 10²⁶ trials."""


def auc(inside: Floats, outside: Floats) -> float:
    """Return the chance that a member's score is above that of another, ties as halves."""
    ranks = rankdata(np.concatenate([inside, outside]))[: len(inside)]
    return float((ranks.sum() - len(inside) * (len(inside) + 1) / 2) / (len(inside) * len(outside)))


def tpr_at(inside: Floats, outside: Floats, fpr: float) -> float:
    """Return the share of members above a threshold that at most a share ``fpr`` of the others is above.

    Where so many others tie that no threshold between them will do, it lies above the tie.
    """
    allowed = math.floor(fpr * len(outside) + 1e-9)
    threshold = np.sort(outside)[len(outside) - 1 - allowed] if allowed < len(outside) else -np.inf
    return float((inside > threshold).mean())


def interval(
    groups: Sequence[tuple[Floats, Floats]],
    score: Callable[[Floats, Floats], float],
    draws: int = 100,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Return a score over all groups of (inside, outside), and its 95 % interval over groups drawn with replacement."""
    draw = np.random.default_rng(seed)

    def of(chosen: Sequence[int]) -> float:
        return score(*(np.concatenate([groups[k][side] for k in chosen]) for side in (0, 1)))

    resampled = [of(draw.integers(len(groups), size=len(groups)).tolist()) for _ in range(draws)]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return of(range(len(groups))), float(low), float(high)


def share_bounds(hits: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of a share after so many hits (Clopper and Pearson 1934)."""
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, trials - hits)) if hits < trials else 1.0
    return low, high


def epsilon_of_rates(
    true_positives: int,
    inside: int,
    false_positives: int,
    outside: int,
    delta: float,
    confidence: float = CONFIDENCE,
) -> float:
    """Return a lower bound on ε by the rates of one attack, fixed before (Jagielski, Ullman, Oprea 2020).

    Each rate has an interval of its own, together at the confidence; (ε, δ) bounds TPR by e^ε FPR + δ, and 1 − FPR by
    e^ε (1 − TPR) + δ.
    """
    each = 1 - (1 - confidence) / 2
    tpr_low = share_bounds(true_positives, inside, each)[0]
    fpr_high = share_bounds(false_positives, outside, each)[1]
    found = [0.0]
    for numerator, denominator in (
        (tpr_low - delta, fpr_high),
        (1 - fpr_high - delta, 1 - tpr_low),
    ):
        if numerator > 0 and denominator > 0:
            found.append(math.log(numerator / denominator))
    return max(found)


def mu_of_rates(
    true_positives: int,
    inside: int,
    false_positives: int,
    outside: int,
    confidence: float = CONFIDENCE,
) -> float:
    """Return a lower bound on μ of a mechanism that claims μ-GDP, as the Gaussian one does (Nasr et al. 2023).

    No attack has Φ⁻¹(TPR) − Φ⁻¹(FPR) above μ, and with Gaussian noise one has exactly that: so this bound is close,
    where that of :func:`epsilon_of_rates` would take some 1/δ trials.
    """
    each = 1 - (1 - confidence) / 2
    tpr_low = share_bounds(true_positives, inside, each)[0]
    fpr_high = share_bounds(false_positives, outside, each)[1]
    return max(0.0, float(ndtri(tpr_low) - ndtri(fpr_high)))


def epsilon_of_scores(
    inside: Floats, outside: Floats, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return a lower bound on ε: the threshold that does best on every second score, judged on the others."""
    (tried_in, judged_in), (tried_out, judged_out) = ((s[::2], s[1::2]) for s in (inside, outside))
    best, threshold = -1.0, 0.0
    for candidate in np.unique(
        np.quantile(np.concatenate([tried_in, tried_out]), np.linspace(0, 1, 201))
    ):
        rates = (
            int((tried_in > candidate).sum()),
            len(tried_in),
            int((tried_out > candidate).sum()),
            len(tried_out),
        )
        if (found := epsilon_of_rates(*rates, delta, confidence)) > best:
            best, threshold = found, float(candidate)
    rates = (
        int((judged_in > threshold).sum()),
        len(judged_in),
        int((judged_out > threshold).sum()),
        len(judged_out),
    )
    return epsilon_of_rates(*rates, delta, confidence)


def epsilon_of_guesses(
    right: int, guesses: int, secrets: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return a lower bound on ε by guesses of many secrets in few runs (Steinke, Nasr, Jagielski 2023, Theorem 5.2).

    ``secrets`` are fair coins, each of which decided something that a neighbouring data set would have otherwise; with
    ``guesses`` of them the attack was bold enough to name the outcome.
    """

    def chance(epsilon: float) -> float:
        """Return the largest chance of so many right guesses."""
        right_each = 1 / (1 + math.exp(-epsilon))
        below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, right_each))
        worst = float((below / np.arange(1, right + 1)).max(initial=0.0))
        return float(binom.sf(right - 1, guesses, right_each)) + 2 * secrets * delta * worst

    low, high = 0.0, LARGEST_EPSILON
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) < 1 - confidence else (low, middle)
    return low
