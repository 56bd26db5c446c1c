"""Measure time and memory of runs with cohorts of 1,000 out of 10⁵ to 10⁷ registered clients.

The clients are synthetic, form four clusters, have 3 to 30 training examples (Zipf) and 2 test
examples each, and are stored in folders of Arrow files: 7.6 GB for 10⁷ clients. In each round 1,000
clients train logistic regression, one epoch in batches of 10. After every 10th round 1,000 clients
are evaluated. Each run is a separate process with one thread. All times are times of the processor,
so that other programs on the machine change them little:

- *begin*: from opening the folder to the first round, without imports;
- *train*: training of the cohort, in a round (median over all rounds but the first);
- *fedclade*: everything else in a round: sampling, queries, means, records (median);
- *longest*: the longest round without its training, which is a round with an evaluation;
- *end*: from the last round to the finished run folder.

Peak memory is that of the process, with pages of mapped files. *Checkpoint* is the size of the last
checkpoint. *State* is the number of clients for which the run stores anything.

    python benchmarks/many_clients.py --out DIR
    python benchmarks/many_clients.py --out DIR --clients 10000000 --methods fedavg --rounds 50
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedclade import LocalTraining, simulate
from fedclade.data import PlantedSettings, open_folder, write_planted
from fedclade.training import SimulatedClients

CLIENTS = (100_000, 1_000_000, 10_000_000)
METHODS = ("fedavg", "scaffold", "ditto", "ifca", "cfl", "rcfl")
COHORT, ROUNDS, EVALUATED, EVERY = 1_000, 50, 1_000, 10
LOCAL = LocalTraining(epochs=1, batch_size=10, lr=0.05)

Line = dict[str, Any]

COLUMNS = {
    "clients": "{:,}",
    "method": "{}",
    "begin_s": "{:.1f}",
    "train_s": "{:.2f}",
    "fedclade_s": "{:.2f}",
    "longest_s": "{:.2f}",
    "end_s": "{:.1f}",
    "peak_gb": "{:.2f}",
    "own_gb": "{:.2f}",
    "checkpoint_mb": "{:.2f}",
    "state": "{:,}",
    "clusters": "{}",
    "ari_assigned": "{:.3f}",
}


def build(clients: int, folder: Path) -> None:
    """Write the data of a number of clients to a folder, unless it exists."""
    if not folder.exists():
        write_planted(folder, PlantedSettings(clients=clients, least=3, most=30, test=2))


def measure(data: Path, method: str, rounds: int, out: Path) -> Line:
    """Run a method in this process, and return its times, memory and sizes."""
    torch.set_num_threads(1)
    seconds = {"train": 0.0}
    simulated: list[SimulatedClients] = []
    count_training(seconds, simulated)
    start = process_time()
    federation = open_folder(data)
    ends: list[float] = []
    trained: list[float] = []

    def note_round(row: Any, tree: Any) -> None:
        ends.append(process_time())
        trained.append(seconds["train"])

    run = simulate(
        method,
        "mclr",
        federation,
        rounds=rounds,
        client_fraction=COHORT / len(federation),
        evaluate_every=EVERY,
        evaluate_clients=EVALUATED,
        local=LOCAL,
        folder=out,
        checkpoint_every=EVERY,
        on_round=note_round,
    )
    finished = process_time()
    of_rounds = [end - begin for begin, end in pairwise(ends)]
    training = [end - begin for begin, end in pairwise(trained)]
    rest = [whole - part for whole, part in zip(of_rounds, training, strict=True)]
    last = max((out / "checkpoints").glob("round-*"))
    return {
        "clients": len(federation),
        "method": method,
        "begin_s": ends[0] - trained[0] - start,
        "train_s": median(training),
        "fedclade_s": median(rest),
        "longest_s": max(rest),
        "end_s": finished - ends[-1],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "own_gb": own_memory() / 1e9,
        "checkpoint_mb": sum(f.stat().st_size for f in last.rglob("*") if f.is_file()) / 1e6,
        "state": len({name.split("/")[0] for name in simulated[-1].store.tensors()}),
        "clusters": run.summary["clusters"]["found"],
        "ari_assigned": run.metric_rows[-1]["ari_assigned"],
    }


def count_training(seconds: dict[str, float], simulated: list[SimulatedClients]) -> None:
    """Let simulated clients add the time of their training to ``seconds``, and record them."""
    handle: Callable[..., Any] = SimulatedClients.handle_updates

    def handle_updates(self: SimulatedClients, *arguments: Any) -> Any:
        start = process_time()
        simulated[:] = [self]
        updates = handle(self, *arguments)
        seconds["train"] += process_time() - start
        return updates

    SimulatedClients.handle_updates = handle_updates


def own_memory() -> int:
    """Return the memory of this process in bytes without pages of mapped files."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("RssAnon"))) * 1024


def show(lines: list[Line]) -> Table:
    """Return the measurements as a table."""
    table = Table(title=f"{COHORT:,} clients in a round, {EVALUATED:,} evaluated")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*(form.format(line[name]) for name, form in COLUMNS.items()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for data and runs")
    parser.add_argument("--clients", nargs="*", type=int, default=CLIENTS)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        clients, method = arguments.one
        run = out / f"{method}-{clients}-{arguments.rounds}"
        line = measure(out / f"clients-{clients}", method, arguments.rounds, run)
        run.with_suffix(".json").write_text(json.dumps(line) + "\n")
        return
    lines: list[Line] = []
    for clients in arguments.clients:
        build(clients, out / f"clients-{clients}")
        for method in arguments.methods:
            file = out / f"{method}-{clients}-{arguments.rounds}.json"
            if not file.exists():
                case = ["--one", str(clients), method, "--rounds", str(arguments.rounds)]
                command = [sys.executable, __file__, "--out", str(out), *case]
                subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            lines.append(json.loads(file.read_text()))
    Console(width=180).print(show(lines))


if __name__ == "__main__":
    main()
