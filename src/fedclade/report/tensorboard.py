"""The rounds of a run as event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedclade.core import ParameterTree, import_extra
from fedclade.runs import Row

FOLDER = "tensorboard"
"""In the run folder."""

SCORES: Mapping[str, str] = {
    "mean": "mean",
    "worst tenth": "worst10_mean",
    "10th percentile": "p10",
    "weighted": "weighted",
}
"""What is written of each metric, by what TensorBoard calls it: the end of its column of ``metrics.parquet``."""

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


class TensorBoardLog:
    """Writes event files, a scalar for each number of a round; to be called after every round.

    Of a run that is continued, what an earlier part wrote of the same rounds is replaced.

    Parameters
    ----------
    folder
        Of the run; the files go into ``tensorboard`` in it.

    Raises
    ------
    MissingExtraError
        If tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._module = import_extra("torch.utils.tensorboard", "tensorboard", "tensorboard", "--log tensorboard")
        self._folder = folder / FOLDER
        self._writer: Any = None

    def __call__(self, row: Row, tree: ParameterTree) -> None:
        """Write the row of a round."""
        if self._writer is None:  # not before the run has made its folder
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=row["round"])
        for tag, column in {**scores(row), **TAGS}.items():
            if (value := row.get(column)) is not None:
                self._writer.add_scalar(tag, value, row["round"])
        self._writer.flush()

    def close(self) -> None:
        """Bring everything to the disk."""
        if self._writer is not None:
            self._writer.close()


def scores(row: Row) -> dict[str, str]:
    """Return the columns of the metrics in a row, by what TensorBoard calls them."""
    metrics = [name.removesuffix("_mean") for name in row if name.endswith("_mean") and name != "loss_mean"]
    metrics = [name for name in metrics if not name.endswith("_worst10")]
    return {f"{metric}/{tag}": f"{metric}_{end}" for metric in metrics for tag, end in SCORES.items()}
