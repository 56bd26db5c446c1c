"""Scores on validation data, and the round that they choose.

Validation examples are a client's own, and it never trains on them: it sets them aside from its training data
(``data.validation_fraction``), or brings them itself, see :func:`fedclade.federation`. Test data have no part in the
choice, so that the test score of the chosen round is one of a model that was not picked for it; the best test score of
all rounds would not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, isnan
from typing import Any

from fedclade.core import ConfigError, Evaluation, shown, unknown
from fedclade.data import Federation
from fedclade.runs.store.row_table import Row
from fedclade.tasks import Metric, mean_score


def check_validation(federation: Federation, what: str = "evaluate_validation = true") -> None:
    """Check that every client has validation data, which something needs; a ConfigError if not."""
    if missing := federation.without_validation:
        some = "no client has any" if len(missing) == len(federation) else f"these have none: {shown(list(missing))}"
        raise ConfigError(
            f"{what} needs validation data of every client, and {some}; set "
            "data.validation_fraction above 0, such as 0.2, or give clients validation data of their own"
        )


def validation_columns(metrics: Sequence[Metric], evaluation: Evaluation | None) -> Row:
    """Return the means over the clients of an evaluation on validation data, as columns of ``metrics.parquet``.

    Clients without a score are left out of the mean by that metric, which is None if no client has one.
    """
    if evaluation is None:
        return {}
    scores = evaluation.scores.double()
    columns: Row = {}
    for metric, mean, of_clients in zip(metrics, scores.mean(0).tolist(), scores.T, strict=True):
        columns[column_of(metric.name)] = mean_score(of_clients.tolist()) if isnan(mean) else mean
    losses = evaluation.known_losses.double()
    return columns | {column_of("loss"): losses.mean().item() if len(losses) else None}


def metric_named(metrics: Sequence[Metric], name: str | None, setting: str) -> Metric:
    """Return the metric of a task by its name, or the loss; the first metric if it has no name.

    Raises
    ------
    ConfigError
        If the task has no such metric; it names the ``setting``.
    """
    if name is None:
        return metrics[0]
    known = {metric.name: metric for metric in (LOSS, *metrics)}
    if name not in known:
        raise ConfigError(unknown(f"metric: {setting} =", name, known))
    return known[name]


LOSS = Metric("loss", higher_is_better=False)
"""The loss as a metric by which a round is chosen."""


def column_of(metric: str) -> str:
    """Return the column of ``metrics.parquet`` with the mean score on validation data by a metric."""
    return f"validation_{metric}"


def chosen_round(rows: Iterable[Row], metric: Metric) -> Row | None:
    """Return the row of the round with the best mean score on validation data, the first of equals; None without any.

    ``rows`` are those of ``metrics.parquet``, of which those count that have a score on test data too.
    """
    best: Row | None = None
    column, sign = column_of(metric.name), 1 if metric.higher_is_better else -1
    for row in rows:
        score = row.get(column)
        if score is None or not isfinite(score) or row.get(f"{metric.name}_mean") is None:
            continue
        if best is None or sign * score > sign * best[column]:
            best = row
    return best


def chosen(rows: Sequence[Row], metrics: Sequence[Metric], metric: Metric, *, is_kept: bool = False) -> dict[str, Any]:
    """Return what ``summary.json`` says of the round that validation data chooses; nothing without validation data.

    Under ``chosen`` are the metric that chooses, the round, and its mean scores on validation and on test data. If the
    run keeps the models of that round (``is_kept``), the scores of the last round with any are under ``last``.
    """
    row = chosen_round(rows, metric)
    if row is None:
        return {}
    metrics = [*metrics, *([] if metric in metrics else [metric])]
    facts: dict[str, Any] = {"chosen": {"metric": metric.name, **_scores(row, metrics)}}
    if is_kept:
        facts["chosen"]["kept"] = True
        evaluated = [each for each in rows if each.get(f"{metric.name}_mean") is not None]
        facts["last"] = _scores(evaluated[-1], metrics)
    return facts


def _scores(row: Row, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return the mean scores of a round on validation and on test data, by metric."""
    return {
        "round": row["round"],
        "validation": {metric.name: row.get(column_of(metric.name)) for metric in metrics},
        "test": {metric.name: row.get(f"{metric.name}_mean") for metric in metrics},
    }
