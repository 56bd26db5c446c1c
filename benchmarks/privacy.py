"""Measure ε, ARI and accuracy of clustered methods with client-side differential privacy.

The data are MNIST with four label swaps, and the model is linear with 7,850 parameters. So that
only the effect of noise is measured, each method knows the number of clusters: FL+HC and FedGroup
directly, and CFL by the rounds in which it may split. The criteria of CFL depend on norms, to which
noise of norm zC√D is added. Therefore the given rounds replace ε₁, and √(ε₂² + z²C²D) replaces ε₂.
The oracle, which has the true clusters, shows how noise affects the models alone.

    python benchmarks/privacy.py --data-dir DIR
    python benchmarks/privacy.py --data-dir DIR --clients 200 --samples 200 --rounds 8 --rounds-before 1
        --noise 0.03 0.1 0.3 --methods fl_hc fedgroup oracle
"""

from __future__ import annotations

import argparse
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from fedclade import Run
from fedclade.config import check_config

PARAMETERS = 7850
EPS2 = 1.25
NOISE = (None, 0.0, 0.01, 0.02, 0.03, 0.05, 0.1)
METHODS = ("cfl", "fl_hc", "fedgroup", "fedavg", "oracle")

Options = dict[str, dict[str, Any]]


def options(noise: float, arguments: argparse.Namespace) -> Options:
    """Return each method's settings for a noise multiplier."""
    eps2 = math.hypot(EPS2, noise * arguments.clip * math.sqrt(PARAMETERS))
    return {
        "cfl": {"split_rounds": [10, 14, 18], "eps2": eps2},
        "fl_hc": {"rounds_before": arguments.rounds_before, "n_clusters": 4},
        "fedgroup": {"groups": 4, "pretrain_scale": arguments.clients // 4},
        "fedavg": {},
        "oracle": {},
    }


def run(method: str, noise: float | None, seed: int, arguments: argparse.Namespace) -> Run:
    """Run a method with a noise multiplier, or without privacy."""
    config: dict[str, Any] = {
        **{"seed": seed, "rounds": arguments.rounds, "evaluate_every": arguments.rounds},
        "data": {
            **{
                "name": "mnist",
                "clients": arguments.clients,
                "samples_per_client": arguments.samples,
            },
            **{"shift": "label_swap", "clusters": 4},
        },
        "model": {"name": "mclr"},
        "local": {"epochs": 3, "batch_size": 20, "lr": 0.1},
        "algorithm": {"name": method, **options(noise or 0.0, arguments)[method]},
    }
    if noise is not None:
        config["privacy"] = {"clip_norm": arguments.clip, "noise_multiplier": noise}
    checked = check_config(config)
    return checked.run(checked.federation(arguments.data_dir))


def level(text: str) -> float | None:
    """Return a noise multiplier, or None for no privacy at all."""
    return None if text == "off" else float(text)


def rows(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for noise in arguments.noise:
        for method in arguments.methods:
            runs = [run(method, noise, seed, arguments) for seed in range(arguments.seeds)]
            spent = runs[0].summary.get("privacy", {}).get("epsilon")
            aris = [each.summary["clusters"]["ari"] for each in runs]
            accuracies = [each.summary["accuracy"]["mean"] for each in runs]
            yield [
                "off" if noise is None else f"{noise:g}",
                "∞" if spent is None else f"{spent:,.0f}",
                method,
                " ".join(f"{ari:.2f}" for ari in aris),
                f"{100 * mean(accuracies):.1f}",
            ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--clients", type=int, default=20, help="number of clients (default: 20)")
    parser.add_argument(
        "--samples", type=int, default=300, help="images of each client (default: 300)"
    )
    parser.add_argument("--rounds", type=int, default=24, help="number of rounds (default: 24)")
    parser.add_argument(
        "--rounds-before",
        type=int,
        default=2,
        help="rounds of FL+HC before it clusters (default: 2)",
    )
    parser.add_argument(
        "--clip", type=float, default=2.0, metavar="C", help="clipping norm (default: 2)"
    )
    parser.add_argument(
        "--noise",
        type=level,
        nargs="*",
        default=NOISE,
        metavar="z",
        help="noise multipliers; off: no noise and no clipping",
    )
    parser.add_argument("--methods", nargs="*", default=METHODS, help="methods to run")
    arguments = parser.parse_args()

    table = Table(box=box.MARKDOWN)
    for column in ("z", "ε at δ = 1e-5", "method", "ARI by seed", "accuracy, %"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows(arguments):
        table.add_row(*row)
    console = Console(width=110)
    console.print(
        f"{arguments.clients} clients × {arguments.samples}, {arguments.rounds} rounds, C = {arguments.clip:g}"
    )
    console.print(table)
    console.print(
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
