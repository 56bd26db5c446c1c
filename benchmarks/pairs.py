"""Measure clustering of so many clients that a matrix of all pairs would not fit into memory.

    python benchmarks/pairs.py            # bi-partitions of 1,000, 10,000 and 100,000 clients
    python benchmarks/pairs.py sample     # other linkages of 10,000 clients, and of samples of them
    python benchmarks/pairs.py rules      # rules by which clients outside of a sample join clusters

The first command measures time and memory of the bi-partition by a spanning tree. Up to 10,000
clients, it also uses a matrix of all pairs, and compares all merges with those of SciPy. The second
command compares clusters of a sample, which the other clients join, with clusters of all clients.
The third does so for several rules, with 4,000 clients.

Signatures are synthetic: clusters of unequal sizes, each with a direction of its own, plus noise
that is twice as long (``clear``) or five times as long (``noisy``). Each bi-partition runs in a
separate process; its memory is that of the whole process, with the signatures, torch and SciPy.
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.cluster.hierarchy import linkage
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import squareform
from sklearn.metrics import adjusted_rand_score, confusion_matrix
from torch import Tensor

from fedclade.clustering.linkage import agglomerate, cut
from fedclade.clustering.sampling import assign_to_nearest_mean
from fedclade.clustering.similarity import compute_cosines, compute_distances, cosine_similarity
from fedclade.clustering.spanning_tree import (
    find_bipartition_by_tree,
    find_optimal_bipartition,
    single_linkage,
)

SHARES = (0.4, 0.3, 0.2, 0.1)
"""Share of the clients in each cluster."""

NOISE = {"clear": 2.0, "noisy": 5.0}

LINKAGES = (
    ("l2", "complete"),
    ("l2", "average"),
    ("l2", "ward"),
    ("cosine", "complete"),
    ("cosine", "average"),
)


def signatures_of(clients: int, size: int, noise: float) -> tuple[Tensor, np.ndarray]:
    """Draw signatures ``[n, R]``; return them with the true cluster of each."""
    truth = np.random.default_rng(0).choice(len(SHARES), clients, p=SHARES)
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(len(SHARES), size, generator=draw)
    rows = torch.randn(clients, size, generator=draw).mul_(noise)
    for start in range(0, clients, 1000):
        rows[start : start + 1000] += centres[torch.from_numpy(truth[start : start + 1000])]
    return rows, truth


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def measure(clients: int, size: int, threads: int, way: str) -> dict[str, Any]:
    """Find the bi-partition by a spanning tree or by a matrix; return time, memory and ARI."""
    torch.set_num_threads(threads)
    rows, truth = signatures_of(clients, size, NOISE["clear"])
    before = peak_bytes()
    start, cpu = perf_counter(), process_time()
    if way == "tree":
        found = find_bipartition_by_tree(rows, range(clients))
    else:
        found = find_optimal_bipartition(cosine_similarity(rows), range(clients))
    seconds, cpu_seconds = perf_counter() - start, process_time() - cpu
    labels = np.isin(np.arange(clients), found.first)
    return {
        **{
            "clients": clients,
            "size": size,
            "threads": threads,
            "way": way,
            "load": os.getloadavg()[0],
        },
        **{
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "bytes": peak_bytes(),
            "bytes_before": before,
        },
        **{
            "alpha_cross_max": found.alpha_cross_max,
            "sizes": [len(found.first), len(found.second)],
        },
        "ari": float(adjusted_rand_score(truth, labels)),
    }


def compare(clients: int, size: int, threads: int) -> dict[str, Any]:
    """Compare all merges with those of SciPy, with cosines in float64."""
    torch.set_num_threads(threads)
    rows, _ = signatures_of(clients, size, NOISE["clear"])
    merges = single_linkage(rows, "cosine")
    units = rows.double().numpy()
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    apart = units @ units.T
    np.subtract(1.0, apart, out=apart)
    theirs = linkage(squareform(apart, checks=False), "single")
    same = bool((cut(merges, 2) == cut(theirs, 2)).all())
    return {
        **{
            "clients": clients,
            "largest_difference": float(np.abs(merges[:, 2] - theirs[:, 2]).max()),
        },
        **{"same_bipartition": same, "last_gap": float(theirs[-1, 2] - theirs[-2, 2])},
    }


def share_elsewhere(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of clients in different clusters, with the best matching of the clusters."""
    both = confusion_matrix(one, other)
    return 1 - both[linear_sum_assignment(-both)].sum() / len(one)


def sampled(
    clients: int, size: int, threads: int, sizes: list[int], draws: int
) -> list[dict[str, Any]]:
    """Cluster samples, which other clients join by the nearest mean; compare with all clients."""
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    k = len(SHARES)
    for data, noise in NOISE.items():
        signatures, truth = signatures_of(clients, size, noise)
        for metric in ("l2", "cosine"):
            start = perf_counter()
            apart = compute_distances(signatures, metric)
            seconds_pairs = perf_counter() - start
            for method in (name for of, name in LINKAGES if of == metric):
                start = perf_counter()
                exact = cut(agglomerate(apart, method), k)
                whole = {"data": data, "metric": metric, "linkage": method}
                seconds = seconds_pairs + perf_counter() - start
                rows.append(
                    {**whole, "sample": clients, "seconds": seconds, **scores(exact, exact, truth)}
                )
                for m in sizes:
                    several = [
                        one_sample(signatures, m, draw, metric, method, exact, truth)
                        for draw in range(draws)
                    ]
                    means = {
                        name: float(np.mean([each[name] for each in several]))
                        for name in several[0]
                    }
                    rows.append({**whole, "sample": m, "draws": draws, **means})
                    print(json.dumps(rows[-1]), file=sys.stderr)
            del apart
    return rows


def drawn_clusters(
    signatures: Tensor, m: int, draw: int, metric: str, method: str
) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.sort(np.random.default_rng(draw).choice(len(signatures), m, replace=False))
    return drawn, cut(
        agglomerate(compute_distances(signatures[torch.from_numpy(drawn)], metric), method),
        len(SHARES),
    )


def one_sample(
    signatures: Tensor,
    m: int,
    draw: int,
    metric: str,
    method: str,
    exact: np.ndarray,
    truth: np.ndarray,
) -> dict[str, float]:
    start = perf_counter()
    drawn, labels = drawn_clusters(signatures, m, draw, metric, method)
    found = assign_to_nearest_mean(signatures, drawn, labels, metric)
    return {"seconds": perf_counter() - start, **scores(found, exact, truth)}


