"""Scenarios: TOML files that compare several algorithms on one task, or on several tasks.

The tasks are the cells of a grid, one for each combination of the values of some settings, or data
sets with a name. A scenario may also define scales: alternative settings under a name, such as fewer
clients and rounds for a quick run; and a tuning of each algorithm before the runs to compare.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from fedclade.config.check import check_config
from fedclade.config.data import with_files_found
from fedclade.config.labels import check_labels
from fedclade.config.settings import Config
from fedclade.config.toml_files import apply_overrides, as_override, read_toml
from fedclade.core import ConfigError, DataError, checked, name_problem, shown, unknown

MAIN_TRIALS = 2
"""Number of trials of an algorithm's main setting, after the trials of step sizes."""


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
class Tuning:
    """Trials that choose each algorithm's step size and main setting on validation data.

    All algorithms have the same number of trials. First, each step size is tried. Then, at the best
    step size, two other values of the algorithm's main setting are tried. An algorithm without a
    main setting is tried with two more step sizes instead, next to the best one.
    """

    seed: int
    """Seed of the trials; it should be none of the seeds of the runs to compare."""
    step_sizes: tuple[float, ...]
    settings: Mapping[str, tuple[str, tuple[Any, ...]]] = field(
        default_factory=dict[str, tuple[str, tuple[Any, ...]]]
    )
    """The main setting of an algorithm, with the two values to try, by the algorithm's label."""

    @property
    def trials(self) -> int:
        """Number of trials of each algorithm."""
        return len(self.step_sizes) + MAIN_TRIALS


