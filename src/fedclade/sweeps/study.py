"""The study of a sweep: Optuna's, kept in a journal in the sweep's folder.

What a trial draws belongs to the sweep's seed, the trial's number and what it has been told by then. Trials are told in
the order of their numbers, and trial k is drawn when all up to k - N have been told, where N run side by side. So what
is drawn depends neither on which of them ends first, nor on whether the sweep was interrupted.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.config import Batch, Config
from fedclade.core import ParameterTree, RunError, RunInterrupted, import_extra, rng, shown
from fedclade.runs import OnRound, Row, chosen_round, column_of
from fedclade.sweeps.space import Parameter
from fedclade.tasks import Metric

# One trial: the runs of one config, and the score that they come to on validation data.


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


SAMPLERS = ("tpe", "random", "grid")

JOURNAL = "trials.journal"
"""In the sweep's folder."""

_NOTED = "fedclade"


def import_optuna() -> Any:
    """Return Optuna; a MissingExtraError says how to install it."""
    optuna = import_extra("optuna", "optuna", "sweep", "a sweep")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """Trials of some parameters, in a journal.

    Parameters
    ----------
    folder
        Of the sweep; the journal is made, or read if there is one.
    parameters
        What trials draw.
    sampler
        One of :data:`SAMPLERS`.
    seed
        Keys what they draw.
    higher_is_better
        The direction.
    of
        What the sweep is of: trials of another are not continued.

    Raises
    ------
    RunError
        If the journal is that of another sweep, or cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        parameters: Sequence[Parameter],
        sampler: str,
        seed: int,
        *,
        higher_is_better: bool,
        of: Mapping[str, Any],
    ) -> None:
        self._optuna, self._sampler, self._seed, self._parameters = import_optuna(), sampler, seed, parameters
        journal, path = self._optuna.storages.journal, folder / JOURNAL
        try:
            _drop_half_line(path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # parts of it were experimental in earlier versions
                storage = self._optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))
            direction = "maximize" if higher_is_better else "minimize"
            self._study = self._optuna.create_study(
                storage=storage, study_name="fedclade", direction=direction, load_if_exists=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"cannot read or write {path}: {type(error).__name__}: {error}") from error
        noted, of = self._study.user_attrs.get(_NOTED), json.loads(json.dumps(of, default=str))
        if noted is None:
            self._study.set_user_attr(_NOTED, of)
        elif different := [key for key in {**noted, **of} if noted.get(key) != of.get(key)]:
            key = different[0]
            raise RunError(
                f"{folder} holds another sweep: its {key} is {shown(noted.get(key))}, not {shown(of.get(key))}; give "
                "the same command to continue it, or name another folder"
            )

    @property
    def trials(self) -> Sequence[Any]:
        """Optuna's trials, by number."""
        kinds = self._optuna.trial.TrialState
        return [trial for trial in self._study.get_trials(deepcopy=False) if trial.state != kinds.WAITING]

    @property
    def study(self) -> Any:
        """Optuna's study."""
        return self._study

    def failure(self, number: int) -> str:
        """Return why a trial failed; nothing if it did not."""
        return self._study.user_attrs.get(f"failure of {number}", "")

    def is_told(self, number: int) -> bool:
        """Whether a trial has ended."""
        return number < len(self.trials) and self.trials[number].state.is_finished()

    def drawn(self, number: int) -> dict[str, Any]:
        """Return what a trial drew; the next one draws now. One that was killed while it drew has failed."""
        trials = self.trials
        if number < len(trials) and (trials[number].state.is_finished() or self._is_whole(trials[number])):
            return dict(trials[number].params)
        if number < len(trials):
            self.tell(number, None, "interrupted as it began")
            return {}
        if self._sampler == "grid":
            self._study.enqueue_trial(dict(self._grid(number)), skip_if_exists=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study.sampler = self._sampler_of(number)
            return dict(self._study.ask({each.key: self._distribution(each) for each in self._parameters}).params)

    def tell(self, number: int, value: float | None, why: str = "") -> None:
        """End a trial with its score, or None with why it failed."""
        states = self._optuna.trial.TrialState
        if value is None:
            self._study.set_user_attr(f"failure of {number}", why)
        self._study.tell(number, value, state=states.FAIL if value is None else states.COMPLETE)

    def _is_whole(self, trial: Any) -> bool:
        return set(trial.params) == {each.key for each in self._parameters}

    def _grid(self, number: int) -> dict[str, Any]:
        values = next(itertools.islice(itertools.product(*(each.grid for each in self._parameters)), number, None))
        return dict(zip([each.key for each in self._parameters], values, strict=True))

    def _sampler_of(self, number: int) -> Any:
        """Return a sampler for one trial: from the sweep's seed alone, so that it needs no memory of its own."""
        seed = rng.torch_seed(self._seed, "sweep", number) % 2**32
        samplers = self._optuna.samplers
        if self._sampler == "tpe":  # which also keeps away from what those beside it draw
            return samplers.TPESampler(seed=seed, constant_liar=True)
        return samplers.RandomSampler(seed=seed)

    def _distribution(self, parameter: Parameter) -> Any:
        made = self._optuna.distributions
        if parameter.values is not None:
            return made.CategoricalDistribution([*parameter.values])
        kind = made.IntDistribution if parameter.whole else made.FloatDistribution
        return kind(parameter.low, parameter.high, log=parameter.log)


def _drop_half_line(path: Path) -> None:
    """Remove what a process that was killed has left of its last line."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
