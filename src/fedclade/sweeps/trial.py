"""One trial: the runs of one config, and the score that they come to on validation data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedclade.config import Batch, Config
from fedclade.core import ParameterTree, RunInterrupted
from fedclade.runs import OnRound, Row, chosen_round, column_of
from fedclade.tasks import Metric


@dataclass(frozen=True)
class Job:
    """What a trial runs, and where."""

    label: str
    config: Config
    seeds: int
    folder: Path
    data_dir: Path | None
    device: str
    memory: int | str | None
    metric: str
    higher_is_better: bool


@dataclass(frozen=True)
class Outcome:
    """What a trial came to: its score, or why it has none."""

    score: float | None = None
    failure: str = ""
    interrupted: str = ""


def silent(name: str, rounds: int) -> OnRound:
    """Show nothing of a run."""

    def on_round(row: Row, tree: ParameterTree) -> None:
        pass

    return on_round


def run_trial(
    job: Job, start: Callable[[str, int], OnRound] = silent, stop: Callable[[], bool] = lambda: False
) -> Outcome:
    """Run a trial, or what is left of it.

    The score of a run is that of the round with the best mean score on validation data; a trial's is the mean over its
    seeds, and none if one of them failed.
    """
    batch = Batch(start, job.data_dir, job.device, job.memory, stop=stop)
    try:
        runs = batch.run({job.label: job.config}, job.seeds, job.folder).get(job.label, [])
    except RunInterrupted as interrupted:
        return Outcome(interrupted=interrupted.happened)
    if batch.failures:
        return Outcome(failure="; ".join(batch.failures))
    metric = Metric(job.metric, job.higher_is_better)
    found = [row[column_of(job.metric)] for run in runs if (row := chosen_round(run.metric_rows, metric)) is not None]
    if len(found) < len(runs):
        return Outcome(failure=f"no round has a finite {job.metric} on validation data")
    return Outcome(sum(found) / len(found))
