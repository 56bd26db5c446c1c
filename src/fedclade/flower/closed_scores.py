"""Scores of a client with a privacy budget or secure aggregation: one number a model, in two digits, and counted.

An exact score is an oracle: a server chooses the models, and reads an example off a few hundred
losses. So a closed client answers with scores only if its policy discloses them, never with a loss,
a count, or a score on training data. With a privacy budget each score also gets noise, and is
booked in the ledger.
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
"""Tasks in which each example has one target, so that none weighs more than another in a mean."""

DIGITS = 2
"""Of a score that is disclosed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreNoise:
    """The noise on a private client's scores.

    Parameters
    ----------
    deviation
        Standard deviation, for a score in [0, 1].
    book
        Books so many scores that are about to leave; what it raises keeps them back.
    """

    deviation: float
    book: Callable[[int], None]


@dataclass(frozen=True)
class ClosedScores:
    """Answers with scores by one metric, in two digits.

    Parameters
    ----------
    metric
        The first of the task.
    noise
        Of a client with a privacy budget; its metric lies in [0, 1].
    """

    metric: Metric
    noise: ScoreNoise | None = None

    def replied(self, models: int, evaluate: Callable[[], Evaluation]) -> list[float]:
        """Return the scores of so many models.

        With noise whatever happens depends on the number of models alone: what cannot be scored,
        or has no score, counts as 0.
        """
        if self.noise is None:
            scores = evaluate().scores[:, 0].tolist()
            return [self._rounded(score) for score in scores]
        self.noise.book(models)
        try:
            exact = evaluate().scores[:, 0].tolist()
        except ConfigError:  # which the question alone causes
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
            held = score if 0 <= score <= 1 else 0.0  # NaN is not
            noisy.append(self._rounded(min(1.0, max(0.0, held + self.noise.deviation * number))))
        return noisy

    def _rounded(self, score: float) -> float:
        if not math.isfinite(score):
            return score
        return round(score, DIGITS) if self.metric.share else float(f"{score:.{DIGITS}g}")


def is_mean(metric: Metric, kind: TaskKind) -> bool:
    """Return whether a score is a mean over examples of numbers in [0, 1], which one of n moves by 1/n at most."""
    return metric.share and metric.terms is not None and metric.final is None and kind in ONE_TARGET
