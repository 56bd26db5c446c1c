"""The rounds of a run as event files of TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedclade.core import ConfigError, checked, flat, import_extra
from fedclade.runs import EndRecord, RoundRecord
from fedclade.trackers.tracker import AnyRecord, Tracker

FOLDER = "tensorboard"
"""In the run folder."""


class TensorBoardTracker(Tracker):
    """Writes every round to event files of TensorBoard.

    Of a run that is continued, what an earlier part wrote of the same rounds is replaced.

    Parameters
    ----------
    folder
        Where the files go; ``tensorboard`` in the run folder, if left out.

    Raises
    ------
    MissingExtraError
        If tensorboard is not installed.
    ConfigError
        After the first round, if there is neither a ``folder`` nor a run folder.
    """

    @checked()
    def __init__(self, folder: str | Path | None = None) -> None:
        self._module = import_extra("torch.utils.tensorboard", "tensorboard", "tensorboard", "--log tensorboard")
        self._folder = folder
        self._writer: Any = None

    def open(self, record: AnyRecord) -> None:
        """Begin event files, with the config as text."""
        folder = self._folder or (record.folder and record.folder / FOLDER)
        if folder is None:
            raise ConfigError("TensorBoardTracker needs a folder: give it one, or give the run one")
        at = record.round if isinstance(record, RoundRecord) else None
        self._writer = self._module.SummaryWriter(str(folder), purge_step=at)
        rows = "".join(f"| {key} | {json.dumps(value)} |\n" for key, value in flat(record.config).items())
        self._writer.add_text("config", f"| setting | value |\n|:--|:--|\n{rows}", at or 0)

    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, number)
        self._writer.flush()

    def close(self, record: EndRecord) -> None:
        """Write the summary as text, and bring everything to the disk."""
        if record.reason == "finished" and record.run is not None:
            text = json.dumps(record.run.summary, indent=4)
            indented = "\n".join(f"    {line}" for line in text.splitlines())  # as Markdown has code
            self._writer.add_text("summary", indented, record.run.summary["rounds"])
        self._writer.close()
