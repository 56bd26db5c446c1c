"""Function ``sweep``, which runs or continues a search for the best settings of a config.

A sweep consists of trials: in a trial, values for the varied settings are drawn, and a run is made
with these values for each of several seeds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedclade.config import Config, apply_overrides, check_config, find_config, read_config
from fedclade.core import (
    ConfigError,
    RunError,
    RunInterrupted,
    call_own,
    checked,
    flat,
    require,
    unknown,
)
from fedclade.report import Score
from fedclade.runs import OnRound, Run, check_free, check_validation, fitted_task, without_unset
from fedclade.sweeps.places import (
    Executor,
    ProcessExecutor,
    RayExecutor,
    SerialExecutor,
    check_main_guard,
)
from fedclade.sweeps.result import SweepResult
from fedclade.sweeps.space import (
    Parameter,
    check_values,
    fitted,
    overrides_of,
    parse_over,
    values_of,
)
from fedclade.sweeps.study import JOURNAL, SAMPLERS, Job, Outcome, Study, import_optuna, silent
from fedclade.training import Actors

TRIALS = 20
"""Default number of trials, except for a grid, which has a trial for each combination of values."""

OnTrial = Callable[[int, Mapping[str, Any], Outcome, Score], object]
"""Callback after each trial, with the trial's number, drawn values by key, outcome and metric."""


@checked()
def sweep(
    config: str | Path | Mapping[str, Any],
    over: Sequence[str] | Mapping[str, Any],
    folder: str | Path,
    *,
    trials: int | None = None,
    seeds: int = 1,
    sampler: str = "tpe",
    seed: int = 0,
    metric: str | None = None,
    processes: int = 1,
    ray: Actors | None = None,
    overrides: Sequence[str] = (),
    data_dir: str | Path | None = None,
    device: str = "auto",
    memory: int | str | None = None,
    resume: bool = False,
    on_start: Callable[[str, int], OnRound] = silent,
    on_trial: OnTrial = lambda *_: None,
    stop: Callable[[], bool] = lambda: False,
) -> SweepResult:
    """Search for the settings of a config with the best score on validation data.

    A sweep consists of trials. In a trial, values for the parameters in ``over`` are drawn, and a
    run is made with these values for each of several seeds. The score of a run is the best mean
    score on validation data over its rounds. Validation data is a part of each client's data on
    which the client never trains: see ``evaluate_validation`` of :class:`~fedclade.RunSettings`,
    which a sweep sets. Test data is not used for the search.

    The drawn values of a trial depend on ``seed``, on the scores of earlier trials and, with
    ``processes``, on the number of parallel trials. They do not depend on which trial ends first,
    nor on interruptions: trials are drawn and completed in the order of their numbers.

    The folder of the sweep contains the run folders, ``trial-NN/seed-N`` for each trial and seed,
    and a comparison of the trials.

    Parameters
    ----------
    config
        Path of a TOML file; name of a config in ``fedclade ls configs``; or content of a config as
        a mapping.
    over
        Parameters to vary, with their ranges or values, such as ``["local.lr=0.01..0.3(log)"]``, or
        ``{"local.lr": "0.01..0.3(log)", "local.epochs": [1, 5]}``; see :func:`parse_over`.
    folder
        Folder of the sweep; it must not exist yet unless ``resume`` is set.
    trials
        Number of trials; by default 20, or all combinations of a grid.
    seeds
        Number of runs of each trial, with seeds 0, 1, ...; the trial's score is the mean of their
        scores.
    sampler
        ``tpe``, Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), ``random``, or
        ``grid``, for lists of values and ranges of whole numbers.
    seed
        Seed of the sampler.
    metric
        Metric to optimize: maximized if higher values are better, and otherwise minimized. By
        default it is the first metric of the task.
    processes
        Number of parallel trials, each with its share of the threads. With more than one, a script
        needs a main guard (``if __name__ == "__main__":``), since each process imports it.
    ray
        Settings of a Ray cluster on which trials run: ``count`` is the number of trials that run in
        parallel, and ``cores`` the number of CPU cores of each of them. None: trials run on this
        machine, see ``processes``.
    overrides
        Changes of the config, in the form of the option ``--set``.
    data_dir, device, memory
        See :func:`fedclade.simulate`; the memory limit applies to each run separately.
    resume
        Whether to continue the sweep in the folder: finished trials are read, and runs continue
        from their checkpoints. ``trials`` may be larger than before.
    on_start
        Callback when a run starts in this process, with the run's name and number of rounds. It
        returns the callback for the end of each round.
    on_trial
        Callback when a trial has ended.
    stop
        Function that is called after every round; if it returns True, the sweep is interrupted.

    Returns
    -------
    SweepResult
        Trials from best to worst, with their runs.

    Raises
    ------
    ConfigError
        If an argument is invalid, the config does not accept a value, or a client has no validation
        data.
    MissingExtraError
        If Optuna is not installed, or Ray if ``ray`` is set.
    RunError
        If the folder already exists and ``resume`` is not set, if it contains a sweep with other
        settings, if no trial finishes, or if a process dies.
    RunInterrupted
        If ``stop`` returned True.
    """
    on_start = partial(call_own, "on_start", on_start)
    on_trial = partial(call_own, "on_trial", on_trial)
    stop = partial(call_own, "stop", stop)
    if processes > 1:
        check_main_guard()
    require(
        ("trials", trials, trials is None or trials >= 1, "at least 1"),
        ("seeds", seeds, seeds >= 1, "at least 1"),
        ("processes", processes, processes >= 1, "at least 1"),
        ("seed", seed, seed >= 0, "at least 0"),
    )
    if sampler not in SAMPLERS:
        raise ConfigError(unknown("sampler", sampler, SAMPLERS))
    if ray is not None and processes > 1:
        raise ConfigError(
            f"a sweep runs trials in several processes or on Ray, not both, but processes is "
            f"{processes} and ray is set; leave one of them out"
        )
    target = Path(folder)
    if not resume:
        _check_folder(target)
    import_optuna()

    source = _Source(config, (*overrides, "evaluate_validation=true"))
    parameters = parse_over(over)
    base = source.read(())
    parameters = fitted(parameters, source.read)
    check_values(parameters, source.read)
    if sampler == "grid":
        n_combinations = math.prod(len(parameter.grid) for parameter in parameters)
        trials = n_combinations if trials is None else min(trials, n_combinations)
    score = _choose_score(base, metric, data_dir)

    # A sweep can be continued only with the same settings; these are stored in its journal.
    identity: dict[str, Any] = _list_settings(base)
    for parameter in parameters:
        identity[f"--over {parameter.key}"] = parameter.as_dict()
    identity |= {"--sampler": sampler, "--seed": seed, "--seeds": seeds, "--metric": score.name}
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot write the sweep to {target}: {error}; choose another folder"
        ) from error
    higher_is_better = score.sign > 0
    study = Study(target, parameters, sampler, seed, higher_is_better=higher_is_better, of=identity)
    total = max(trials or TRIALS, len(study.trials))
    if all(study.has_ended(number) for number in range(total)):
        # Nothing is left to run: start neither processes nor Ray.
        processes = 1
        ray = None
    place = _make_executor(processes, ray, device, on_start, stop=stop)
    search = _Search(
        study=study,
        source=source,
        parameters=parameters,
        score=score,
        folder=target,
        seeds=seeds,
        data_dir=data_dir,
        device=device,
        memory=memory,
    )
    try:
        search.run(place, total, on_trial, stop)
    finally:
        place.close()
    return search.collect_result(total)


