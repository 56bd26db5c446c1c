"""The config of a run folder: written at the start of the run, with a sum of it in its last line."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedclade.core import RunError
from fedclade.runs.store.contents import CONFIG as CONFIG_SHAPE
from fedclade.runs.store.shape import check_shape
from fedclade.runs.store.toml_text import to_toml

CONFIG = "config.toml"
"""The first file of a run folder, there from the start of the run."""

_SUM = "# SHA-256 of the lines above: "
"""What the last line of a config begins with, so that it can be checked from the start of the run."""


REMEDY = "restore it from a copy, or run its config again"
"""Of a damaged run folder."""


def read_run_config(folder: Path) -> Mapping[str, Any]:
    """Read the config of a run folder; a RunError if it is damaged."""
    try:
        text = (folder / CONFIG).read_text(encoding="utf-8")
        content, mark, noted = text.rpartition(_SUM)
        if mark and noted.strip() != _sha256(content):
            raise ValueError(f"{CONFIG} is not what was written: its SHA-256 is not the one in its last line")
        try:
            config = tomllib.loads(text)
        except ValueError as error:
            raise ValueError(f"{CONFIG} is no TOML ({error})") from error
        check_shape(config, CONFIG_SHAPE, CONFIG)
        return config
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"the run folder {folder} is damaged: {type(error).__name__}: {error}; {REMEDY}") from error


def is_private(config: Mapping[str, Any]) -> bool:
    """Whether the models of a run are for the user alone: those of a network have learned from the data of others."""
    return "network" in config


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config as TOML."""
    text = to_toml(config)
    path.write_text(f"{text}{_SUM}{_sha256(text)}\n", encoding="utf-8")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
