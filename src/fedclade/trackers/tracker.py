"""What trackers have in common: they open at the first round that they hear of, write numbers, and close."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedclade.core import write_text
from fedclade.runs import Callback, EndRecord, RoundRecord, Row, version_of

# What trackers write of a run: the numbers of a round by their tags.

SCORES: Mapping[str, str] = {
    "mean": "mean",
    "worst tenth": "worst10_mean",
    "10th percentile": "p10",
    "weighted": "weighted",
}
"""What is written of each metric, by its tag: the end of its column of ``metrics.parquet``."""

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
"""The other columns that are written."""

MOST_SIZES = 20
"""With more clusters only the sizes of the largest and the smallest are written."""


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round by their tags, and how many clients each cluster has."""
    row = record.metrics
    columns = {tag: row.get(column) for tag, column in {**scores(row), **TAGS}.items()}
    numbers = {tag: float(value) for tag, value in columns.items() if value is not None}
    sizes = {leaf.id: float(len(leaf.members)) for leaf in record.tree.leaves if leaf.members}
    if sizes:
        numbers |= {"clusters/largest": max(sizes.values()), "clusters/smallest": min(sizes.values())}
    if len(sizes) <= MOST_SIZES:
        numbers |= {f"cluster sizes/node {node}": size for node, size in sizes.items()}
    return numbers


def scores(row: Row) -> dict[str, str]:
    """Return the columns of the metrics in a row, by their tags."""
    metrics = [name.removesuffix("_mean") for name in row if name.endswith("_mean") and name != "loss_mean"]
    metrics = [name for name in metrics if not name.endswith("_worst10")]
    return {f"{metric}/{tag}": f"{metric}_{end}" for metric in metrics for tag, end in SCORES.items()}


IDS = "trackers.json"
"""In the run folder: the id of the run with each tracker, and how far it got, so that a continued run stays one."""

AnyRecord = RoundRecord | EndRecord


class Tracker(Callback):
    """Writes the numbers of every round to where other runs are followed; the base of the trackers.

    It can follow one run after another, but not two at a time.
    """

    _state: Literal["new", "open", "broken"] = "new"

    @abstractmethod
    def open(self, record: AnyRecord) -> None:
        """Begin, or go on with what an earlier part of the run wrote; nothing is called again if it fails."""

    @abstractmethod
    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a round by their tags."""

    @abstractmethod
    def close(self, record: EndRecord) -> None:
        """Write what there is to say of the whole run, and bring everything to where it belongs."""

    def on_round(self, record: RoundRecord, /) -> None:
        """Write the numbers of the round."""
        if self._opened(record):
            self.write(record.round, numbers_of(record))

    def on_end(self, record: EndRecord, /) -> None:
        """Write the summary, if the run finished, and close."""
        try:
            if (record.run is not None or self._state == "open") and self._opened(record):
                self.close(record)
        finally:
            self._state = "new"

    def _opened(self, record: AnyRecord) -> bool:
        if self._state == "new":
            self._state = "broken"
            self.open(record)
            self._state = "open"
        return self._state == "open"


def tags_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what runs are told apart by."""
    names = {"method": config["algorithm"]["name"], "data": config["data"]["name"]}
    return {**names, "fedclade": version_of("fedclade")}


def name_of_run(record: AnyRecord) -> str:
    """Return what to call a run: as its folder, or by its method and seed."""
    config = record.config
    return f"{config['algorithm']['name']}-seed{config['seed']}" if record.folder is None else record.folder.name


def kept(folder: Path | None, tracker: str) -> dict[str, Any]:
    """Return what an earlier part of a run kept for a tracker, such as its id; nothing if there is none."""
    return {} if folder is None else _kept(folder).get(tracker, {})


def keep(folder: Path | None, tracker: str, **what: Any) -> None:
    """Keep something for the later parts of a run, where it has a folder."""
    if folder is not None:
        there = _kept(folder)
        write_text(folder / IDS, json.dumps({**there, tracker: {**there.get(tracker, {}), **what}}) + "\n")


def files_of(folder: Path | None) -> list[Path]:
    """Return the files of a finished run that are small and say most."""
    found = [] if folder is None else [folder / "summary.json", folder / "config.toml"]
    return [path for path in found if path.is_file()]


def _kept(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        read = json.loads((folder / IDS).read_text(encoding="utf-8"))
        return {name: dict(found) for name, found in read.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none yet, or damaged: then it is tracked as a new run
        return {}
