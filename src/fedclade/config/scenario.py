"""Scenarios: TOML files that compare several algorithms on one task, or on each task of a grid.

A scenario may define several scales, such as a small one for a quick look.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.config.batch import check_labels
from fedclade.config.check import check_config
from fedclade.config.data import with_files_found
from fedclade.config.settings import Config
from fedclade.config.toml_files import apply_overrides, as_override, read_toml
from fedclade.core import ConfigError, checked, shown, unknown


@dataclass(frozen=True)
class Printed:
    """Published scores: means over all scenarios of a group."""

    source: str
    name: str
    """Name of the group."""
    scenarios: tuple[str, ...]
    figures: Mapping[str, float]
    """Scores by the algorithm's name in ``[algorithms]``, in the unit of tables.

    Shares are in percent.
    """


@dataclass(frozen=True)
class Scenario:
    """One task for several algorithms, each to be run with the seeds 0, 1, ..."""

    name: str
    configs: Mapping[str, Config]
    """Configs by the algorithm's name in ``[algorithms]``; they differ in nothing else."""
    seeds: int
    printed: Printed | None = None
    """Published scores of the group to which the scenario belongs; None if there are none."""

    @property
    def folder(self) -> str:
        """Name of the scenario's folder: letters, digits, dots, dashes and underscores."""
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-")


def is_scenario(path: Path) -> bool:
    """Return whether a TOML file is a scenario, rather than the config of one run.

    Raises the errors of :func:`read_toml`.
    """
    return "algorithms" in read_toml(path)


def known_scales(path: Path) -> tuple[str, ...]:
    """Return the scales that a scenario defines, in addition to its own settings."""
    return tuple(_table(read_toml(path), "scales", path))


@checked()
def read_scenarios(
    path: Path, overrides: Sequence[str] = (), scale: str | None = None
) -> list[Scenario]:
    """Read and check the scenarios of a file: one, or one for each cell of a grid.

    A scenario is a config with a table ``[algorithms]`` in place of ``[algorithm]``. It has a table
    of hyper-parameters for each algorithm, with the algorithm's ``name`` if that differs from the
    key. A scenario may have a number of ``seeds``, and tables ``[scales.NAME]`` with the settings
    that differ at that scale. A table ``[cells]`` of lists, such as ``"data.level" = [1, 5]``,
    defines a scenario for each combination of their values.

    ``[printed]`` has the figures of a paper, to be shown next to new results: their ``source``, the
    keys of ``[cells]`` over which they are means (``means_over``), and a table for each combination
    of values of the other keys, such as ``5 = { fedavg = 80.9 }``. The figures apply to the file's
    own settings only; they are left out with a scale or with overrides.

    Parameters
    ----------
    path
        The TOML file.
    overrides
        Changes as after ``--set``; they take precedence over the file and the scale.
    scale
        Name of a scale; None: the file's own settings.

    Raises
    ------
    ConfigError
        If the file is missing or not TOML, or the scale is unknown; or with all other problems at
        once, one line for each.
    """
    raw = read_toml(path)
    scales = _table(raw, "scales", path)
    if scale is not None:
        if scale not in scales:
            raise ConfigError(f"{path}: {unknown('scale', scale, scales)}")
        raw = _merged(raw, _table(scales, scale, path))
    apply_overrides(raw, overrides)
    algorithms = _table(raw, "algorithms", path)
    seeds = raw.get("seeds", 1)
    if not algorithms:
        raise ConfigError(f"{path}: [algorithms] should name at least 1 algorithm, got none")
    try:
        check_labels(algorithms)
    except ConfigError as error:
        raise ConfigError(f"{path}: a key of [algorithms]: {error}") from None
    if "algorithm" in raw:
        raise ConfigError(
            f"{path}: a scenario has no [algorithm]; set hyper-parameters in [algorithms]"
        )
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ConfigError(
            f"{path}: seeds should be a whole number of at least 1, got {shown(seeds)}"
        )
    besides = ("algorithms", "scales", "seeds", "cells", "printed")
    shared = {key: value for key, value in raw.items() if key not in besides}
    shared = with_files_found(shared, path.parent)
    cells = _table(raw, "cells", path)
    for key, values in cells.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{path}: {key} of [cells] should be a list of values, got {shown(values)}"
            )
        if twice := next((value for i, value in enumerate(values) if value in values[:i]), None):
            raise ConfigError(
                f"{path}: {key} of [cells] should be different values, got {shown(twice)} twice"
            )
    found: list[Scenario] = []
    as_it_stands = scale is None and not overrides
    printed = (
        _printed(path, _table(raw, "printed", path), cells, algorithms) if as_it_stands else {}
    )
    for values in itertools.product(*cells.values()):
        name = _name(path, values)
        of_cell = copy.deepcopy(shared)
        apply_overrides(
            of_cell, [as_override(key, value) for key, value in zip(cells, values, strict=True)]
        )
        found.append(Scenario(name, _configs(path, of_cell, algorithms), seeds, printed.get(name)))
    return found


