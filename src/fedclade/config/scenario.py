"""Scenarios: TOML files that set several algorithms the same task, or several tasks, at a scale of choice."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.config.check import check_config
from fedclade.config.data import with_files_found
from fedclade.config.settings import Config
from fedclade.config.toml_files import apply_overrides, as_override, read_toml
from fedclade.core import ConfigError, shown, unknown


@dataclass(frozen=True)
class Scenario:
    """One task for several algorithms, to be run with the seeds 0, 1, ... each."""

    name: str
    configs: Mapping[str, Config]
    """By the algorithm's name in the table ``[algorithms]``; they differ in nothing else."""
    seeds: int

    @property
    def folder(self) -> str:
        """The name as that of a folder: letters, digits, dots, dashes and underscores."""
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-")


def is_scenario(path: Path) -> bool:
    """Return whether a TOML file is a scenario rather than the config of one run; raises what reading it raises."""
    return "algorithms" in read_toml(path)


def known_scales(path: Path) -> tuple[str, ...]:
    """Return the scales that a scenario can be run at besides as it stands."""
    return tuple(_table(read_toml(path), "scales", path))


def read_scenarios(path: Path, overrides: Sequence[str] = (), scale: str | None = None) -> list[Scenario]:
    """Read and check the scenarios of a file: one, or one for each cell of a grid.

    A scenario is a config with a table ``[algorithms]`` in place of ``[algorithm]``: a table of hyper-parameters for
    each algorithm, with its ``name`` where that differs from the key. It may have a number of ``seeds``, and tables
    ``[scales.NAME]`` with whatever differs at that scale. ``overrides``, as after ``--set``, win over both. A table
    ``[cells]`` of lists, such as ``"data.level" = [1, 5]``, makes a scenario of each combination of their values.

    Raises
    ------
    ConfigError
        If the file is missing or no TOML, the scale is unknown, or with all other problems at once, a line for each.
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
    if "algorithm" in raw:
        raise ConfigError(f"{path}: a scenario has no [algorithm]; set hyper-parameters in [algorithms]")
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ConfigError(f"{path}: seeds should be a whole number of at least 1, got {shown(seeds)}")
    shared = {key: value for key, value in raw.items() if key not in ("algorithms", "scales", "seeds", "cells")}
    shared = with_files_found(shared, path.parent)
    cells = _table(raw, "cells", path)
    for key, values in cells.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: {key} of [cells] should be a list of values, got {shown(values)}")
    found: list[Scenario] = []
    for values in itertools.product(*cells.values()):
        name, of_cell = " ".join([path.stem, *map(str, values)]), copy.deepcopy(shared)
        apply_overrides(of_cell, [as_override(key, value) for key, value in zip(cells, values, strict=True)])
        found.append(Scenario(name, _configs(path, of_cell, algorithms), seeds))
    return found


def read_scenario(path: Path, overrides: Sequence[str] = (), scale: str | None = None) -> Scenario:
    """Read and check a file of one scenario, see :func:`read_scenarios`; a ConfigError if it has several."""
    scenario, *others = read_scenarios(path, overrides, scale)
    if others:
        raise ConfigError(f"{path} has {1 + len(others)} scenarios, the cells of a grid")
    return scenario


def _configs(path: Path, shared: Mapping[str, Any], algorithms: Mapping[str, Any]) -> dict[str, Config]:
    """Return the config of each algorithm."""
    configs: dict[str, Config] = {}
    problems: dict[str, None] = {}  # a dict, since all algorithms share the problems of the other sections
    for label in algorithms:
        try:
            configs[label] = check_config({**shared, "algorithm": {"name": label, **_table(algorithms, label, path)}})
        except ConfigError as error:
            named = re.sub(r"\balgorithm(?=[.\]])", f"algorithms.{label}", str(error))
            problems |= dict.fromkeys(f"{path}: {line}" for line in named.splitlines())
    if problems:
        raise ConfigError("\n".join(problems))
    return configs


def _table(raw: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    table = raw.get(key, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {key} should be a table, got {shown(table)}")
    return table


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``, table by table."""
    merged = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
