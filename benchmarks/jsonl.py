"""Runs as lines of a JSON file, with which an interrupted script continues where it stopped.

A *line* is a JSON object with the arguments of a run (its *job*) and its results.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser with the options --data-dir, --out and --table, to which scripts add others.

    Parameters
    ----------
    description
        Text for --help, usually the docstring of the script.
    out
        Default path of the JSON file.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--data-dir", type=Path, help="folder with MNIST")
    made.add_argument(
        "--out", type=Path, default=Path(out), help=f"JSON file, one line per run (default: {out})"
    )
    made.add_argument(
        "--table", action="store_true", help="run nothing, only print the table of stored runs"
    )
    return made


def read(out: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if the file does not exist."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def add(out: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a file."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def run_missing(
    out: Path,
    jobs: Iterable[Mapping[str, Any]],
    work: Callable[..., Mapping[str, Any]],
    minutes: float = math.inf,
) -> None:
    """Run each job that has no line yet, and append a line with the job and its results.

    Parameters
    ----------
    out
        The JSON file.
    jobs
        Arguments of ``work``, by name, for each run.
    work
        Function that makes a run and returns its results.
    minutes
        Time after which no job is started.
    """
    done, until = read(out), time.monotonic() + 60 * minutes
    for job in jobs:
        if any(job.items() <= line.items() for line in done):
            continue
        if time.monotonic() > until:
            print(
                f"stopped after {minutes:g} minutes; the same call continues with {dict(job)}",
                flush=True,
            )
            return
        add(out, {**job, **work(**job)})
