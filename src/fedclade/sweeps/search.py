"""The function ``sweep``: runs or continues a search for the best settings of a config."""

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
"""Default number of trials; a grid has as many as it has combinations."""

OnTrial = Callable[[int, Mapping[str, Any], Outcome, Score], object]
"""Called after each trial with its number, its drawn values by key, its outcome and the metric."""


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

    Test data are not used for the search. Validation data are the clients' own, and they never
    train on them: see ``evaluate_validation`` of :class:`~fedclade.RunSettings`, which a sweep
    sets. The score of a run is that of the round with the best mean score on validation data.

    The drawn values of a trial depend on ``seed``, on the earlier trials and, with ``processes``,
    on the number of parallel trials. They do not depend on which trial ends first, nor on
    interruptions: trials are drawn and completed in the order of their numbers.

    The folder is also that of a comparison, with a run in ``trial-NN/seed-N`` for each trial and
    seed.

    Parameters
    ----------
    config
        TOML file, name of a config in ``fedclade ls configs``, or content of such a file.
    over
        Parameters to vary, such as ``["local.lr=0.01..0.3(log)"]``, or ``{"local.lr":
        "0.01..0.3(log)", "local.epochs": [1, 5]}``; see :func:`parse_over`.
    folder
        Folder of the sweep; it must not exist yet unless ``resume`` is set.
    trials
        Number of trials; by default 20, or all combinations of a grid.
    seeds
        Runs of each trial, with seeds 0, 1, ...; their mean is the score of the trial.
    sampler
        ``tpe``, Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), ``random``, or
        ``grid``, for lists of values and ranges of whole numbers.
    seed
        Seed of the sampler.
    metric
        Metric to optimize, in its own direction; by default the first one of the task.
    processes
        Number of parallel trials, each with its share of the threads. With more than one, a script
        needs a main guard (``if __name__ == "__main__":``), since each process imports it.
    ray
        Run trials as tasks on a Ray cluster, with ``count`` and ``cores`` of these actors.
    overrides
        Changes of the config, as after ``--set``.
    data_dir, device, memory
        See :func:`fedclade.simulate`; the memory is that of one run.
    resume
        Continue the sweep in the folder: finished trials are read, runs continue from their
        checkpoints. There can be more ``trials`` than before.
    on_start
        Called with the name and the number of rounds when a run starts in this process; returns the
        callback for the end of each round.
    on_trial
        Called when a trial has ended.
    stop
        Called after every round; the sweep is interrupted if it returns True.

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
        If the folder exists or has another sweep, no trial finishes, or a process dies.
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
            f"trials run in processes or on Ray, got processes {processes} and Ray; leave one out"
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
        raise RunError(f"cannot write the sweep to {target}: {error}") from error
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
    """Check that a folder is free for a new sweep."""
    if (folder / JOURNAL).exists():
        raise RunError(
            f"{folder} holds a sweep; continue it with --resume, or choose another folder"
        )
    check_free(folder, take_over=True)


@dataclass(frozen=True)
class _Source:
    """A config that can be read again with further overrides."""

    config: str | Path | Mapping[str, Any]
    overrides: tuple[str, ...]

    def read(self, more: Sequence[str]) -> Config:
        overrides = [*self.overrides, *more]
        if isinstance(self.config, Mapping):
            raw = copy.deepcopy(dict(self.config))
            apply_overrides(raw, overrides)
            return check_config(raw)
        return read_config(find_config(str(self.config)), overrides)


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Trials of a sweep, and what they have in common."""

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
        """Run all trials that have not ended, in parallel as far as the place allows it.

        Trials are completed in the order of their numbers, so that the values that later ones draw
        do not depend on which trial ends first.
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
                raise RunInterrupted(outcome.interrupted, "")
            self.study.tell(number, outcome.score, outcome.failure)
            on_trial(number, self._values(number), outcome, self.score)

    def _start_trial(self, place: Executor, number: int, stop: Callable[[], bool]) -> Any:
        """Start a trial; return its handle or outcome, or None if it has ended before."""
        if self.study.has_ended(number):
            return None
        if stop():
            raise RunInterrupted(f"interrupted before trial {number}", "")
        drawn = self.study.drawn(number)
        if self.study.has_ended(number):
            return None
        try:
            config = self._config(drawn)
        except ConfigError as error:  # a combination of values that the config does not accept
            return Outcome(failure=str(error))
        job = Job(
            label=_label(number),
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
        """Return the result, with the runs read from the folder."""
        finished: list[int] = []
        failures: dict[str, str] = {}
        for number in range(total):
            failure = self.study.failure(number)
            if failure:
                failures[_label(number)] = failure
            else:
                finished.append(number)
        if not finished:
            reasons = "; ".join(dict.fromkeys(failures.values()))
            raise RunError(f"none of {total} trials finished: {reasons}")
        configs: dict[str, Config] = {}
        runs: dict[str, Sequence[Run]] = {}
        for number in finished:
            configs[_label(number)] = self._config(self.study.drawn(number))
            runs[_label(number)] = self._runs(number)
        return SweepResult(
            folder=self.folder,
            parameters=self.parameters,
            score=self.score,
            configs=configs,
            runs=runs,
            drawn={_label(number): self._values(number) for number in range(total)},
            failures=failures,
            study=self.study.study,
        )

    def _runs(self, number: int) -> list[Run]:
        folder = self.folder / _label(number)
        return [Run.load(folder / f"seed-{seed}") for seed in range(self.seeds)]

    def _config(self, drawn: Mapping[str, Any]) -> Config:
        return self.source.read(overrides_of(self.parameters, drawn))

    def _values(self, number: int) -> dict[str, Any]:
        return values_of(self.parameters, self.study.drawn(number))


def _label(number: int) -> str:
    return f"trial-{number:02d}"


def _make_executor(
    processes: int,
    ray: Actors | None,
    device: str,
    on_start: Callable[[str, int], OnRound],
    *,
    stop: Callable[[], bool],
) -> Executor:
    if ray is not None:
        return RayExecutor(ray, device)
    if processes > 1:
        return ProcessExecutor(processes)
    return SerialExecutor(on_start, stop)


def _choose_score(base: Config, metric: str | None, data_dir: str | Path | None) -> Score:
    """Return the metric to optimize, after a check that clients have validation data."""
    federation = base.federation(data_dir)
    check_validation(federation, "a sweep")
    task = fitted_task(base.settings, federation)
    metrics = {entry.name: entry for entry in task.metrics}
    if metric is not None and metric not in metrics:
        raise ConfigError(unknown("metric: --metric", metric, metrics))
    return Score(metrics[metric or next(iter(metrics))])


def _list_settings(config: Config) -> dict[str, Any]:
    """Return a config's settings by dotted names, without those that change no result."""
    settings = flat(without_unset(config.as_dict()))
    return {
        key: value for key, value in settings.items() if key not in ("checkpoint_every", "seed")
    }
