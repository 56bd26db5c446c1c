"""Files of configs: finding them, reading them, and applying a user's overrides."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedclade.core import ConfigError, checked, shown, unknown

Section = dict[str, Any]

MOST_NESTED = 20
"""Largest depth of nested tables and lists: functions that process a config may be recursive."""


def read_toml(path: Path) -> Section:
    """Read a TOML file.

    Raises
    ------
    ConfigError
        If the file is missing or not TOML, or contains values that no config can have: numbers of
        more than 64 bits, or tables nested more than :data:`MOST_NESTED` deep.
    """
    try:
        # TOML is always UTF-8, whatever the locale
        return _parsed(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def _parsed(text: str, where: str) -> Section:
    """Parse TOML, and check that all parts of the library can handle its values."""
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeError):
        raise
    except RecursionError as error:
        raise ConfigError(
            f"{where}: tables and lists should be at most {MOST_NESTED} deep"
        ) from error
    except ValueError as error:  # Python's limit on digits, or a date that does not exist
        raise ConfigError(f"{where} is not a TOML file: {error}") from error
    _check_values(raw, where, MOST_NESTED)
    return raw


def _check_values(value: object, where: str, deeper: int) -> None:
    if isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(
            f"{where}: whole numbers should have at most 64 bits, as TOML has them, got "
            f"{shown(value)}"
        )
    if isinstance(value, dict | list):
        if deeper == 0:
            raise ConfigError(f"{where}: tables and lists should be at most {MOST_NESTED} deep")
        for entry in value.values() if isinstance(value, dict) else value:
            _check_values(entry, where, deeper - 1)


def apply_overrides(raw: Section, overrides: Sequence[str]) -> None:
    """Change a config, as read from a file, in place.

    Parameters
    ----------
    raw
        The config.
    overrides
        Changes ``key=value`` or ``section.key=value``. A value is parsed as TOML; if it is not
        TOML, it is a string.

    Raises
    ------
    ConfigError
        If an override is malformed, or its path leads through a value that is not a section.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        *sections, key = path.strip().split(".")
        if not equals or not all([*sections, key]):
            raise ConfigError(f"--set takes section.key=value, got {shown(override)}")
        try:
            value = _parsed(f"value = {text}", f"--set {shown(override)}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        target: Any = raw
        for depth, section in enumerate(sections, start=1):
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(
                    f"--set {shown(override)}: {shown('.'.join(sections[:depth]))} is not a section"
                )
        target[key] = value


def as_override(key: str, value: object) -> str:
    """Return the argument of ``--set`` that sets a key to a value.

    The value is a text, a number, a truth value, or a list of these.

    >>> as_override("local.lr", 0.1), as_override("model.name", "cnn"), as_override("model.hidden", [16, 16])
    ('local.lr=0.1', 'model.name="cnn"', 'model.hidden=[16, 16]')
    """
    return f"{key}={json.dumps(value, ensure_ascii=False, default=str)}"  # valid TOML, too


def config_folder() -> Path:
    """Return the folder of fedclade's own configs: in the package, or next to it in a checkout."""
    packaged = Path(__file__).parents[1] / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "configs"


@checked()
def find_config(name: str) -> Path:
    """Return the path of a config.

    Parameters
    ----------
    name
        A file, or the name of one of fedclade's own configs.

    Raises
    ------
    ConfigError
        If there is no such config.
    """
    path = Path(name)
    if os.path.isfile(path):  # noqa: PTH113 -- Path's raises if no file can have the name
        return path
    shipped = {file.stem: file for file in sorted(config_folder().glob("*.toml"))}
    if (
        path.stem in shipped
        and path.suffix in ("", ".toml")
        and path.parent in (Path(), Path("configs"))
    ):
        return shipped[path.stem]
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ConfigError(
            f"there is no config {name}; 'fedclade ls configs' lists those that come with fedclade"
        )
    raise ConfigError(unknown("config", name, shipped))


@checked()
def find_configs(name: str) -> list[Path]:
    """Return the paths of all configs in a folder, or of a single config.

    Parameters
    ----------
    name
        A folder of the user's, or one of fedclade's own, such as ``suite``; or a config as for
        :func:`find_config`. One of fedclade's own folders is also found if the user's folder of
        that name has no config, such as a folder of results.

    Raises
    ------
    ConfigError
        If nothing has that name, or the folder has no config.
    """
    folders = Path(name), config_folder() / name
    there = [each for each in folders if os.path.isdir(each)]  # noqa: PTH112 -- as in find_config
    if not there:
        return [find_config(name)]
    if not (found := next(filter(None, (sorted(each.glob("*.toml")) for each in there)), None)):
        raise ConfigError(f"the folder {there[0]} holds no config: no file ends in .toml")
    return found
