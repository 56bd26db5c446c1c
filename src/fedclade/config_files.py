"""The files of configs: where they are, what they say, and what a user overrides of it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedclade.errors import ConfigError, unknown

Section = dict[str, Any]


def read_toml(path: Path) -> Section:
    """Read a TOML file.

    Raises
    ------
    ConfigError
        If it is missing or no TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def apply_overrides(raw: Section, overrides: Sequence[str]) -> None:
    """Change a config as read from a file by each ``section.key=value``.

    Raises
    ------
    ConfigError
        If one is written wrongly, or names no section.
    """
    for override in overrides:
        _set(raw, override)


def _set(raw: Section, override: str) -> None:
    """Apply one ``section.key=value``; the value is TOML, or else a string."""
    path, equals, text = override.partition("=")
    *sections, key = path.strip().split(".")
    if not equals or not key or len(sections) > 1:
        raise ConfigError(f"--set takes section.key=value, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    target = raw
    for section in sections:
        target = target.setdefault(section, {})
    if not isinstance(target, dict):
        raise ConfigError(f"--set {override!r}: {sections[0]!r} is not a section")
    target[key] = value


def config_folder() -> Path:
    """Return the folder of the configs that come with fedclade: inside the package, or beside it in a checkout."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "configs"


def find_config(name: str) -> Path:
    """Return the path of a config: a file, or the name of one that comes with fedclade.

    Raises
    ------
    ConfigError
        If there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(config_folder().glob("*.toml"))}
    if path.stem in shipped and path.suffix in ("", ".toml") and path.parent in (Path(), Path("configs")):
        return shipped[path.stem]
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ConfigError(f"there is no config {name}; 'fedclade ls configs' lists those that come with fedclade")
    raise ConfigError(unknown("config", name, shipped))


def find_configs(name: str) -> list[Path]:
    """Return the paths of all configs of a folder, or of the one config that :func:`find_config` finds.

    A folder is the user's, or one that comes with fedclade, such as ``suite``.

    Raises
    ------
    ConfigError
        If there is nothing of that name.
    """
    folder = next((each for each in (Path(name), config_folder() / name) if each.is_dir()), None)
    if folder is None:
        return [find_config(name)]
    if not (found := sorted(folder.glob("*.toml"))):
        raise ConfigError(f"the folder {folder} holds no config: no file ends in .toml")
    return found
