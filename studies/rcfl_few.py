"""Measure replicated clustering (rcfl) in difficult cases.

The cases have few clients, small clusters, few examples, or clusters that appear late in a run.
rcfl is compared with FedAvg, with the oracle, and with CFL that splits by the same test
(``criterion = "replicated"``).

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.
The table is made from this file.

    python studies/rcfl_few.py --data-dir DIR --out few.jsonl            # 10 seeds
    python studies/rcfl_few.py --out few.jsonl --table                   # only print the table
"""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import torch
from rcfl import LOCAL, as_table, read
from rich.console import Console
from rich.table import Table
from torch import nn

from fedclade import CFL, FedAvg, Oracle, ReplicatedCFL, load_federation, simulate
from fedclade.algorithms import Algorithm
from fedclade.core.queries import RoundPlan
from fedclade.data import Federation
from fedclade.runs.backend import Backend
from fedclade.tasks.metrics import cluster_scores, mean_and_interval

Line = dict[str, Any]

METHODS = ("rcfl", "fedavg", "oracle", "cfl")


@dataclass(frozen=True)
class Case:
    """Sizes of the clusters, the shift by which they differ, and settings of the run."""

    shift: str
    sizes: tuple[int, ...]
    images: int = 300
    rounds: int = 20
    model: str = "mlp"
    begins: int = 1  # the round in which the clusters appear
    alpha: float = 0.0  # above 0: no clusters; each client's label shares are from Dirichlet(alpha)

    @property
    def clients(self) -> int:
        """Number of clients."""
        return sum(self.sizes)


def lenet(seed: int) -> nn.Module:
    """Return LeNet-5 for images of 28 x 28 pixels."""
    torch.manual_seed(seed)
    maps = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    dense = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*maps, nn.Flatten(), *dense)


CASES: Mapping[str, Case] = {
    "4 clients, 2 clusters, permutation": Case("label_permutation", (2, 2)),
    "6 clients, 2 clusters, permutation": Case("label_permutation", (3, 3)),
    "8 clients, 2 clusters, permutation": Case("label_permutation", (4, 4)),
    "10 clients, 2 clusters, permutation": Case("label_permutation", (5, 5), rounds=10),
    "10 clients, 2 clusters, permutation, 40 rounds": Case("label_permutation", (5, 5), rounds=40),
    "8 clients, 4 clusters, permutation": Case("label_permutation", (2, 2, 2, 2)),
    "1 of 20 differs, swap": Case("label_swap", (19, 1)),
    "2 of 20 differ, permutation": Case("label_permutation", (18, 2)),
    "2 of 20 differ, swap": Case("label_swap", (18, 2)),
    "2/2/2/14, permutation": Case("label_permutation", (14, 2, 2, 2)),
    "2/2/2/14, swap": Case("label_swap", (14, 2, 2, 2)),
    "20 images a client, rotation": Case("rotation", (5, 5, 5, 5), images=20, rounds=40),
    "clusters appear in round 34": Case("label_permutation", (5, 5, 5, 5), rounds=60, begins=34),
    "clusters appear in round 34, 6 clients": Case(
        "label_permutation", (3, 3), rounds=60, begins=34
    ),
    "LeNet, 10 clients, 4 swaps": Case("label_swap", (3, 3, 2, 2), rounds=10, model="lenet"),
    "Dirichlet(0.1), 20 clients": Case("", (20,), rounds=40, alpha=0.1),
    "Dirichlet(0.5), 20 clients": Case("", (20,), rounds=40, alpha=0.5),
    "Dirichlet(5), 20 clients": Case("", (20,), rounds=40, alpha=5.0),
    "iid, 4 clients": Case("", (4,), rounds=20),
    "iid, 10 clients": Case("", (10,), rounds=10),
    "iid, 20 clients": Case("", (20,), rounds=20),
}


