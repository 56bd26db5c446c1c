"""Measure time and peak memory of a round, by the numbers of clients and threads.

Each client trains on 60 examples with MNIST's shape, one epoch in batches of 10, and the server
averages the updates. The table has the time per client, which is constant if the time of a round is
proportional to the number of clients. Other processes affect CPU time less. CPU time and memory
include worker processes.

In the first table, clients train logistic regression. In the second, they train a larger model and
are compared by sketches, with and without streaming: a server that streams stores no updates. Each
measurement runs in a separate process, because a process reports the largest memory that it has
ever had.

    python benchmarks/scaling.py
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import multiprocessing
import os
import resource
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedclade import Federation, LocalTraining, Pool
from fedclade.channel.middleware import Channel
from fedclade.channel.signature import CountSketch, Sketching
from fedclade.channel.streaming import Streaming
from fedclade.core import memory_bytes
from fedclade.core.aggregate import mean
from fedclade.core.clients import Clients
from fedclade.core.queries import Round
from fedclade.data.federation import ClientData
from fedclade.models import build_model
from fedclade.training import SimulatedClients
from fedclade.training.memory import default_memory, updates_at_once

EXAMPLES, IMAGES = 60, 60_000
CLIENTS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
CLIENTS_FOR_THREADS = 1_000
CLIENTS_OF_LARGE, SKETCH = 2_000, 1024
WIDTH = 140


def federation_of(clients: int) -> Federation:
    """Return clients with 60 random images each, from a pool as large as MNIST."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (IMAGES, 1, 28, 28), generator=draw, dtype=torch.uint8)
    y = torch.randint(10, (IMAGES,), generator=draw)
    everything = np.arange(IMAGES)
    pool = Pool("random", x, y, y.numpy(), everything, everything[:0], 10)
    held = [np.arange(k * EXAMPLES, (k + 1) * EXAMPLES) % IMAGES for k in range(clients)]
    none, one = everything[:0], everything[:1]
    return Federation(
        pool, tuple(ClientData(k, f"c{k}", k, held[k], none, one) for k in range(clients))
    )


def workers() -> list[Path]:
    """Return the folders in ``/proc`` of the worker processes; none if there are no workers."""
    children = [
        number
        for file in Path("/proc/self/task").glob("*/children")
        for number in file.read_text().split()
    ]
    return [Path("/proc") / number for number in children]


def cpu_time() -> float:
    """Return the CPU seconds of this process and its workers."""
    ticks = os.sysconf("SC_CLK_TCK")
    stats = [(worker / "stat").read_text().rpartition(")")[2].split() for worker in workers()]
    return process_time() + sum(int(stat[11]) + int(stat[12]) for stat in stats) / ticks


def memory_of_workers() -> int:
    """Return the bytes of private memory of the worker processes."""
    lines = [
        line.split()
        for worker in workers()
        for line in (worker / "smaps_rollup").read_text().splitlines()
    ]
    return sum(
        1024 * int(line[1]) for line in lines if line[0] in ("Private_Clean:", "Private_Dirty:")
    )


def measure(
    model: str,
    stream: bool,
    clients: int,
    threads: int,
    engine: str,
    memory: int | None,
    rounds: int,
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    module = build_model(model, input_shape=(1, 28, 28), outputs=10)
    simulated = SimulatedClients(federation_of(clients), module, engine=engine, memory=memory)
    params, layout = simulated.layout.flatten(module), simulated.layout
    asked: Clients = simulated
    if model != "mclr":
        asked = Channel(asked, Sketching(CountSketch(0, layout.n_parameters, SKETCH)))
    if stream:
        budget = memory or default_memory(params.device)
        asked = Channel(
            asked, Streaming(asked.sizes, updates_at_once(params.nbytes, params.device, budget))
        )
    times: list[tuple[float, float]] = []
    for number in range(1, rounds + 2):
        start = perf_counter(), cpu_time()
        spec = LocalTraining(batch_size=10, lr=0.05)
        params = params + mean(
            asked.train(asked.ids, params[None], [0] * clients, Round(number, spec))
        )
        times.append((perf_counter() - start[0], cpu_time() - start[1]))
    unit = 1 if sys.platform == "darwin" else 1024
    (first, _), *others = times  # the first round gathers the data and may measure engines
    seconds, cpu_seconds = (median(each) for each in zip(*others, strict=True))
    return {
        **{
            "model": model,
            "stream": stream,
            "clients": clients,
            "threads": threads,
            "engine": simulated.engine,
        },
        **{"first_round": first, "seconds": seconds, "cpu_seconds": cpu_seconds},
        **{
            "update_bytes": clients * params.nbytes,
            "samples_per_second": clients * EXAMPLES / seconds,
        },
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        + memory_of_workers(),
    }


def in_a_process(*arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def shown(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    times = "first round, s", "round, s", "µs/client", "CPU µs/client", "samples/s"
    for column in ("clients", "threads", "engine", "stream", *times, "updates, GB", "peak, GB"):
        table.add_column(column, justify="left" if column in ("engine", "stream") else "right")
    for row in rows:
        counts = (
            f"{row['clients']:,}",
            str(row["threads"]),
            row["engine"],
            "yes" if row["stream"] else "no",
        )
        each = (
            f"{1e6 * row[seconds] / row['clients']:,.0f}" for seconds in ("seconds", "cpu_seconds")
        )
        times = (
            f"{row['first_round']:.2f}",
            f"{row['seconds']:.3f}",
            *each,
            f"{row['samples_per_second']:,.0f}",
        )
        table.add_row(
            *counts, *times, f"{row['update_bytes'] / 1e9:.2f}", f"{row['peak_bytes'] / 1e9:.2f}"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clients",
        nargs="*",
        type=int,
        default=CLIENTS,
        help="numbers of clients of the first table",
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="largest number of threads"
    )
    parser.add_argument("--engine", default="auto", help="the engine (default: auto)")
    parser.add_argument("--memory", type=memory_bytes, help="memory limit, such as 4GB")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds, of which tables have the median (default: 3)"
    )
    parser.add_argument("--large", default="mlp", help="model of the second table (default: mlp)")
    parser.add_argument(
        "--large-clients",
        type=int,
        default=CLIENTS_OF_LARGE,
        help=f"clients of the second table; 0: no second table (default: {CLIENTS_OF_LARGE})",
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    threads, fixed = arguments.threads, (arguments.engine, arguments.memory, arguments.rounds)
    fewer = [2**k for k in range(threads.bit_length()) if 2**k < threads]
    cases = [(clients, threads) for clients in arguments.clients] + [
        (CLIENTS_FOR_THREADS, some) for some in fewer
    ]
    small = [in_a_process("mclr", False, *case, *fixed) for case in cases]
    if small:
        Console(width=WIDTH).print(
            shown(small, f"a round of mclr, {EXAMPLES} examples for each client")
        )
    streams = (False, True) if arguments.large_clients else ()
    large = [
        in_a_process(arguments.large, stream, arguments.large_clients, threads, *fixed)
        for stream in streams
    ]
    if large:
        Console(width=WIDTH).print(
            shown(large, f"a round of {arguments.large}, compared by sketches of {SKETCH} numbers")
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([*small, *large], indent=2) + "\n")


if __name__ == "__main__":
    main()
