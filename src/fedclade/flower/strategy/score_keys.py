"""Choice of the score and the loss among the metrics that a ClientApp returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedclade.core import ConfigError, UpdateError, shown
from fedclade.tasks import Metric

SCORES = ("acc", "f1", "auc", "score", "precision", "recall", "r2", "iou", "dice")
"""Parts of names by which a metric is recognized as a score that is better if it is higher."""

ERRORS = ("loss", "error", "mae", "mse", "rmse", "perplexity")
"""Parts of names by which a metric is recognized as better if it is lower."""

MetricValues = Mapping[str, Any]


@dataclass(frozen=True)
class ScoreKeys:
    """Names of the metrics by which clients are scored.

    Parameters
    ----------
    score
        Name of the score, which curves, tables and reports show.
    loss
        Name of the loss, by which methods let clients choose a model; None if clients return none.
    higher_is_better
        Whether a higher score is better.
    """

    score: str
    loss: str | None
    higher_is_better: bool

    @property
    def metric(self) -> Metric:
        """The score as a metric of a run."""
        share = self.higher_is_better and "acc" in self.score.lower()
        return Metric(self.score, self.higher_is_better, share)

    @classmethod
    def find(
        cls,
        metrics: MetricValues,
        weight: str,
        *,
        score: str | None = None,
        loss: str | None = None,
        higher_is_better: bool | None = None,
    ) -> ScoreKeys:
        """Find the score and the loss among a client's metrics.

        Parameters
        ----------
        metrics
            Metrics of a client's reply to a request to evaluate.
        weight
            Name of the number of examples.
        score, loss, higher_is_better
            Given names and direction; None for those to find.

        Raises
        ------
        ConfigError
            If a name is missing in the metrics, or several metrics may be meant.
        """
        numbers = [name for name in metrics if name != weight and _is_number(metrics[name])]
        for setting, name in (("score_key", score), ("loss_key", loss)):
            if name is not None and name not in numbers:
                raise ConfigError(
                    f"{setting} = {shown(name)} is not among the metrics that clients return when "
                    f"they evaluate: {shown(numbers)}; name one of them"
                )
        if loss is None:
            loss = _only("loss", [name for name in numbers if "loss" in name.lower()], "loss_key")
        if score is None:
            score = _find_score([name for name in numbers if name != loss])
        if score is None:
            score = loss
        if score is None:
            raise ConfigError(
                "clients return no metric that can be their score when they evaluate, only "
                f"{shown([*metrics])}; return a number such as 'accuracy', or name the metric as "
                "score_key"
            )
        if higher_is_better is None:
            lower = any(part in score.lower() for part in ERRORS)
            higher_is_better = not lower and score != loss
        return cls(score, loss, higher_is_better)

    def read(self, metrics: MetricValues) -> tuple[float, float]:
        """Return the score and the loss in a client's metrics; the loss is NaN if there is none.

        Raises
        ------
        UpdateError
            If the score or the loss is missing, or is not a finite number.
        """
        loss = math.nan
        if self.loss is not None:
            loss = _read_finite(metrics, self.loss)
        return _read_finite(metrics, self.score), loss


def find_train_loss(metrics: MetricValues) -> float | None:
    """Return the training loss in a client's metrics; None if no or several metrics are a loss."""
    found = [name for name in metrics if "loss" in name.lower() and _is_number(metrics[name])]
    return float(metrics[found[0]]) if len(found) == 1 else None


def read_number(metrics: MetricValues, name: str) -> float:
    """Return a number in a client's metrics; raise an UpdateError if it is missing."""
    if name not in metrics or not _is_number(metrics[name]):
        raise UpdateError(
            f"the reply should have the metric {name!r} as a number, got the metrics "
            f"{shown([*metrics])}; return the same metrics from all clients"
        )
    return float(metrics[name])


def _read_finite(metrics: MetricValues, name: str) -> float:
    """Return a number in a client's metrics; raise an UpdateError if it is missing or not finite.

    One score that is NaN would make the means of all clients NaN, and a client would choose a model
    whose loss is NaN.
    """
    value = read_number(metrics, name)
    if not math.isfinite(value):
        raise UpdateError(
            f"the metric {name!r} should be a finite number, got {value:g}; if training diverged, "
            "lower the step size of the clients"
        )
    return value


def _find_score(names: Sequence[str]) -> str | None:
    """Return the name of the only metric that can be the score; None if there is no metric."""
    known = [name for name in names if any(part in name.lower() for part in SCORES)]
    return _only("score", known or names, "score_key")


def _only(what: str, names: Sequence[str], setting: str) -> str | None:
    """Return the only name; None if there is no name.

    Raises
    ------
    ConfigError
        If there are several names.
    """
    if len(names) > 1:
        raise ConfigError(
            f"several metrics that clients return when they evaluate may be the {what}: "
            f"{shown(list(names))}; name one as {setting}"
        )
    return names[0] if names else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
