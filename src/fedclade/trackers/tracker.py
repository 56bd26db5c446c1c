"""Base of the trackers, which open at the first round, write the numbers of rounds, and close."""

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
"""Logged statistics of each metric by tag: the end of their column in ``metrics.parquet``."""

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
"""Other logged columns of ``metrics.parquet`` by tag."""

MOST_SIZES = 20
"""With more clusters, only the sizes of the largest and the smallest are logged."""


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round and the sizes of its clusters, by their tags."""
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
    """Return the columns of the metrics in a row, by their tags."""
    columns: dict[str, str] = {}
    for name in row:
        metric = name.removesuffix("_mean")
        is_metric = name.endswith("_mean") and name != "loss_mean"
        if is_metric and not metric.endswith("_worst10"):
            columns |= {f"{metric}/{tag}": f"{metric}_{end}" for tag, end in SCORES.items()}
    return columns


IDS = "trackers.json"
"""File in the run folder with the run's id and last round at each tracker, for continued runs."""

AnyRecord = RoundRecord | EndRecord


class Tracker(Callback):
    """Base of the trackers: a callback that logs the numbers of every round.

    A tracker can log one run after another, but not two at a time.
    """

    _state: Literal["new", "open", "broken"] = "new"

    @abstractmethod
    def open(self, record: AnyRecord) -> None:
        """Open a new log, or that of an earlier part of the run.

        If it fails, the tracker is not called again for this run.
        """

    @abstractmethod
    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a round by their tags."""

    @abstractmethod
    def close(self, record: EndRecord) -> None:
        """Write the summary of the run, and finish the log."""

    def on_round(self, record: RoundRecord, /) -> None:
        """Write the numbers of the round."""
        if self._ensure_open(record):
            self.write(record.round, numbers_of(record))

    def on_end(self, record: EndRecord, /) -> None:
        """Write the summary, if the run finished, and close."""
        try:
            has_content = record.run is not None or self._state == "open"
            if has_content and self._ensure_open(record):
                self.close(record)
        finally:
            self._state = "new"

    def _ensure_open(self, record: AnyRecord) -> bool:
        """Open the log if necessary; return whether it is open."""
        if self._state == "new":
            self._state = "broken"  # stays so if opening fails
            self.open(record)
            self._state = "open"
        return self._state == "open"


def tags_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a run: its method, its data and the version."""
    names = {"method": config["algorithm"]["name"], "data": config["data"]["name"]}
    return {**names, "fedclade": version_of("fedclade")}


def name_of_run(record: AnyRecord) -> str:
    """Return the name of a run: that of its folder, or else its method and seed."""
    if record.folder is not None:
        return record.folder.name
    config = record.config
    return f"{config['algorithm']['name']}-seed{config['seed']}"


def kept(folder: Path | None, tracker: str) -> dict[str, Any]:
    """Return a tracker's values of an earlier part of a run, such as its id; empty without any."""
    return {} if folder is None else _read_values(folder).get(tracker, {})


def keep(folder: Path | None, tracker: str, **what: Any) -> None:
    """Store a tracker's values for later parts of a run, if it has a folder."""
    if folder is None:
        return
    values = _read_values(folder)
    values[tracker] = {**values.get(tracker, {}), **what}
    write_text(folder / IDS, json.dumps(values) + "\n")


def files_of(folder: Path | None) -> list[Path]:
    """Return the small files of a finished run: its summary and its config."""
    if folder is None:
        return []
    files = [folder / "summary.json", folder / "config.toml"]
    return [path for path in files if path.is_file()]


def _read_values(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the stored values of all trackers."""
    try:
        content = json.loads((folder / IDS).read_text(encoding="utf-8"))
        return {name: dict(values) for name, values in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # no file yet, or a damaged one: the run is logged as a new one