def by_rules(
    clients: int, size: int, threads: int, sizes: list[int], draws: int
) -> list[dict[str, Any]]:
    """Compare rules by which clients outside of a sample join clusters, on noisy signatures.

    They join the cluster with the nearest mean, or by the farthest, mean or nearest distance from
    its members in the sample.
    """
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    signatures, _ = signatures_of(clients, size, NOISE["noisy"])
    for metric, method in LINKAGES:
        exact = cut(agglomerate(compute_distances(signatures, metric), method), len(SHARES))
        for m in sizes:
            found: dict[str, list[float]] = {}
            for draw in range(draws):
                drawn, labels = drawn_clusters(signatures, m, draw, metric, method)
                to_members = torch.cdist(signatures, signatures[torch.from_numpy(drawn)]).numpy()
                if metric == "cosine":
                    to_members = 1 - compute_cosines(
                        signatures, signatures[torch.from_numpy(drawn)]
                    )
                by_mean = assign_to_nearest_mean(signatures, drawn, labels, metric)
                found.setdefault("mean of the members", []).append(
                    adjusted_rand_score(exact, by_mean)
                )
                for name, over in (
                    ("farthest", np.max),
                    ("mean distance", np.mean),
                    ("nearest", np.min),
                ):
                    apart = np.stack(
                        [over(to_members[:, labels == k], axis=1) for k in range(len(SHARES))],
                        axis=1,
                    )
                    other = apart.argmin(axis=1)
                    other[drawn] = labels
                    found.setdefault(name, []).append(adjusted_rand_score(exact, other))
            means = {name: float(np.mean(each)) for name, each in found.items()}
            rows.append({"metric": metric, "linkage": method, "sample": m, **means})
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def scores(found: np.ndarray, exact: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    return {
        "ari_exact": float(adjusted_rand_score(exact, found)),
        "elsewhere": share_elsewhere(exact, found),
        "ari_truth": float(adjusted_rand_score(truth, found)),
    }


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def exact_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    table = Table(
        title=f"bi-partition of signatures of {arguments.size:,} numbers, {arguments.threads} threads"
    )
    for column in (
        "clients",
        "method",
        "time, s",
        "CPU time, s",
        "memory, GB",
        "memory before, GB",
        "load",
        "ARI",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for clients in arguments.clients:
        for way in ("matrix", "tree") if clients <= arguments.largest_matrix else ("tree",):
            row = in_a_process(measure, clients, arguments.size, arguments.threads, way)
            times = (f"{row[name]:.1f}" for name in ("seconds", "cpu_seconds"))
            memory = (f"{row[name] / 1e9:.2f}" for name in ("bytes", "bytes_before"))
            table.add_row(
                f"{clients:,}", way, *times, *memory, f"{row['load']:.1f}", f"{row['ari']:.2f}"
            )
            rows.append(row)
        if clients <= arguments.largest_matrix:
            rows.append(in_a_process(compare, clients, arguments.size, arguments.threads))
            print(json.dumps(rows[-1]))
    Console().print(table)
    return rows


def sample_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = in_a_process(
        sampled, 10_000, arguments.size, arguments.threads, arguments.samples, arguments.draws
    )
    table = Table(title="samples of 10,000 clients, means over the draws")
    for column in (
        "data",
        "distance",
        "linkage",
        "sample",
        "seconds",
        "ARI with the exact clusters",
        "in another cluster",
        "ARI with the true clusters",
    ):
        table.add_column(
            column, justify="left" if column in ("data", "distance", "linkage") else "right"
        )
    for row in rows:
        numbers = (
            f"{row['ari_exact']:.3f}",
            f"{100 * row['elsewhere']:.1f} %",
            f"{row['ari_truth']:.3f}",
        )
        names = (row[name] for name in ("data", "metric", "linkage"))
        table.add_row(*names, f"{row['sample']:,}", f"{row['seconds']:.1f}", *numbers)
    Console().print(table)
    return rows


def rules_table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = in_a_process(
        by_rules, 4_000, arguments.size, arguments.threads, arguments.samples[:2], arguments.draws
    )
    table = Table(
        title="4,000 noisy clients: ARI with the exact clusters, by the rule to join a cluster"
    )
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("metric", "linkage") else "right")
    for row in rows:
        table.add_row(
            *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    Console().print(table)
    return rows


WHAT = {"exact": exact_table, "sample": sample_table, "rules": rules_table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="?", choices=tuple(WHAT), default="exact", help="measurement (default: exact)"
    )
    parser.add_argument(
        "--clients",
        nargs="+",
        type=int,
        default=[1_000, 10_000, 100_000],
        help="numbers of clients of exact (default: 1000 10000 100000)",
    )
    parser.add_argument(
        "--largest-matrix",
        type=int,
        default=10_000,
        help="largest number of clients with a matrix of pairs (default: 10000)",
    )
    parser.add_argument(
        "--size", type=int, default=1024, help="length of a signature (default: 1024)"
    )
    parser.add_argument(
        "--samples",
        nargs="+",
        type=int,
        default=[1_000, 2_000, 4_000],
        help="sizes of samples; rules uses the first two (default: 1000 2000 4000)",
    )
    parser.add_argument("--draws", type=int, default=3, help="samples of each size (default: 3)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of torch"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    rows = WHAT[arguments.what](arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
