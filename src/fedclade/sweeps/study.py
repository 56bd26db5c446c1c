"""Study of a sweep, which draws the values of trials with Optuna; and the run of a single trial.

The study is stored in a journal, a file in the sweep's folder. The drawn values of a trial depend
on the sweep's seed, the trial's number and the scores reported until then. Scores are reported in
the order of the trials' numbers, and trial k is drawn when all trials up to k - N have been
reported, where N is the number of parallel trials. The drawn values thus depend neither on which
trial ends first, nor on interruptions of the sweep.
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


@dataclass(frozen=True)
class Job:
    """All that a process needs to run one trial: its config, seeds, folder and further settings."""

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
    """Outcome of a trial: its score, or the reason why it failed or was interrupted."""

    score: float | None = None
    failure: str = ""
    interrupted: str = ""


def silent(name: str, rounds: int) -> OnRound:
    """Return a callback for the rounds of a run that does nothing, and so shows no progress."""

    def on_round(row: Row, tree: ParameterTree) -> None:
        pass

    return on_round


def run_trial(
    job: Job,
    start: Callable[[str, int], OnRound] = silent,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run a trial, or continue an interrupted trial from its checkpoints.

    The score of a run is the best mean score on validation data over its rounds. The score of a
    trial is the mean of the scores of its runs. If a run fails, the trial fails.

    Parameters
    ----------
    job
        Settings of the trial.
    start
        Callback when a run starts; returns the callback for the end of each round.
    stop
        Function that returns whether the trial should stop after the current round.
    """
    batch = Batch(start, job.data_dir, job.device, job.memory, stop=stop)
    try:
        runs = batch.run({job.label: job.config}, job.seeds, job.folder).get(job.label, [])
    except RunInterrupted as interrupted:
        return Outcome(interrupted=interrupted.happened)
    if batch.failures:
        return Outcome(failure="; ".join(batch.failures))
    metric = Metric(job.metric, job.higher_is_better)
    scores: list[float] = []
    for run in runs:
        row = chosen_round(run.metric_rows, metric)
        if row is None:
            return Outcome(failure=f"no round has a finite {job.metric} on validation data")
        scores.append(row[column_of(job.metric)])
    return Outcome(sum(scores) / len(scores))


SAMPLERS = ("tpe", "random", "grid")

JOURNAL = "trials.journal"
"""Name of the file in the sweep's folder that stores the study."""

_IDENTITY = "fedclade"
"""Name of the study's attribute that stores the settings of the sweep."""


