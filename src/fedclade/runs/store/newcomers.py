"""Results of newcomers, as a table for other programs and as JSON that reports read again."""

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
"""Suffixes of the columns with scores, all on a newcomer's test data.

The scores are of the assigned model, the root's model, a model that the newcomer trained alone,
and the assigned model after fine-tuning.
"""

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
    """Assignments of newcomers, and scores of the models for them.

    Parameters
    ----------
    assignments
        Assignment of each newcomer.
    rows
        One row for each newcomer, with these columns. ``client`` and ``name``; ``path`` and
        ``node`` of the model that it got; ``fits``; ``leaf``, the end of its path, whether or not
        it fits there; ``by``, the compared quantity (``similarity``, ``loss`` or ``distance``); for
        every step on its path the ``scores`` of the branch it took, of the best of the ``others``,
        and their ``margins``; the smallest ``margin``; its ``true_cluster``; ``right``, whether it
        got the model of a leaf of that cluster; and its scores, by the metric that counts, in the
        columns of :func:`score_columns <fedclade.runs.score_columns>`, None where the metric is
        undefined for its test data.
    rounds_alone
        Number of rounds for which a newcomer trained a model alone.
    only_fitting
        Whether newcomers only got models that fit them.
    metric
        Name of the metric that counts.
    """

    assignments: Sequence[Assignment]
    rows: Sequence[Row]
    rounds_alone: int
    only_fitting: bool = False
    metric: str = OLD_METRIC

    @property
    def summary(self) -> Row:
        """Summary of all newcomers.

        It has the mean scores, the numbers of newcomers that fit nowhere or have no score, and the
        share of newcomers that got the model of a leaf of their true cluster.
        """
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
        """Return the mean over the newcomers that have a score; None if none has."""
        known = [row[column] for row in self.rows if row[column] is not None]
        return fmean(known) if known else None

    def __repr__(self) -> str:
        return (
            f"Newcomers({len(self.rows)}, fit_nowhere={sum(not row['fits'] for row in self.rows)})"
        )

    def frame(self) -> DataFrame:
        """Return the rows as a pandas data frame.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        return data_frame(self.rows, "Newcomers.frame")

    def save(self, path: Path) -> Path:
        """Write the results as CSV or as JSON, by the file's suffix; an existing file is replaced.

        An interrupted write leaves the existing file unchanged.

        Raises
        ------
        RunError
            If the suffix is another, or the file cannot be written.
        """
        return write_newcomers(path, self.summary, self.rows)


def score_columns(metric: str) -> list[str]:
    """Return the names of the columns with newcomers' scores by a metric."""
    return [f"{metric}{case}" for case in CASES]


def write_newcomers(path: Path, summary: Row, rows: Sequence[Row]) -> Path:
    """Write newcomers as CSV or as JSON, by the file's suffix.

    In CSV, the entries of a list are joined by spaces.

    Raises
    ------
    RunError
        If the suffix is another, or the file cannot be written.
    """
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
    """Read the JSON file of newcomers: the ``summary``, and the rows of the ``newcomers``.

    Raises
    ------
    RunError
        If the file is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        check_shape(content, _SHAPE, path.name)
        scores = dict.fromkeys(
            score_columns(content["summary"].get("metric", OLD_METRIC)), (float, None)
        )
        check_shape(content, {"summary": scores, "newcomers": [scores]}, path.name)
        expected = content.pop("sha256", None)  # files of earlier versions have none
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
