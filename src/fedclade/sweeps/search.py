"""A sweep from its beginning, or from where it stands, to its result."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedclade.config import Config, apply_overrides, check_config, find_config, read_config
from fedclade.core import ConfigError, RunError, RunInterrupted, call_own, checked, flat, require, unknown
from fedclade.report import Score
from fedclade.runs import OnRound, Run, check_free, check_validation, fitted_task, without_unset
from fedclade.sweeps.places import Here, OnRay, Place, Processes, check_main_guard
from fedclade.sweeps.result import SweepResult
from fedclade.sweeps.space import Parameter, check_values, fitted, overrides_of, parse_over, values_of
from fedclade.sweeps.study import JOURNAL, SAMPLERS, Job, Outcome, Study, import_optuna, silent
from fedclade.training import Actors

TRIALS = 20
"""If nothing else is said; of a grid, all."""

Told = Callable[[int, Mapping[str, Any], Outcome, Score], object]
"""Called when a trial has ended, with its number, what it drew by key, and its outcome."""


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
    on_trial: Told = lambda *_: None,
    stop: Callable[[], bool] = lambda: False,
) -> SweepResult:
    """Search for the settings of a config that do best on validation data.

    Test data have no part in the search. Validation data are the clients' own, and they never train on them: see
    ``evaluate_validation`` of :class:`~fedclade.RunSettings`, which a sweep sets. The score of a run is that of the
    round with the best mean score on validation data.

    What trials draw depends on ``seed`` and on the trials before, and with ``processes`` on how many run side by side;
    not on which of them ends first, nor on interruptions: trials are drawn and told in the order of their numbers. The
    folder is that of a comparison, with a run in ``trial-NN/seed-N`` for each trial and seed.

    Parameters
    ----------
    config
        A TOML file, a name of ``fedclade ls configs``, or what such a file holds.
    over
        What to vary, such as ``["local.lr=0.01..0.3(log)"]``, or ``{"local.lr": "0.01..0.3(log)", "local.epochs": [1,
        5]}``; see :func:`parse_over`.
    folder
        Where to keep the sweep; it must not exist yet, unless it is to ``resume``.
    trials
        How many; by default 20, and of a grid all.
    seeds
        Runs of each trial, with seeds 0, 1, ...; their mean counts.
    sampler
        ``tpe``, Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), ``random``, or ``grid``, which takes
        lists of values and ranges of whole numbers.
    seed
        Keys what trials draw.
    metric
        The metric to go by, in its own direction; by default the first of the task.
    processes
        How many trials run side by side, each with its share of the threads. A script that asks for more than one
        needs a main guard (``if __name__ == "__main__":``), since each process imports it.
    ray
        Run trials as tasks of a Ray cluster, with ``count`` and ``cores`` of these actors.
    overrides
        Changes of the config, as after ``--set``.
    data_dir, device, memory
        See :func:`fedclade.simulate`; the memory is that of one run.
    resume
        Go on with the sweep in the folder: trials that ended are read, runs go on from their checkpoints. There can be
        more ``trials`` than before.
    on_start, on_trial
        Called when a run begins in this process, for what to call after each of its rounds, and when a trial has ended.
    stop
        Asked after every round whether to stop.

    Raises
    ------
    ConfigError
        If an argument is not right, the config cannot have a value, or a client has no validation data.
    MissingExtraError
        If Optuna is not installed, or there are to be Ray tasks and Ray is not.
    RunError
        If the folder exists or holds another sweep, no trial finishes, or a process dies.
    RunInterrupted
        If ``stop`` said so.
    """
    on_start, on_trial = partial(call_own, "on_start", on_start), partial(call_own, "on_trial", on_trial)
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
        raise ConfigError(f"trials run in processes or on Ray, got processes {processes} and Ray; leave one out")
    if not resume:
        if (Path(folder) / JOURNAL).exists():
            raise RunError(f"{folder} holds a sweep; continue it with --resume, or name another folder")
        check_free(folder, take_over=True)
    import_optuna()
    source = _Source(config, (*overrides, "evaluate_validation=true"))
    parameters, base = parse_over(over), source.read(())
    parameters = fitted(parameters, source.read)
    check_values(parameters, source.read)
    if sampler == "grid":
        largest = math.prod(len(parameter.grid) for parameter in parameters)
        trials = largest if trials is None else min(trials, largest)
    score = _score(base, metric, data_dir)
    of = {
        **_settings(base),
        **{f"--over {each.key}": each.as_dict() for each in parameters},
        **{"--sampler": sampler, "--seed": seed, "--seeds": seeds, "--metric": score.name},
    }
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write the sweep to {target}: {error}") from error
    study = Study(target, parameters, sampler, seed, higher_is_better=score.sign > 0, of=of)
    total = max(trials or TRIALS, len(study.trials))
    if all(study.is_told(number) for number in range(total)):
        processes, ray = 1, None  # none of which is needed any more
    place = _place(processes, ray, device, on_start, stop)
    search = _Search(study, source, parameters, score, target, seeds, data_dir, device, memory)
    try:
        search.run(place, total, on_trial, stop)
    finally:
        place.close()
    return search.result(total)


@dataclass(frozen=True)
class _Source:
    """A config that can be read with overrides."""

    config: str | Path | Mapping[str, Any]
    overrides: tuple[str, ...]

    def read(self, more: Sequence[str]) -> Config:
        overrides = [*self.overrides, *more]
        if isinstance(self.config, Mapping):
            raw = copy.deepcopy(dict(self.config))
            apply_overrides(raw, overrides)
            return check_config(raw)
        return read_config(find_config(str(self.config)), overrides)


@dataclass(frozen=True)
class _Search:
    study: Study
    source: _Source
    parameters: Sequence[Parameter]
    score: Score
    folder: Path
    seeds: int
    data_dir: str | Path | None
    device: str
    memory: int | str | None

    def run(self, place: Place, total: int, on_trial: Told, stop: Callable[[], bool]) -> None:
        """Run all trials that have not ended, as many side by side as there is room for."""
        begun: dict[int, Any] = {}
        asked = 0
        for told in range(total):
            while asked < min(total, told + place.count):
                if not self.study.is_told(asked) and (job := self._begin(place, asked, stop)) is not None:
                    begun[asked] = job
                asked += 1
            if told not in begun:
                continue
            outcome = begun.pop(told)
            if not isinstance(outcome, Outcome):
                outcome = place.outcome(outcome, stop)
            if outcome.interrupted:
                raise RunInterrupted(outcome.interrupted, "")
            self.study.tell(told, outcome.score, outcome.failure)
            on_trial(told, self._values(told), outcome, self.score)

    def _begin(self, place: Place, number: int, stop: Callable[[], bool]) -> Any:
        if stop():
            raise RunInterrupted(f"interrupted before trial {number}", "")
        drawn = self.study.drawn(number)
        if self.study.is_told(number):
            return None
        try:
            config = self._config(drawn)
        except ConfigError as error:  # of values that do not go together
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

    def result(self, total: int) -> SweepResult:
        """Return what came of it, with the runs read from the folder."""
        done, failed = [], {}
        for number in range(total):
            if why := self.study.failure(number):
                failed[_label(number)] = why
            else:
                done.append(number)
        if not done:
            reasons = "; ".join(dict.fromkeys(failed.values()))
            raise RunError(f"none of {total} trials finished: {reasons}")
        return SweepResult(
            folder=self.folder,
            parameters=self.parameters,
            score=self.score,
            configs={_label(number): self._config(self.study.drawn(number)) for number in done},
            runs={_label(number): self._runs(number) for number in done},
            drawn={_label(number): self._values(number) for number in range(total)},
            failures=failed,
            study=self.study.study,
        )

    def _runs(self, number: int) -> list[Run]:
        return [Run.load(self.folder / _label(number) / f"seed-{seed}") for seed in range(self.seeds)]

    def _config(self, drawn: Mapping[str, Any]) -> Config:
        return self.source.read(overrides_of(self.parameters, drawn))

    def _values(self, number: int) -> dict[str, Any]:
        return values_of(self.parameters, self.study.drawn(number))


def _label(number: int) -> str:
    return f"trial-{number:02d}"


def _place(
    processes: int, ray: Actors | None, device: str, on_start: Callable[[str, int], OnRound], stop: Callable[[], bool]
) -> Place:
    if ray is not None:
        return OnRay(ray, device)
    return Processes(processes) if processes > 1 else Here(on_start, stop)


def _score(base: Config, metric: str | None, data_dir: str | Path | None) -> Score:
    """Return what the sweep goes by, once it is known that the data can tell."""
    federation = base.federation(data_dir)
    check_validation(federation, "a sweep")
    metrics = {each.name: each for each in fitted_task(base.settings, federation).metrics}
    if metric is not None and metric not in metrics:
        raise ConfigError(unknown("metric: --metric", metric, metrics))
    return Score(metrics[metric or next(iter(metrics))])


def _settings(config: Config) -> dict[str, Any]:
    """Return a config's settings by dotted names, without those that change no result."""
    named = flat(without_unset(config.as_dict()))
    return {key: value for key, value in named.items() if key not in ("checkpoint_every", "seed")}
