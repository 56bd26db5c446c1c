"""Measure time and memory of clients in a folder of Arrow files: to write, open, and train.

The script writes folders with 10⁴ to 10⁶ clients in synthetic clusters, with 30 examples per client
on average, and opens each in a separate process. ``bytes_per_client`` counts the arrays of ids,
keys, examples and true clusters. Memory is divided into memory of the process that opening the
folder and preparing the clients added (``own_mb``), and pages of mapped files, which the system can
free if necessary (``mapped_mb``). ``fetch_ms`` is the time to read the examples of a cohort of
1,000 clients, and ``round_ms`` the time to train logistic regression on them, one epoch in batches
of 20. Both are medians over cohorts that were not read before.

    python benchmarks/federation_files.py --out DIR
    python benchmarks/federation_files.py --out DIR --clients 10000 100000
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import multiprocessing
import re
import resource
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedclade import LocalTraining
from fedclade.core import ArrayMapping, Round
from fedclade.data import ClientTable, PlantedSettings, open_folder, write_planted
from fedclade.models import build_model
from fedclade.training import SimulatedClients
from fedclade.training.data import ClientsData

CLIENTS = (10_000, 100_000, 1_000_000)
COHORT, ROUNDS = 1_000, 6
COLUMNS = {
    "clients": "{:,}",
    "size_mb": "{:,.0f}",
    "build_s": "{:.1f}",
    "build_peak_mb": "{:,.0f}",
    "open_s": "{:.2f}",
    "fingerprint_s": "{:.2f}",
    "ready_s": "{:.2f}",
    "bytes_per_client": "{:.0f}",
    "own_mb": "{:.0f}",
    "mapped_mb": "{:.0f}",
    "fetch_ms": "{:.0f}",
    "round_ms": "{:.0f}",
}


def built(clients: int, folder: Path) -> dict[str, Any]:
    """Write a folder; return the time and the peak memory."""
    start = perf_counter()
    write_planted(folder, PlantedSettings(clients=clients))
    return {
        "build_s": perf_counter() - start,
        "build_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def opened(clients: int, folder: Path) -> dict[str, Any]:
    """Open a folder, and train cohorts; return times and memory."""
    torch.set_num_threads(1)
    before, start = memory(), perf_counter()
    federation = open_folder(folder)
    known, table, truth = perf_counter(), federation.clients, federation.true_clusters
    federation.fingerprint  # noqa: B018
    told = perf_counter()
    model = build_model(
        "mclr", input_shape=federation.pool.input_shape, outputs=federation.pool.outputs, seed=0
    )
    simulated = SimulatedClients(federation, model, "cpu", "stacked")
    ready, after = perf_counter(), memory()
    assert isinstance(table, ClientTable)
    assert isinstance(truth, ArrayMapping)
    models, fetched, rounds = simulated.layout.flatten(model)[None], list[float](), list[float]()
    data, spec = ClientsData(federation, torch.device("cpu"), 2**30), LocalTraining(batch_size=20)
    for number in range(1, ROUNDS + 1):
        draw = np.random.default_rng(number)
        for_fetch, for_round = (
            np.sort(draw.choice(clients, COHORT, replace=False)).tolist() for _ in range(2)
        )
        this_round, begin = Round(number, spec, 0), perf_counter()
        torch.cat([x for client in for_fetch for x, _ in [data.examples(client, this_round)]])
        fetched.append(perf_counter() - begin)
        begin = perf_counter()
        simulated.train(for_round, models, [0] * COHORT, this_round)
        rounds.append(perf_counter() - begin)
    return {
        "clients": clients,
        "size_mb": sum(file.stat().st_size for file in folder.iterdir()) / 1e6,
        "open_s": known - start,
        "fingerprint_s": told - known,
        "ready_s": ready - told,
        "bytes_per_client": (table.nbytes + np.asarray(truth.array).nbytes) / clients,
        "own_mb": after["RssAnon"] - before["RssAnon"],
        "mapped_mb": after["RssFile"] - before["RssFile"],
        "fetch_ms": 1e3 * median(fetched[1:]),
        "round_ms": 1e3 * median(rounds[1:]),
    }


def memory() -> dict[str, float]:
    """Return the memory of this process in MB: the fields ``Rss*`` of ``/proc/self/status``."""
    told = Path("/proc/self/status").read_text()
    return {name: int(size) / 1e3 for name, size in re.findall(r"(Rss\w+):\s+(\d+) kB", told)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the data, which is not deleted"
    )
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=CLIENTS,
        help="numbers of clients (default: 10000 100000 1000000)",
    )
    chosen = parser.parse_args()
    table = Table(*COLUMNS, box=None)
    for clients in chosen.clients:
        found, folder = dict[str, Any](), chosen.out / f"planted-{clients}"
        for measured in (built, opened):
            if measured is built and folder.exists():
                found |= dict.fromkeys(("build_s", "build_peak_mb"), float("nan"))
                continue
            # In a new process, because a process reports the largest memory that it ever had.
            with multiprocessing.get_context("spawn").Pool(1) as process:
                found |= process.apply(measured, (clients, folder))
        table.add_row(*(form.format(found[name]) for name, form in COLUMNS.items()))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
