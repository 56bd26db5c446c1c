"""Seconds for a round and peak memory, against the number of clients in it and against threads.

Clients of 60 examples of MNIST's shape train logistic regression, one epoch in batches of 10. Every measurement has a
process of its own, since a process never tells less memory than it once had.

    python benchmarks/scaling.py
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import multiprocessing
import resource
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedclade import Federation, LocalSpec, Pool
from fedclade.clients import Round
from fedclade.data.federation import ClientData
from fedclade.engine import SimulatedClients
from fedclade.engine.memory import memory_bytes
from fedclade.models import build_model

EXAMPLES, IMAGES = 60, 60_000
CLIENTS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
CLIENTS_FOR_THREADS = 1_000


def federation_of(clients: int) -> Federation:
    """Return clients that hold 60 random images each, of a pool as large as MNIST."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (IMAGES, 1, 28, 28), generator=draw, dtype=torch.uint8)
    y = torch.randint(10, (IMAGES,), generator=draw)
    everything = np.arange(IMAGES)
    pool = Pool("random", x, y, y.numpy(), everything, everything[:0], 10)
    held = [np.arange(k * EXAMPLES, (k + 1) * EXAMPLES) % IMAGES for k in range(clients)]
    none, one = everything[:0], everything[:1]
    return Federation(pool, tuple(ClientData(k, f"c{k}", k, held[k], none, one) for k in range(clients)))


def measure(clients: int, threads: int, engine: str, memory: int | None, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    module = build_model("mclr", input_shape=(1, 28, 28), outputs=10)
    simulated = SimulatedClients(federation_of(clients), module, engine=engine, memory=memory)
    models = simulated.layout.flatten(module)[None]
    seconds: list[float] = []
    for number in range(rounds + 1):
        start = perf_counter()
        simulated.train(simulated.ids, models, [0] * clients, Round(number + 1, LocalSpec(batch_size=10, lr=0.05)))
        seconds.append(perf_counter() - start)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    first, *others = seconds  # the first gathers the data and may measure engines
    return {
        **{"clients": clients, "threads": threads, "engine": simulated.engine, "first_round": first},
        **{"seconds": median(others), "samples_per_second": clients * EXAMPLES / median(others), "peak_bytes": peak},
    }


def in_a_process(*arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=CLIENTS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="at most")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--memory", type=memory_bytes, help="such as 4GB")
    parser.add_argument("--rounds", type=int, default=3, help="the table has the median")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    fixed = arguments.engine, arguments.memory, arguments.rounds
    rows = [in_a_process(clients, arguments.threads, *fixed) for clients in arguments.clients]
    fewer = [2**k for k in range(arguments.threads.bit_length()) if 2**k < arguments.threads]
    rows += [in_a_process(CLIENTS_FOR_THREADS, threads, *fixed) for threads in fewer]
    table = Table(title=f"a round of mclr, {EXAMPLES} examples for each client")
    for column in ("clients", "threads", "engine", "first round, s", "round, s", "samples/s", "peak memory, GB"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        times = f"{row['first_round']:.2f}", f"{row['seconds']:.3f}", f"{row['samples_per_second']:,.0f}"
        counts = f"{row['clients']:,}", str(row["threads"]), row["engine"]
        table.add_row(*counts, *times, f"{row['peak_bytes'] / 1e9:.2f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
