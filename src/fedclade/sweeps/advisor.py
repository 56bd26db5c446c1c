"""Function ``advise``, which recommends a method for the clients' data.

It compares one model for all clients, a model for each group, and the method ``auto``, by short
runs on parts of the clients' training data.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.config import (
    TableFiles,
    apply_overrides,
    check_config,
    find_config,
    read_toml,
    with_files_found,
    write_starter,
)
from fedclade.core import ConfigError, RunError, Served, checked, require
from fedclade.data import Federation, TextFormat, inspect_files
from fedclade.report import count, duration
from fedclade.runs import OnRound, Run, events_of
from fedclade.sweeps.advice import CHOICE, KINDS, METHODS, ONE_MODEL, Advice, Measured
from fedclade.sweeps.inner_data import InnerData, check_inner, split_training
from fedclade.sweeps.study import silent
from fedclade.tasks import Metric

VALIDATION = 0.2
"""Share of a client's training data that ``auto`` gets as validation data, unless it is set."""

EXPECTED_STEPS: Mapping[str, float] = {"fedavg": 1.0, "rcfl": 1.7, "auto": 2.5, "local": 1.0}
"""Expected training steps of each method, as a multiple of FedAvg's.

The number of ``auto`` is its budget. The number of ``rcfl`` depends on the number of rounds, and is
an upper bound for 20 rounds.
"""

SECONDS_PER_STEP = 1.5
"""Duration of an average step of all methods, as a multiple of the duration of a step of FedAvg.

``rcfl`` and ``auto`` also compare and evaluate models.
"""

_UNUSED = ("newcomers", "presence", "stop", "target", "report")
"""Sections of a config that do not apply to the short runs."""

_UNUSED_TOP = ("evaluate_validation", "keep_best", "evaluate_clients", "checkpoint_every")
"""Top-level settings of a config that do not apply to the short runs."""

Source = Federation | str | Path | Mapping[str, Any] | Sequence[str]
"""Clients' data: a federation, a config, or files with tables."""


@checked()
def advise(
    source: Source,
    *,
    rounds: int = 20,
    seeds: int = 3,
    client: str | None = None,
    target: str | None = None,
    text_format: TextFormat | None = None,
    overrides: Sequence[str] = (),
    data_dir: str | Path | None = None,
    device: str = "auto",
    report: Callable[[str], object] = lambda line: None,
    on_start: Callable[[str, int], OnRound] = silent,
    stop: Callable[[], bool] = lambda: False,
) -> Advice:
    """Recommend what each client should be served with: one model, its group's, or an own model.

    Four methods are compared: ``fedavg`` (one model for all clients), ``rcfl`` (a model for each
    group of clients, which the method finds), ``auto`` (for each client the best of these and of
    several kinds of own models) and ``local`` (each client alone).

    Only training data is used, never test data. In each of several repetitions, a fifth of each
    client's training data is held out to compare the methods. ``auto`` chooses models on another
    part, its validation data, so that the held-out examples have chosen no model. The other methods
    train on that part, too.

    The recommended method is ``fedavg`` if no other method has a gain beyond noise: a lower mean
    loss than one model for all, by more than one standard error over the clients. It is ``rcfl`` if
    the gain of its groups is beyond noise, ``auto`` does not improve on them beyond noise, and most
    clients share their group with others. Otherwise it is ``auto``. The same held-out examples
    decide between these three methods, so that a gain whose interval is close to 0 is slightly
    overestimated.

    Parameters
    ----------
    source
        A federation; a config, as the path of a TOML file, name or mapping; or files with tables as
        for ``fedclade init``: file names, a pattern, or a folder.
    rounds
        Number of rounds of each run, at least 1.
    seeds
        Number of repetitions with other splits of the training data, at least 1. More repetitions
        narrow the interval.
    client, target
        Column with the client of a row, and column to predict, of tables; guessed if None.
    text_format
        Format of tables in text files; detected if None.
    overrides
        Changes of the config, in the form of the command-line option ``--set``, such as
        ``["model.name=cnn"]``. For a federation, they are changes of a config without any keys.
    data_dir, device
        See :func:`fedclade.simulate`.
    report
        Called with lines of text: the budget in training steps before the runs, the estimated time
        after the first run, and both as spent after all runs.
    on_start
        Called when a run starts, with the run's name and number of rounds; returns a function that
        is called after each round.
    stop
        Called after each round; if it returns True, :class:`~fedclade.RunInterrupted` is raised.

    Returns
    -------
    Advice
        The advice, with :attr:`~Advice.sentences` and a config (:meth:`~Advice.to_toml`). For a
        federation, the config has no section ``[data]``.

    Raises
    ------
    ConfigError
        If an argument or the config is invalid, no column can be the client or the target, or the
        data changes during a run.
    DataError
        If files cannot be read, or fewer than two clients have enough examples.
    RunError
        If the training of one model for all clients diverged.
    UpdateError
        If the training of any method diverged on all clients.

    Examples
    --------
    >>> import fedclade
    >>> clients = fedclade.load_federation("digits", clients=6, shift="label_swap", clusters=2)
    >>> fedclade.advise(clients, rounds=8, seeds=1).method
    'rcfl'
    """
    require(
        ("rounds", rounds, rounds >= 1, "at least 1"), ("seeds", seeds, seeds >= 1, "at least 1")
    )
    start = perf_counter()
    data = _Data.read(source, client, target, text_format, overrides, data_dir)
    least = 2 if data.is_fixed else 3
    left_out = check_inner(data.federation, least)
    trials = _Trials(data, rounds, device, report, on_start, stop)
    measured = trials.measure(seeds)
    steps = trials.steps / (trials.steps_of_fedavg / seeds)
    method = measured.choose_method()
    advice = Advice.of(
        measured,
        method,
        data.recommend(method, rounds),
        left_out,
        steps=steps,
        seconds=perf_counter() - start,
    )
    report(
        f"spent: {steps:.1f} times the training steps of one FedAvg run, {duration(advice.seconds)}"
    )
    return advice


@dataclass(frozen=True, eq=False)
class _Data:
    """The clients' data and the config of their runs.

    Parameters
    ----------
    raw
        The config as the user has written it, as nested dictionaries.
    federation
        All clients.
    fraction
        Share of a client's training data that is validation data for ``auto``.
    has_section
        Whether the config has a section ``[data]``.
    is_fixed
        Whether a rule of the user divides each client's data, such as by groups of rows: the
        validation data of the federation is then what methods are compared on.
    """

    raw: dict[str, Any]
    federation: Federation
    fraction: float
    has_section: bool
    is_fixed: bool

    @classmethod
    def read(
        cls,
        source: Source,
        client: str | None,
        target: str | None,
        text_format: TextFormat | None,
        overrides: Sequence[str],
        data_dir: str | Path | None,
    ) -> _Data:
        """Read the data and the config from what a user has named."""
        if isinstance(source, Federation):
            raw: dict[str, Any] = {}
            apply_overrides(raw, overrides)
            return cls(raw, source, VALIDATION, has_section=False, is_fixed=False)
        raw = _read_raw(source, client, target, text_format)
        apply_overrides(raw, overrides)
        section = raw.setdefault("data", {})
        config = check_config(raw)
        fraction = config.data.get("validation_fraction") or VALIDATION
        is_fixed = config.data.get("groups") is not None or config.data.get("test") == "last"
        if is_fixed:
            # The first half of the held-out examples chooses models, the other half compares them.
            wider = {**raw, "data": {**section, "validation_fraction": 2 * VALIDATION}}
            config = check_config(wider)
        federation = config.federation(data_dir)
        return cls(raw, federation, fraction, has_section=True, is_fixed=is_fixed)

    def prepare(self, method: str, rounds: int, seed: int) -> dict[str, Any]:
        """Return the config of a short run with a method."""
        raw = {key: deepcopy(self.raw[key]) for key in self.raw if key not in _UNUSED}
        for key in _UNUSED_TOP:
            raw.pop(key, None)
        # Clients are only evaluated after the last round.
        raw |= {"rounds": rounds, "evaluate_every": rounds, "seed": raw.get("seed", 0) + seed}
        raw["algorithm"] = self._describe(method)
        return raw

    def recommend(self, method: str, rounds: int) -> dict[str, Any]:
        """Return the config of the recommended run: that of the user, with another method."""
        raw = deepcopy(self.raw)
        raw["algorithm"] = self._describe(method)
        raw.setdefault("rounds", rounds)
        if method == CHOICE and self.has_section and not raw["data"].get("validation_fraction"):
            raw["data"]["validation_fraction"] = VALIDATION
        return raw

    def _describe(self, method: str) -> dict[str, Any]:
        """Return the section ``[algorithm]``, with the user's options if they are of the method."""
        section = self.raw.get("algorithm", {})
        return dict(section) if section.get("name") == method else {"name": method}


