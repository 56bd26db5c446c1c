"""Early stopping: a callback that ends a run when its validation score no longer improves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from fedclade.core import (
    ConfigError,
    at_least,
    check_settings,
    checked,
    document_settings,
    in_range,
    setting,
)
from fedclade.runs.best_round import column_of, metric_named
from fedclade.runs.callbacks import Callback, RoundRecord
from fedclade.runs.stopping import FINISH, Finish
from fedclade.runs.store.contents import Row
from fedclade.tasks import Metric


@checked()
@document_settings
@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Callback that finishes a run when the mean score on validation data no longer improves.

    Test data do not influence the decision. With early stopping, the run evaluates clients on
    validation data whenever it evaluates them on test data, and every client must have validation
    data. The decision depends on the table of metrics alone, so a run that is interrupted and
    continued stops in the same round as an uninterrupted run. To store the models of the best round
    instead of the models of the last round, set ``keep_best``.

    In a config, the section ``[stop]`` has the same keys.

    Raises
    ------
    ConfigError
        If settings are out of range; the message has a line for each of them.

    Examples
    --------
    >>> import fedclade
    >>> data = fedclade.load_federation("digits", clients=2, samples_per_client=40, validation_fraction=0.25)
    >>> stopping = fedclade.EarlyStopping("loss", patience=1, min_delta=10.0)
    >>> run = fedclade.simulate("fedavg", "mclr", data, rounds=9, callbacks=[stopping])
    >>> run.summary["stopped"]["round"]
    2
    """

    metric: str | None = setting(
        None,
        doc="""Name of the metric to follow, or ``loss``; by default the first metric of the task.
        Whether higher or lower is better depends on the metric.""",
    )
    patience: int = setting(
        10,
        at_least(1),
        doc="""Number of evaluations in a row without an improvement after which the run finishes,
        at least 1. Clients are evaluated in every round, unless ``evaluate_every`` is larger
        than 1.""",
    )
    min_delta: float = setting(
        0.0,
        in_range("[0, inf)", "at least 0, and finite"),
        doc="""Smallest difference, at least 0: a score is an improvement if it is better than the
        best score so far by more than this. A score that is NaN or infinite is no improvement.""",
    )
    start_round: int = setting(
        1,
        at_least(1),
        doc="""First round that is counted, at least 1. Set it to a later round if clusters split
        late: before a split, scores may stay the same for many rounds.""",
    )

    def __post_init__(self) -> None:
        check_settings(self, "stop")

    @property
    def section(self) -> dict[str, Any]:
        """Settings as the section ``[stop]`` of a config."""
        return asdict(self)

    def on_round(self, record: RoundRecord, /) -> Finish | None:
        """Return FINISH if the score has not improved in the last ``patience`` evaluations.

        Raises
        ------
        ConfigError
            If clients have been evaluated, but no client has scores on validation data.
        """
        metric = metric_named(record.scored_by, self.metric, "stop.metric")
        is_evaluated = record.metrics.get(f"{metric.name}_mean") is not None
        if is_evaluated and not any(column_of(metric.name) in row for row in record.rows):
            raise ConfigError(
                f"round {record.round}: EarlyStopping needs scores on validation data, but no "
                "client has any; set evaluate_validation = true, and data.validation_fraction "
                "above 0 for every client, such as 0.2"
            )
        return FINISH if self.reason_in(record.rows, metric) else None

    def reason(self, record: RoundRecord, /) -> str:
        """Return the reason for finishing the run, as text for ``summary.json``.

        The text names the score that has not improved, and the round of its best value.
        """
        metric = metric_named(record.scored_by, self.metric, "stop.metric")
        return self.reason_in(record.rows, metric) or ""

    def reason_in(self, rows: Sequence[Row], metric: Metric) -> str | None:
        """Return the reason for stopping a run with the given rows; None if it should continue.

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