def federation_of(case: Case, seed: int, data_dir: Path | None) -> Federation:
    """Return a federation with MNIST images, and with the clients and clusters of the case."""
    settings: dict[str, Any] = {
        "clients": case.clients,
        "samples_per_client": case.images,
        "test_samples": 500,
    }
    settings |= {"seed": seed, "data_dir": data_dir}
    if case.alpha:
        spread: dict[str, Any] = {
            "partition": "dirichlet",
            "partition_arguments": {"alpha": case.alpha},
        }
        return load_federation("mnist", **settings, **spread)
    if not case.shift:
        return load_federation("mnist", **settings)
    pool = load_federation("mnist", shift=case.shift, clusters=len(case.sizes), **settings)
    if len(set(case.sizes)) == 1:
        return pool
    assert pool.true_clusters is not None  # a shift makes clusters
    views = {pool.true_clusters[client.id]: client.label_map for client in pool.clients}
    wanted = [cluster for cluster, size in enumerate(case.sizes) for _ in range(size)]
    truth = {client.id: cluster for client, cluster in zip(pool.clients, wanted, strict=True)}
    clients = tuple(replace(client, label_map=views[truth[client.id]]) for client in pool.clients)
    return replace(pool, clients=clients, true_clusters=truth)


def run(case: Case, method: str, seed: int, data_dir: Path | None) -> Line:
    """Run a method in a case."""
    federation = federation_of(case, seed, data_dir)
    make: dict[str, Algorithm] = {
        "rcfl": ReplicatedCFL(check_every=1 if case.begins > 1 else 7),
        "fedavg": FedAvg(),
        "oracle": Oracle(federation.true_clusters or {}),
        "cfl": CFL(criterion="replicated"),
    }
    if case.begins > 1:
        return _appearing(case, make[method], seed, federation)
    lenets = case.model == "lenet"
    done = simulate(
        make[method],
        lenet if lenets else case.model,
        federation,
        local=LOCAL,
        rounds=case.rounds,
        seed=seed,
        evaluate_every=case.rounds,
        engine="loop" if lenets else "stacked",
    )
    return {
        "accuracy": done.summary["accuracy"]["mean"],
        "ari": done.summary["clusters"]["ari"],
        "ari_3": done.metric_rows[2]["ari"],
        "clusters": done.summary["clusters"]["found"],
    }


def _appearing(case: Case, algorithm: Algorithm, seed: int, federation: Federation) -> Line:
    """Run a case in which clusters appear during the run.

    Until then all clients have one distribution, and the oracle trains one model for all clients.
    """
    truth = federation.true_clusters
    assert truth is not None  # a shift makes clusters
    alike = tuple(replace(client, label_map=None) for client in federation.clients)
    first: Algorithm = FedAvg() if isinstance(algorithm, Oracle) else algorithm
    state: Any = None
    aris: list[float] = []
    for method, clients, rounds in (
        (first, alike, range(1, case.begins)),
        (algorithm, federation.clients, range(case.begins, case.rounds + 1)),
    ):
        there = replace(federation, clients=clients)
        world = Backend.simulated_by(there, case.model, method, seed=seed, engine="stacked")
        if state is None:
            state = method.init(world.initial, world.clients)
        elif method is not first:
            state = method.init(state.tree.nodes[0].params, world.clients)
        for number in rounds:
            state, _ = method.step(
                state, world.clients.ids, world.clients, RoundPlan(number, LOCAL, seed)
            )
            aris.append(cluster_scores(state.tree.leaf_of, truth)["ari"] or 0.0)
        models, rows = state.tree.models(
            [state.tree.leaf_of[client] for client in world.clients.ids]
        )
        scores = world.clients.evaluate(world.clients.ids, models, rows, "test").scores
    found = next((number for number, ari in enumerate(aris, 1) if ari == 1), None)
    clusters = sum(bool(leaf.members) for leaf in state.tree.leaves)
    accuracy = float(scores[:, 0].mean())
    return {
        "accuracy": accuracy,
        "ari": aris[-1],
        "ari_3": aris[2],
        "found": found,
        "clusters": clusters,
    }


