"""Scenarios: TOML files that compare several algorithms on one task, or on each task of a grid.

A grid has a cell for each combination of the values of some settings. A scenario may also define
scales: alternative settings under a name, such as fewer clients and rounds for a quick run.
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
    """Published scores for a group of scenarios, to be shown in tables next to new results.

    Each score is a mean over all scenarios of the group.
    """

    source: str
    name: str
    """Name of the group."""
    scenarios: tuple[str, ...]
    figures: Mapping[str, float]
    """Scores by the algorithm's name in ``[algorithms]``, as in tables: shares are in percent."""


@dataclass(frozen=True)
class Scenario:
    """Comparison of several algorithms on one task, each run with the seeds 0, 1, ..."""

    name: str
    configs: Mapping[str, Config]
    """Configs by the algorithm's name in ``[algorithms]``; they differ in the algorithm only."""
    seeds: int
    printed: Printed | None = None
    """Published scores of the group to which the scenario belongs; None if there are none."""

    @property
    def folder(self) -> str:
        """Name of the folder for the scenario's runs, derived from the scenario's name.

        It consists of letters, digits, dots, dashes and underscores.
        """
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-")


def is_scenario(path: Path) -> bool:
    """Return whether a TOML file is a scenario with several algorithms, rather than a config.

    Raises the errors of :func:`read_toml`.
    """
    return "algorithms" in read_toml(path)


def known_scales(path: Path) -> tuple[str, ...]:
    """Return the names of the scales that a scenario file defines.

    A scale is a named set of settings that replace settings of the scenario, such as fewer rounds.
    """
    return tuple(_get_table(read_toml(path), "scales", path))


@checked()
def read_scenarios(
    path: Path, overrides: Sequence[str] = (), scale: str | None = None
) -> list[Scenario]:
    """Read and check the scenarios in a file: a single scenario, or one for each cell of a grid.

    A scenario is a config with a table ``[algorithms]`` in place of ``[algorithm]``. The table has
    an entry with hyper-parameters for each algorithm, and with the algorithm's ``name`` if the name
    differs from the key. A scenario may state a number of ``seeds``. Tables ``[scales.NAME]`` have
    the settings that differ at the scale NAME. A table ``[cells]`` of lists, such as ``"data.level"
    = [1, 5]``, defines a grid: a scenario for each combination of the values.

    A table ``[printed]`` has the scores published in a paper, to be shown next to new results. Its
    key ``source`` names the paper. If each score is a mean over several scenarios of the grid, the
    key ``means_over`` lists the keys of ``[cells]`` over which the means are taken. For each
    combination of values of the other keys of ``[cells]``, the table has an entry with the score of
    each algorithm, such as ``5 = { fedavg = 80.9 }``. The published scores apply only to the
    settings in the file: they are left out if a scale or overrides are given.

    Parameters
    ----------
    path
        The TOML file.
    overrides
        Changes that take precedence over the file and the scale, in the form of the command-line
        option ``--set``.
    scale
        Name of a scale; None: the settings in the file without a scale.

    Raises
    ------
    ConfigError
        If the file is missing or not TOML, if the scale is unknown, or if settings are invalid; the
        message has a line for each problem.
    """
    raw = read_toml(path)
    scales = _get_table(raw, "scales", path)
    if scale is not None:
        if scale not in scales:
            raise ConfigError(f"{path}: {unknown('scale', scale, scales)}")
        raw = _merge_tables(raw, _get_table(scales, scale, path))
    apply_overrides(raw, overrides)
    algorithms = _get_table(raw, "algorithms", path)
    seeds = raw.get("seeds", 1)
    if not algorithms:
        raise ConfigError(f"{path}: [algorithms] should name at least 1 algorithm, got none")
    try:
        check_labels(algorithms)
    except ConfigError as error:
        raise ConfigError(f"{path}: a key of [algorithms] is invalid: {error}") from None
    if "algorithm" in raw:
        raise ConfigError(
            f"{path}: a scenario should have no section [algorithm]; set hyper-parameters in "
            "[algorithms]"
        )
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ConfigError(
            f"{path}: seeds should be a whole number of at least 1, got {shown(seeds)}"
        )
    besides = ("algorithms", "scales", "seeds", "cells", "printed")
    shared = {key: value for key, value in raw.items() if key not in besides}
    shared = with_files_found(shared, path.parent)
    cells = _get_table(raw, "cells", path)
    _check_cells(cells, path)
    found: list[Scenario] = []
    as_it_stands = scale is None and not overrides
    printed = (
        _read_printed(path, _get_table(raw, "printed", path), cells, algorithms)
        if as_it_stands
        else {}
    )
    for values in itertools.product(*cells.values()):
        name = _scenario_name(path, values)
        of_cell = copy.deepcopy(shared)
        apply_overrides(
            of_cell, [as_override(key, value) for key, value in zip(cells, values, strict=True)]
        )
        found.append(
            Scenario(name, _check_configs(path, of_cell, algorithms), seeds, printed.get(name))
        )
    return found


def _check_cells(cells: Mapping[str, Any], path: Path) -> None:
    """Check that each key of the table ``[cells]`` has a list of different values."""
    for key, values in cells.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{path}: {key} of [cells] should be a list of values, got {shown(values)}"
            )
        repeated = [value for place, value in enumerate(values) if value in values[:place]]
        if repeated:
            raise ConfigError(
                f"{path}: {key} of [cells] should list different values, got {shown(repeated[0])} "
                "more than once"
            )


def read_scenario(path: Path, overrides: Sequence[str] = (), scale: str | None = None) -> Scenario:
    """Read and check a file with a single scenario.

    The parameters are as for :func:`read_scenarios`.

    Raises
    ------
    ConfigError
        If the file has several scenarios, or in a case in which :func:`read_scenarios` raises it.
    """
    scenario, *others = read_scenarios(path, overrides, scale)
    if others:
        raise ConfigError(
            f"{path} should have a single scenario, got {1 + len(others)} scenarios, the cells of "
            "a grid; remove [cells], or read the file with read_scenarios"
        )
    return scenario


def _check_configs(
    path: Path, shared: Mapping[str, Any], algorithms: Mapping[str, Any]
) -> dict[str, Config]:
    """Return the checked config of each algorithm of a scenario, by the algorithm's label.

    ``shared`` has the settings that all algorithms share, and ``algorithms`` is the table
    ``[algorithms]``.
    """
    configs: dict[str, Config] = {}
    # A problem in a section that all algorithms share occurs for each algorithm. The dict is an
    # ordered set, in which it is reported once.
    problems: dict[str, None] = {}
    for label in algorithms:
        try:
            configs[label] = check_config(
                {**shared, "algorithm": {"name": label, **_get_table(algorithms, label, path)}}
            )
        except ConfigError as error:
            named = re.sub(r"\balgorithm(?=[.\]])", f"algorithms.{label}", str(error))
            problems |= dict.fromkeys(f"{path}: {line}" for line in named.splitlines())
    if problems:
        raise ConfigError("\n".join(problems))
    return configs


def _scenario_name(path: Path, values: Sequence[Any]) -> str:
    """Return the name of the scenario for a cell of a grid, given the values of the cell."""
    return " ".join([path.stem, *map(str, values)])


def _read_printed(
    path: Path,
    table: Mapping[str, Any],
    cells: Mapping[str, Sequence[Any]],
    algorithms: Mapping[str, Any],
) -> dict[str, Printed]:
    """Check the table ``[printed]``, and return the published scores by the scenario's name."""
    if not table:
        return {}
    source = table.get("source", "")
    over = table.get("means_over", [])
    if not isinstance(source, str) or not source:
        raise ConfigError(
            f"{path}: source of [printed] should state where the scores were published, got "
            f"{shown(source)}"
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
        groups.setdefault(group, []).append(_scenario_name(path, values))
    found: dict[str, Printed] = {}
    for group in (key for key in table if key not in ("source", "means_over")):
        if group not in groups:
            raise ConfigError(f"{path}: {unknown('group of [printed]:', group, groups)}")
        figures = _get_table(table, group, path)
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


def _get_table(raw: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    """Return the table under a key of a scenario file, or an empty table if the key is unset."""
    table = raw.get(key, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {key} should be a table, got {shown(table)}")
    return table


def _merge_tables(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table ``base`` updated with ``changes``; nested tables are merged recursively."""
    merged = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        merged[key] = (
            _merge_tables(old, value)
            if isinstance(old, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged
