"""A callback that finishes a run when its score on validation data no longer improves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from fedclade.core import ConfigError, checked, require
from fedclade.runs.callbacks import Callback, RoundRecord
from fedclade.runs.history import column_of, metric_named
from fedclade.runs.stopping import FINISH, Finish
from fedclade.runs.store.contents import Row
from fedclade.tasks import Metric


@checked()
@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Finish a run when the clients' mean score on validation data has not improved for a while.

    Test data do not influence the decision. The run evaluates on validation data wherever it
    evaluates on test data (``evaluate_validation`` of :class:`~fedclade.RunSettings` is set), and
    every client must have validation data. The decision depends on the table of metrics alone, so a
    run that is interrupted and continued stops in the same round as one that is not. To store the
    models of the best round rather than those of the last, set ``keep_best``.

    In a config, the section ``[stop]`` has the same keys.

    Parameters
    ----------
    metric
        Name of the metric to follow, or ``loss``; by default the first metric of the task. Whether
        higher or lower is better depends on the metric.
    patience
        Number of evaluations in a row without an improvement after which the run finishes, at least
        1. These are rounds, unless ``evaluate_every`` is larger than 1.
    min_delta
        A score is an improvement if it is better than the best score so far by more than this, at
        least 0. A score that is NaN or infinite is no improvement.
    start_round
        Rounds before this one are not counted, at least 1. Set it if clusters split late: before a
        split, scores may stay the same for many rounds.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.

    Examples
    --------
    >>> import fedclade
    >>> data = fedclade.load_federation("digits", clients=2, samples_per_client=40, validation_fraction=0.25)
    >>> stopping = fedclade.EarlyStopping("loss", patience=1, min_delta=10.0)
    >>> run = fedclade.simulate("fedavg", "mclr", data, rounds=9, callbacks=[stopping])
    >>> run.summary["stopped"]["round"]
    2
    """

    metric: str | None = None
    patience: int = 10
    min_delta: float = 0.0
    start_round: int = 1

    def __post_init__(self) -> None:
        require(
            ("stop.patience", self.patience, self.patience >= 1, "at least 1"),
            (
                "stop.min_delta",
                self.min_delta,
                0 <= self.min_delta < float("inf"),
                "at least 0, and finite",
            ),
            ("stop.start_round", self.start_round, self.start_round >= 1, "at least 1"),
        )

    @property
    def section(self) -> dict[str, Any]:
        """The ``[stop]`` section of a config."""
        return asdict(self)

    def on_round(self, record: RoundRecord, /) -> Finish | None:
        """Return FINISH if the score has not improved for ``patience`` evaluations.

        Raises
        ------
        ConfigError
            If clients are evaluated, but have no scores on validation data.
        """
        metric = metric_named(record.scored_by, self.metric, "stop.metric")
        is_evaluated = record.metrics.get(f"{metric.name}_mean") is not None
        if is_evaluated and not any(column_of(metric.name) in row for row in record.rows):
            raise ConfigError(
                f"round {record.round}: EarlyStopping needs scores on validation data, and no "
                "client has any; set evaluate_validation = true, and data.validation_fraction "
                "above 0 for every client, such as 0.2"
            )
        return FINISH if self.reason_in(record.rows, metric) else None

    def reason(self, record: RoundRecord, /) -> str:
        """Return the reason as text: the score that has not improved, and since which round."""
        metric = metric_named(record.scored_by, self.metric, "stop.metric")
        return self.reason_in(record.rows, metric) or ""

    def reason_in(self, rows: Sequence[Row], metric: Metric) -> str | None:
        """Return why a run should stop after some rounds, or None if it should go on.

        Parameters
        ----------
        rows
            Rows of ``metrics.parquet`` so far.
        metric
            The metric that is followed.
        """
        column = column_of(metric.name)
        sign = 1 if metric.higher_is_better else -1
        best: Row | None = None
        waited = 0
        for row in rows:
            if column not in row or row["round"] < self.start_round:
                continue
            score = row[column]
            is_known = score is not None and isfinite(score)
            if is_known and (best is None or sign * (score - best[column]) > self.min_delta):
                best = row
                waited = 0
            else:
                waited += 1
        if waited < self.patience:
            return None
        since = "at all" if best is None else f"since round {best['round']}"
        return f"{column} has not improved in {waited} evaluations, {since}"
