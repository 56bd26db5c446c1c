"""What became of newcomers, and the files that say it: a table for other programs, JSON that reports read again."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedclade.clustering import Assignment
from fedclade.core import RunError, appear
from fedclade.runs.store.contents import Row, check_shape, data_frame
from fedclade.tasks import OLD_METRIC, RIGHT

if TYPE_CHECKING:
    from pandas import DataFrame

CASES = ("", "_root", "_own", "_fine_tuned")
"""Endings of columns with scores, all on a newcomer's test data: of the model it got, the root's, its own, and the one
it got fine-tuned."""

_SHAPE = {
    "summary": {
        **{
            "newcomers": int,
            "fit_nowhere": int,
            RIGHT: (float, None),
            "only_fitting?": bool,
            "metric?": str,
        }
    },
    "newcomers": [{"name": str, "path": [int], "fits": bool, "margin": (float, None)}],
    "sha256?": str,
}


@dataclass(frozen=True, eq=False)
class Newcomers:
    """Where newcomers go, and how well the models suit them.

    Parameters
    ----------
    assignments
        Where each goes.
    rows
        One for each newcomer: ``client``, ``name``, ``path`` and ``node`` of the model that it got,
        ``fits``, ``leaf`` (where its way led, whether or not it fits there), ``by``
        (``similarity``, ``loss`` or ``distance``), for every step on its way the ``scores`` of the
        branch it took, of the best ``others`` and their ``margins``, the smallest ``margin``, its
        ``true_cluster``, whether it got the model of a leaf of that (``right``), and its scores, by
        the metric that counts, in the columns of :func:`score_columns
        <fedclade.runs.score_columns>`; None where the metric is undefined for its test data.
    rounds_alone
        For how many rounds a newcomer trained a model of its own.
    only_fitting
        Whether newcomers got no model that does not fit them.
    metric
        The name of the metric that counts.
    """

    assignments: Sequence[Assignment]
    rows: Sequence[Row]
    rounds_alone: int
    only_fitting: bool = False
    metric: str = OLD_METRIC

    @property
    def summary(self) -> Row:
        """Means, the numbers of those that fit nowhere or have no score, and the share in their true cluster's leaf."""
        right = [row["right"] for row in self.rows if row["right"] is not None]
        return {
            "newcomers": len(self.rows),
            "fit_nowhere": sum(not row["fits"] for row in self.rows),
            RIGHT: fmean(right) if right else None,
            **{column: self._mean(column) for column in score_columns(self.metric)},
            "without_score": sum(row[self.metric] is None for row in self.rows),
            "metric": self.metric,
            "rounds_alone": self.rounds_alone,
            "only_fitting": self.only_fitting,
        }

    def _mean(self, column: str) -> float | None:
        """Return the mean of the newcomers that have a score; None if none has."""
        known = [row[column] for row in self.rows if row[column] is not None]
        return fmean(known) if known else None

    def __repr__(self) -> str:
        return (
            f"Newcomers({len(self.rows)}, fit_nowhere={sum(not row['fits'] for row in self.rows)})"
        )

    def frame(self) -> DataFrame:
        """Return the rows as a pandas data frame; a MissingExtraError if pandas is not installed."""
        return data_frame(self.rows, "Newcomers.frame")

    def save(self, path: Path) -> Path:
        """Write them as CSV or as JSON, by the file's suffix; a file that is there is replaced in one go.

        Raises
        ------
        RunError
            If the suffix is another, or the file cannot be written.
        """
        return write_newcomers(path, self.summary, self.rows)


def score_columns(metric: str) -> list[str]:
    """Return the columns with newcomers' scores."""
    return [f"{metric}{case}" for case in CASES]


def write_newcomers(path: Path, summary: Row, rows: Sequence[Row]) -> Path:
    """Write newcomers as CSV or as JSON, by the file's suffix. In CSV, what is a list in JSON is joined by spaces."""
    writers = {".csv": _write_csv, ".json": _write_json}
    if path.suffix not in writers:
        raise RunError(f"newcomers can be written as .csv or .json, got {path.name!r}")
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        appear(path, lambda beside: writers[path.suffix](beside, summary, rows))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from error
    return path


def read_newcomers(path: Path) -> Mapping[str, Any]:
    """Read JSON as it was written: the ``summary``, and the rows of the ``newcomers``; a RunError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        check_shape(content, _SHAPE, path.name)
        scores = dict.fromkeys(
            score_columns(content["summary"].get("metric", OLD_METRIC)), (float, None)
        )
        check_shape(content, {"summary": scores, "newcomers": [scores]}, path.name)
        expected = content.pop("sha256", None)  # which those of earlier versions lack
        if expected not in (None, _sum_of(content)):
            raise ValueError("its SHA-256 is not the one in it")
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged: {error}; make it again with: fedclade assign {path.parent}"
        ) from error
    return content


def _write_csv(path: Path, _: Row, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            lists = {
                name: " ".join(map(str, value))
                for name, value in row.items()
                if isinstance(value, list)
            }
            writer.writerow({**row, **lists})


def _write_json(path: Path, summary: Row, rows: Sequence[Row]) -> None:
    content = {"summary": summary, "newcomers": rows}
    path.write_text(
        json.dumps({**content, "sha256": _sum_of(content)}, indent=2) + "\n", encoding="utf-8"
    )


def _sum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
