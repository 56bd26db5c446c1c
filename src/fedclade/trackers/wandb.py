"""The rounds of a run in Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fedclade.core import ConfigError, checked, flat, import_extra
from fedclade.runs import EndRecord
from fedclade.trackers.tracker import AnyRecord, Tracker, files_of, keep, kept, name_of_run, tags_of


class WandbTracker(Tracker):
    """Writes every round to Weights & Biases.

    Its own settings count: ``WANDB_MODE=offline`` writes files to be synchronized later, into the run folder where
    ``WANDB_DIR`` does not say otherwise. A run that is continued goes on under the same id.

    Parameters
    ----------
    project
        Its name; ``WANDB_PROJECT`` or ``fedclade``, if left out.

    Raises
    ------
    MissingExtraError
        If wandb is not installed.
    ConfigError
        If nobody is logged in, and the mode is online.
    """

    @checked()
    def __init__(self, project: str | None = None) -> None:
        self._module = import_extra("wandb", "wandb", "wandb", "--log wandb")
        self._project = project or os.environ.get("WANDB_PROJECT") or "fedclade"
        if self._module.setup().settings.mode == "online":
            try:
                self._module.login(verify=False)  # before the run, not in its first round
            except self._module.errors.UsageError as error:
                raise ConfigError(f"Weights & Biases cannot be used: {error} Or set WANDB_MODE=offline.") from error
        self._run: Any = None
        self._written = 0

    def open(self, record: AnyRecord) -> None:
        """Begin a run with the config, or go on with that of an earlier part."""
        before = kept(record.folder, "wandb")
        self._written = int(before.get("round", 0))
        self._run = self._module.init(
            project=self._project,
            id=before.get("id"),
            resume="allow",
            name=name_of_run(record),
            config=flat(record.config),
            tags=[f"{key}:{value}"[:64] for key, value in tags_of(record.config).items()],  # it takes no longer ones
            dir=os.environ.get("WANDB_DIR") or record.folder,
            reinit="create_new",
            allow_val_change=True,
            settings=self._module.Settings(console="off"),  # which would take the terminal away from progress bars
        )
        keep(record.folder, "wandb", id=self._run.id)

    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers; nothing, if an earlier part of the run got further."""
        if number > self._written and number >= self._run.step:
            self._run.log(dict(numbers), step=number)
            self._written = number

    def close(self, record: EndRecord) -> None:
        """Keep the summary, and say how the run ended."""
        if record.reason == "finished" and record.run is not None:
            self._run.summary.update(flat(record.run.summary))
            for path in files_of(record.folder):
                self._run.save(str(path), base_path=str(path.parent), policy="now")
        keep(record.folder, "wandb", round=self._written)
        self._run.finish(exit_code=1 if record.reason == "failed" else 0)
