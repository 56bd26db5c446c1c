"""Several methods over one federation, each with several seeds: ``fedclade compare`` for Python."""

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
"""An algorithm, its name, or a config, which has a model and settings of its own."""

Clients: TypeAlias = Federation | Callable[[int], Federation]
"""The clients' data, or a function that makes it from the seed."""


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
    """Run methods over one federation, each with the same seeds, and put them side by side.

    Parameters
    ----------
    methods
        Algorithms, or their names, by what to call them, such as ``{"fedavg": "fedavg", "cfl": CFL(eps2=0.8)}``; or
        names alone; or configs, as ``fedclade.config.read_config`` reads them, each with its own model and settings.
    model, settings, engine
        As for :func:`fedclade.simulate`; left out for configs.
    federation
        The clients' data, or a function that makes it from the seed. Configs without one load their own.
    seeds
        How many, from 0 on, or which.
    name
        Of what they are compared on; it goes into the title.
    device
        As for :func:`fedclade.simulate`.
    folder
        Where to keep the runs, in ``METHOD/seed-N``. The same call goes on where an earlier one was stopped, and reads
        what that had finished.
    progress
        As for :func:`fedclade.simulate`, with a bar for each method.
    **options
        Single fields of :class:`RunSettings <fedclade.RunSettings>`, such as ``rounds=40``; left out for configs.

    Returns
    -------
    Comparison
        Which a notebook shows; ``.plot()``, ``.frame()``, ``.save(folder)``, and the runs by name in ``.runs``.

    Raises
    ------
    ConfigError
        If there is no method or no seed, a seed is given twice, a method is called what no folder in ``folder`` can be,
        a model or a federation is missing, or is given beside configs; and what :func:`fedclade.simulate` raises.
    """
    given = _named([methods] if isinstance(methods, str) else methods)
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    require(
        ("methods", given, bool(given), "at least 1"),
        ("seeds", seeds, bool(numbers) and all(seed >= 0 for seed in numbers), "at least 1, none below 0"),
        ("seeds", seeds, len(set(numbers)) == len(numbers), "different numbers, or a run would count more than once"),
        ("seed", options.get("seed"), "seed" not in options, "left out: seeds says which"),
    )
    if folder is not None:
        check_labels(given)
    _check(given, model, federation, given_settings=settings is not None or bool(options))
    settings = settings_from(settings, options)

    def one(method: Method, seed: int, **common: Any) -> Run:
        data = federation(seed) if callable(federation) else federation
        if isinstance(method, Config):
            config = replace(method, top=replace(method.top, seed=seed))
            return config.run(config.federation() if data is None else data, **common)
        assert model is not None  # as has been checked
        assert data is not None
        return simulate(method, model, data, replace(settings, seed=seed), engine=engine, **common)

    runs: dict[str, list[Run]] = {label: [] for label in given}
    with ExitStack() as stack:
        bars = progress_bars() if (at_prompt() if progress is None else progress) else None
        if bars is not None:
            stack.enter_context(bars.shown())
        for label, method in given.items():
            rounds = method.top.rounds if isinstance(method, Config) else settings.rounds
            show = None if bars is None else bars.start(label, rounds * len(numbers))
            for i, seed in enumerate(numbers):
                on_round = None if show is None else _going_on(show, i * rounds)
                place = None if folder is None else Path(folder) / label / f"seed-{seed}"
                runs[label].append(one(method, seed, device=device, on_round=on_round, folder=place, progress=False))
    return Comparison(runs, name)


def _named(methods: Mapping[str, Method] | Iterable[str]) -> dict[str, Method]:
    """Return methods by what to call them; a ConfigError if a list has other things than names, or one twice."""
    named: dict[str, Method] = {}
    if isinstance(methods, Mapping):
        named.update(methods)
    else:
        names = list(methods)
        for name in names:
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (it is given by users)
                raise ConfigError(
                    f"methods should be names, or a table of algorithms by what to call them, got {shown(name)}"
                )
            if names.count(name) > 1:
                raise ConfigError(f"each method can be compared once, got {shown(name)} more than once")
        named.update((name, name) for name in names)
    for label, method in named.items():
        if not isinstance(label, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"what to call a method should be a string, got {shown(label)}")
        if not isinstance(method, Algorithm | str | Config):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"methods[{shown(label)}] should be an algorithm, its name or a config, got {shown(method)}"
            )
    return named


def _going_on(show: OnRound, before: int) -> OnRound:
    """Return what shows a round of a run after so many rounds of others, on one bar."""
    return lambda row, tree: show({**row, "round": before + row["round"]}, tree)


def _check(methods: Mapping[str, Method], model: object, federation: object, *, given_settings: bool) -> None:
    """Check that configs stand alone, and that algorithms have what they need."""
    configs = [label for label, method in methods.items() if isinstance(method, Config)]
    if configs and len(configs) < len(methods):
        raise ConfigError(f"methods should be configs or algorithms, got both: {configs[0]!r} is a config")
    if configs and (model is not None or given_settings):
        raise ConfigError(f"the config {configs[0]!r} has a model and settings of its own; leave these out")
    if not configs and (model is None or federation is None):
        missing = "model" if model is None else "federation"
        raise ConfigError(f"compare needs a {missing} beside algorithms, as fedclade.simulate does; got None")
