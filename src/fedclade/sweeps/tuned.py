"""Comparison of methods in several scenarios, in each of which every method is tuned first.

All methods have the same number of trials on validation data, see
:class:`fedclade.config.Tuning`. With the chosen settings, each method then has one run with each of
the seeds to compare. A trial has another seed than these runs, so that it chooses settings on other
data splits. One more run measures training steps and traffic without the cost of evaluations: some
methods train for each evaluation, such as fine-tuning.

The result of each run is a file of its own. Runs whose files are there are not repeated, so that an
interrupted comparison continues where it stopped. This holds for failed runs, too: most of them
diverge at a step size.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from fedclade.algorithms import method_named
from fedclade.config import Config, Scenario, Tuning, check_config, check_labels
from fedclade.core import (
    ConfigError,
    FedcladeError,
    RunError,
    RunInterrupted,
    appear,
    shown,
    unknown,
    write_text,
)
from fedclade.data import Federation
from fedclade.runs import Run, column_of

NEXT_STEP_SIZES = (0.45, 2.2)
"""Factors of the best step size, which are tried for methods without a main setting.

The step sizes lie in the middle between the best step size and its neighbours, if these differ by a
factor of 5.
"""

RESULTS = "runs.parquet"
"""File in the comparison's folder with one row for each run."""


Purpose = Literal["trial", "test", "cost"]
"""A trial of settings, a run to compare, or a run that is evaluated only after its last round."""


@dataclass(frozen=True)
class TunedRun:
    """Settings and results of a single run.

    Numbers are None if the run failed, and scores also if they are not finite.
    """

    set: str
    """Name of the scenario."""
    method: str
    """The method's label in ``[algorithms]``."""
    purpose: Purpose
    number: int
    """Number of the trial, or the seed of another run."""
    seed: int
    step_size: float
    setting: str
    """The method's main setting with its value, such as ``lam = 0.1``; empty if it has none."""
    config_sha256: str
    """Checksum of the config, without the paths of files and without the seed."""
    data_sha256: str
    """Checksum of the data files; empty if the scenario does not state the origin of its data."""
    failure: str = ""
    metric: str = ""
    higher_is_better: bool = True
    clients: int = 0
    score: float | None = None
    """Mean score of the clients on test data after the last round."""
    worst_tenth: float | None = None
    """Mean score of the worst tenth of the clients on test data."""
    clients_without_score: int = 0
    validation: float | None = None
    """Mean score of the clients on validation data after the last round."""
    rounds: int | None = None
    best_round: int | None = None
    """First round with the best mean score on validation data."""
    clusters: int | None = None
    steps: int | None = None
    """Training steps of all clients in all rounds."""
    bytes_up: int | None = None
    bytes_down: int | None = None
    seconds: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def gain(self) -> float:
        """Score on validation data by which trials are compared; minus infinity if it is missing."""
        if self.validation is None:
            return -math.inf
        return self.validation if self.higher_is_better else -self.validation


@dataclass(frozen=True)
class Choice:
    """Settings of a run: the step size, and a value of the method's main setting, if it has one."""

    step_size: float
    setting: str = ""
    value: Any = None

    def apply(self, config: Config) -> Config:
        """Return a config with these settings."""
        changed = replace(config, local=replace(config.local, lr=self.step_size))
        if not self.setting:
            return changed
        return replace(changed, algorithm={**config.algorithm, self.setting: self.value})

    def __str__(self) -> str:
        return f"{self.setting} = {json.dumps(self.value)}" if self.setting else ""


def first_choices(config: Config, tuning: Tuning, label: str) -> list[Choice]:
    """Return the settings of a method's first trials: all step sizes."""
    setting, _ = tuning.settings.get(label, ("", ()))
    value = config.algorithm.get(setting)
    return [Choice(step_size, setting, value) for step_size in tuning.step_sizes]


def last_choices(best: Choice, tuning: Tuning, label: str) -> list[Choice]:
    """Return the settings of a method's last trials, given the best settings of the first trials.

    They are the other values of the method's main setting or, without one, further step sizes.
    """
    if label in tuning.settings:
        setting, values = tuning.settings[label]
        return [Choice(best.step_size, setting, value) for value in values]
    # Rounded, so that the step sizes can be read in tables.
    return [Choice(float(f"{best.step_size * factor:.2g}")) for factor in NEXT_STEP_SIZES]


