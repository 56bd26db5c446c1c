"""What trackers write of a run: the numbers of a round by their tags."""

from __future__ import annotations

from collections.abc import Mapping

from fedclade.runs import RoundRecord, Row

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
