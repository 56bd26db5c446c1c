"""Measure the clusters of FL+HC with ``threshold = "auto"``, with and without true clusters.

The script trains FedAvg, and clusters all clients after several rounds. For each metric and
linkage, the table has the two merge heights between which the largest relative gap is, and the
number of clusters; this is 1 if the gap is no larger than expected by chance. The column "right" is
the share of seeds with an ARI of at least 0.95, or with one cluster if there are no true clusters.

    python benchmarks/gaps.py --data mnist --data-dir DIR --clients 20 100 --shifts none label_swap
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedclade import FedAvg, Federation, LocalTraining, load_federation
from fedclade.clustering.linkage import agglomerate, count_clusters_by_gap, cut, find_largest_gap
from fedclade.clustering.similarity import compute_distances
from fedclade.core.queries import RoundPlan
from fedclade.data import SHIFTS
from fedclade.runs import module_for
from fedclade.tasks.metrics import cluster_scores
from fedclade.training import SimulatedClients

WAYS = (
    ("l1", "complete"),
    ("l2", "ward"),
    ("l2", "average"),
    ("cosine", "average"),
    ("cosine", "complete"),
)
SPEC = LocalTraining(epochs=3, batch_size=20, lr=0.1)


def updates_after(
    federation: Federation, model: str, rounds: Sequence[int], seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the updates ``[m, D]`` of all clients at FedAvg's model after each number of rounds."""
    module = module_for(model, federation.pool.schema, seed)
    clients = SimulatedClients(federation, module)
    algorithm = FedAvg()
    state = algorithm.init(clients.layout.flatten(module), clients)
    for done in range(max(rounds) + 1):
        this_round = RoundPlan(done + 1, SPEC, seed)
        if done in rounds:
            models, rows = state.tree.models([0] * len(federation))
            yield done, clients.train(federation.ids, models, rows, this_round).signatures
        state, _ = algorithm.step(state, federation.ids, clients, this_round)


def found(updates: Tensor, metric: str, linkage: str, federation: Federation) -> tuple[str, bool]:
    """Return a text with the gap and the number of clusters, and whether the clusters are right."""
    merges = agglomerate(compute_distances(updates, metric), linkage)
    heights = merges[:, 2]
    n_clusters, above = count_clusters_by_gap(heights), len(heights) + 1 - find_largest_gap(heights)
    labels = dict(zip(federation.ids, cut(merges, n_clusters).tolist(), strict=True))
    ari = cluster_scores(labels, federation.true_clusters)["ari"]
    right = n_clusters == 1 if ari is None else ari >= 0.95
    return f"{heights[above - 1]:.3g}–{heights[above]:.3g}: {n_clusters}", right


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits", help="data set (default: digits)")
    parser.add_argument("--data-dir", type=Path, help="folder with the data set")
    parser.add_argument(
        "--samples", type=int, help="examples of each client (default: all examples are used)"
    )
    parser.add_argument("--model", default="mlp", help="the model (default: mlp)")
    parser.add_argument(
        "--clients", nargs="+", type=int, default=[20], help="numbers of clients (default: 20)"
    )
    parser.add_argument(
        "--shifts",
        nargs="+",
        choices=SHIFTS,
        default=["none", "label_swap", "label_permutation"],
        help="shifts of the data (default: none label_swap label_permutation)",
    )
    parser.add_argument(
        "--rounds",
        nargs="+",
        type=int,
        default=[1, 3, 5, 10],
        help="rounds after which clients are clustered (default: 1 3 5 10)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    arguments = parser.parse_args()
    for clients in arguments.clients:
        for shift in arguments.shifts:
            cells: dict[tuple[int, str, str], list[tuple[str, bool]]] = {}
            for seed in range(arguments.seeds):
                federation = load_federation(
                    arguments.data,
                    clients=clients,
                    samples_per_client=arguments.samples,
                    shift=shift,
                    seed=seed,
                    data_dir=arguments.data_dir,
                )
                for done, updates in updates_after(
                    federation, arguments.model, arguments.rounds, seed
                ):
                    for way in WAYS:
                        cells.setdefault((done, *way), []).append(found(updates, *way, federation))
            table = Table(
                title=f"{arguments.data}, {clients} clients, shift {shift}: gap and clusters found"
            )
            for column in (
                "rounds",
                "metric",
                "linkage",
                *(f"seed {s}" for s in range(arguments.seeds)),
                "right",
            ):
                table.add_column(
                    column,
                    justify="left" if column in ("metric", "linkage") else "right",
                    no_wrap=True,
                )
            for (done, metric, linkage), row in sorted(
                cells.items(), key=lambda cell: (WAYS.index(cell[0][1:]), cell)
            ):
                right = sum(is_right for _, is_right in row) / len(row)
                table.add_row(
                    str(done), metric, linkage, *(words for words, _ in row), f"{right:.0%}"
                )
            Console(width=120).print(table)


if __name__ == "__main__":
    main()
