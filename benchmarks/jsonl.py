"""Runs that are lines of a JSON file, so that an interrupted call goes on where it stopped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Return what reads the command line: where the data are, and the file; a script adds its own options."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data-dir", type=Path, help="where MNIST is")
    made.add_argument("--out", type=Path, default=Path(out), help="one line for each run")
    made.add_argument("--table", action="store_true", help="run nothing, and print the table of what has been run")
    return made


def read(out: Path) -> list[dict[str, Any]]:
    """Return what has been run."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def add(out: Path, line: Mapping[str, Any]) -> None:
    """Write down a run."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
