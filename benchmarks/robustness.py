"""Measure how much accuracy adversaries cost the honest clients, by method, kind and share.

The data are MNIST, with clients of four label swaps or of one distribution, and the model is an
MLP. The score is the mean test accuracy of the honest clients minus that of the same clients in a
run without adversaries.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python benchmarks/robustness.py --data-dir DIR --out robustness.jsonl --seeds 3
    python benchmarks/robustness.py --data-dir DIR --out robustness.jsonl --shares 0.1 0.4 --methods rcfl fedavg
    python benchmarks/robustness.py --data-dir DIR --out robustness.jsonl --task "one distribution" --methods rcfl
    python benchmarks/robustness.py --out robustness.jsonl --table
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import torch
from rich.console import Console

from fedclade import (
    CFL,
    FLHC,
    IFCA,
    FedAvg,
    FedGroup,
    LocalTraining,
    Oracle,
    ReplicatedCFL,
    load_federation,
    simulate,
)
from fedclade.algorithms import Algorithm
from fedclade.channel import Adversary
from fedclade.core import Aggregation
from fedclade.data import Federation
from fedclade.report.comparison_files import markdown_table
from fedclade.runs import Run

Line = dict[str, Any]

LOCAL, ROUNDS, CLUSTERS = LocalTraining(epochs=3, batch_size=20, lr=0.1), 30, 4

TASKS: Mapping[str, Mapping[str, Any]] = {
    "swaps": {"shift": "label_swap", "clusters": CLUSTERS},
    "one distribution": {},
}
NO_LIMITS = Aggregation(largest_weight=math.inf, largest_norm=math.inf, clip_above=math.inf)

METHODS: Mapping[str, tuple[type[Algorithm], Mapping[str, Any], Aggregation]] = {
    "rcfl": (ReplicatedCFL, {}, Aggregation()),
    "rcfl, geometric median": (ReplicatedCFL, {}, Aggregation(rule="geometric_median")),
    "rcfl, clipped at 5": (ReplicatedCFL, {}, Aggregation(clip_above=5.0)),
    "rcfl, clipped geometric median": (
        ReplicatedCFL,
        {},
        Aggregation(rule="geometric_median", clip_above=2.0),
    ),
    "cfl": (CFL, {"eps1": "auto", "eps2": 0.75}, Aggregation()),
    "fl_hc": (FLHC, {"rounds_before": 5, "metric": "l2", "linkage": "ward"}, Aggregation()),
    "fedgroup": (FedGroup, {"groups": CLUSTERS, "pretrain_scale": 1}, Aggregation()),
    "ifca": (IFCA, {"clusters": CLUSTERS}, Aggregation()),
    "oracle": (Oracle, {}, Aggregation()),
    "oracle, geometric median": (Oracle, {}, Aggregation(rule="geometric_median")),
    "fedavg": (FedAvg, {}, Aggregation()),
    "fedavg, no limits": (FedAvg, {}, NO_LIMITS),
    "fedavg, median": (FedAvg, {}, Aggregation(rule="median")),
}
"""Methods: the algorithm, its options, and the aggregation of updates."""

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
    "evasive sign flip": {"kind": "sign_flip", "evasive": True},
    "evasive ipm": {"kind": "ipm", "evasive": True},
    "evasive, scaled -5": {"kind": "scaled", "factor": -5.0, "evasive": True},
    "size and sign": {"kind": "sign_flip", "size": 10**9},
}


def federation_of(task: str, clients: int, seed: int, data_dir: Path | None) -> Federation:
    """Return the federation of a task, with 300 images for each client."""
    settings = {"samples_per_client": 300, "test_samples": 100 * clients, **TASKS[task]}
    return load_federation("mnist", clients=clients, **settings, seed=seed, data_dir=data_dir)


def run_of(method: str, federation: Federation, seed: int, adversary: Adversary | None) -> Run:
    """Run a method, with adversaries or without them."""
    kind, options, aggregate = METHODS[method]
    truth = {"true_clusters": federation.true_clusters} if kind is Oracle else {}
    settings = {
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "seed": seed,
        "engine": "stacked",
        "progress": False,
    }
    return simulate(
        kind(**options, **truth),
        "mlp",
        federation,
        local=LOCAL,
        aggregate=aggregate,
        adversary=adversary,
        **settings,
    )


def scores_of(run: Run) -> dict[int, float]:
    """Return the accuracy of each client after the last round."""
    return {row["client"]: row["accuracy"] for row in run.client_rows if row["round"] == ROUNDS}


def line_of(run: Run, honest: Mapping[int, float]) -> Line:
    """Return the results of a run with adversaries.

    ``honest`` has the accuracy of each client in a run without adversaries.
    """
    told, scores = run.summary["adversary"], scores_of(run)
    there = [client for client in scores if client not in told["ids"]]
    now, before = mean(scores[client] for client in there), mean(honest[client] for client in there)
    return {
        "honest": round(100 * now, 2),
        "without": round(100 * before, 2),
        "ari_honest": None if told["ari_honest"] is None else round(told["ari_honest"], 3),
        "success": None if told["attack_success"] is None else round(told["attack_success"], 3),
        "honest_clusters": len({run.tree.leaf_of[client] for client in there}),
        "beside_honest": told["clusters"]["adversaries_with_honest"],
        "adversaries": len(told["ids"]),
    }


def table_of(lines: Sequence[Line], task: str, share: float, clients: int) -> str:
    """Return a Markdown table of kinds of adversaries by methods, with the results of a cell."""
    cells: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        if (line["task"], line["share"], line["clients"]) == (task, share, clients):
            cells[line["kind"], line["method"]].append(line)
    methods = [method for method in METHODS if any(of == method for _, of in cells)]
    rows = [
        [kind, *(cell_of(cells[kind, m]) for m in methods)]
        for kind in KINDS
        if any(k == kind for k, _ in cells)
    ]
    if not rows:
        return ""
    seeds = max(len(each) for each in cells.values())
    title = f"{task}, {clients} clients, share {share}, up to {seeds} seeds"
    return f"{title}\n\n{markdown_table(['kind', *methods], rows)}\n"


def cell_of(lines: Sequence[Line]) -> str:
    """Return the text of a cell.

    The text has the mean change of the honest clients' accuracy in points, with that of the worst
    seed in brackets; the lowest ARI among the honest clients, if it is below 1; and the success of
    a backdoor.
    """
    if not lines:
        return ""
    lost = [line["honest"] - line["without"] for line in lines]
    text = f"{mean(lost):+.1f}" + (f" ({min(lost):+.1f})" if len(lost) > 1 else "")
    aris = [line["ari_honest"] for line in lines if line["ari_honest"] is not None]
    clusters = not lines[0]["method"].startswith("fedavg")
    text += f" · {min(aris):.2f}" if clusters and aris and min(aris) < 0.995 else ""
    success = [line["success"] for line in lines if line["success"] is not None]
    return (text + (f" · {100 * mean(success):.0f} %" if success else "")).replace("-", "−")


def main() -> None:
    """Make missing runs, and print the tables."""
    parser = jsonl.parser(__doc__, "robustness.jsonl")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--task", default="swaps", choices=TASKS, help="data of the clients (default: swaps)"
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[20], help="numbers of clients (default: 20)"
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.2],
        help="shares of adversaries (default: 0.2)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        choices=METHODS,
        help="methods to run (default: all)",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=list(KINDS),
        choices=KINDS,
        help="kinds of adversaries (default: all)",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=250)
    done = {name_of(line) for line in jsonl.read(given.out)}
    seeds = range(0 if given.table else given.seeds)
    for seed, clients, method in product(seeds, given.clients, given.methods):
        heads = [
            {
                "task": given.task,
                "method": method,
                "kind": kind,
                "share": share,
                "clients": clients,
                "seed": seed,
            }
            for share, kind in product(given.shares, given.kinds)
        ]
        missing = [head for head in heads if name_of(head) not in done]
        if not missing:
            continue
        federation = federation_of(given.task, clients, seed, given.data_dir)
        honest = scores_of(run_of(method, federation, seed, None))
        for head in missing:
            adversary = Adversary(share=head["share"], **KINDS[head["kind"]])
            line = {**head, **line_of(run_of(method, federation, seed, adversary), honest)}
            jsonl.add(given.out, line)
            console.print(line, markup=False, highlight=False)
    lines = jsonl.read(given.out)
    for task, clients, share in sorted(
        {(line["task"], line["clients"], line["share"]) for line in lines}
    ):
        console.print(table_of(lines, task, share, clients), markup=False, highlight=False)


def name_of(line: Line) -> tuple[Any, ...]:
    """Return the values that identify a run."""
    return tuple(line[key] for key in ("task", "method", "kind", "share", "clients", "seed"))


if __name__ == "__main__":
    main()
