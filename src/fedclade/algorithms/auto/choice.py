"""Choice of a model for each client among several candidates, by losses on validation data.

A client has few validation examples, so its own losses are weak evidence. The losses of all clients
together are strong evidence, but clients differ. The choice therefore combines both, as a
random-effects model (empirical Bayes) does:

1. All clients together select a *common candidate*: the most general one whose mean loss is within
   one standard error of the best mean loss. The standard error is of the paired difference, over
   clients.
2. The *gain* of another candidate for a client is the logarithm of the ratio of two losses: that of
   the common candidate, and that of the other one. A gain of 0.1 is a loss that is about 10 %
   lower. An observed gain is the client's true gain plus noise, whose variance is inversely
   proportional to the number of the client's validation examples.
3. The mean of the true gains and their variance τ² over clients are estimated for each candidate
   (DerSimonian and Laird 1986). A client's observed gain is then shrunk towards the mean: the less,
   the more validation examples the client has, and the more the clients' gains differ.
4. Each client is served with the candidate that has the largest shrunk gain, if this gain is
   larger than a margin; otherwise with the common candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from fedclade.core import Evaluation

Matrix = NDArray[np.float64]

NOISE = 1.0
"""Variance of the logarithm of a ratio of two losses of a client, times its number of examples.

If the losses of single examples have a standard deviation as large as their mean, and the losses
of two models on the same example have a correlation of 1/2, this variance is 1.
"""

LEAST_LOSS = 0.02
"""Smallest loss that is told from 0, as a share of the median of all losses.

It bounds the gain of a client whose models are all nearly perfect.
"""

MARGIN = 0.5
"""Standard deviations of a client's gain by which it must exceed 0 before the client departs."""


@dataclass(frozen=True, eq=False)
class Losses:
    """Validation losses of n clients with K candidates, in the order from general to special.

    Parameters
    ----------
    ids
        Ids of the clients, ``[n]``.
    values
        Loss of each client with each candidate, ``[n, K]``; NaN if the client does not have the
        candidate, and infinite if the candidate's loss is not a finite number.
    examples
        Number of validation examples of each client, ``[n]``.
    """

    ids: tuple[int, ...]
    values: Matrix
    examples: Matrix

    @classmethod
    def of(cls, answers: Sequence[Evaluation]) -> Losses:
        """Collect the losses from the clients' replies, one evaluation for each candidate.

        Clients that did not reply about the first candidate are left out. If some client reports
        a score but no loss, all losses are computed from scores: the share of wrong examples, if
        scores are shares, such as accuracies; otherwise the score, with the sign changed if higher
        values are better.

        Parameters
        ----------
        answers
            Replies to the evaluation of each candidate. All clients have the first candidate.
        """
        if any(answer.without_loss for answer in answers):
            are_shares = all(_has_shares(answer) for answer in answers)
            columns = [_read_scores(answer, are_shares=are_shares) for answer in answers]
        else:
            columns = [_read_losses(answer) for answer in answers]
        ids = tuple(sorted(columns[0]))
        values = np.full((len(ids), len(answers)), np.nan)
        for k, column in enumerate(columns):
            for row, client in enumerate(ids):
                if client in column:
                    loss = column[client]
                    values[row, k] = loss if np.isfinite(loss) else np.inf
        counts = dict(zip(answers[0].ids, answers[0].examples.tolist(), strict=True))
        examples = np.array([max(1, counts[client]) for client in ids], dtype=np.float64)
        return cls(ids, values, examples)


def _read_losses(answer: Evaluation) -> Mapping[int, float]:
    """Return the loss of each client that replied."""
    return dict(zip(answer.ids, answer.losses.tolist(), strict=True))


def _read_scores(answer: Evaluation, *, are_shares: bool) -> Mapping[int, float]:
    """Return a substitute for the loss of each client that replied, computed from its score.

    With ``are_shares``, scores are shares of correct examples, and losses those of wrong ones.
    """
    losses = 1 - answer.merit if are_shares else -answer.merit
    return dict(zip(answer.ids, losses.tolist(), strict=True))


def _has_shares(answer: Evaluation) -> bool:
    """Return whether all scores are in [0, 1] and higher is better, as for accuracies."""
    known = answer.merit[answer.merit.isfinite()]
    return answer.higher_is_better and bool(((known >= 0) & (known <= 1)).all())