def _read_raw(
    source: str | Path | Mapping[str, Any] | Sequence[str],
    client: str | None,
    target: str | None,
    text_format: TextFormat | None,
) -> dict[str, Any]:
    """Return a config as nested dictionaries: of a file or mapping, or a new one for tables."""
    if isinstance(source, Mapping):
        _refuse_columns(client, target, text_format)
        return deepcopy(dict(source))
    names = [str(source)] if isinstance(source, str | Path) else [str(name) for name in source]
    if not names:
        raise ConfigError("advise needs at least one file or a config, got none; name a file")
    path = _find_config(names)
    if path is not None:
        _refuse_columns(client, target, text_format)
        raw = read_toml(path)
        if "algorithms" in raw:
            raise ConfigError(
                f"{path} is a scenario: it has several [algorithms]; name a config with one"
            )
        return with_files_found(raw, path.parent)
    files = TableFiles.find(names)
    inspection = inspect_files(files.paths, client, target, text_format)
    # A file in the current folder, relative to which the files are named.
    text = write_starter(inspection, files, Path("advice.toml"), text_format)
    return with_files_found(tomllib.loads(text), Path())


def _find_config(names: Sequence[str]) -> Path | None:
    """Return the path of the config that a user names; None if files with tables are named."""
    if len(names) > 1:
        return None
    name = names[0]
    if Path(name).suffix == ".toml":
        return find_config(name)
    if Path(name).suffix or Path(name).exists():
        return None
    with suppress(ConfigError):
        return find_config(name)
    return None


def _refuse_columns(client: str | None, target: str | None, text_format: TextFormat | None) -> None:
    """Check that no column of tables is named in addition to a config, which names them itself."""
    for key, value in (("client", client), ("target", target)):
        if value is not None:
            raise ConfigError(
                f"a config names its columns itself, got {key} {value!r}; leave it out, or change "
                f"the config by --set data.{key}={value}"
            )
    if text_format not in (None, TextFormat()):
        raise ConfigError(
            "a config states the format of its files itself; leave out encoding, separator, "
            "decimal and dates, or set them in the section [data]"
        )


