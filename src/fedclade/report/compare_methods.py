"""Comparison of methods on one federation with several seeds: ``fedclade compare`` in Python."""

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
"""An algorithm, the name of an algorithm, or a config that specifies its own model and settings."""

Clients: TypeAlias = Federation | Callable[[int], Federation]
"""The clients' data, or a function that takes a seed and returns the clients' data."""


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
    """Run several methods on one federation with the same seeds, and compare the results.

    Parameters
    ----------
    methods
        Methods to compare: a mapping from labels to algorithms or names of algorithms, such as
        ``{"fedavg": "fedavg", "cfl": CFL()}``; or a list of names; or a mapping from labels to
        configs, as ``fedclade.config.read_config`` returns them, each with its own model and
        settings.
    model, settings, engine
        As in :func:`fedclade.simulate`. Each config specifies these itself: with configs, ``model``
        and ``settings`` are not allowed, and ``engine`` is ignored.
    federation
        The clients' data, or a function that takes a seed and returns the data. If it is
        omitted, each config loads the data that it specifies.
    seeds
        List of seeds, or a number n for the seeds 0, ..., n − 1.
    name
        Name of the data, for the title of the comparison.
    device
        As in :func:`fedclade.simulate`.
    folder
        Folder in which each run is stored, as ``LABEL/seed-N``. A repeated call with the same
        arguments continues an interrupted comparison and reads finished runs from the folder.
    progress
        As in :func:`fedclade.simulate`, with one progress bar per method.
    **options
        Single fields of :class:`RunSettings <fedclade.RunSettings>`, such as ``rounds=40``; not
        allowed with configs.

    Returns
    -------
    Comparison
        Comparison with ``.plot()``, ``.frame()`` and ``.save(folder)``, and with the runs by
        label in ``.runs``. Notebooks display it as a table.

    Raises
    ------
    ConfigError
        If there is no method or no seed, a seed is repeated, a label cannot be the name of a
        folder, a model or a federation is missing, or a model or settings are given with
        configs; also in all cases in which :func:`fedclade.simulate` raises it.
    """
    by_label = _label_methods([methods] if isinstance(methods, str) else methods)
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    are_valid = bool(numbers) and all(seed >= 0 for seed in numbers)
    are_distinct = len(set(numbers)) == len(numbers)
    distinct = "distinct, as the run of a repeated seed would count more than once"
    require(
        ("methods", by_label, bool(by_label), "a list or mapping with at least 1 method"),
        ("seeds", seeds, are_valid, "a number of at least 1, or a list of numbers of at least 0"),
        ("seeds", seeds, are_distinct, distinct),
        ("seed", options.get("seed"), "seed" not in options, "omitted (use seeds instead)"),
    )
    if folder is not None:
        check_labels(by_label)
    has_settings = settings is not None or bool(options) or engine != "auto"
    _check_methods(by_label, model, federation, has_settings=has_settings)
    settings = settings_from(settings, options)

    def run_method(method: Method, seed: int, **common: Any) -> Run:
        """Run one method with one seed; ``common`` are further arguments of :func:`simulate`."""
        if callable(federation):
            data = federation(seed)
        else:
            data = federation
        if isinstance(method, Config):
            config = replace(method, top=replace(method.top, seed=seed))
            if data is None:
                data = config.federation()
            return config.run(data, **common)
        assert model is not None  # checked above
        assert data is not None
        seeded = replace(settings, seed=seed)
        return simulate(method, model, data, seeded, engine=engine, **common)

    runs: dict[str, list[Run]] = {label: [] for label in by_label}
    if progress is None:
        progress = at_prompt()
    with ExitStack() as stack:
        bars = None
        if progress:
            bars = progress_bars()
            stack.enter_context(bars.shown())
        for label, method in by_label.items():
            rounds = method.top.rounds if isinstance(method, Config) else settings.rounds
            on_round = None
            if bars is not None:
                on_round = bars.start(label, rounds * len(numbers))
            for i, seed in enumerate(numbers):
                run = run_method(
                    method,
                    seed,
                    device=device,
                    on_round=_shift_rounds(on_round, i * rounds),
                    folder=_name_run_folder(folder, label, seed),
                    progress=False,
                )
                runs[label].append(run)
    return Comparison(runs, name)


def _label_methods(methods: Mapping[str, Method] | Iterable[str]) -> dict[str, Method]:
    """Return the methods by label; in a list of names, each name is also the label.

    Raises
    ------
    ConfigError
        If a list contains anything but names, or a name twice, or if a label or a method in a
        mapping has the wrong type.
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
            raise ConfigError(f"each label in methods should be a string, got {shown(label)}")
        if not isinstance(method, Algorithm | str | Config):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"methods[{shown(label)}] should be an Algorithm, a name or a Config, got "
                f"{shown(method)}"
            )
    return by_label


def _check_name(name: object, names: Sequence[object]) -> None:
    """Check that an entry of a list of methods is a name, and that the name occurs only once.

    Parameters
    ----------
    name
        The entry to check.
    names
        All entries of the list.

    Raises
    ------
    ConfigError
        If the entry is not a string, or occurs more than once.
    """
    if not isinstance(name, str):
        raise ConfigError(
            "methods should be a list of names of algorithms or a mapping from labels to "
            f"algorithms, got a list with {shown(name)}"
        )
    if names.count(name) > 1:
        raise ConfigError(
            f"methods should contain each name once, got {shown(name)} more than once; to compare "
            "variants of an algorithm, pass a mapping from labels to algorithms"
        )


def _name_run_folder(folder: str | Path | None, label: str, seed: int) -> Path | None:
    """Return the folder ``folder/LABEL/seed-N`` of a run; None if runs are not stored."""
    if folder is None:
        return None
    return Path(folder) / label / f"seed-{seed}"


def _shift_rounds(on_round: OnRound | None, offset: int) -> OnRound | None:
    """Wrap a progress callback so that several runs of one method advance the same progress bar.

    Parameters
    ----------
    on_round
        Callback of the bar, called after each round; None without a progress bar.
    offset
        Number of rounds of the method's earlier runs, which is added to the round of this run.

    Returns
    -------
    OnRound or None
        The callback for this run; None without a progress bar.
    """
    if on_round is None:
        return None
    return lambda row, tree: on_round({**row, "round": offset + row["round"]}, tree)


def _check_methods(
    methods: Mapping[str, Method], model: object, federation: object, *, has_settings: bool
) -> None:
    """Check that the arguments of :func:`compare` fit the kind of its methods.

    Algorithms need a model and a federation. Each config specifies its own model and settings, so
    the arguments for them are not allowed with configs. Configs cannot be mixed with algorithms.

    Raises
    ------
    ConfigError
        If an argument is missing, or not allowed with configs, or both kinds of methods are given.
    """
    configs = [label for label, method in methods.items() if isinstance(method, Config)]
    if configs and len(configs) < len(methods):
        raise ConfigError(
            f"methods should be all configs or all algorithms, got both: {configs[0]!r} is a config"
        )
    if configs and (model is not None or has_settings):
        raise ConfigError(
            f"model, settings and engine should be omitted with configs, as the config "
            f"{configs[0]!r} specifies its own"
        )
    if not configs and (model is None or federation is None):
        missing = "model" if model is None else "federation"
        raise ConfigError(
            f"fedclade.compare needs a {missing} to run algorithms, got None; pass this argument, "
            "or compare configs"
        )
