"""The rounds of a run in MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from fedclade.core import ConfigError, checked, flat, import_extra
from fedclade.runs import EndRecord
from fedclade.trackers.tracker import AnyRecord, Tracker, files_of, keep, kept, name_of_run, tags_of

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
