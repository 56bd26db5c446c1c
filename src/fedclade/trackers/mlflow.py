"""Trackers, which log the metrics of every round to TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedclade.core import ConfigError, checked, flat, import_extra
from fedclade.runs import EndRecord, RoundRecord
from fedclade.trackers.tracker import AnyRecord, Tracker, files_of, keep, kept, name_of_run, tags_of

FOLDER = "tensorboard"
"""Name of the folder for TensorBoard's event files in the run folder."""


class TensorBoardTracker(Tracker):
    """Tracker that writes every round to event files of TensorBoard.

    If a run is continued, rounds that were logged before the interruption and run again are
    replaced.

    Parameters
    ----------
    folder
        Folder of the event files; by default ``tensorboard`` in the run folder.

    Raises
    ------
    MissingExtraError
        If tensorboard is not installed.
    ConfigError
        After the first round, if there is neither a ``folder`` nor a run folder.
    """

    @checked()
    def __init__(self, folder: str | Path | None = None) -> None:
        self._module = import_extra(
            "torch.utils.tensorboard", "tensorboard", "tensorboard", "--log tensorboard"
        )
        self._folder = folder
        self._writer: Any = None

    def open(self, record: AnyRecord) -> None:
        """Create TensorBoard's event files, with the run's config as a text."""
        folder = self._folder or (record.folder and record.folder / FOLDER)
        if folder is None:
            raise ConfigError(
                "TensorBoardTracker has no folder to write to; set its folder, or the run's folder"
            )
        at = record.round if isinstance(record, RoundRecord) else None
        self._writer = self._module.SummaryWriter(str(folder), purge_step=at)
        rows = "".join(
            f"| {key} | {json.dumps(value)} |\n" for key, value in flat(record.config).items()
        )
        self._writer.add_text("config", f"| setting | value |\n|:--|:--|\n{rows}", at or 0)

    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a round as TensorBoard scalars."""
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, number)
        self._writer.flush()

    def close(self, record: EndRecord) -> None:
        """Write the run's summary as a text, if the run finished, and close the event files."""
        if record.reason == "finished" and record.run is not None:
            text = json.dumps(record.run.summary, indent=4)
            # as Markdown has code
            indented = "\n".join(f"    {line}" for line in text.splitlines())
            self._writer.add_text("summary", indented, record.run.summary["rounds"])
        self._writer.close()