def work(job: tuple[str, str, int, Path | None, Path]) -> str:
    """Run one method in one case with one seed, and write its line."""
    name, method, seed, data_dir, out = job
    torch.set_num_threads(1)
    line = {
        "part": "few",
        "task": name,
        "method": method,
        "seed": seed,
        **run(CASES[name], method, seed, data_dir),
    }
    jsonl.add(out, line)
    return f"{name}: {method}, seed {seed}"


def table(lines: Sequence[Line]) -> Table:
    """Return a table with a row for each case.

    The columns contain the accuracies, and the shares of runs in which all clusters are right at
    the end and after round 3.
    """
    by_case: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        by_case[line["task"]][line["method"]].append(line)
    rows = [(name, *_cells(by_case[name])) for name in CASES if name in by_case]
    columns = (
        "case",
        "runs",
        "rcfl",
        "ARI",
        "right",
        "right after round 3",
        "FedAvg",
        "oracle",
        "difference",
        "CFL by the test",
        "CFL right",
    )
    return as_table("few clients, small clusters, few examples", columns, rows)


def _cells(found: Mapping[str, list[Line]]) -> Iterator[str]:
    rcfl = found["rcfl"]
    yield str(len(rcfl))
    yield _accuracy(rcfl)
    knows = bool(rcfl) and rcfl[0]["ari"] is not None
    yield f"{mean(line['ari'] for line in rcfl):.2f}" if knows else ""
    yield _right(rcfl)
    yield f"{mean(line['ari_3'] == 1 for line in rcfl):.0%}" if knows else ""
    yield _accuracy(found["fedavg"])
    yield _accuracy(found["oracle"])
    other = {line["seed"]: line["accuracy"] for line in found["oracle"] or found["fedavg"]}
    ahead = [
        100 * (line["accuracy"] - other[line["seed"]]) for line in rcfl if line["seed"] in other
    ]
    middle, interval = mean_and_interval(ahead) if ahead else (0.0, None)
    yield f"{middle:+.1f}" + (f" ± {interval:.1f}" if interval is not None else "")
    yield _accuracy(found["cfl"])
    yield _right(found["cfl"])


def _right(lines: Sequence[Line]) -> str:
    """Return the share of runs with exactly the true clusters at the end.

    In cases without clusters, it is the share of runs with one cluster; with label shares from a
    Dirichlet distribution, it is empty.
    """
    if not lines or CASES[lines[0]["task"]].alpha:
        return ""
    return f"{mean(line['ari'] == 1 if line['ari'] is not None else line['clusters'] == 1 for line in lines):.0%}"


def _accuracy(lines: Sequence[Line]) -> str:
    return f"{100 * mean(line['accuracy'] for line in lines):.1f}" if lines else ""


def main() -> None:
    """Run missing cases, and print the table."""
    parser = jsonl.parser(__doc__, "few.jsonl")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (default: 10)")
    parser.add_argument("--only", default="", help="first letters of the cases to run")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=METHODS,
        choices=METHODS,
        help="methods to run (default: all)",
    )
    parser.add_argument("--processes", type=int, default=1, help="number of processes (default: 1)")
    given = parser.parse_args()
    console = Console(width=200)
    if not given.table:
        done = {(line["task"], line["method"], line["seed"]) for line in read(given.out)}
        jobs = [
            (name, method, seed, given.data_dir, given.out)
            for seed in range(given.seeds)
            for name in CASES
            if name.startswith(given.only)
            for method in given.methods
            if (name, method, seed) not in done
            and not (method == "oracle" and not CASES[name].shift)
        ]
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            for finished in pool.imap_unordered(work, jobs):
                console.print(finished)
    console.print(table(read(given.out)))


if __name__ == "__main__":
    main()