def _check_folder(folder: Path) -> None:
    """Check that the folder of a new sweep contains neither another sweep nor other files."""
    if (folder / JOURNAL).exists():
        raise RunError(
            f"{folder} already contains a sweep; continue it with --resume, or choose another "
            "folder"
        )
    check_free(folder, take_over=True)


@dataclass(frozen=True)
class _Source:
    """Config of a sweep, not yet read: each trial reads it with its drawn values as overrides."""

    config: str | Path | Mapping[str, Any]
    overrides: tuple[str, ...]

    def read(self, more: Sequence[str]) -> Config:
        """Read the config, apply the overrides of all trials and then ``more``, and check it."""
        overrides = [*self.overrides, *more]
        if isinstance(self.config, Mapping):
            raw = copy.deepcopy(dict(self.config))
            apply_overrides(raw, overrides)
            return check_config(raw)
        return read_config(find_config(str(self.config)), overrides)


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Running sweep: its study, and the settings that all of its trials have in common."""

    study: Study
    source: _Source
    parameters: Sequence[Parameter]
    score: Score
    folder: Path
    seeds: int
    data_dir: str | Path | None
    device: str
    memory: int | str | None

    def run(self, place: Executor, total: int, on_trial: OnTrial, stop: Callable[[], bool]) -> None:
        """Run all trials that have not ended, as many in parallel as the executor allows.

        Trials are completed in the order of their numbers, so that the drawn values of later trials
        do not depend on which trial ends first.

        Parameters
        ----------
        place
            Executor of the trials.
        total
            Number of trials, including trials that have ended before.
        on_trial
            Callback when a trial has ended.
        stop
            Function that returns whether the sweep should stop.
        """
        running: dict[int, Any] = {}
        next_number = 0
        for number in range(total):
            while next_number < min(total, number + place.count):
                handle = self._start_trial(place, next_number, stop)
                if handle is not None:
                    running[next_number] = handle
                next_number += 1
            if number not in running:
                continue
            outcome = running.pop(number)
            if not isinstance(outcome, Outcome):
                outcome = place.outcome(outcome, stop)
            if outcome.interrupted:
                raise RunInterrupted(outcome.interrupted, "continue the sweep with --resume")
            self.study.tell(number, outcome.score, outcome.failure)
            on_trial(number, self._get_drawn_values(number), outcome, self.score)

    def _start_trial(self, place: Executor, number: int, stop: Callable[[], bool]) -> Any:
        """Start a trial on the executor, unless the trial has ended or cannot run.

        Returns
        -------
        Any
            The executor's handle of the started trial. If the config does not accept the drawn
            values, the failed :class:`Outcome` instead; if the trial has ended before, None.
        """
        if self.study.has_ended(number):
            return None
        if stop():
            raise RunInterrupted(
                f"interrupted before trial {number}", "continue the sweep with --resume"
            )
        drawn = self.study.drawn(number)
        if self.study.has_ended(number):
            return None
        try:
            config = self._read_trial_config(drawn)
        except ConfigError as error:  # a combination of values that the config does not accept
            return Outcome(failure=str(error))
        job = Job(
            label=_name_trial(number),
            config=config,
            seeds=self.seeds,
            folder=self.folder.resolve(),
            data_dir=None if self.data_dir is None else Path(self.data_dir).resolve(),
            device=self.device,
            memory=self.memory,
            metric=self.score.name,
            higher_is_better=self.score.sign > 0,
        )
        return place.begin(job)

    def collect_result(self, total: int) -> SweepResult:
        """Return the result of the sweep, with all finished runs read from its folder."""
        finished: list[int] = []
        failures: dict[str, str] = {}
        for number in range(total):
            failure = self.study.failure(number)
            if failure:
                failures[_name_trial(number)] = failure
            else:
                finished.append(number)
        if not finished:
            reasons = "; ".join(dict.fromkeys(failures.values()))
            raise RunError(f"none of the {total} trials of the sweep finished: {reasons}")
        configs: dict[str, Config] = {}
        runs: dict[str, Sequence[Run]] = {}
        for number in finished:
            configs[_name_trial(number)] = self._read_trial_config(self.study.drawn(number))
            runs[_name_trial(number)] = self._load_runs(number)
        return SweepResult(
            folder=self.folder,
            parameters=self.parameters,
            score=self.score,
            configs=configs,
            runs=runs,
            drawn={_name_trial(number): self._get_drawn_values(number) for number in range(total)},
            failures=failures,
            study=self.study.study,
        )

    def _load_runs(self, number: int) -> list[Run]:
        """Load the runs of a finished trial, one for each seed."""
        folder = self.folder / _name_trial(number)
        return [Run.load(folder / f"seed-{seed}") for seed in range(self.seeds)]

    def _read_trial_config(self, drawn: Mapping[str, Any]) -> Config:
        """Return the config with the values that the study has drawn for a trial."""
        return self.source.read(overrides_of(self.parameters, drawn))

    def _get_drawn_values(self, number: int) -> dict[str, Any]:
        """Return the drawn values of a trial, as values of the config, by the settings' keys."""
        return values_of(self.parameters, self.study.drawn(number))


