"""Statistics of audits: the success of membership attacks, and lower bounds on ε from it.

A *member* is an example, or a client, that took part in training. An attack gives a score to
members and to others: the larger the score, the more likely it is a member. All bounds on ε are
lower bounds at a confidence: if a bound is ε, the attacked mechanism is not (ε', δ)-private for any
ε' < ε, except with probability 1 − confidence.
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
"""Largest bound that is computed. A larger bound would need more than 10²⁶ trials."""


def auc(inside: Floats, outside: Floats) -> float:
    """Return the probability that a member has a higher score than another; ties count half."""
    ranks = rankdata(np.concatenate([inside, outside]))[: len(inside)]
    return float((ranks.sum() - len(inside) * (len(inside) + 1) / 2) / (len(inside) * len(outside)))


def tpr_at(inside: Floats, outside: Floats, fpr: float) -> float:
    """Return the true positive rate at a false positive rate of at most ``fpr``.

    The threshold is the lowest one with this false positive rate. If several others have the same
    score and not all of them may be above the threshold, it is above all of them.
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
    """Return a statistic over all groups, and its 95 % bootstrap interval over groups.

    Parameters
    ----------
    groups
        For each group the scores of members and the scores of others.
    score
        The statistic, such as :func:`auc`, of concatenated groups.
    draws
        Number of bootstrap samples.
    seed
        Seed of the samples.

    Returns
    -------
    tuple of float
        The statistic, and the lower and upper end of its interval.
    """
    draw = np.random.default_rng(seed)

    def of(chosen: Sequence[int]) -> float:
        return score(*(np.concatenate([groups[k][side] for k in chosen]) for side in (0, 1)))

    resampled = [of(draw.integers(len(groups), size=len(groups)).tolist()) for _ in range(draws)]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return of(range(len(groups))), float(low), float(high)


def share_bounds(hits: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the exact confidence interval of a share, ``hits`` of ``trials`` (Clopper-Pearson)."""
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
    """Return a lower bound on ε by the rates of one attack (Jagielski, Ullman, Oprea 2020).

    The threshold of the attack must be fixed before the trials. (ε, δ)-privacy implies
    TPR ≤ e^ε FPR + δ and 1 − FPR ≤ e^ε (1 − TPR) + δ, where TPR and FPR are the true and the false
    positive rate. Both rates are replaced by ends of confidence intervals, which together have the
    given confidence.

    Parameters
    ----------
    true_positives, inside
        Number of members that the attack takes for members, and number of members.
    false_positives, outside
        Number of others that the attack takes for members, and number of others.
    delta
        δ of the guarantee.
    confidence
        Confidence of the bound.
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
    """Return a lower bound on μ of a mechanism that claims μ-GDP, such as Gaussian noise.

    GDP is Gaussian differential privacy; the bound is from Nasr et al. (2023). No attack has
    Φ⁻¹(TPR) − Φ⁻¹(FPR) above μ, and with Gaussian noise the best attack attains μ. Therefore this
    bound is close with few trials, whereas :func:`epsilon_of_rates` would need about 1/δ trials.
    """
    each = 1 - (1 - confidence) / 2
    tpr_low = share_bounds(true_positives, inside, each)[0]
    fpr_high = share_bounds(false_positives, outside, each)[1]
    return max(0.0, float(ndtri(tpr_low) - ndtri(fpr_high)))


def epsilon_of_scores(
    inside: Floats, outside: Floats, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return a lower bound on ε by scores.

    The threshold with the largest bound on every second score is chosen, and the bound is computed
    on the other scores.
    """
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
    """Return a lower bound on ε by guesses of many secrets in few runs.

    The bound is Theorem 5.2 of Steinke, Nasr, Jagielski (2023).

    Parameters
    ----------
    right
        Number of correct guesses.
    guesses
        Number of secrets that the attack guesses; it may abstain on the others.
    secrets
        Number of secrets: fair coins, each of which chooses between neighbouring data sets.
    delta
        δ of the guarantee.
    confidence
        Confidence of the bound.
    """

    def chance(epsilon: float) -> float:
        """Return the largest probability of this number of correct guesses under ε."""
        right_each = 1 / (1 + math.exp(-epsilon))
        below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, right_each))
        worst = float((below / np.arange(1, right + 1)).max(initial=0.0))
        return float(binom.sf(right - 1, guesses, right_each)) + 2 * secrets * delta * worst

    low, high = 0.0, LARGEST_EPSILON
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) < 1 - confidence else (low, middle)
    return low
