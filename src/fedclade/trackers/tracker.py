"""Base class of trackers: callbacks that log the numbers of every round to an external service.

A tracker opens a log at the first round of a run, writes the numbers of every round by their *tags*
(names such as ``loss/test``), and closes the log at the end.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedclade.core import write_text
from fedclade.runs import Callback, EndRecord, RoundRecord, Row, version_of

SCORES: Mapping[str, str] = {
    "mean": "mean",
    "worst tenth": "worst10_mean",
    "10th percentile": "p10",
    "weighted": "weighted",
}
"""Logged statistics of each metric: tag, and end of the column's name in ``metrics.parquet``."""

TAGS: Mapping[str, str] = {
    "loss/test": "loss_mean",
    "loss/train": "train_loss",
    "clusters/found": "clusters",
    "clusters/ARI": "ari",
    "clusters/NMI": "nmi",
    "updates/mean norm": "mean_norm",
    "updates/max norm": "max_norm",
    "updates/alpha cross max": "alpha_cross_max",
    "updates/separation gap": "separation_gap",
    "traffic/bytes up": "bytes_up",
    "traffic/bytes down": "bytes_down",
    "time/seconds": "seconds",
}
"""Further logged numbers: tag, and name of the column in ``metrics.parquet``."""

MOST_SIZES = 20
"""Largest number of clusters whose sizes are all logged.

With more clusters, only the largest and the smallest size are logged.
"""


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round that trackers log: metrics and cluster sizes, by their tags."""
    row = record.metrics
    numbers: dict[str, float] = {}
    for tag, column in {**scores(row), **TAGS}.items():
        value = row.get(column)
        if value is not None:
            numbers[tag] = float(value)
    sizes = {leaf.id: float(len(leaf.members)) for leaf in record.tree.leaves if leaf.members}
    if sizes:
        numbers |= {
            "clusters/largest": max(sizes.values()),
            "clusters/smallest": min(sizes.values()),
        }
    if len(sizes) <= MOST_SIZES:
        numbers |= {f"cluster sizes/node {node}": size for node, size in sizes.items()}
    return numbers


def scores(row: Row) -> dict[str, str]:
    """List the columns of a round's results that have statistics of the task's metrics.

    The result is a mapping from the tag under which a statistic, such as the mean accuracy, is
    logged to the name of its column.
    """
    columns: dict[str, str] = {}
    for name in row:
        metric = name.removesuffix("_mean")
        is_metric = name.endswith("_mean") and name != "loss_mean"
        if is_metric and not metric.endswith("_worst10"):
            columns |= {f"{metric}/{tag}": f"{metric}_{end}" for tag, end in SCORES.items()}
    return columns


IDS = "trackers.json"
"""Name of a file in the run folder that stores each tracker's id of the run and last round.

A continued run uses it to continue the log.
"""

AnyRecord = RoundRecord | EndRecord


class Tracker(Callback):
    """Base class of trackers: callbacks that log the numbers of every round.

    A tracker can log several runs one after the other, but not at the same time.
    """

    _state: Literal["new", "open", "broken"] = "new"

    @abstractmethod
    def open(self, record: AnyRecord) -> None:
        """Open a log for the run; for a continued run, open its earlier log.

        If this method raises an exception, the tracker is not called again for this run.
        """

    @abstractmethod
    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a round to the log, by their tags."""

    @abstractmethod
    def close(self, record: EndRecord) -> None:
        """Write the summary of the run to the log, if the run finished, and close the log."""

    def on_round(self, record: RoundRecord, /) -> None:
        """Write the numbers of a round to the log, which is opened at the first round."""
        if self._ensure_open(record):
            self.write(record.round, numbers_of(record))

    def on_end(self, record: EndRecord, /) -> None:
        """Close the log at the end of a run; the tracker can then log another run."""
        try:
            has_content = record.run is not None or self._state == "open"
            if has_content and self._ensure_open(record):
                self.close(record)
        finally:
            self._state = "new"

    def _ensure_open(self, record: AnyRecord) -> bool:
        """Open the log if it is not open yet; return whether it is open.

        The log stays closed if an earlier attempt to open it failed.
        """
        if self._state == "new":
            self._state = "broken"  # stays so if opening fails
            self.open(record)
            self._state = "open"
        return self._state == "open"


def tags_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a run by which trackers can filter runs: method, data and version."""
    names = {"method": config["algorithm"]["name"], "data": config["data"]["name"]}
    return {**names, "fedclade": version_of("fedclade")}


def name_of_run(record: AnyRecord) -> str:
    """Return a name for a run: the name of its folder or, without a folder, method and seed."""
    if record.folder is not None:
        return record.folder.name
    config = record.config
    return f"{config['algorithm']['name']}-seed{config['seed']}"


def kept(folder: Path | None, tracker: str) -> dict[str, Any]:
    """Return the values that a tracker has stored in a run folder, such as the run's id.

    The result is empty if there is no folder, or if nothing has been stored.
    """
    return {} if folder is None else _read_values(folder).get(tracker, {})


def keep(folder: Path | None, tracker: str, **what: Any) -> None:
    """Store values of a tracker in the run folder, with which a continued run resumes its log.

    Without a folder, nothing is stored.
    """
    if folder is None:
        return
    values = _read_values(folder)
    values[tracker] = {**values.get(tracker, {}), **what}
    write_text(folder / IDS, json.dumps(values) + "\n")


def files_of(folder: Path | None) -> list[Path]:
    """Return the files of a finished run that trackers upload: its summary and its config."""
    if folder is None:
        return []
    files = [folder / "summary.json", folder / "config.toml"]
    return [path for path in files if path.is_file()]


def _read_values(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the stored values of all trackers from a run folder, by tracker."""
    try:
        content = json.loads((folder / IDS).read_text(encoding="utf-8"))
        return {name: dict(values) for name, values in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # no file yet, or a damaged one: the run is logged as a new one
