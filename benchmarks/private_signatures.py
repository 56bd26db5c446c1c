"""Measure ARI and accuracy of the method ``private_choice`` with 1,000 clients, at ε = 8 and ε = 2.

Each client has 60 images of MNIST. In each of four clusters, two labels are swapped or all labels
are permuted. FedAvg and the oracle, which has the true clusters, run with the same noise on their
sums. A part of ε is spent on randomized response, the queries about signatures have a noise
multiplier of their own, and the rest of ε is spent on the sums of the rounds.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.
The table is made from this file.

    python benchmarks/private_signatures.py --data-dir DIR --out private.jsonl   # 3 seeds
    python benchmarks/private_signatures.py --out private.jsonl --table          # only the table
    python benchmarks/private_signatures.py --mechanisms    # compare mechanisms on single clients
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import defaultdict
from statistics import mean
from typing import Any

import jsonl
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq

from fedclade.channel import Release, composed_epsilon
from fedclade.config import check_config

CLUSTERS = 4
BEFORE, AFTER = 3, 4
ROUNDS = BEFORE + 1 + AFTER
DELTA = 1e-5
CLIP = 0.5
LEVELS: dict[str, tuple[float, float, float] | None] = {
    "none": None,
    "8": (8.0, 5.6, 7.0),
    "2": (2.0, 1.2, 20.0),
}
"""Levels of privacy: the total ε, the ε of the choice, and the noise multiplier of queries."""
METHODS = ("private_choice", "fedavg", "oracle")
SHIFTS = ("label_swap", "label_permutation")


def noise_for(epsilon: float, choice: float, questions: float) -> float:
    """Return the smallest noise multiplier of the rounds' sums for a total of at most ε."""

    def excess(z: float) -> float:
        updates = [Release(noise_multiplier=z)] * (BEFORE + AFTER)
        rest = [
            *[Release(noise_multiplier=questions)] * 2,
            Release(epsilon=choice, options=CLUSTERS),
        ]
        return composed_epsilon([*updates, *rest], DELTA, sampled=False) - epsilon

    return math.ceil(100 * float(brentq(excess, 2.0, 200.0, xtol=0.005)) + 1) / 100