def import_optuna() -> Any:
    """Import Optuna, and turn off its log messages except warnings.

    Raises
    ------
    MissingExtraError
        If Optuna is not installed.
    """
    optuna = import_extra("optuna", "optuna", "sweep", "a sweep")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """Study of a sweep: draws the values of trials and stores their results, with Optuna.

    Parameters
    ----------
    folder
        Folder of the sweep; if it contains a journal, the study in it is continued.
    parameters
        The varied settings, whose values are drawn.
    sampler
        Name of the method by which values are drawn, one of :data:`SAMPLERS`.
    seed
        Seed of the sampler.
    higher_is_better
        Whether trials with higher scores are better.
    of
        Settings of the sweep by name. They are stored in a new journal, and must equal the
        settings in a journal that is continued.

    Raises
    ------
    RunError
        If the journal belongs to a sweep with other settings, or cannot be read or written.
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
        self._optuna = import_optuna()
        self._sampler = sampler
        self._seed = seed
        self._parameters = parameters
        storages = self._optuna.storages
        path = folder / JOURNAL
        try:
            _drop_incomplete_line(path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # parts were experimental in earlier versions
                backend = storages.journal.JournalFileBackend(str(path))
                storage = storages.JournalStorage(backend)
            direction = "maximize" if higher_is_better else "minimize"
            self._study = self._optuna.create_study(
                storage=storage, study_name="fedclade", direction=direction, load_if_exists=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise RunError(
                f"cannot read or write the sweep's journal {path}: {type(error).__name__}: "
                f"{error}; choose another folder for a new sweep"
            ) from error
        self._check_identity(folder, json.loads(json.dumps(of, default=str)))

    def _check_identity(self, folder: Path, identity: dict[str, Any]) -> None:
        """Store the settings of a new sweep; check that a continued sweep has the same settings."""
        stored = self._study.user_attrs.get(_IDENTITY)
        if stored is None:
            self._study.set_user_attr(_IDENTITY, identity)
            return
        for key in {**stored, **identity}:
            if stored.get(key) != identity.get(key):
                raise RunError(
                    f"{folder} contains a sweep with other settings: its {key} is "
                    f"{shown(stored.get(key))}, not {shown(identity.get(key))}; use the same "
                    "command to continue it, or choose another folder"
                )

    @property
    def trials(self) -> Sequence[Any]:
        """Optuna's trials whose values have been drawn, in the order of their numbers."""
        kinds = self._optuna.trial.TrialState
        return [
            trial
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state != kinds.WAITING
        ]

    @property
    def study(self) -> Any:
        """Optuna's study object, from which, for example, figures of the trials can be made."""
        return self._study

    def failure(self, number: int) -> str:
        """Return the error message of a failed trial; empty if the trial did not fail."""
        return self._study.user_attrs.get(f"failure of {number}", "")

    def has_ended(self, number: int) -> bool:
        """Return whether a trial has ended and its score or failure is stored."""
        return number < len(self.trials) and self.trials[number].state.is_finished()

    def drawn(self, number: int) -> dict[str, Any]:
        """Return the drawn values of a trial; draw them if the trial is a new one.

        If the sweep was killed while the values of the trial were drawn, the trial is stored as
        failed, and the result is empty.
        """
        trials = self.trials
        if number < len(trials):
            trial = trials[number]
            if trial.state.is_finished() or self._is_complete(trial):
                return dict(trial.params)
            self.tell(number, None, "interrupted while its values were drawn")
            return {}
        if self._sampler == "grid":
            self._study.enqueue_trial(self._select_combination(number), skip_if_exists=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study.sampler = self._make_sampler(number)
            distributions = {p.key: self._make_distribution(p) for p in self._parameters}
            return dict(self._study.ask(distributions).params)

    def tell(self, number: int, value: float | None, why: str = "") -> None:
        """Store the result of a trial in the study.

        Parameters
        ----------
        number
            Number of the trial.
        value
            Score of the trial; None if it failed.
        why
            Reason of the failure.
        """
        states = self._optuna.trial.TrialState
        if value is None:
            self._study.set_user_attr(f"failure of {number}", why)
        state = states.FAIL if value is None else states.COMPLETE
        self._study.tell(number, value, state=state)

    def _is_complete(self, trial: Any) -> bool:
        """Return whether the values of all varied settings have been drawn for a trial."""
        return set(trial.params) == {parameter.key for parameter in self._parameters}

    def _select_combination(self, number: int) -> dict[str, Any]:
        """Return the combination of values with a given number in the grid, by key."""
        combinations = itertools.product(*(parameter.grid for parameter in self._parameters))
        values = next(itertools.islice(combinations, number, None))
        keys = [parameter.key for parameter in self._parameters]
        return dict(zip(keys, values, strict=True))

    def _make_sampler(self, number: int) -> Any:
        """Create Optuna's sampler for one trial.

        Its seed depends on the sweep's seed and the trial's number, so that an interrupted sweep
        can continue without a stored state of the sampler.
        """
        seed = rng.torch_seed(self._seed, "sweep", number) % 2**32
        samplers = self._optuna.samplers
        if self._sampler == "tpe":
            # The option keeps parallel trials from drawing similar values.
            return samplers.TPESampler(seed=seed, constant_liar=True)
        return samplers.RandomSampler(seed=seed)

    def _make_distribution(self, parameter: Parameter) -> Any:
        """Create Optuna's distribution of the values of a varied setting."""
        distributions = self._optuna.distributions
        if parameter.values is not None:
            return distributions.CategoricalDistribution([*parameter.values])
        kind = distributions.FloatDistribution
        if parameter.whole:
            kind = distributions.IntDistribution
        return kind(parameter.low, parameter.high, log=parameter.log)


def _drop_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line from a journal, which a killed process may have left."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
