"""Measure how often replicated clustering (rcfl) separates clients of one distribution.

Each simulation assigns MNIST images to n clients at random and runs the first three rounds, in some
cases also the rounds until a later check. It records the p-values of the tests.

Each simulation is stored as one line of a JSON file, and an interrupted call continues where it
stopped.

    python studies/rcfl_level.py --data-dir DIR --out level.jsonl   # 1,000 simulations of each case
    python studies/rcfl_level.py --out level.jsonl --table          # only print the table
"""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonl
import numpy as np
import torch
from rcfl import LOCAL, as_table
from rich.console import Console
from rich.table import Table
from torch import nn

from fedclade import LocalTraining, ReplicatedCFL, load_federation
from fedclade.core import Check
from fedclade.core.queries import RoundPlan
from fedclade.data import Federation
from fedclade.runs.backend import Backend

Line = dict[str, Any]

LEVELS = (0.05, 0.01)


@dataclass(frozen=True)
class Case:
    """Number of clients, images of each client, and settings of the run."""

    clients: int
    images: int
    local: LocalTraining = LOCAL
    model: str = "mlp"
    spread: float = 0.0  # standard deviation of the logarithm of clients' numbers of images
    rounds: int = 3


def batch_norm(seed: int) -> nn.Module:
    """Return a perceptron with BatchNorm."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
    )


CASES: Mapping[str, Case] = {
    **{
        f"{n} clients, {images} images": Case(n, images)
        for images in (40, 300)
        for n in (2, 4, 6, 10, 20)
    },
    "10 clients, 40 images, BatchNorm": Case(10, 40, model="batch_norm"),
    "10 clients, 40 images, momentum 0.9": Case(10, 40, replace(LOCAL, momentum=0.9, lr=0.02)),
    # With this step size, the updates of parts are scaled up.
    "10 clients, 40 images, step size 0.01": Case(10, 40, replace(LOCAL, lr=0.01)),
    "10 clients, 40 images, 10 epochs": Case(10, 40, replace(LOCAL, epochs=10)),
    "10 clients, 20 to 1,000 images": Case(10, 150, spread=1.0),
    "14 clients, 40 images, check in round 7": Case(14, 40, rounds=7),
    "14 clients, 40 images, check in round 21": Case(14, 40, rounds=21),
}


@cache
def _all_images(data_dir: Path | None) -> Federation:
    return load_federation("mnist", clients=20, test_samples=10, seed=0, data_dir=data_dir)


def dealt(case: Case, seed: int, data_dir: Path | None) -> Federation:
    """Assign images to clients at random, each image to at most one client."""
    draw, everything = (
        np.random.default_rng([seed, case.clients, case.images]),
        _all_images(data_dir),
    )
    images = np.concatenate([np.asarray(client.train) for client in everything.clients])
    sizes = case.images * np.exp(case.spread * draw.normal(size=case.clients))
    ends = np.cumsum(np.clip(sizes.round(), min(20, case.images), 1000).astype(int))
    hands = np.split(draw.permutation(images), ends)[: case.clients]
    clients = zip(everything.clients[: case.clients], hands, strict=True)
    return replace(
        everything, clients=tuple(replace(client, train=np.sort(hand)) for client, hand in clients)
    )


def simulation(case: Case, seed: int, data_dir: Path | None) -> Line:
    """Run the rounds; return p-values by round, and whether there is more than one cluster."""
    algorithm, federation = ReplicatedCFL(), dealt(case, seed, data_dir)
    model = batch_norm if case.model == "batch_norm" else case.model
    engine = "stacked" if case.model == "mlp" else "loop"
    world = Backend.simulated_by(federation, model, algorithm, seed=seed, engine=engine)
    state, p_values = algorithm.init(world.initial, world.clients), dict[int, float]()
    for number in range(1, case.rounds + 1):
        state, log = algorithm.step(
            state, world.clients.ids, world.clients, RoundPlan(number, case.local, seed)
        )
        checks = [event for event in log.events if isinstance(event, Check)]
        if checks:
            p_values[number] = checks[0].p_value
    return {"p": p_values, "parted": sum(bool(leaf.members) for leaf in state.tree.leaves) > 1}


def work(job: tuple[str, int, Path | None, Path]) -> None:
    """Run one simulation, and write its line."""
    name, seed, data_dir, out = job
    torch.set_num_threads(1)
    line = {"case": name, "seed": seed, **simulation(CASES[name], seed, data_dir)}
    jsonl.add(out, line)


def table(lines: Sequence[Line]) -> Table:
    """Return a table with a row for each case.

    The columns contain the shares of simulations with p at most a level in a round, and the number
    of simulations that ended with more than one cluster.
    """
    by_case: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_case[line["case"]].append(line)
    rows = [(name, *_cells(by_case[name])) for name in CASES if name in by_case]
    rows.append(("all", *_cells(lines)))
    shares = (
        f"p ≤ {level:g} in round {rounds}" for level in LEVELS for rounds in ("3", "7, 14, 21")
    )
    return as_table("clients of one distribution", ("case", "simulations", *shares, "split"), rows)


def _cells(found: Sequence[Line]) -> Iterator[str]:
    yield str(len(found))
    for level in LEVELS:
        for rounds in (("3",), ("7", "14", "21")):
            p = [
                np.array([line["p"][number] for line in found if number in line["p"]])
                for number in rounds
            ]
            yield ", ".join(f"{(each <= level).mean():.1%}" for each in p if len(each))
    yield str(sum(line["parted"] for line in found))


def main() -> None:
    """Run missing simulations, and print the table."""
    parser = jsonl.parser(__doc__, "level.jsonl")
    parser.add_argument(
        "--simulations", type=int, default=1000, help="simulations of each case (default: 1000)"
    )
    parser.add_argument("--processes", type=int, default=1, help="number of processes (default: 1)")
    given = parser.parse_args()
    console = Console(width=160)
    if not given.table:
        done = {(line["case"], line["seed"]) for line in jsonl.read(given.out)}
        jobs = [
            (name, seed, given.data_dir, given.out)
            for seed in range(given.simulations)
            for name in CASES
            if (name, seed) not in done
        ]
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            for count, _ in enumerate(pool.imap_unordered(work, jobs), 1):
                if count % 100 == 0:
                    console.print(f"{count} of {len(jobs)} simulations")
    console.print(table(jsonl.read(given.out)))


if __name__ == "__main__":
    main()
