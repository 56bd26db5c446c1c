"""Measure the time of batched matrix products of small models, by torch and by NumPy.

A product is the forward pass of a dense layer in one step of 20 clients with batches of 10: its
inputs times its weights. torch computes it with one and with two threads, first repeatedly without
a pause, and then after 150 µs of other work on one thread, as in a training step. After this time
torch's second thread is asleep.

    python benchmarks/products.py
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedclade.training.stacking.functions import TINY
from fedclade.training.threads import using_threads

ROWS = 10
LAYERS = ((128, 10), (784, 10), (512, 10), (784, 32), (784, 128), (3136, 512))
PAUSE = 150e-6
WIDTH = 130


def microseconds(run: Callable[[], object], repeats: int, pause: float) -> float:
    """Return the median time over the repeats, each after a pause of ``pause`` seconds."""
    seen: list[float] = []
    for _ in range(repeats):
        until = perf_counter() + pause
        while perf_counter() < until:
            pass
        start = perf_counter()
        run()
        seen.append(perf_counter() - start)
    return 1e6 * median(seen)


def row(clients: int, inputs: int, outputs: int, repeats: int) -> list[str]:
    draw = torch.Generator().manual_seed(0)
    left = torch.randn(clients, ROWS, inputs, generator=draw)
    right = torch.randn(clients, outputs, inputs, generator=draw).mT
    out = torch.empty(clients, ROWS, outputs)
    arrays = left.numpy(), right.numpy(), out.numpy()
    times: list[float] = []
    for threads in (1, 2):
        with using_threads(threads):
            times += [
                microseconds(lambda: torch.bmm(left, right, out=out), repeats, pause)
                for pause in (0, PAUSE)
            ]
    times.append(
        microseconds(lambda: np.matmul(arrays[0], arrays[1], out=arrays[2]), repeats, PAUSE)
    )
    size = ROWS * inputs * outputs
    taken = "NumPy" if size <= TINY else "torch"
    return [f"{inputs} → {outputs}", f"{size:,}", *(f"{time:,.1f}" for time in times), taken]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=20, help="number of clients (default: 20)")
    parser.add_argument("--repeats", type=int, default=300, help="number of repeats (default: 300)")
    arguments = parser.parse_args()
    table = Table(title=f"µs for the products of {arguments.clients} clients")
    columns = (
        "torch, 1 thread",
        "after a pause",
        "torch, 2 threads",
        "after a pause",
        "NumPy, after a pause",
    )
    for column in ("layer", "multiplications", *columns, "used by fedclade"):
        table.add_column(column, justify="right")
    for inputs, outputs in LAYERS:
        table.add_row(*row(arguments.clients, inputs, outputs, arguments.repeats))
    Console(width=WIDTH).print(table)


if __name__ == "__main__":
    main()