def run(
    shift: str, level: str, method: str, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run a method, and return its line."""
    began = time.perf_counter()
    options: dict[str, Any] = {}
    if method == "private_choice":
        options = {"clusters": CLUSTERS, "rounds_before": BEFORE, "sketch": 128}
    config: dict[str, Any] = {
        **{"seed": seed, "rounds": ROUNDS, "evaluate_every": ROUNDS, "stream": True},
        "data": {
            **{"name": "mnist", "clients": arguments.clients, "samples_per_client": 60},
            **{"shift": shift, "clusters": CLUSTERS},
        },
        "model": {"name": "mclr"},
        "local": {"epochs": 3, "batch_size": 20, "lr": 0.1},
        "algorithm": {"name": method, **options},
    }
    if (setting := LEVELS[level]) is not None:
        config["privacy"] = {
            **{
                "model": "central",
                "clip_norm": CLIP,
                "delta": DELTA,
                "noise_multiplier": noise_for(*setting),
            },
            **{
                "signature_epsilon": setting[1],
                "signature_noise": setting[2],
                "min_cluster_size": 20,
            },
        }
    checked = check_config(config)
    done = checked.run(checked.federation(arguments.data_dir))
    return {
        **{"shift": shift, "level": level, "method": method, "seed": seed},
        **{"ari": done.summary["clusters"]["ari"], "accuracy": done.summary["accuracy"]["mean"]},
        "epsilon": done.summary.get("privacy", {}).get("epsilon"),
        "noise_multiplier": config.get("privacy", {}).get("noise_multiplier"),
        "seconds": time.perf_counter() - began,
    }


def table(lines: list[dict[str, Any]]) -> Table:
    """Return the table of the runs: the lowest ARI, and mean accuracies."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        found[line["shift"], line["level"], line["method"]].append(line)
    made = Table(box=box.MARKDOWN)
    for column in ("shift", "ε", "z", "lowest ARI", *METHODS, "seeds"):
        made.add_column(column, justify="left" if column == "shift" else "right")
    for shift in SHIFTS:
        for level in LEVELS:
            mine = found[shift, level, "private_choice"]
            if not mine:
                continue
            spent = mine[0]["epsilon"]
            accuracies = [found[shift, level, method] for method in METHODS]
            made.add_row(
                *(
                    shift,
                    "∞" if spent is None else f"{spent:.2f}",
                    f"{mine[0]['noise_multiplier'] or 0:g}",
                ),
                f"{min(each['ari'] for each in mine):.3f}",
                *(
                    f"{100 * mean(each['accuracy'] for each in some):.1f} %" if some else ""
                    for some in accuracies
                ),
                str(len(mine)),
            )
    return made


def mechanisms() -> Table:
    """Return a table of the shares of single clients whose cluster is identified by one release.

    The four clusters are around the corners of a tetrahedron. A client's direction in 3 dimensions
    differs by 15° on average from the corner of its cluster. It releases this direction, by the
    Gaussian mechanism (at δ = 1e-5) or by PrivUnit (Bhowmick et al. 2018), which draws from a cap
    of 30° around the direction with the probability that ε permits; or it releases the nearest
    corner, by randomized response.
    """
    import dp_accounting

    draw = np.random.default_rng(0)
    corners = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) / math.sqrt(3)
    truth = np.arange(100_000) % 4
    v = corners[truth] + 0.19 * draw.standard_normal((len(truth), 3))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    made = Table(box=box.MARKDOWN)
    for column in ("ε", "Gaussian", "PrivUnit", "randomized response"):
        made.add_column(column, justify="right")
    for epsilon in (2.0, 4.0, 5.5, 8.0):
        gaussian = v + 2 * dp_accounting.get_sigma_gaussian(epsilon, DELTA) * draw.standard_normal(
            v.shape
        )
        cap = math.cos(math.radians(30))
        inside = math.exp(epsilon) * (1 - cap) / (1 + cap)
        inside /= 1 + inside
        t = np.where(
            draw.random(len(v)) < inside,
            draw.uniform(cap, 1, len(v)),
            draw.uniform(-1, cap, len(v)),
        )
        beside = np.cross(v, draw.standard_normal(v.shape))
        beside /= np.linalg.norm(beside, axis=1, keepdims=True)
        unit = t[:, None] * v + np.sqrt(1 - t**2)[:, None] * beside
        chosen = (v @ corners.T).argmax(1)
        told = np.where(
            draw.random(len(v)) < CLUSTERS / (math.exp(epsilon) + 3),
            draw.integers(4, size=len(v)),
            chosen,
        )
        shares = [((each @ corners.T).argmax(1) == truth).mean() for each in (gaussian, unit)]
        made.add_row(
            f"{epsilon:g}", *(f"{100 * share:.1f} %" for share in (*shares, (told == truth).mean()))
        )
    return made


def main() -> None:
    parser = jsonl.parser(__doc__, "private_signatures.jsonl")
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="seeds (default: 0 1 2)"
    )
    parser.add_argument(
        "--clients", type=int, default=1000, help="number of clients (default: 1000)"
    )
    parser.add_argument(
        "--shifts",
        nargs="*",
        default=list(SHIFTS),
        choices=SHIFTS,
        help="shifts to run (default: all)",
    )
    parser.add_argument(
        "--levels",
        nargs="*",
        default=list(LEVELS),
        choices=list(LEVELS),
        help="values of ε; none: without privacy (default: all)",
    )
    parser.add_argument(
        "--methods",
        nargs="*",
        default=list(METHODS),
        choices=METHODS,
        help="methods to run (default: all)",
    )
    parser.add_argument(
        "--mechanisms", action="store_true", help="only compare mechanisms on single clients"
    )
    arguments = parser.parse_args()
    if arguments.mechanisms:
        Console(width=100).print(mechanisms())
        return
    os.nice(15)
    named = ("shift", "level", "method", "seed")
    cells = [
        (s, v, m, n)
        for n in arguments.seeds
        for s in arguments.shifts
        for v in arguments.levels
        for m in METHODS
    ]
    for cell in cells:
        if arguments.table or cell[2] not in arguments.methods:
            continue
        if any(tuple(line[name] for name in named) == cell for line in jsonl.read(arguments.out)):
            continue
        jsonl.add(arguments.out, run(*cell, arguments))
    Console(width=120).print(table(jsonl.read(arguments.out)))


if __name__ == "__main__":
    main()