def select_methods(scenarios: Sequence[Scenario], names: Sequence[str]) -> list[Scenario]:
    """Return scenarios with the named methods only.

    Parameters
    ----------
    scenarios
        The scenarios.
    names
        Labels of methods in the scenarios, or names of other methods, which are added with the
        hyper-parameters of their records: methods that other packages add to fedclade, or
        ``module:object`` as in the key ``name`` of a config. The label of the latter is the name of
        the object.

    Raises
    ------
    ConfigError
        If a method is unknown.
    """
    return [_select_methods(scenario, names) for scenario in scenarios]


def _select_methods(scenario: Scenario, names: Sequence[str]) -> Scenario:
    configs: dict[str, Config] = {}
    for name in names:
        label = name.rpartition(":")[2]
        if name in scenario.configs:
            configs[name] = scenario.configs[name]
            continue
        try:
            method = method_named(name)
        except ConfigError as error:
            if ":" in name:
                raise
            known = unknown("method", name, scenario.configs)
            raise ConfigError(f"--methods: {known}") from error
        any_config = next(iter(scenario.configs.values()))
        section = {"name": name, **method.options}
        configs[label] = check_config({**any_config.as_dict(), "algorithm": section})
    check_labels(configs)
    return replace(scenario, configs=configs)


@dataclass
class TunedComparison:
    """Runs of a comparison of methods in scenarios in which each method is tuned first.

    Parameters
    ----------
    scenarios
        The scenarios, each with a tuning.
    folder
        Folder of the results.
    data_dir
        Folder of the data.
    seeds
        Number of seeds to compare; None: as many as the scenario states.
    device, memory
        As in :meth:`fedclade.config.Config.run`.
    on_run
        Called after each run, also if its result was there already, with the result and the number
        of runs that are left.
    stop
        Function that returns whether to stop before the next run.
    over
        Function that returns whether it is too late to begin another run.

    Raises
    ------
    ConfigError
        If a scenario has no tuning, or trials need settings that are invalid.
    """

    scenarios: Sequence[Scenario]
    folder: Path
    data_dir: Path | None = None
    seeds: int | None = None
    device: str = "auto"
    memory: int | str | None = None
    on_run: Callable[[TunedRun, int], object] = lambda run, left: None
    stop: Callable[[], bool] = lambda: False
    over: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        for scenario in self.scenarios:
            tuning = scenario.tuning
            if tuning is None:
                raise ConfigError(
                    f"scenario {shown(scenario.name)} should have a table [tuning], got none"
                )
            for label, config in scenario.configs.items():
                for choice in last_choices(Choice(0.1), tuning, label):
                    _check_algorithm(choice.apply(config), scenario.name, label)
        self._federations: dict[int, Federation] = {}

    @property
    def total(self) -> int:
        """Number of runs of the comparison."""
        return sum(self._count_runs(scenario) for scenario in self.scenarios)

    def run(self) -> list[TunedRun]:
        """Make all runs that are missing, and return the results of all runs.

        All results in the folder, including those of earlier calls with other methods or scenarios,
        are also written to a table, :data:`RESULTS`, even if the comparison is stopped.

        Raises
        ------
        DataError
            If data files are missing, or have other contents than expected.
        RunError
            If the folder cannot be written, or has results of runs with other settings.
        RunInterrupted
            If the comparison is stopped.
        """
        for scenario in self.scenarios:
            if scenario.source is not None:
                scenario.source.check_files(self.data_dir)
        results: list[TunedRun] = []
        try:
            for scenario in self.scenarios:
                self._federations.clear()
                for label in scenario.configs:
                    self._run_method(scenario, label, results)
        finally:
            if results:
                write_table(self.folder / RESULTS, read_folder(self.folder))
        return results

    def _count_runs(self, scenario: Scenario) -> int:
        trials = 0 if scenario.tuning is None else scenario.tuning.trials
        return len(scenario.configs) * (trials + (self.seeds or scenario.seeds) + 1)

    def _run_method(self, scenario: Scenario, label: str, results: list[TunedRun]) -> None:
        """Tune a method in a scenario, and make the runs to compare; append them to ``results``."""
        tuning = scenario.tuning
        if tuning is None:
            return
        runs = _MethodRuns(self, scenario, label, results)
        trials: list[tuple[TunedRun, Choice]] = []
        for choice in first_choices(scenario.configs[label], tuning, label):
            trials.append((runs.make("trial", len(trials), tuning.seed, choice), choice))
        for choice in last_choices(_best_choice(trials), tuning, label):
            trials.append((runs.make("trial", len(trials), tuning.seed, choice), choice))
        best = _best_choice(trials)
        for seed in range(
            scenario.first_seed, scenario.first_seed + (self.seeds or scenario.seeds)
        ):
            runs.make("test", seed, seed, best)
        runs.make("cost", scenario.first_seed, scenario.first_seed, best)

    def load_federation(self, config: Config) -> Federation:
        """Return the data of a run; runs with the same scenario and seed share it."""
        seed = config.top.seed
        if seed not in self._federations:
            self._federations[seed] = config.federation(self.data_dir)
        return self._federations[seed]