def _name_trial(number: int) -> str:
    """Return the name of a trial, which is also the name of its folder."""
    return f"trial-{number:02d}"


def _make_executor(
    processes: int,
    ray: Actors | None,
    device: str,
    on_start: Callable[[str, int], OnRound],
    *,
    stop: Callable[[], bool],
) -> Executor:
    """Create the executor of the trials: on Ray, in several processes, or in this process."""
    if ray is not None:
        return RayExecutor(ray, device)
    if processes > 1:
        return ProcessExecutor(processes)
    return SerialExecutor(on_start, stop)


def _choose_score(base: Config, metric: str | None, data_dir: str | Path | None) -> Score:
    """Choose the metric to optimize, and check that clients have validation data.

    Raises
    ------
    ConfigError
        If the task has no such metric, or a client has no validation data.
    """
    federation = base.federation(data_dir)
    check_validation(federation, "a sweep")
    task = fitted_task(base.settings, federation)
    metrics = {entry.name: entry for entry in task.metrics}
    if metric is not None and metric not in metrics:
        raise ConfigError(unknown("value of --metric", metric, metrics))
    return Score(metrics[metric or next(iter(metrics))])


def _list_settings(config: Config) -> dict[str, Any]:
    """Return a config's settings by dotted names, without settings that do not affect results."""
    settings = flat(without_unset(config.as_dict()))
    return {
        key: value for key, value in settings.items() if key not in ("checkpoint_every", "seed")
    }
