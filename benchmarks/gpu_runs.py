"""Whole runs for ``benchmarks/gpu.sh``: rounds beside pfl-research, and a run of CFL.

    python benchmarks/gpu_runs.py peers peers.md --device cuda
    python benchmarks/gpu_runs.py cfl run.md --device cuda

Each writes a table in Markdown. The rounds are those of ``benchmarks/peers``, on random images, and
each is a process. pfl-research is measured with one process and with several processes on the GPU,
if it is installed.
"""

from __future__ import annotations

import fedclade  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

PEERS = Path(__file__).resolve().parent / "peers"
TASKS = {"mlp-20": 20, "mlp-100": 100, "cnn-10": 10}
"""Tasks of ``benchmarks/peers``, with their numbers of clients."""

WAYS = {"fedclade": ("plain module",), "pfl": ("1 process", "4 processes")}
"""Ways to run a simulator, by the name of its package."""

SECONDS = {"cuda": 60, "cpu": 180}
"""Time after which a run counts as failed, by device."""


def write_images(folder: Path) -> None:
    """Write random images and labels in the form in which ``benchmarks/peers`` reads MNIST."""
    draw = np.random.default_rng(0)
    for name, n in (("", (max(TASKS.values()), 300)), ("test_", (500,))):
        images = draw.integers(256, size=(*n, 1, 28, 28), dtype=np.uint8)
        np.save(folder / f"{name}x.npy", images)
        np.save(folder / f"{name}y.npy", draw.integers(10, size=n, dtype=np.int64))


def seconds_per_round(peer: str, task: str, way: str, data: Path, device: str) -> float | None:
    """Return the median time of a round of a simulator; None if the run fails."""
    lines = data / "lines.jsonl"
    lines.unlink(missing_ok=True)
    command = [sys.executable, str(PEERS / peer / "train.py"), peer, task, way, str(lines)]
    paths = [str(PEERS / "shared"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    settings = {
        "PEERS_DATA": str(data),
        "PEERS_DEVICE": device,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    try:
        done = subprocess.run(
            command, env=os.environ | settings, timeout=SECONDS[device], check=False
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode or not lines.exists():
        return None
    return median(json.loads(lines.read_text())["seconds"])


def peers_table(device: str, tasks: Sequence[str]) -> str:
    """Return a table with the seconds of a round in fedclade and in pfl-research."""
    lines = [
        "**Seconds of a round of federated averaging, median**",
        "",
        "| task | simulator | way | seconds | time / fedclade's |",
        "|:--|:--|:--|--:|--:|",
    ]
    peers = [peer for peer in WAYS if find_spec(peer) is not None]
    ways = [(peer, way) for peer in peers for way in WAYS[peer]]
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        for task in tasks:
            base: float | None = None
            for peer, way in ways:
                seconds = seconds_per_round(peer, task, way, Path(folder), device)
                if peer == "fedclade":
                    base = seconds
                cells = "failed | –"
                if seconds is not None:
                    ratio = f"{seconds / base:.1f}" if base else "–"
                    cells = f"{seconds:.4f} | {ratio}"
                lines.append(f"| {task} | {peer} | {way} | {cells} |")
    if "pfl" not in peers:
        lines += ["", "pfl-research is not installed, so it was not measured."]
    return "\n".join(lines) + "\n"


def cfl_table(device: str, rounds: int) -> str:
    """Run CFL on handwritten digits of 20 clients in four groups, and return a table."""
    federation = fedclade.load_federation(
        "digits", clients=20, shift="label_swap", clusters=4, seed=0
    )
    start = perf_counter()
    run = fedclade.simulate(
        fedclade.CFL(eps1=0.2, eps2=0.5),
        "mlp",
        federation,
        rounds=rounds,
        device=device,
        local=fedclade.LocalTraining(epochs=3, batch_size=20, lr=0.1),
        references=False,
    )
    seconds = perf_counter() - start
    summary = run.summary
    engine = summary.get("engine_fallback", summary["engine"])
    clusters = summary["clusters"]
    return "\n".join(
        [
            "**A whole run of CFL: digits, 20 clients, four label swaps**",
            "",
            "| rounds | seconds | training | server | clusters | ARI | mean accuracy | engine |",
            "|--:|--:|--:|--:|--:|--:|--:|:--|",
            f"| {summary['rounds']} | {seconds:.1f} | {summary['seconds']['train']:.1f} | "
            f"{summary['seconds']['server']:.1f} | {clusters['found']} | {clusters['ari']:.2f} | "
            f"{summary['accuracy']['mean']:.3f} | {engine} |",
            "",
        ]
    )


def machine(device: str) -> str:
    """Return a line with the device, versions and date."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU (a trial of the script)"
    cuda = f", CUDA {torch.version.cuda}" if device == "cuda" else ""
    return (
        f"{name}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}{cuda}, fedclade {fedclade.__version__}, {date.today().isoformat()}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("peers", "cfl", "machine"), help="part to run")
    parser.add_argument("out", type=Path, help="file for the table")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="device")
    parser.add_argument("--quick", action="store_true", help="one task, or four rounds")
    arguments = parser.parse_args()
    if arguments.part == "peers":
        table = peers_table(arguments.device, [*TASKS][: 1 if arguments.quick else None])
    elif arguments.part == "cfl":
        table = cfl_table(arguments.device, 4 if arguments.quick else 40)
    else:
        table = machine(arguments.device)
    arguments.out.write_text(table)
    if arguments.part != "machine":
        print(table)


if __name__ == "__main__":
    main()