@dataclass(frozen=True)
class _MethodRuns:
    """The runs of one method in one scenario."""

    comparison: TunedComparison
    scenario: Scenario
    label: str
    results: list[TunedRun]

    def make(self, purpose: Purpose, number: int, seed: int, choice: Choice) -> TunedRun:
        """Return the result of a run: read it if its file is there, or else make the run."""
        config = choice.apply(self.scenario.configs[self.label])
        top = replace(config.top, seed=seed)
        if purpose == "cost":
            top = replace(top, evaluate_every=top.rounds)
        config = replace(config, top=top)
        source = self.scenario.source
        planned = TunedRun(
            set=self.scenario.name,
            method=self.label,
            purpose=purpose,
            number=number,
            seed=seed,
            step_size=choice.step_size,
            setting=str(choice),
            config_sha256=config_digest(config),
            data_sha256="" if source is None else source.digest,
        )
        path = self._path(planned)
        result = read_result(path)
        if result is None:
            result = self._execute(planned, config)
            write_result(path, result)
        elif _settings_of(result) != _settings_of(planned):
            raise RunError(
                f"{path} has the result of a run with other settings or data; choose another folder "
                "with --out"
            )
        self.results.append(result)
        comparison = self.comparison
        comparison.on_run(result, comparison.total - len(self.results))
        return result

    def _path(self, run: TunedRun) -> Path:
        """Return the file of a run's result."""
        name = f"{run.purpose}-{run.number}.json"
        return self.comparison.folder / "runs" / self.scenario.folder / self.label / name

    def _execute(self, planned: TunedRun, config: Config) -> TunedRun:
        """Make a run, and return its result, also if the run fails."""
        comparison = self.comparison
        name = f"{planned.set}: {planned.method}, {planned.purpose} {planned.number}"
        if comparison.stop() or comparison.over():
            raise RunInterrupted(f"the comparison stopped before {name}", "repeat the command")
        # Without its data no method can run, so an error is raised and not stored.
        federation = comparison.load_federation(config)
        began = monotonic()
        try:
            run = config.run(
                federation,
                device=comparison.device,
                memory=comparison.memory,
                stop=comparison.stop,
                progress=False,
                references=False,
            )
        except RunInterrupted:
            raise
        except FedcladeError as error:  # other methods can still be compared
            return replace(planned, failure=str(error).splitlines()[0])
        return with_results(planned, run, seconds=round(monotonic() - began, 2))


def with_results(planned: TunedRun, run: Run, *, seconds: float) -> TunedRun:
    """Return a planned run with the results of its execution."""
    summary = run.summary
    metric = summary["metrics"][0]
    name = metric["name"]
    sign = 1 if metric["higher_is_better"] else -1
    column = column_of(name)
    validation = [(row["round"], finite_or_none(row.get(column))) for row in run.metric_rows]
    known = [(score, number) for number, score in validation if score is not None]
    best = max(known, key=lambda pair: (sign * pair[0], -pair[1]), default=None)
    scores = summary[name]
    return replace(
        planned,
        metric=name,
        higher_is_better=metric["higher_is_better"],
        clients=summary["clients"],
        score=finite_or_none(scores["mean"]),
        worst_tenth=finite_or_none(scores.get("worst10_mean")),
        clients_without_score=scores.get("without_score", 0),
        validation=validation[-1][1] if validation else None,
        rounds=summary["rounds"],
        best_round=None if best is None else best[1],
        clusters=summary["clusters"]["found"],
        steps=summary.get("steps", {}).get("total"),
        bytes_up=summary["bytes_up"],
        bytes_down=summary["bytes_down"],
        seconds=seconds,
        versions=summary["versions"],
    )


def finite_or_none(value: float | None) -> float | None:
    """Return a number; None if it is missing, NaN or infinite."""
    return float(value) if value is not None and math.isfinite(value) else None


def config_digest(config: Config) -> str:
    """Return the checksum of a config without its seed and without the paths of data files."""
    content = config.as_dict()
    content.pop("seed", None)
    content["data"] = {key: value for key, value in content["data"].items() if key != "files"}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _settings_of(run: TunedRun) -> tuple[Any, ...]:
    return run.seed, run.config_sha256, run.data_sha256


def _best_choice(trials: Sequence[tuple[TunedRun, Choice]]) -> Choice:
    """Return the settings of the best trial on validation data; the first among equal ones."""
    return max(trials, key=lambda trial: trial[0].gain)[1]


def _check_algorithm(config: Config, scenario: str, label: str) -> None:
    """Check that the algorithm of a config can be built."""
    try:
        config.built_algorithm(None)
    except ConfigError as error:
        raise ConfigError(
            f"scenario {scenario}: a setting of {label} in [tuning.settings] is invalid: {error}"
        ) from error


def read_result(path: Path) -> TunedRun | None:
    """Read the result of a run; None if there is no file.

    Raises
    ------
    RunError
        If the file is damaged.
    """
    try:
        return TunedRun(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"cannot read the result {path}: {error}; delete the file to repeat its run"
        ) from error


def read_folder(folder: Path) -> list[TunedRun]:
    """Read all results in the folder of a comparison, sorted by scenario and method.

    Raises
    ------
    RunError
        If a file is damaged.
    """
    found = [read_result(path) for path in sorted((folder / "runs").glob("*/*/*.json"))]
    return [run for run in found if run is not None]


def write_result(path: Path, run: TunedRun) -> None:
    """Write the result of a run to a file.

    Raises
    ------
    RunError
        If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(run), indent=1) + "\n")
    except OSError as error:
        raise RunError(
            f"cannot write the result {path}: {error}; make the folder writable, and repeat the "
            "command"
        ) from error


def as_rows(runs: Sequence[TunedRun]) -> list[dict[str, Any]]:
    """Return the rows of the table of results, one for each run.

    The versions are columns of their own, such as ``version_torch``.
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        row = asdict(run)
        versions = row.pop("versions")
        rows.append(row | {f"{_VERSION}{name}": version for name, version in versions.items()})
    return rows


def write_table(path: Path, runs: Sequence[TunedRun]) -> None:
    """Write results to a Parquet file, with a row for each run.

    Raises
    ------
    RunError
        If the file cannot be written.
    """
    import pyarrow as pa  # imported here because the import is slow
    import pyarrow.parquet as pq

    rows = as_rows(runs)
    # The versions of the last run come last, and are missing in the rows of failed runs.
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        appear(path, lambda beside: pq.write_table(table, beside, compression="zstd"))
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error}; make the folder writable, and repeat the command"
        ) from error


def read_table(path: Path) -> list[TunedRun]:
    """Read results from a Parquet file that :func:`write_table` has written.

    Raises
    ------
    RunError
        If the file is missing or damaged.
    """
    import pyarrow as pa  # imported here because the import is slow
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
        return [_as_run(row) for row in rows]
    except (OSError, pa.ArrowException, TypeError) as error:
        raise RunError(
            f"cannot read the results {path}: {error}; name the file that 'fedclade compare natural' "
            "has written"
        ) from error


def _as_run(row: Mapping[str, Any]) -> TunedRun:
    """Return the run of a row of the table."""
    values = {name: value for name, value in row.items() if not name.startswith(_VERSION)}
    versions = {
        name.removeprefix(_VERSION): value
        for name, value in row.items()
        if name.startswith(_VERSION) and value is not None
    }
    return TunedRun(**values, versions=versions)


_VERSION = "version_"
"""Beginning of the names of columns with versions."""
