"""Measure time and memory of one clustering of m clients by their updates, for every method.

The updates are synthetic: four clusters, each with a direction of its own, plus noise that is twice
as long. Each measurement runs in a separate process, because a process reports the largest memory
that it has ever had. The memory is in addition to the updates. A bi-partition divides clients in
two, so its ARI with the four clusters is low.

    python benchmarks/clustering.py
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import multiprocessing
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from fedclade.clustering.linkage import LINKAGES, agglomerate, cut
from fedclade.clustering.similarity import (
    METRICS,
    Similarity,
    compute_distances,
    cosine_similarity,
    k_means,
    ternary_similarity,
)
from fedclade.clustering.spanning_tree import find_optimal_bipartition

CLUSTERS = 4


@dataclass(frozen=True)
class Method:
    """A way to cluster clients.

    Parameters
    ----------
    compare
        Function of updates ``[m, D]`` that returns the similarities, distances or points by which
        clients are clustered.
    cluster
        Function of this result that returns the cluster of each client, ``[m]``.
    """

    compare: Callable[[Tensor], Any]
    cluster: Callable[[Any], Any]


def two_clusters(alpha: Similarity) -> list[bool]:
    m = len(alpha)
    first = set(find_optimal_bipartition(alpha, range(m)).first)
    return [client in first for client in range(m)]


def hierarchical(metric: str, linkage: str) -> Method:
    return Method(
        partial(compute_distances, metric=metric),
        lambda apart: cut(agglomerate(apart, linkage), CLUSTERS),
    )


METHODS: Mapping[str, Method] = {
    "bi-partition": Method(cosine_similarity, two_clusters),
    **{
        f"{metric} {linkage}": hierarchical(metric, linkage)
        for metric in METRICS
        for linkage in LINKAGES
        if linkage != "ward" or metric == "l2"
    },
    "ternary k-means": Method(
        ternary_similarity, lambda points: k_means(points, CLUSTERS, np.random.default_rng(0))
    ),
}


def updates_of(clients: int, size: int) -> tuple[Tensor, list[int]]:
    """Draw updates ``[m, D]``; return them with the true cluster of each."""
    draw = torch.Generator().manual_seed(0)
    truth = [client % CLUSTERS for client in range(clients)]
    updates = torch.randn(clients, size, generator=draw).mul_(2.0)
    centres = torch.randn(CLUSTERS, size, generator=draw)
    for client, cluster in enumerate(truth):
        updates[client] += centres[cluster]
    return updates, truth


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def measure(method: str, clients: int, size: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    updates, truth = updates_of(clients, size)
    chosen = METHODS[method]
    chosen.cluster(chosen.compare(updates[:8]))  # loads libraries that are loaded at first use
    before, start = peak_bytes(), perf_counter()
    compared = chosen.compare(updates)
    middle = perf_counter()
    labels = chosen.cluster(compared)
    end = perf_counter()
    return {
        **{"method": method, "clients": clients, "size": size, "threads": threads},
        **{
            "seconds_compare": middle - start,
            "seconds_cluster": end - middle,
            "bytes": peak_bytes() - before,
        },
        "ari": float(adjusted_rand_score(truth, labels)),
    }


def in_a_process(*arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--clients",
        nargs="+",
        type=int,
        default=[1_000, 10_000],
        help="numbers of clients (default: 1000 10000)",
    )
    parser.add_argument(
        "--size",
        type=int,
        default=7_850,
        help="length D of an update (default: 7850, logistic regression on MNIST)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="methods to measure (default: all)",
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of torch"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for clients in arguments.clients:
        table = Table(
            title=f"{clients:,} clients, updates of {arguments.size:,} entries, {arguments.threads} threads"
        )
        for column in ("method", "compare, s", "cluster, s", "memory, GB", "ARI"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for method in arguments.methods:
            rows.append(row := in_a_process(method, clients, arguments.size, arguments.threads))
            times = (f"{row[step]:.2f}" for step in ("seconds_compare", "seconds_cluster"))
            table.add_row(method, *times, f"{row['bytes'] / 1e9:.2f}", f"{row['ari']:.2f}")
        Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
