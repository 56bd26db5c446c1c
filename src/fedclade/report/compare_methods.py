"""Comparison of methods on one federation with several seeds: ``fedclade compare`` for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from torch import nn

from fedclade.algorithms import Algorithm
from fedclade.config import Config, check_labels
from fedclade.core import ConfigError, at_prompt, checked, require, shown
from fedclade.data import Federation
from fedclade.report.comparison import Comparison
from fedclade.report.progress import progress_bars
from fedclade.runs import Maker, OnRound, Run, RunOptions, RunSettings, settings_from, simulate

Method: TypeAlias = Algorithm | str | Config
"""An algorithm, its name, or a config with its own model and settings."""

Clients: TypeAlias = Federation | Callable[[int], Federation]
"""The clients' data, or a function that returns it for a seed."""


@checked()
def compare(
    methods: Mapping[str, Method] | Iterable[str],
    model: nn.Module | str | Maker | None = None,
    federation: Clients | None = None,
    settings: RunSettings | None = None,
    *,
    seeds: int | Sequence[int] = 1,
    name: str = "",
    device: str = "auto",
    engine: str = "auto",
    folder: str | Path | None = None,
    progress: bool | None = None,
    **options: Unpack[RunOptions],
) -> Comparison:
    """Run methods on one federation, each with the same seeds, and compare them.

    Parameters
    ----------
    methods
        Algorithms or their names, by labels, such as ``{"fedavg": "fedavg", "cfl": CFL()}``; or a
        list of names; or configs, as ``fedclade.config.read_config`` returns them, each with
        its own model and settings.
    model, settings, engine
        As in :func:`fedclade.simulate`; not allowed with configs.
    federation
        The clients' data, or a function that returns it for a seed. Configs load their own data if
        it is not given.
    seeds
        Number of seeds, counted from 0, or a list of seeds.
    name
        Name of the data, for the title.
    device
        As in :func:`fedclade.simulate`.
    folder
        Folder in which the runs are stored, as ``METHOD/seed-N``. The same call continues an
        interrupted comparison, and reads finished runs.
    progress
        As in :func:`fedclade.simulate`, with a bar for each method.
    **options
        Single fields of :class:`RunSettings <fedclade.RunSettings>`, such as ``rounds=40``; not
        allowed with configs.

    Returns
    -------
    Comparison
        Comparison with ``.plot()``, ``.frame()`` and ``.save(folder)``, and with the runs by label
        in ``.runs``. Notebooks show it as a table.

    Raises
    ------
    ConfigError
        If there is no method or no seed, a seed is repeated, a label cannot be the name of a
        folder, a model or a federation is missing, or a model is given with configs; also whatever
        :func:`fedclade.simulate` raises.
    """
    by_label = _label_methods([methods] if isinstance(methods, str) else methods)
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    are_valid = bool(numbers) and all(seed >= 0 for seed in numbers)
    are_distinct = len(set(numbers)) == len(numbers)
    distinct = "different numbers, or a run would count more than once"
    require(
        ("methods", by_label, bool(by_label), "at least 1"),
        ("seeds", seeds, are_valid, "at least 1, none below 0"),
        ("seeds", seeds, are_distinct, distinct),
        ("seed", options.get("seed"), "seed" not in options, "left out: use seeds"),
    )
    if folder is not None:
        check_labels(by_label)
    has_settings = settings is not None or bool(options)
    _check_methods(by_label, model, federation, has_settings=has_settings)
    settings = settings_from(settings, options)

    def run_method(method: Method, seed: int, **common: Any) -> Run:
        data = federation(seed) if callable(federation) else federation
        if isinstance(method, Config):
            config = replace(method, top=replace(method.top, seed=seed))
            return config.run(config.federation() if data is None else data, **common)
        assert model is not None  # checked above
        assert data is not None
        seeded = replace(settings, seed=seed)
        return simulate(method, model, data, seeded, engine=engine, **common)

    runs: dict[str, list[Run]] = {label: [] for label in by_label}
    is_shown = at_prompt() if progress is None else progress
    with ExitStack() as stack:
        bars = progress_bars() if is_shown else None
        if bars is not None:
            stack.enter_context(bars.shown())
        for label, method in by_label.items():
            rounds = method.top.rounds if isinstance(method, Config) else settings.rounds
            on_round = None if bars is None else bars.start(label, rounds * len(numbers))
            for i, seed in enumerate(numbers):
                run = run_method(
                    method,
                    seed,
                    device=device,
                    on_round=None if on_round is None else _shift_rounds(on_round, i * rounds),
                    folder=None if folder is None else Path(folder) / label / f"seed-{seed}",
                    progress=False,
                )
                runs[label].append(run)
    return Comparison(runs, name)


def _label_methods(methods: Mapping[str, Method] | Iterable[str]) -> dict[str, Method]:
    """Return methods by label; names of algorithms are their own labels.

    Raises
    ------
    ConfigError
        If a list contains anything but names, or one twice, or a label or a method is invalid.
    """
    by_label: dict[str, Method] = {}
    if isinstance(methods, Mapping):
        by_label.update(methods)
    else:
        names = list(methods)
        for name in names:
            _check_name(name, names)
            by_label[name] = name
    for label, method in by_label.items():
        # Users may pass anything, whatever the annotations say.
        if not isinstance(label, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"the label of a method should be a string, got {shown(label)}")
        if not isinstance(method, Algorithm | str | Config):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"methods[{shown(label)}] should be an algorithm, its name or a config, got "
                f"{shown(method)}"
            )
    return by_label


def _check_name(name: object, names: Sequence[object]) -> None:
    if not isinstance(name, str):
        raise ConfigError(
            f"methods should be names, or a table of algorithms by their labels, got {shown(name)}"
        )
    if names.count(name) > 1:
        raise ConfigError(f"each method can be compared once, got {shown(name)} more than once")


def _shift_rounds(on_round: OnRound, offset: int) -> OnRound:
    """Return a callback for a run whose rounds follow ``offset`` rounds of others on one bar."""
    return lambda row, tree: on_round({**row, "round": offset + row["round"]}, tree)


def _check_methods(
    methods: Mapping[str, Method], model: object, federation: object, *, has_settings: bool
) -> None:
    """Check that configs have no further settings, and that algorithms have a model and data."""
    configs = [label for label, method in methods.items() if isinstance(method, Config)]
    if configs and len(configs) < len(methods):
        raise ConfigError(
            f"methods should be configs or algorithms, got both: {configs[0]!r} is a config"
        )
    if configs and (model is not None or has_settings):
        raise ConfigError(
            f"the config {configs[0]!r} has a model and settings of its own; leave these out"
        )
    if not configs and (model is None or federation is None):
        missing = "model" if model is None else "federation"
        raise ConfigError(
            f"compare needs a {missing} for algorithms, as fedclade.simulate does; got None"
        )
