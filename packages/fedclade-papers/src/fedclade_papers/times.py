"""Estimates of how long experiments take on a GPU with all settings of the papers.

The time of an experiment is estimated as the number of training examples that its runs process,
divided by the number of examples that a GPU trains on in a second. The number of examples follows
from the settings. It is an upper bound for FL+HC, in which a round after the clustering step trains
at most all clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedclade_papers.cache import Settings

Examples = Mapping[str, int]
"""Number of training examples that the runs of an experiment process, by model."""

GPU = "NVIDIA H200"
"""GPU on which the rates were measured."""

RATES = {"cnn": 227_222, "cifar_cnn": 238_000, "lstm": 42_187}
"""Examples per second of training on the GPU, by model.

``cnn`` and ``lstm``: ``benchmarks/engine.py --device cuda --clients 100``, with batches of 10
examples. ``cifar_cnn``: from the time of ``cfl-fig8-cifar`` at the scale of the paper.
"""

TRAINING_EXAMPLES = {"mnist": 60_000, "cifar10": 50_000, "ag_news": 120_000}
"""Number of training examples of each data set."""

TWO_KINDS = 2
"""Figure 7 of CFL has runs with congruent and with incongruent clients."""

TWO_METHODS = 2
"""Figures 8 and 9 of CFL have runs of FL and of CFL."""


def count_examples(name: str, settings: Settings) -> Examples | None:
    """Count the training examples that the runs of an experiment process.

    Parameters
    ----------
    name, settings
        Name and settings of the experiment.

    Returns
    -------
    dict
        The number of examples by model; an example counts once in each epoch of each run. None: the
        experiment is not known here, or needs data whose size is not known.
    """
    counters: dict[str, Callable[[Settings], Examples]] = {
        "cfl-fig5-data": _count_gaps,
        "cfl-fig6-rounds": _count_gaps,
        "cfl-fig7-norms": _count_norms,
        "cfl-fig7-steps": _count_norms,
        "cfl-fig8-cifar": _count_splits,
        "cfl-fig9-agnews": _count_splits,
        "flhc-iid": _count_iid,
        "flhc-table1": _count_fractions,
        "flhc-table2": _count_fractions,
        "flhc-cohort": _count_fractions,
        "flhc-table4": _count_linkages,
        "flhc-table5": _count_linkages,
    }
    if name not in counters:
        return None
    return counters[name](settings)


def estimate_seconds(examples: Examples) -> float:
    """Estimate how many seconds training on a number of examples takes on :data:`GPU`."""
    return sum(number / RATES[model] for model, number in examples.items())


def _count_gaps(settings: Settings) -> Examples:
    """Count the examples of figures 5 and 6 of CFL: one run for each number of data points."""
    found = Counter[str]()
    rounds = max(_as_list(settings["rounds"]))
    for task in settings["tasks"].values():
        for points in _as_list(task["points"]):
            in_a_round = settings["epochs"] * settings["clients"] * points
            found[task["model"]] += len(settings["seeds"]) * rounds * in_a_round
    return found


def _count_norms(settings: Settings) -> Examples:
    """Count the examples of figure 7 of CFL: two clients of each kind, for each step size."""
    examples = TRAINING_EXAMPLES[settings["data"]]
    if settings["samples_per_client"] is not None:
        examples = 2 * settings["samples_per_client"]
    runs = TWO_KINDS * len(settings.get("step_sizes", [0.0])) * len(settings["seeds"])
    in_a_run = settings["rounds"] * settings["epochs"] * examples
    return {settings["model"]: runs * in_a_run}


def _count_splits(settings: Settings) -> Examples:
    """Count the examples of figures 8 and 9 of CFL, without ``rcfl`` and without criteria."""
    examples = TRAINING_EXAMPLES[settings["data"]]
    if settings["samples_per_client"] is not None:
        examples = settings["clients"] * settings["samples_per_client"]
    runs = TWO_METHODS * len(settings["seeds"])
    return {settings["model"]: runs * settings["rounds"] * settings["epochs"] * examples}


def _count_fractions(settings: Settings) -> Examples:
    """Count the examples of Tables I and II of FL+HC: FL by fraction, and FL+HC by cell."""
    found = 0
    for fraction in settings["client_fractions"]:
        found += _count_averaging(settings, fraction)
        for n in settings["rounds_before"]:
            if [fraction, n] not in settings["left_out"]:
                cells = 1 + len(settings["other_cohorts"])
                found += cells * _count_clustered(settings, fraction, n)
    return {settings["model"]: len(settings["seeds"]) * found}


def _count_linkages(settings: Settings) -> Examples:
    """Count the examples of Tables IV and V of FL+HC: a run for each cut of each linkage."""
    fraction = settings["client_fraction"]
    n = settings["rounds_before"]
    # The automatic threshold is one more cut.
    cuts = len(settings["hows"]) * (len(settings["threshold_shares"]) + len(settings["cuts"]) + 1)
    found = _count_averaging(settings, fraction)
    found += _count_updates(settings, fraction, n)
    found += cuts * _count_clustered(settings, fraction, n)
    return {settings["model"]: len(settings["seeds"]) * found}


def _count_iid(settings: Settings) -> Examples:
    """Count the examples of FL+HC on IID clients: few runs, and updates for each clustering."""
    fraction = settings["client_fraction"]
    found = _count_averaging(settings, fraction)
    found += _count_clustered(settings, fraction, min(settings["rounds_before"]))
    # The updates after most rounds are made again, with pixels that are scaled in another way.
    for n in [*settings["rounds_before"], max(settings["rounds_before"])]:
        found += _count_updates(settings, fraction, n)
    return {settings["model"]: len(settings["seeds"]) * found}


def _count_updates(settings: Settings, fraction: float, rounds_before: int) -> int:
    """Count the examples until all clients' updates are known: FL, and the clustering step."""
    return round((rounds_before * fraction + 1) * _count_all(settings))


def _count_all(settings: Settings) -> int:
    """Return the number of examples in a round of FL+HC in which all clients train."""
    return settings["clients"] * settings["samples_per_client"] * settings["epochs"]


def _count_averaging(settings: Settings, fraction: float) -> int:
    """Count the examples of a run of FL with a client fraction."""
    return round(settings["rounds"] * fraction * _count_all(settings))


def _count_clustered(settings: Settings, fraction: float, rounds_before: int) -> int:
    """Count the examples of a run of FL+HC if all clients train in each round after clustering."""
    later = settings["rounds"] - rounds_before
    return round((rounds_before * fraction + 1 + later) * _count_all(settings))


def _as_list(value: Any) -> Sequence[int]:
    """Return a list as it is, and a number as a list with one entry."""
    if isinstance(value, list):
        return value  # pyright: ignore[reportUnknownVariableType]
    return [value]