def read_scenario(path: Path, overrides: Sequence[str] = (), scale: str | None = None) -> Scenario:
    """Read and check a file with a single scenario; see :func:`read_scenarios`.

    Raises
    ------
    ConfigError
        As :func:`read_scenarios`; or if the file has several scenarios.
    """
    scenario, *others = read_scenarios(path, overrides, scale)
    if others:
        raise ConfigError(f"{path} has {1 + len(others)} scenarios, the cells of a grid")
    return scenario


def _configs(
    path: Path, shared: Mapping[str, Any], algorithms: Mapping[str, Any]
) -> dict[str, Config]:
    """Return the config of each algorithm."""
    configs: dict[str, Config] = {}
    # a dict, to report only once the problems of sections that all algorithms share
    problems: dict[str, None] = {}
    for label in algorithms:
        try:
            configs[label] = check_config(
                {**shared, "algorithm": {"name": label, **_table(algorithms, label, path)}}
            )
        except ConfigError as error:
            named = re.sub(r"\balgorithm(?=[.\]])", f"algorithms.{label}", str(error))
            problems |= dict.fromkeys(f"{path}: {line}" for line in named.splitlines())
    if problems:
        raise ConfigError("\n".join(problems))
    return configs


def _name(path: Path, values: Sequence[Any]) -> str:
    """Return the name of a cell's scenario."""
    return " ".join([path.stem, *map(str, values)])


def _printed(
    path: Path,
    table: Mapping[str, Any],
    cells: Mapping[str, Sequence[Any]],
    algorithms: Mapping[str, Any],
) -> dict[str, Printed]:
    """Return the published scores for each scenario, by its name."""
    if not table:
        return {}
    source = table.get("source", "")
    over = table.get("means_over", [])
    if not isinstance(source, str) or not source:
        raise ConfigError(
            f"{path}: source of [printed] should say where the figures stand, got {shown(source)}"
        )
    wrong = [key for key in over if key not in [*cells]] if isinstance(over, list) else [over]
    if wrong:
        raise ConfigError(
            f"{path}: means_over of [printed] should be a list of keys of [cells], got "
            f"{shown(wrong[0])}"
        )
    groups: dict[str, list[str]] = {}
    for values in itertools.product(*cells.values()):
        group = " ".join(
            str(value) for key, value in zip(cells, values, strict=True) if key not in over
        )
        groups.setdefault(group, []).append(_name(path, values))
    found: dict[str, Printed] = {}
    for group in (key for key in table if key not in ("source", "means_over")):
        if group not in groups:
            raise ConfigError(f"{path}: {unknown('group of [printed]:', group, groups)}")
        figures = _table(table, group, path)
        for label, figure in figures.items():
            if label not in algorithms:
                raise ConfigError(
                    f"{path}: {unknown(f'algorithm of [printed.{group}]:', label, algorithms)}"
                )
            if (
                not isinstance(figure, int | float)
                or isinstance(figure, bool)
                or not math.isfinite(figure)
            ):
                raise ConfigError(
                    f"{path}: {label} of [printed.{group}] should be a number, got {shown(figure)}"
                )
        names = tuple(groups[group])
        found |= dict.fromkeys(
            names, Printed(source, f"{path.stem} {group}".strip(), names, figures)
        )
    return found


def _table(raw: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    table = raw.get(key, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {key} should be a table, got {shown(table)}")
    return table


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``changes``; nested tables are merged."""
    merged = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        merged[key] = (
            _merged(old, value)
            if isinstance(old, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged
