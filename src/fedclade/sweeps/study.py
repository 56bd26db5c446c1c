"""Study of a sweep: Optuna's, stored in a journal in the sweep's folder; and single trials.

The drawn values of a trial depend on the sweep's seed, the trial's number and the scores reported
until then. Scores are reported in the order of the trials' numbers, and trial k is drawn when all
trials up to k - N have been reported, where N is the number of parallel trials. The drawn values
thus depend neither on which trial ends first, nor on interruptions of the sweep.
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
    """Work of a trial: its config, seeds and folder, and how they are run."""

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
    """Outcome of a trial: its score, or the reason why it has none."""

    score: float | None = None
    failure: str = ""
    interrupted: str = ""


def silent(name: str, rounds: int) -> OnRound:
    """Return a callback that does nothing."""

    def on_round(row: Row, tree: ParameterTree) -> None:
        pass

    return on_round


def run_trial(
    job: Job,
    start: Callable[[str, int], OnRound] = silent,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run a trial, or continue an interrupted one.

    The score of a run is that of the round with the best mean score on validation data. The score
    of a trial is the mean over its seeds; it has none if one of them failed.
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
"""File of the study in the sweep's folder."""

_IDENTITY = "fedclade"
"""Attribute of the study with the settings of the sweep."""


def import_optuna() -> Any:
    """Import Optuna; raise a MissingExtraError if it is not installed."""
    optuna = import_extra("optuna", "optuna", "sweep", "a sweep")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """Trials with some parameters, stored in a journal.

    Parameters
    ----------
    folder
        Folder of the sweep; an existing journal is read.
    parameters
        Parameters whose values are drawn.
    sampler
        One of :data:`SAMPLERS`.
    seed
        Seed of the sampler.
    higher_is_better
        Direction of the score.
    of
        Settings of the sweep; a journal with other settings is not continued.

    Raises
    ------
    RunError
        If the journal belongs to another sweep, or cannot be read or written.
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
                f"cannot read or write {path}: {type(error).__name__}: {error}"
            ) from error
        self._check_identity(folder, json.loads(json.dumps(of, default=str)))

    def _check_identity(self, folder: Path, identity: dict[str, Any]) -> None:
        """Store the settings of a new sweep, or check that they are those of the stored one."""
        stored = self._study.user_attrs.get(_IDENTITY)
        if stored is None:
            self._study.set_user_attr(_IDENTITY, identity)
            return
        for key in {**stored, **identity}:
            if stored.get(key) != identity.get(key):
                raise RunError(
                    f"{folder} holds another sweep: its {key} is {shown(stored.get(key))}, not "
                    f"{shown(identity.get(key))}; use the same command to continue it, or choose "
                    "another folder"
                )

    @property
    def trials(self) -> Sequence[Any]:
        """Optuna's trials, by number."""
        kinds = self._optuna.trial.TrialState
        return [
            trial
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state != kinds.WAITING
        ]

    @property
    def study(self) -> Any:
        """Optuna's study."""
        return self._study

    def failure(self, number: int) -> str:
        """Return the error of a failed trial; empty if it did not fail."""
        return self._study.user_attrs.get(f"failure of {number}", "")

    def has_ended(self, number: int) -> bool:
        """Return whether a trial has ended and its score or failure is stored."""
        return number < len(self.trials) and self.trials[number].state.is_finished()

    def drawn(self, number: int) -> dict[str, Any]:
        """Return the drawn values of a trial, and draw them for the next one.

        A trial that was killed while its values were drawn has failed.
        """
        trials = self.trials
        if number < len(trials):
            trial = trials[number]
            if trial.state.is_finished() or self._is_complete(trial):
                return dict(trial.params)
            self.tell(number, None, "interrupted as it began")
            return {}
        if self._sampler == "grid":
            self._study.enqueue_trial(self._select_combination(number), skip_if_exists=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study.sampler = self._make_sampler(number)
            distributions = {p.key: self._make_distribution(p) for p in self._parameters}
            return dict(self._study.ask(distributions).params)

    def tell(self, number: int, value: float | None, why: str = "") -> None:
        """Store the end of a trial: its score, or None and the reason why it failed."""
        states = self._optuna.trial.TrialState
        if value is None:
            self._study.set_user_attr(f"failure of {number}", why)
        state = states.FAIL if value is None else states.COMPLETE
        self._study.tell(number, value, state=state)

    def _is_complete(self, trial: Any) -> bool:
        """Return whether the values of all parameters are drawn."""
        return set(trial.params) == {parameter.key for parameter in self._parameters}

    def _select_combination(self, number: int) -> dict[str, Any]:
        """Return a combination of values of the grid by its number."""
        combinations = itertools.product(*(parameter.grid for parameter in self._parameters))
        values = next(itertools.islice(combinations, number, None))
        keys = [parameter.key for parameter in self._parameters]
        return dict(zip(keys, values, strict=True))

    def _make_sampler(self, number: int) -> Any:
        """Return a sampler for one trial, seeded by its number, so that no state is stored."""
        seed = rng.torch_seed(self._seed, "sweep", number) % 2**32
        samplers = self._optuna.samplers
        if self._sampler == "tpe":
            # The option keeps parallel trials from drawing similar values.
            return samplers.TPESampler(seed=seed, constant_liar=True)
        return samplers.RandomSampler(seed=seed)

    def _make_distribution(self, parameter: Parameter) -> Any:
        distributions = self._optuna.distributions
        if parameter.values is not None:
            return distributions.CategoricalDistribution([*parameter.values])
        kind = distributions.FloatDistribution
        if parameter.whole:
            kind = distributions.IntDistribution
        return kind(parameter.low, parameter.high, log=parameter.log)


def _drop_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line, left by a process that was killed."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
