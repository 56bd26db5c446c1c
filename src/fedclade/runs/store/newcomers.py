"""Results of newcomers: written as a CSV table, or as JSON that reports read.

A newcomer is a client that did not train in the run and is assigned one of its models afterwards.
"""

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
"""Suffixes of the names of the columns with scores on a newcomer's test data.

In order, the scores are of the assigned model, the root's model, a model that the newcomer trained
alone, and the assigned model after fine-tuning.
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
    """Assignments of a run's models to newcomers, and the newcomers' scores by these models.

    A newcomer is a client that did not train in the run. It is assigned to a path in the parameter
    tree, from the root to a leaf, and gets the model of one node on the path.

    Parameters
    ----------
    assignments
        Assignment of each newcomer.
    rows
        One row for each newcomer. The columns are:

        - ``client`` and ``name``: id and name of the newcomer;
        - ``path`` and ``node``: nodes from the root to the node of the assigned model, and this
          node;
        - ``leaf`` and ``fits``: leaf at the end of the newcomer's whole path, and whether the
          newcomer fits the selected branch at every step to this leaf;
        - ``by``: quantity by which branches were compared (``similarity``, ``loss`` or
          ``distance``);
        - ``scores``, ``others`` and ``margins``: for every step, this quantity for the selected
          branch, for the best other branch, and the difference;
        - ``margin``: smallest of the margins;
        - ``true_cluster`` and ``right``: the newcomer's true cluster, and whether the assigned
          model is from a leaf of this true cluster; None if true clusters are unknown;
        - columns of :func:`score_columns <fedclade.runs.score_columns>`: scores of the newcomer;
          None if the metric is undefined for its test data.
    rounds_alone
        Number of rounds for which each newcomer trained a model alone, for comparison.
    only_fitting
        Whether newcomers were only assigned models that fit them.
    metric
        Name of the metric of the scores.
    """

    assignments: Sequence[Assignment]
    rows: Sequence[Row]
    rounds_alone: int
    only_fitting: bool = False
    metric: str = OLD_METRIC

    @property
    def summary(self) -> Row:
        """Mean scores, and numbers of newcomers that fit no leaf or have no score.

        If true clusters are known, the summary also has the share of newcomers whose assigned model
        is from a leaf of their true cluster.
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
        """Return the mean of a column of scores; None if no newcomer has a score in it.

        Newcomers without a score are left out.
        """
        known = [row[column] for row in self.rows if row[column] is not None]
        if not known:
            return None
        return fmean(known)

    def __repr__(self) -> str:
        return (
            f"Newcomers({len(self.rows)}, fit_nowhere={sum(not row['fits'] for row in self.rows)})"
        )

    def frame(self) -> DataFrame:
        """Return the rows as a pandas data frame, with one row for each newcomer.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        return data_frame(self.rows, "Newcomers.frame")

    def save(self, path: Path) -> Path:
        """Write the results as CSV or JSON, according to the suffix of the file.

        An existing file is replaced. An interrupted write leaves an existing file unchanged.

        Raises
        ------
        RunError
            If the suffix is neither ``.csv`` nor ``.json``, or the file cannot be written.
        """
        return write_newcomers(path, self.summary, self.rows)


def score_columns(metric: str) -> list[str]:
    """Return the names of the columns with scores by a metric, such as ``accuracy_root``."""
    return [f"{metric}{case}" for case in CASES]


def write_newcomers(path: Path, summary: Row, rows: Sequence[Row]) -> Path:
    """Write newcomers' results as CSV or JSON, according to the suffix of the file.

    In CSV, the entries of a list are joined by spaces.

    Raises
    ------
    RunError
        If the suffix is neither ``.csv`` nor ``.json``, or the file cannot be written.
    """
    writers = {".csv": _write_csv, ".json": _write_json}
    if path.suffix not in writers:
        raise RunError(f"a file of newcomers should end in .csv or .json, got {path.name!r}")
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path.name} is a folder; choose the name of a file")
        appear(path, lambda beside: writers[path.suffix](beside, summary, rows))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from error
    return path


def read_newcomers(path: Path) -> Mapping[str, Any]:
    """Read the JSON file of newcomers' results.

    The result has the keys ``summary`` and ``newcomers``, a list of rows.

    Raises
    ------
    RunError
        If the file cannot be read or is damaged.
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
            raise ValueError(
                f"{path.name} was changed: its SHA-256 differs from the recorded SHA-256"
            )
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
    """Return the SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