@dataclass(frozen=True)
class Source:
    """Origin of a scenario's data, with checksums of its files."""

    about: str
    licence: str
    address: str
    """Web page from which the data can be downloaded."""
    sha256: Mapping[str, str]
    """SHA-256 checksum of each file, by the path of the file in the data folder."""

    @property
    def digest(self) -> str:
        """SHA-256 checksum of all files together: of their paths and checksums."""
        lines = [f"{path} {checksum}\n" for path, checksum in sorted(self.sha256.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_files(self, data_dir: Path | None) -> None:
        """Check that all files are there and have the expected contents.

        Parameters
        ----------
        data_dir
            Folder of the data; by default the folder that ``FEDCLADE_DATA_DIR`` names, or else the
            working directory.

        Raises
        ------
        DataError
            If a file is missing or has another checksum; the message has the expected checksum, and
            where to download the data.
        """
        folder = Path(data_dir or os.environ.get("FEDCLADE_DATA_DIR") or ".").expanduser()
        origin = f"download the data from {self.address} ({self.licence})"
        for name, expected in self.sha256.items():
            path = folder / name
            try:
                content = path.read_bytes()
            except OSError as error:
                raise DataError(
                    f"cannot read {path}: {error.strerror}; {origin}, put the file there (SHA-256 "
                    f"{expected}), and name its folder with --data-dir"
                ) from error
            found = hashlib.sha256(content).hexdigest()
            if found != expected:
                raise DataError(
                    f"{path} should have the SHA-256 checksum {expected}, got {found}; {origin} "
                    "again"
                )


@dataclass(frozen=True)
class Scenario:
    """Comparison of several algorithms on one task, each run with several seeds."""

    name: str
    configs: Mapping[str, Config]
    """Configs by the algorithm's name in ``[algorithms]``; they differ in the algorithm only."""
    seeds: int
    printed: Printed | None = None
    """Published scores of the group to which the scenario belongs; None if there are none."""
    first_seed: int = 0
    """The runs have the seeds ``first_seed``, ``first_seed + 1``, ..."""
    tuning: Tuning | None = None
    source: Source | None = None
    """Origin of the data; None if the scenario does not state it."""

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
    = [1, 5]``, defines a grid: a scenario for each combination of the values. Instead of a grid,
    tables ``[sets.NAME]`` may have the settings of several data sets: a scenario for each of them.
    A table ``[sets.NAME.source]`` states the origin of the data set, see :class:`Source`.

    The runs have the seeds from ``first_seed`` on, which is 0 if left out. A table ``[tuning]``
    states that each algorithm is tuned first, see :class:`Tuning`: with the ``seed``, the
    ``step_sizes``, and a table ``[tuning.settings]`` with entries such as ``ditto = { lam = [0.1,
    0.3] }``.

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
    first_seed = raw.get("first_seed", 0)
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
    if not _is_whole(seeds) or seeds < 1:
        raise ConfigError(
            f"{path}: seeds should be a whole number of at least 1, got {shown(seeds)}"
        )
    if not _is_whole(first_seed) or first_seed < 0:
        raise ConfigError(
            f"{path}: first_seed should be a whole number of at least 0, got {shown(first_seed)}"
        )
    shared = {key: value for key, value in raw.items() if key not in _SCENARIO_KEYS}
    tuning = _read_tuning(path, _get_table(raw, "tuning", path), algorithms)
    _check_tuning_seed(path, tuning, first_seed, seeds)
    if sets := _get_table(raw, "sets", path):
        if "cells" in raw:
            raise ConfigError(f"{path}: [sets] cannot be combined with [cells]; remove one of them")
        return [
            _read_set(
                path,
                name,
                _merge_tables({**shared, "algorithms": algorithms}, _get_table(sets, name, path)),
                seeds=seeds,
                first_seed=first_seed,
                tuning=tuning,
            )
            for name in sets
        ]
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
            Scenario(
                name,
                _check_configs(path, of_cell, algorithms),
                seeds,
                printed.get(name),
                first_seed,
                tuning,
            )
        )
    return found


_SCENARIO_KEYS = (
    "algorithms",
    "cells",
    "first_seed",
    "printed",
    "scales",
    "seeds",
    "sets",
    "tuning",
)
"""Top-level keys of a scenario that are no keys of a config."""


def _read_set(
    path: Path,
    name: str,
    raw: Mapping[str, Any],
    *,
    seeds: int,
    first_seed: int,
    tuning: Tuning | None,
) -> Scenario:
    """Return the scenario of a table ``[sets.NAME]``, merged with the settings that all sets share."""
    if problem := name_problem(name):
        raise ConfigError(f"{path}: a key of [sets] is invalid, {shown(name)}: {problem}")
    source = _read_source(path, name, _get_table(raw, "source", path))
    shared = {key: value for key, value in raw.items() if key not in ("algorithms", "source")}
    if source is None:
        shared = with_files_found(shared, path.parent)
    configs = _check_configs(path, shared, _get_table(raw, "algorithms", path))
    return Scenario(name, configs, seeds, first_seed=first_seed, tuning=tuning, source=source)


def _read_source(path: Path, name: str, table: Mapping[str, Any]) -> Source | None:
    """Check the table ``[sets.NAME.source]``, and return its contents; None without the table."""
    if not table:
        return None
    where = f"[sets.{name}.source]"
    known = [each.name for each in fields(Source)]
    if extra := [key for key in table if key not in known]:
        raise ConfigError(f"{path}: {unknown(f'key of {where}:', extra[0], known)}")
    for key in ("about", "licence", "address"):
        if not isinstance(table.get(key), str) or not table[key]:
            raise ConfigError(
                f"{path}: {key} of {where} should be a text, got {shown(table.get(key))}"
            )
    checksums = _get_table(table, "sha256", path)
    for file, checksum in checksums.items():
        if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{64}", checksum):
            raise ConfigError(
                f"{path}: {file} of {where} should have a SHA-256 checksum of 64 hexadecimal "
                f"digits, got {shown(checksum)}"
            )
    if not checksums:
        raise ConfigError(f"{path}: sha256 of {where} should name at least 1 file, got none")
    return Source(table["about"], table["licence"], table["address"], dict(checksums))


def _read_tuning(
    path: Path, table: Mapping[str, Any], algorithms: Mapping[str, Any]
) -> Tuning | None:
    """Check the table ``[tuning]`` of a scenario, and return its contents; None without the table."""
    if not table:
        return None
    if extra := [key for key in table if key not in ("seed", "step_sizes", "settings")]:
        known = ("seed", "step_sizes", "settings")
        raise ConfigError(f"{path}: {unknown('key of [tuning]:', extra[0], known)}")
    seed = table.get("seed")
    if not _is_whole(seed) or seed < 0:
        raise ConfigError(
            f"{path}: seed of [tuning] should be a whole number of at least 0, got {shown(seed)}"
        )
    step_sizes = table.get("step_sizes")
    if not isinstance(step_sizes, list) or not step_sizes or not all(map(_is_positive, step_sizes)):
        raise ConfigError(
            f"{path}: step_sizes of [tuning] should be a list of positive numbers, got "
            f"{shown(step_sizes)}"
        )
    settings: dict[str, tuple[str, tuple[Any, ...]]] = {}
    for label, entry in _get_table(table, "settings", path).items():
        if label not in algorithms:
            raise ConfigError(
                f"{path}: {unknown('algorithm of [tuning.settings]:', label, algorithms)}"
            )
        values = [*entry.values()] if isinstance(entry, Mapping) else []
        if len(values) != 1 or not isinstance(values[0], list) or len(values[0]) != MAIN_TRIALS:
            raise ConfigError(
                f"{path}: {label} of [tuning.settings] should be a table with 1 setting and a list "
                f"of {MAIN_TRIALS} values, got {shown(entry)}"
            )
        settings[label] = (next(iter(entry)), tuple(values[0]))
    return Tuning(seed, tuple(float(value) for value in step_sizes), settings)


def _check_tuning_seed(path: Path, tuning: Tuning | None, first_seed: int, seeds: int) -> None:
    """Check that the seed of the tuning is none of the seeds of the runs to compare."""
    if tuning is not None and first_seed <= tuning.seed < first_seed + seeds:
        raise ConfigError(
            f"{path}: seed of [tuning] should be none of the seeds {first_seed} to "
            f"{first_seed + seeds - 1} of the runs to compare, got {tuning.seed}"
        )


def _is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value of a TOML file is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    """Return whether a value of a TOML file is a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0


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