@dataclass(eq=False)
class _Trials:
    """Short runs of all methods on parts of the training data.

    ``steps`` counts the training steps of all runs, and ``steps_of_fedavg`` those of the runs of
    FedAvg.
    """

    data: _Data
    rounds: int
    device: str
    report: Callable[[str], object]
    on_start: Callable[[str, int], OnRound]
    stop: Callable[[], bool]
    steps: int = field(default=0, init=False)
    steps_of_fedavg: int = field(default=0, init=False)

    def measure(self, seeds: int) -> Measured:
        """Run all methods with all seeds, and return the results."""
        planned = seeds * sum(EXPECTED_STEPS.values())
        self.report(
            f"budget: {len(METHODS)} methods, {self.rounds} rounds and {count(seeds, 'seed')}: about "
            f"{planned:.0f} times the training steps of one FedAvg run"
        )
        # The first round of a process takes several seconds more, for imports.
        self._run(self._split(0), ONE_MODEL, 0, 1, silent)
        self.steps = 0
        runs: dict[str, list[Run]] = {method: [] for method in METHODS}
        for seed in range(seeds):
            inner = self._split(seed)
            for method in METHODS:
                before, start = self.steps, perf_counter()
                runs[method].append(self._run(inner, method, seed, self.rounds, self.on_start))
                if method == ONE_MODEL:
                    self.steps_of_fedavg += self.steps - before
                if method == ONE_MODEL and seed == 0:
                    seconds = planned * SECONDS_PER_STEP * (perf_counter() - start)
                    self.report(f"time: about {duration(seconds)}, judging by the first run")
        return _collect(runs)

    def _split(self, seed: int) -> InnerData:
        return split_training(
            self.data.federation, seed, self.data.fraction, is_fixed=self.data.is_fixed
        )

    def _run(
        self,
        inner: InnerData,
        method: str,
        seed: int,
        rounds: int,
        on_start: Callable[[str, int], OnRound],
    ) -> Run:
        """Run a method on a part of the training data, evaluated on held-out examples."""
        config = check_config(self.data.prepare(method, rounds, seed))
        federation = inner.with_validation if method == CHOICE else inner.without_validation
        run = config.run(
            federation,
            device=self.device,
            on_round=on_start(f"{method} seed {seed}", rounds),
            stop=self.stop,
            progress=False,
            references=False,
        )
        self.steps += run.summary["steps"]["total"]
        return run


def _collect(runs: Mapping[str, Sequence[Run]]) -> Measured:
    """Collect losses, scores, groups and kinds of models from all runs, by client.

    Raises
    ------
    RunError
        If the training of one model for all clients diverged.
    """
    first = runs[ONE_MODEL][0]
    metric = Metric(**first.summary["metrics"][0])
    rows = _last_rows(first)
    ids = list(rows)
    losses = {name: _table(each, ids, "loss") for name, each in runs.items()}
    diverged = any(run.has_diverged for run in runs[ONE_MODEL])
    if diverged or not np.isfinite(losses[ONE_MODEL]).all():
        raise RunError(
            "the training of one model for all clients diverged, so that there is nothing to "
            "compare with; set a smaller step size, such as --set local.lr=0.01"
        )
    return Measured(
        names=tuple(rows[client]["name"] for client in ids),
        losses=losses,
        scores={name: _table(each, ids, metric.name) for name, each in runs.items()},
        metric=metric,
        groups={
            name: np.array([[run.tree.leaf_of.get(client, -1) for client in ids] for run in each])
            for name, each in runs.items()
        },
        kinds=np.array([_read_kinds(run, ids) for run in runs[CHOICE]]),
    )


def _last_rows(run: Run) -> dict[int, Mapping[str, Any]]:
    """Return the results of each client after the last round, by the id of the client."""
    return {row["client"]: row for row in run.client_rows}


def _table(runs: Sequence[Run], ids: Sequence[int], column: str) -> NDArray[np.float64]:
    """Return a column of the clients' results in several runs, ``[runs, clients]``."""
    table = np.full((len(runs), len(ids)), np.nan)
    for number, run in enumerate(runs):
        rows = _last_rows(run)
        for place, client in enumerate(ids):
            value = rows[client].get(column)
            table[number, place] = np.nan if value is None else value
    return table


def _read_kinds(run: Run, ids: Sequence[int]) -> list[int]:
    """Return the number of the kind of model that ``auto`` serves each client with."""
    _, choice = events_of(run.events, Served)[-1]
    kind_of: dict[int, int] = {}
    for kind, clients in choice.clients.items():
        kind_of |= dict.fromkeys(clients, KINDS.index(kind))
    return [kind_of.get(client, 0) for client in ids]
