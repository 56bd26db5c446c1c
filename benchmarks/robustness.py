"""How honest clients fare where some of the others lie: methods by kinds of adversaries by their share.

MNIST, four label swaps, the MLP. The score is the mean test accuracy of the honest clients, less that of the same
clients in a run in which everybody is honest. Every run is one line of a JSON file, so that an interrupted call goes on
where it stopped.

    python benchmarks/robustness.py --data-dir DIR --out robustness.jsonl --seeds 3
    python benchmarks/robustness.py --out robustness.jsonl --table
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import torch
from rich.console import Console

from fedclade import CFL, IFCA, FedAvg, FedGroup, FLHC, LocalTraining, Oracle, ReplicatedCFL, load_federation, simulate
from fedclade.algorithms import Algorithm
from fedclade.channel import Adversary
from fedclade.core import Aggregation
from fedclade.data import Federation
from fedclade.report.comparison_files import markdown_table
from fedclade.runs import Run
from fedclade.tasks import mean_and_interval

Line = dict[str, Any]

LOCAL, ROUNDS, CLUSTERS = LocalTraining(epochs=3, batch_size=20, lr=0.1), 30, 4

METHODS: Mapping[str, tuple[type[Algorithm], Mapping[str, Any], Aggregation]] = {
    "rcfl": (ReplicatedCFL, {}, Aggregation()),
    "rcfl, geometric median": (ReplicatedCFL, {}, Aggregation(rule="geometric_median")),
    "cfl": (CFL, {"eps1": "auto", "eps2": 0.75}, Aggregation()),
    "fl_hc": (FLHC, {"rounds_before": 5, "metric": "l2", "linkage": "ward"}, Aggregation()),
    "fedgroup": (FedGroup, {"groups": CLUSTERS, "pretrain_scale": 1}, Aggregation()),
    "ifca": (IFCA, {"clusters": CLUSTERS}, Aggregation()),
    "oracle": (Oracle, {}, Aggregation()),
    "oracle, geometric median": (Oracle, {}, Aggregation(rule="geometric_median")),
    "fedavg": (FedAvg, {}, Aggregation()),
    "fedavg, no limits": (FedAvg, {}, Aggregation(largest_weight=float("inf"), largest_norm=float("inf"), clip_above=float("inf"))),
    "fedavg, median": (FedAvg, {}, Aggregation(rule="median")),
}
"""By name: the algorithm, its options, and how updates are aggregated."""

KINDS: Mapping[str, Mapping[str, Any]] = {
    "label flip": {"kind": "label_flip"},
    "sign flip": {"kind": "sign_flip"},
    "scaled, 10": {"kind": "scaled"},
    "scaled, 1,000": {"kind": "scaled", "factor": 1000.0},
    "scaled, -5": {"kind": "scaled", "factor": -5.0},
    "gaussian": {"kind": "gaussian"},
    "alie": {"kind": "alie"},
    "ipm": {"kind": "ipm"},
    "minmax": {"kind": "minmax"},
    "minsum": {"kind": "minsum"},
    "backdoor": {"kind": "backdoor"},
    "false size": {"kind": "false_size"},
    "copy": {"kind": "copy"},
    "sybils": {"kind": "sybil"},
    "sleeping sign flip": {"kind": "sign_flip", "sleeper": True},
    "sleeping ipm": {"kind": "ipm", "sleeper": True},
    "size and sign": {"kind": "sign_flip", "size": 10**9},
}


def federation_of(clients: int, seed: int, data_dir: Path | None) -> Federation:
    """Return clients with 300 images each."""
    settings = {"samples_per_client": 300, "test_samples": 100 * clients, "shift": "label_swap", "clusters": CLUSTERS}
    return load_federation("mnist", clients=clients, **settings, seed=seed, data_dir=data_dir)


def run_of(method: str, federation: Federation, seed: int, adversary: Adversary | None) -> Run:
    """Run a method, with adversaries or without."""
    kind, options, aggregate = METHODS[method]
    truth = {"true_clusters": federation.true_clusters} if kind is Oracle else {}
    settings = {"rounds": ROUNDS, "evaluate_every": ROUNDS, "seed": seed, "engine": "stacked", "progress": False}
    return simulate(
        kind(**options, **truth), "mlp", federation, local=LOCAL, aggregate=aggregate, adversary=adversary, **settings
    )


def scores_of(run: Run) -> dict[int, float]:
    """Return the accuracy of each client after the last round."""
    return {row["client"]: row["accuracy"] for row in run.client_rows if row["round"] == ROUNDS}


def line_of(run: Run, honest: Mapping[int, float]) -> Line:
    """Return what came of a run, beside the scores where everybody is honest."""
    told, scores = run.summary["adversary"], scores_of(run)
    there = [client for client in scores if client not in told["ids"]]
    now, before = mean(scores[client] for client in there), mean(honest[client] for client in there)
    events = [event for event in run.events if event["kind"] in ("left_out", "limited")]
    return {
        "honest": round(100 * now, 2),
        "without": round(100 * before, 2),
        "ari_honest": told["ari_honest"],
        "success": told["attack_success"],
        "clusters": told["clusters"],
        "limited": len(events),
    }


def main() -> None:
    """Run what is missing, and print the table."""
    parser = jsonl.parser(__doc__, "robustness.jsonl")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[20])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=200)
    done = {(e["method"], e["kind"], e["share"], e["clients"], e["seed"]) for e in jsonl.read(given.out)}
    jobs = [
        (seed, clients, method)
        for seed in range(given.seeds if not given.table else 0)
        for clients in given.clients
        for method in given.methods
    ]
    for seed, clients, method in jobs:
        missing = [
            (kind, share)
            for share in given.shares
            for kind in given.kinds
            if (method, kind, share, clients, seed) not in done
        ]
        if not missing:
            continue
        federation = federation_of(clients, seed, given.data_dir)
        honest = scores_of(run_of(method, federation, seed, None))
        for kind, share in missing:
            head = {"method": method, "kind": kind, "share": share, "clients": clients, "seed": seed}
            run = run_of(method, federation, seed, Adversary(share=share, **KINDS[kind]))
            line = {**head, **line_of(run, honest)}
            jsonl.add(given.out, line)
            console.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    main()