class WandbTracker(Tracker):
    """Tracker that writes every round to Weights & Biases.

    Environment variables of Weights & Biases apply. With ``WANDB_MODE=offline`` it writes files for
    a later synchronization, to the run folder unless ``WANDB_DIR`` is set. A continued run has the
    same id as before.

    Parameters
    ----------
    project
        Name of the project; by default ``WANDB_PROJECT`` or ``fedclade``.

    Raises
    ------
    MissingExtraError
        If wandb is not installed.
    ConfigError
        If no user is logged in, and ``WANDB_MODE`` is not ``offline``.
    """

    @checked()
    def __init__(self, project: str | None = None) -> None:
        self._module = import_extra("wandb", "wandb", "wandb", "--log wandb")
        self._project = project or os.environ.get("WANDB_PROJECT") or "fedclade"
        if self._module.setup().settings.mode == "online":
            try:
                self._module.login(verify=False)  # fails before the run, not in its first round
            except self._module.errors.UsageError as error:
                raise ConfigError(
                    f"Weights & Biases cannot be used: {error} Or set WANDB_MODE=offline."
                ) from error
        self._run: Any = None
        self._written = 0

    def open(self, record: AnyRecord) -> None:
        """Start a run of Weights & Biases with the config; for a continued run, resume it."""
        before = kept(record.folder, "wandb")
        self._written = int(before.get("round", 0))
        self._run = self._module.init(
            project=self._project,
            id=before.get("id"),
            resume="allow",
            name=name_of_run(record),
            config=flat(record.config),
            # Longer tags are refused.
            tags=[f"{key}:{value}"[:64] for key, value in tags_of(record.config).items()],
            dir=os.environ.get("WANDB_DIR") or record.folder,
            reinit="create_new",
            allow_val_change=True,
            # Recording the console would interfere with progress bars.
            settings=self._module.Settings(console="off"),
        )
        keep(record.folder, "wandb", id=self._run.id)

    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a round to Weights & Biases, unless the round was logged before."""
        if number > self._written and number >= self._run.step:
            self._run.log(dict(numbers), step=number)
            self._written = number

    def close(self, record: EndRecord) -> None:
        """Upload the summary and the config, if the run finished, and end the run."""
        if record.reason == "finished" and record.run is not None:
            self._run.summary.update(flat(record.run.summary))
            for path in files_of(record.folder):
                self._run.save(str(path), base_path=str(path.parent), policy="now")
        keep(record.folder, "wandb", round=self._written)
        self._run.finish(exit_code=1 if record.reason == "failed" else 0)


MOST_PARAMS = 100
"""Largest number of parameters in a request to MLflow."""

FOUND = "clusters/found"
"""Tag of a metric that every round has, by which the last logged round is found."""

STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflowTracker(Tracker):
    """Tracker that writes every round to MLflow.

    Runs are stored at ``MLFLOW_TRACKING_URI``, if it is set, or else in ``mlflow.db`` in the
    current folder. Without SQLAlchemy, which ``mlflow-skinny`` does not install, they are stored in
    the folder ``mlruns``; the tracker then sets ``MLFLOW_ALLOW_FILE_STORE``, without which MLflow
    3.13 and later refuse to write to folders.

    A continued run has the same id as before, and rounds that were logged are not logged again.

    Parameters
    ----------
    experiment
        Name of the experiment; by default ``MLFLOW_EXPERIMENT_NAME`` or ``fedclade``.

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
            # Fails before the run, not in its first round.
            self._client.get_experiment_by_name(self._experiment)
        except Exception as error:
            raise ConfigError(
                f"MLflow cannot be used: {error}; check MLFLOW_TRACKING_URI"
            ) from error
        self._run_id = ""
        self._written = 0

    def open(self, record: AnyRecord) -> None:
        """Start an MLflow run with the config as its parameters; for a continued run, resume it."""
        known = self._find_run(kept(record.folder, "mlflow").get("id"))
        if known is None:
            known = self._client.create_run(
                self._get_experiment_id(), tags=tags_of(record.config), run_name=name_of_run(record)
            )
        else:
            self._client.update_run(known.info.run_id, status="RUNNING")
        self._run_id = known.info.run_id
        keep(record.folder, "mlflow", id=self._run_id)
        written = self._client.get_metric_history(self._run_id, FOUND)
        self._written = max((metric.step for metric in written), default=0)
        params: list[Any] = []
        for key, value in flat(record.config).items():
            if key not in known.data.params:  # logged parameters cannot be changed
                params.append(self._module.entities.Param(key, str(value)))
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])

    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a round as MLflow metrics, unless the round was logged before."""
        if number <= self._written:
            return
        now = int(time.time() * 1000)
        make_metric = self._module.entities.Metric
        metrics = [make_metric(tag, value, now, number) for tag, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, record: EndRecord) -> None:
        """Upload the summary and the config, if the run finished, and set the run's status."""
        if record.reason == "finished" and record.run is not None:
            for path in files_of(record.folder):
                self._client.log_artifact(self._run_id, str(path))
            if record.folder is None:
                self._client.log_dict(self._run_id, dict(record.run.summary), "summary.json")
        self._client.set_terminated(self._run_id, STATUS[record.reason])

    def _tracking_uri(self) -> str | None:
        """Return the address at which MLflow stores runs; None for MLflow's default.

        Without database packages (SQLAlchemy, Alembic) and without ``MLFLOW_TRACKING_URI`` the
        address is a local folder.
        """
        has_database = find_spec("sqlalchemy") and find_spec("alembic")
        if self._module.is_tracking_uri_set() or has_database:
            return None
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return "./mlruns"

    def _get_experiment_id(self) -> str:
        """Return the id of the MLflow experiment; create the experiment if it does not exist."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return self._client.create_experiment(self._experiment)
        return experiment.experiment_id

    def _find_run(self, run_id: str | None) -> Any:
        """Return the MLflow run with an id; None if it does not exist here, or is deleted."""
        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except self._module.exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None
