"""Choice of the best round of a run by mean scores on validation data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, isnan
from typing import Any

from fedclade.core import ConfigError, Evaluation, unknown
from fedclade.runs.store.contents import Row
from fedclade.tasks import Metric, mean_score


def validation_columns(metrics: Sequence[Metric], evaluation: Evaluation | None) -> Row:
    """Return mean scores and the mean loss on validation data, as columns of ``metrics.parquet``.

    Parameters
    ----------
    metrics
        Metrics of the task.
    evaluation
        Scores of the clients on validation data; None if the round was not evaluated, which gives
        no columns.

    Returns
    -------
    Row
        The mean over the clients by each metric. A client without a score by a metric is left out
        of its mean, which is None if no client has a score.
    """
    if evaluation is None:
        return {}
    scores = evaluation.scores.double()
    columns: Row = {}
    for metric, mean, of_clients in zip(metrics, scores.mean(0).tolist(), scores.T, strict=True):
        column = column_of(metric.name)
        columns[column] = mean
        if isnan(mean):  # a client has no score
            columns[column] = mean_score(of_clients.tolist())
    losses = evaluation.known_losses.double()
    columns[column_of("loss")] = losses.mean().item() if len(losses) else None
    return columns


def metric_named(metrics: Sequence[Metric], name: str | None, setting: str) -> Metric:
    """Return the metric of a task with a given name, or the task's first metric.

    Parameters
    ----------
    metrics
        The metrics of the task.
    name
        Name of one of the metrics, or ``loss``; None for the first metric of the task.
    setting
        Name of the setting that has the metric's name, for the error message.

    Raises
    ------
    ConfigError
        If the task has no metric of this name.
    """
    if name is None:
        return metrics[0]
    known = {metric.name: metric for metric in (LOSS, *metrics)}
    if name not in known:
        raise ConfigError(unknown(f"metric: {setting} =", name, known))
    return known[name]


LOSS = Metric("loss", higher_is_better=False)
"""The loss as a metric, so that the best round can also be chosen by the loss."""


def column_of(metric: str) -> str:
    """Return the name of the table column with the mean validation score by a metric."""
    return f"validation_{metric}"


def chosen_round(rows: Iterable[Row], metric: Metric) -> Row | None:
    """Return the row of the round with the best mean score on validation data.

    Parameters
    ----------
    rows
        Rows of ``metrics.parquet``. Rows without a score on test data are ignored, as are rows
        whose score on validation data is NaN or infinite.
    metric
        The metric by which rounds are compared; it defines whether higher scores are better.

    Returns
    -------
    Row or None
        The row of the best round, the first among equally good rounds; None if all rows are
        ignored.
    """
    best: Row | None = None
    column = column_of(metric.name)
    sign = 1 if metric.higher_is_better else -1
    for row in rows:
        score = row.get(column)
        if score is None or not isfinite(score) or row.get(f"{metric.name}_mean") is None:
            continue
        if best is None or sign * score > sign * best[column]:
            best = row
    return best


def chosen(
    rows: Sequence[Row], metrics: Sequence[Metric], metric: Metric, *, is_kept: bool = False
) -> dict[str, Any]:
    """Return the entries of ``summary.json`` about the round with the best validation score.

    Parameters
    ----------
    rows
        Rows of ``metrics.parquet``.
    metrics
        The metrics of the task.
    metric
        The metric that chooses the round.
    is_kept
        Whether the run stores the models of the chosen round instead of the last round's models.

    Returns
    -------
    dict
        ``chosen``: the metric by which the round is chosen, the round, and its mean scores on
        validation data and on test data. With ``is_kept`` also ``last``: the scores of the last
        evaluated round. The dict is empty if no round has scores on validation data.
    """
    row = chosen_round(rows, metric)
    if row is None:
        return {}
    if metric not in metrics:
        metrics = [*metrics, metric]
    facts: dict[str, Any] = {"chosen": {"metric": metric.name, **_mean_scores(row, metrics)}}
    if is_kept:
        facts["chosen"]["kept"] = True
        evaluated = [each for each in rows if each.get(f"{metric.name}_mean") is not None]
        facts["last"] = _mean_scores(evaluated[-1], metrics)
    return facts


def _mean_scores(row: Row, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return the mean scores of a round on validation data and on test data, by metric."""
    return {
        "round": row["round"],
        "validation": {metric.name: row.get(column_of(metric.name)) for metric in metrics},
        "test": {metric.name: row.get(f"{metric.name}_mean") for metric in metrics},
    }
