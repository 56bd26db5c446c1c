"""Seconds and peak memory of each part of a run of 10³ to 10⁶ clients, through the command line.

Synthetic clients of four planted clusters, with 10 to 200 examples each (Zipf), lie in a folder of Arrow files. Of each
population a cohort of 1 % and of 100 % trains logistic regression, one epoch in batches of 10; what a round takes is
its median. Every command is a process of its own, whose peak memory the system reports. From the measured parts follows
a model of the cost of populations that do not run here.

    python benchmarks/scale.py                        # the table, and the model of the cost
    python benchmarks/scale.py --goal                 # a million clients, cohorts of 1,000, 50 rounds, with a report
    python benchmarks/scale.py --clients 1000 10000   # less
    python benchmarks/scale.py --actors 1 2           # the rounds on so many Ray actors, besides
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

CLIENTS = (1_000, 10_000, 100_000, 1_000_000)
SHARES = (0.01, 1.0)
ROUNDS = 5
EVALUATED = 1_000
CLUSTERS = 4
GOAL_CLIENTS, GOAL_COHORT, GOAL_ROUNDS = 1_000_000, 1_000, 50
GIB = 2**30


@dataclass(frozen=True)
class Cost:
    """What a command took."""

    seconds: float
    peak: int  # bytes


def fedclade(*arguments: str | Path) -> Cost:
    """Run a command of fedclade's in a process of its own."""
    start = perf_counter()
    command = [sys.executable, "-m", "fedclade", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{said.decode()}")
    return Cost(perf_counter() - start, usage.ru_maxrss * 1024)


def built(clients: int, folder: Path) -> Cost:
    """Write a federation of synthetic clients."""
    raise NotImplementedError