@dataclass(frozen=True, eq=False)
class Choice:
    """Candidate for each of n clients, and the gains by which it was chosen.

    Parameters
    ----------
    common
        Number of the candidate that all clients together selected.
    chosen
        Number of each client's candidate, ``[n]``.
    gains
        Shrunk gain of each client with each candidate, ``[n, K]``: the logarithm of the loss of the
        common candidate over the loss of this candidate. -inf if the client lacks the candidate.
    deviations
        Standard deviation of each of these gains, ``[n, K]``; 0 for the common candidate.
    """

    common: int
    chosen: NDArray[np.int64]
    gains: Matrix
    deviations: Matrix

    def expect_improvement(self, candidate: int) -> float:
        """Return how much a candidate is expected to improve on the clients' chosen candidates.

        It is the mean over clients of the expected positive part of the difference of two gains,
        that of the candidate and that of the client's chosen one. The difference is taken as normal
        with the deviation of the candidate's gain. So a candidate that is worse for all clients has
        a positive value if that is uncertain.
        """
        rows = np.arange(len(self.chosen))
        others = self.chosen != candidate
        # Clients without the candidate, whose gain is -inf, expect no improvement.
        others &= np.isfinite(self.gains[:, candidate])
        ahead = (self.gains[:, candidate] - self.gains[rows, self.chosen])[others]
        deviation = np.maximum(self.deviations[others, candidate], 1e-12)
        scaled = ahead / deviation
        # scipy.stats has both functions, too, but its import takes half a second.
        cumulative = scipy.special.ndtr(scaled)
        density = np.exp(-(scaled**2) / 2) / np.sqrt(2 * np.pi)
        positive = ahead * cumulative + deviation * density
        return float(positive.sum() / len(self.chosen))


def choose_candidates(losses: Losses, *, noise: float = NOISE, margin: float = MARGIN) -> Choice:
    """Choose a candidate for each client, see the description of the module.

    Parameters
    ----------
    losses
        Validation losses of at least one client.
    noise
        Variance of an observed gain, times the number of the client's validation examples.
    margin
        Number of standard deviations of a client's gain by which it must exceed 0.
    """
    logs = _take_logarithms(losses.values)
    common = _select_common(logs)
    n, count = logs.shape
    gains = np.full((n, count), -np.inf)
    deviations = np.zeros((n, count))
    gains[:, common] = 0.0
    for k in range(count):
        have = ~np.isnan(logs[:, k])
        if k == common or not have.any():
            continue
        variances = noise / losses.examples[have]
        observed = logs[have, common] - logs[have, k]
        gains[have, k], deviations[have, k] = shrink_gains(observed, variances)
    lower = gains - margin * deviations
    # The gains of other clients are no reason for a model whose loss is infinite for this client.
    lower[np.isinf(losses.values)] = -np.inf
    chosen = np.where(np.isinf(lower).all(axis=1), common, lower.argmax(axis=1))
    return Choice(common, chosen, gains, deviations)


def shrink_gains(observed: Matrix, variances: Matrix) -> tuple[Matrix, Matrix]:
    """Shrink the observed gains of m clients towards their mean (empirical Bayes).

    Parameters
    ----------
    observed
        Observed gain of each client, ``[m]``.
    variances
        Variance of the noise in each observed gain, ``[m]``.

    Returns
    -------
    tuple
        Estimated gain of each client, and its standard deviation, both ``[m]``.
    """
    between = _estimate_variance_between(observed, variances)
    weights = 1 / (between + variances)
    mean = float((weights * observed).sum() / weights.sum())
    share = between / (between + variances)
    shrunk = mean + share * (observed - mean)
    # The last term is the uncertainty of the mean itself.
    deviations = np.sqrt(share * variances + (1 - share) ** 2 / weights.sum())
    return shrunk, deviations


def _estimate_variance_between(observed: Matrix, variances: Matrix) -> float:
    """Estimate the variance τ² of the true gains over clients (DerSimonian and Laird 1986)."""
    if len(observed) < 2:
        return 0.0
    weights = 1 / variances
    mean = (weights * observed).sum() / weights.sum()
    spread = (weights * (observed - mean) ** 2).sum()
    scale = weights.sum() - (weights**2).sum() / weights.sum()
    return max(0.0, float((spread - (len(observed) - 1)) / scale))


def _take_logarithms(values: Matrix) -> Matrix:
    """Return the logarithms of losses ``[n, K]``, bounded on both sides; NaN stays NaN.

    Losses that are not positive, as of a likelihood, are first shifted to positive numbers.
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return np.where(np.isnan(values), np.nan, 0.0)
    lowest = finite.min()
    if lowest <= 0 and (finite < 0).any():
        values = values - lowest + finite.std()
        finite = finite - lowest + finite.std()
    typical = float(np.median(finite))
    if typical <= 0:
        typical = float(finite.mean())
    if typical <= 0:  # all finite losses are 0
        return np.where(np.isinf(values), 1.0, np.where(np.isnan(values), np.nan, 0.0))
    floor = LEAST_LOSS * typical
    highest = max(float(finite.max()), typical) * 10  # stands for a loss that is not finite
    bounded = np.where(np.isinf(values), highest, np.maximum(values, 0.0))
    return np.log(bounded + floor)


def _select_common(logs: Matrix) -> int:
    """Select the most general candidate within one standard error of the best one.

    Only candidates that all n clients have are considered.
    """
    complete = [k for k in range(logs.shape[1]) if not np.isnan(logs[:, k]).any()]
    best = min(complete, key=lambda k: logs[:, k].mean())
    for k in complete:
        worse_by = logs[:, k] - logs[:, best]
        n = len(worse_by)
        error = worse_by.std(ddof=1) / np.sqrt(n) if n > 1 else 0.0
        if worse_by.mean() <= error:
            return k
    return best
