"""Scores that a closed client reports: rounded, counted and, with a privacy budget, noisy.

A client is closed if it has a privacy budget or insists on secure aggregation. Exact scores would
reveal its data: the server chooses the models, and could reconstruct an example from a few hundred
losses. So a closed client reports scores only if its policy discloses them: one number for each
model, in two digits. It never reports a loss, a number of examples, or a score on training data.
With a privacy budget each score also gets noise, and the privacy ledger records its cost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from fedclade.channel import system_normal
from fedclade.core import ConfigError, Evaluation, TaskKind
from fedclade.tasks import Metric

ONE_TARGET: tuple[TaskKind, ...] = ("classification", "binary")
"""Tasks in which each example has one target, so that all have the same weight in a mean."""

DIGITS = 2
"""Number of digits of a disclosed score."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreNoise:
    """Noise on the scores of a client with a privacy budget.

    Parameters
    ----------
    deviation
        Standard deviation of the noise that is added to a score in [0, 1].
    book
        Function that records the privacy cost of a number of scores in the client's ledger. It is
        called before the scores are sent; if it raises an error, they are not sent.
    """

    deviation: float
    book: Callable[[int], None]


@dataclass(frozen=True)
class ClosedScores:
    """Mechanism by which a closed client reports scores: by one metric, in two digits.

    A client is closed if it has a privacy budget or insists on secure aggregation.

    Parameters
    ----------
    metric
        First metric of the task.
    noise
        Noise that is added to scores; None for a client without a privacy budget. With noise, the
        metric must be in [0, 1].
    """

    metric: Metric
    noise: ScoreNoise | None = None

    def replied(self, models: int, evaluate: Callable[[], Evaluation]) -> list[float]:
        """Return the rounded scores of models, with noise if the client has a privacy budget.

        With noise, the reply has the same form for all data: a model that cannot be evaluated, or
        whose score is undefined, has the score 0 before noise is added.

        Parameters
        ----------
        models
            Number of models.
        evaluate
            Function that evaluates the models on the client's data.
        """
        if self.noise is None:
            scores = evaluate().scores[:, 0].tolist()
            return [self._round_score(score) for score in scores]
        self.noise.book(models)
        try:
            exact = evaluate().scores[:, 0].tolist()
        except ConfigError:  # the query alone causes this error, so the error reveals no data
            raise
        except Exception:
            _log.exception(
                "evaluation failed; the reported scores consist of noise only, since a missing "
                "score would reveal data"
            )
            exact = [0.0] * models
        normal = system_normal(models).tolist()
        noisy: list[float] = []
        for score, number in zip(exact, normal, strict=True):
            held = score if 0 <= score <= 1 else 0.0  # 0 for NaN, too
            # Rounding and clipping are applied after the noise, so they cost no further privacy.
            noisy.append(
                self._round_score(min(1.0, max(0.0, held + self.noise.deviation * number)))
            )
        return noisy

    def _round_score(self, score: float) -> float:
        """Round a score to two decimals if it is in [0, 1], else to two significant digits."""
        if not math.isfinite(score):
            return score
        return round(score, DIGITS) if self.metric.share else float(f"{score:.{DIGITS}g}")


def is_mean(metric: Metric, kind: TaskKind) -> bool:
    """Return whether a score by a metric is a mean over examples of numbers in [0, 1].

    A single one of n examples then changes the score by at most 1/n, so less noise is needed.
    """
    return metric.share and metric.terms is not None and metric.final is None and kind in ONE_TARGET
