"""Command ``example``: copy an example data set that is part of fedclade."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedclade.cli.options import new_console, say
from fedclade.core import ConfigError, RunError, appear, unknown

EXAMPLES = Path(__file__).parent / "examples"
"""Folder with a folder for each example: the clients' CSV files, and a config.

The files are named as in the documentation.

``examples/hospitals.py`` made the files of ``hospitals``.
"""


def copy_example(*, name: str, out: Path | None) -> None:
    """Carry out the command ``fedclade example``."""
    known = list_examples()
    if name not in known:
        raise ConfigError(unknown("example", name, known))
    target = Path(name) if out is None else out
    if target.exists():
        raise ConfigError(f"{target} exists already; name another folder with --out, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        appear(target, lambda beside: shutil.copytree(EXAMPLES / name, beside))
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}; name another folder with --out") from error
    console = new_console()
    files = len(list(target.glob("*.csv")))
    config = target / f"{name}.toml"
    say(console, f"{target}: {files} CSV files, one for each client, and the config {config.name}")
    say(console, f"next: fedclade run {config}")


def list_examples() -> list[str]:
    """Return the names of all examples."""
    return sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir())
