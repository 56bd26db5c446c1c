"""Scores of a client with a privacy budget or secure aggregation: rounded and counted.

An exact score is an oracle: a server chooses the models, and could reconstruct an example from a
few hundred losses. So a closed client reports scores only if its policy discloses them: one number
for each model, in two digits. It never reports a loss, a count, or a score on training data. With a
privacy budget each score also gets noise, and is booked in the ledger.
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
    """Noise on a private client's scores.

    Parameters
    ----------
    deviation
        Standard deviation, for a score in [0, 1].
    book
        Function that books a number of scores in the ledger before they leave; an error prevents
        them from leaving.
    """

    deviation: float
    book: Callable[[int], None]


@dataclass(frozen=True)
class ClosedScores:
    """Replies with scores by one metric, in two digits.

    Parameters
    ----------
    metric
        First metric of the task.
    noise
        Noise of a client with a privacy budget, with a metric in [0, 1]; None for no noise.
    """

    metric: Metric
    noise: ScoreNoise | None = None

    def replied(self, models: int, evaluate: Callable[[], Evaluation]) -> list[float]:
        """Return the scores of ``models`` models.

        With noise the form of the reply depends only on the number of models: a model that cannot
        be scored, or has no score, counts as 0.
        """
        if self.noise is None:
            scores = evaluate().scores[:, 0].tolist()
            return [self._rounded(score) for score in scores]
        self.noise.book(models)
        try:
            exact = evaluate().scores[:, 0].tolist()
        except ConfigError:  # the query alone causes this error, so it reveals no data
            raise
        except Exception:
            _log.exception(
                "evaluation failed; the scores are noise alone, since a missing one would reveal "
                "data"
            )
            exact = [0.0] * models
        normal = system_normal(models).tolist()
        noisy: list[float] = []
        for score, number in zip(exact, normal, strict=True):
            held = score if 0 <= score <= 1 else 0.0  # 0 for NaN, too
            # Rounding and clipping follow the noise, so they reveal nothing more.
            noisy.append(self._rounded(min(1.0, max(0.0, held + self.noise.deviation * number))))
        return noisy

    def _rounded(self, score: float) -> float:
        if not math.isfinite(score):
            return score
        return round(score, DIGITS) if self.metric.share else float(f"{score:.{DIGITS}g}")


def is_mean(metric: Metric, kind: TaskKind) -> bool:
    """Return whether a score is a mean over examples of numbers in [0, 1].

    One of n examples then changes the score by at most 1/n.
    """
    return metric.share and metric.terms is not None and metric.final is None and kind in ONE_TARGET
