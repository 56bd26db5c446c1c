"""Compare the speed of training and evaluation in two versions of fedclade, for built-in models.

Each process imports one version. It makes 20 clients with 100 examples each, lets all of them train
(in batches of 10) and evaluate for some rounds, and prints the examples per second. The two
versions run alternately, so that changes of the machine's speed affect both. The table has the best
of all turns, and the ratio of the two versions.

    git worktree add ../before COMMIT
    python benchmarks/two_versions.py ../before/src --turns 5
    python benchmarks/two_versions.py ../before/src --device cuda --json results.json
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedclade import LocalTraining, federation
from fedclade.core import Round
from fedclade.models import build_model
from fedclade.training import SimulatedClients

CLIENTS, EXAMPLES, LABELS = 20, 100, 10
MODELS = {
    "mclr": (1, 28, 28),
    "mlp": (1, 28, 28),
    "cnn": (1, 28, 28),
    "lenet": (1, 28, 28),
    "cifar_cnn": (3, 32, 32),
}
HERE = Path(__file__).resolve().parent.parent / "src"


def measure(name: str, device: str, rounds: int) -> dict[str, float]:
    """Return examples per second of training and evaluation, and seconds to make the clients."""
    draw = np.random.default_rng(0)
    shape = MODELS[name]
    data = {}
    for client in range(CLIENTS):
        inputs = draw.normal(size=(2 * EXAMPLES, *shape)).astype(np.float32)
        labels = draw.integers(LABELS, size=2 * EXAMPLES)
        data[f"c{client}"] = (inputs, labels)
    clients_data = federation(data, labels=LABELS)
    module = build_model(name, input_shape=shape, outputs=LABELS, seed=0)
    start = process_time()
    clients = SimulatedClients(clients_data, module, device)
    making = process_time() - start
    models = clients.layout.flatten(module)[None].to(device)
    ids = list(clients.ids)
    rows = [0] * len(ids)
    spec = LocalTraining(epochs=1, batch_size=10, lr=0.01)

    def train(number: int) -> None:
        clients.train(ids, models, rows, Round(number, spec))

    def evaluate(_: int) -> None:
        clients.evaluate(ids, models, rows, "test")

    speeds: dict[str, float] = {"making": making}
    examples = {
        "train": sum(clients.sizes.values()),
        "evaluate": sum(len(c.test) for c in clients_data.clients),
    }
    for what, act in (("train", train), ("evaluate", evaluate)):
        act(1)  # warm-up, which chooses the engine and fills the caches
        best = float("inf")
        for number in range(2, 2 + rounds):
            wait(device)
            start = perf_counter()
            act(number)
            wait(device)
            best = min(best, perf_counter() - start)
        speeds[what] = examples[what] / best
    return speeds


def wait(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def run_script(script: str, source: Path, *options: str, **variables: str) -> str:
    """Run a script with ``--measure`` and one version of fedclade; return its last output line."""
    environment = {**os.environ, "PYTHONPATH": str(source), **variables}
    command = [sys.executable, script, str(source), "--measure", *options]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


def run_version(source: Path, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Measure all models in a process that imports one version."""
    return json.loads(run_script(__file__, source, "--device", device, "--rounds", str(rounds)))


def best_of(turns: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the largest speeds and the smallest times of all turns."""
    best: dict[str, dict[str, float]] = {}
    for name in MODELS:
        best[name] = {
            "train": max(turn[name]["train"] for turn in turns),
            "evaluate": max(turn[name]["evaluate"] for turn in turns),
            "making": min(turn[name]["making"] for turn in turns),
        }
    return best


def table_of(
    other: Mapping[str, Mapping[str, float]], this: Mapping[str, Mapping[str, float]], machine: str
) -> Table:
    """Return the table with the results of both versions."""
    table = Table(title=f"examples/s, other version → this one, {machine}")
    for column in (
        "model",
        "training",
        "ratio",
        "evaluation",
        "ratio",
        "making the clients, CPU ms",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in MODELS:
        before, after = other[name], this[name]
        table.add_row(
            name,
            f"{before['train']:,.0f} → {after['train']:,.0f}",
            f"{after['train'] / before['train']:.2f}",
            f"{before['evaluate']:,.0f} → {after['evaluate']:,.0f}",
            f"{after['evaluate'] / before['evaluate']:.2f}",
            f"{1000 * before['making']:.1f} → {1000 * after['making']:.1f}",
        )
    return table


def main() -> None:
    """Measure one version, or both versions alternately."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="folder src of another version")
    parser.add_argument(
        "--turns", type=int, default=3, help="measurements of each version (default: 3)"
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="timed rounds of a measurement (default: 8)"
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="device (default: cpu)"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="only measure the version that Python imports, and print JSON",
    )
    arguments = parser.parse_args()
    if arguments.measure:
        print(
            json.dumps({name: measure(name, arguments.device, arguments.rounds) for name in MODELS})
        )
        return
    others, these = [], []
    for _ in range(arguments.turns):
        others.append(run_version(arguments.other.resolve(), arguments.device, arguments.rounds))
        these.append(run_version(HERE, arguments.device, arguments.rounds))
    other, this = best_of(others), best_of(these)
    machine = (
        torch.cuda.get_device_name()
        if arguments.device == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    Console(width=120).print(table_of(other, this, f"{machine}, torch {torch.__version__}"))
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": machine, "other": other, "this": this}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
