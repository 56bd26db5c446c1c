"""Functions that find and read config files, and apply overrides (``--set key=value``)."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedclade.config.shipped import config_folder
from fedclade.core import ConfigError, checked, shown, unknown

Section = dict[str, Any]

MOST_NESTED = 20
"""Largest depth of nested tables and lists in a config.

Functions that process a config may be recursive, and Python limits the depth of recursion.
"""


def read_toml(path: Path) -> Section:
    """Read a TOML file and return its contents as nested dictionaries.

    Raises
    ------
    ConfigError
        If the file is missing or not TOML, or contains values that no config can have: integers of
        more than 64 bits, or tables and lists that are nested more than :data:`MOST_NESTED` deep.
    """
    try:
        # A TOML file is always encoded in UTF-8, whatever the locale.
        return _parse_toml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}; check the path and its permissions"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def _parse_toml(text: str, where: str) -> Section:
    """Parse a TOML text, and check that its values are not too long or too deeply nested.

    ``where`` is the source of the text, for messages. An invalid TOML text raises the errors of
    :func:`tomllib.loads`.
    """
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeError):
        raise
    except RecursionError as error:
        raise ConfigError(
            f"{where}: tables and lists should be nested at most {MOST_NESTED} deep"
        ) from error
    except ValueError as error:  # Python's limit on digits, or a date that does not exist
        raise ConfigError(f"{where} is not a TOML file: {error}") from error
    _check_values(raw, where, MOST_NESTED)
    return raw


def _check_values(value: object, where: str, deeper: int) -> None:
    if isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(
            f"{where}: whole numbers should have at most 64 bits, as in TOML, got {shown(value)}"
        )
    if isinstance(value, dict | list):
        if deeper == 0:
            raise ConfigError(
                f"{where}: tables and lists should be nested at most {MOST_NESTED} deep"
            )
        for entry in value.values() if isinstance(value, dict) else value:
            _check_values(entry, where, deeper - 1)


def apply_overrides(raw: Section, overrides: Sequence[str]) -> None:
    """Change values of a config in place.

    Parameters
    ----------
    raw
        The config as nested dictionaries, as read from a file.
    overrides
        Changes in the form ``key=value`` or ``section.key=value``. A value is parsed as TOML; a
        value that is not valid TOML is taken as a string.

    Raises
    ------
    ConfigError
        If an override does not have this form, or if a part of the key before the last dot refers
        to a value that is not a section.
    """
    for override in overrides:
        path, equals, text = override.partition("=")
        *sections, key = path.strip().split(".")
        if not equals or not all([*sections, key]):
            raise ConfigError(
                f"--set should have the form section.key=value, got {shown(override)}"
            )
        try:
            value = _parse_toml(f"value = {text}", f"--set {shown(override)}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        target: Any = raw
        for depth, section in enumerate(sections, start=1):
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(
                    f"--set {shown(override)} is invalid: {shown('.'.join(sections[:depth]))} has "
                    "a value and is not a section"
                )
        target[key] = value


def as_override(key: str, value: object) -> str:
    """Return the argument of the option ``--set`` that sets a key of a config to a value.

    The value is a string, a number, a Boolean, or a list of such values.

    >>> as_override("local.lr", 0.1), as_override("model.name", "cnn"), as_override("model.hidden", [16, 16])
    ('local.lr=0.1', 'model.name="cnn"', 'model.hidden=[16, 16]')
    """
    return f"{key}={json.dumps(value, ensure_ascii=False, default=str)}"  # valid TOML, too


@checked()
def find_config(name: str) -> Path:
    """Return the path of a config file, given its path or its name.

    Parameters
    ----------
    name
        Path of a file, or name of a config that comes with fedclade.

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
        A user's folder; a folder that comes with fedclade, such as ``suite``; or a config as for
        :func:`find_config`. If a user's folder contains no config, such as a folder with results,
        fedclade's folder of the same name is used.

    Raises
    ------
    ConfigError
        If there is no config or folder of this name, or if the folder contains no config.
    """
    folders = Path(name), config_folder() / name
    there = [each for each in folders if os.path.isdir(each)]  # noqa: PTH112 -- as in find_config
    if not there:
        return [find_config(name)]
    if not (found := next(filter(None, (sorted(each.glob("*.toml")) for each in there)), None)):
        raise ConfigError(
            f"the folder {there[0]} contains no config: no file ends in .toml; name another folder"
        )
    return found
