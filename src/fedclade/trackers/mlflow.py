"""The rounds of a run in MLflow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedclade.core import ConfigError, checked, flat, import_extra
from fedclade.runs import EndRecord, RoundRecord
from fedclade.trackers.tracker import AnyRecord, Tracker, files_of, keep, kept, name_of_run, tags_of

# The rounds of a run as event files of TensorBoard.

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


# The rounds of a run in Weights & Biases.


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


MOST_PARAMS = 100
"""That MLflow takes at once."""

FOUND = "clusters/found"
"""A number that every round has."""

STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflowTracker(Tracker):
    """Writes every round to MLflow.

    Where to is MLflow's own affair: ``MLFLOW_TRACKING_URI``, or ``mlflow.db`` here. Without SQLAlchemy, as
    ``mlflow-skinny`` alone installs it, it is files in ``mlruns`` here, for which ``MLFLOW_ALLOW_FILE_STORE`` is set:
    MLflow refuses to write any since 3.13, unless that says otherwise.

    A run that is continued goes on under the same id, and what was written of a round stays.

    Parameters
    ----------
    experiment
        Its name; ``MLFLOW_EXPERIMENT_NAME`` or ``fedclade``, if left out.

    Raises
    ------
    MissingExtraError
        If mlflow-skinny is not installed.
    ConfigError
        If MLflow cannot be reached.
    """

    @checked()
    def __init__(self, experiment: str | None = None) -> None:
        self._module = import_extra("mlflow", "mlflow-skinny", "mlflow", "--log mlflow")
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedclade"
        try:
            self._client: Any = self._module.MlflowClient(self._tracking_uri())
            self._client.get_experiment_by_name(self._experiment)  # before the run, not in its first round
        except Exception as error:
            raise ConfigError(f"MLflow cannot be used: {error}") from error
        self._run_id, self._written = "", 0

    def open(self, record: AnyRecord) -> None:
        """Begin a run with the config as its parameters, or go on with that of an earlier part."""
        known = self._found(kept(record.folder, "mlflow").get("id"))
        if known is None:
            name, tags = name_of_run(record), tags_of(record.config)
            known = self._client.create_run(self._experiment_id(), tags=tags, run_name=name)
        else:
            self._client.update_run(known.info.run_id, status="RUNNING")
        self._run_id = known.info.run_id
        keep(record.folder, "mlflow", id=self._run_id)
        written = self._client.get_metric_history(self._run_id, FOUND)
        self._written = max((metric.step for metric in written), default=0)
        of_param, there = self._module.entities.Param, known.data.params  # which cannot be changed
        params = [of_param(key, str(value)) for key, value in flat(record.config).items() if key not in there]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])

    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write a metric for each number; nothing, if an earlier part of the run got further."""
        if number <= self._written:
            return
        now, of_metric = int(time.time() * 1000), self._module.entities.Metric
        metrics: Sequence[Any] = [of_metric(tag, value, now, number) for tag, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, record: EndRecord) -> None:
        """Keep the summary, and say how the run ended."""
        if record.reason == "finished" and record.run is not None:
            for path in files_of(record.folder):
                self._client.log_artifact(self._run_id, str(path))
            if record.folder is None:
                self._client.log_dict(self._run_id, dict(record.run.summary), "summary.json")
        self._client.set_terminated(self._run_id, STATUS[record.reason])

    def _tracking_uri(self) -> str | None:
        """Return where to write; None for MLflow's own choice."""
        if self._module.is_tracking_uri_set() or (find_spec("sqlalchemy") and find_spec("alembic")):
            return None
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return "./mlruns"

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        return self._client.create_experiment(self._experiment) if found is None else found.experiment_id

    def _found(self, run_id: str | None) -> Any:
        """Return the run of an id; None if there is none any more, as in another store."""
        if run_id is None:
            return None
        try:
            found = self._client.get_run(run_id)
        except self._module.exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return found if found.info.lifecycle_stage == "active" else None
