"""Runs that are lines of a JSON file, so that an interrupted call goes on where it stopped."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Return what reads the command line: where the data are, and the file; a script adds its own options."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--data-dir", type=Path, help="where MNIST is")
    made.add_argument("--out", type=Path, default=Path(out), help="one line for each run")
    made.add_argument(
        "--table", action="store_true", help="run nothing, and print the table of what has been run"
    )
    return made


def read(out: Path) -> list[dict[str, Any]]:
    """Return what has been run."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def add(out: Path, line: Mapping[str, Any]) -> None:
    """Write down a run."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def run_missing(
    out: Path,
    jobs: Iterable[Mapping[str, Any]],
    work: Callable[..., Mapping[str, Any]],
    minutes: float = math.inf,
) -> None:
    """Run each job that has no line yet, and write what it finds behind the job itself; begin none after some minutes.

    A job is the arguments of ``work``, by name.
    """
    done, until = read(out), time.monotonic() + 60 * minutes
    for job in jobs:
        if any(job.items() <= line.items() for line in done):
            continue
        if time.monotonic() > until:
            print(
                f"stopped after {minutes:g} minutes; the same call goes on with {dict(job)}",
                flush=True,
            )
            return
        add(out, {**job, **work(**job)})
