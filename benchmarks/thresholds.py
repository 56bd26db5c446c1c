"""Print the update norms of mixed and of pure clusters, between which CFL's threshold ε₂ must lie.

A *mixed* cluster has clients of several true clusters, a *pure* cluster of one. The script runs CFL
on data with known clusters. For several ε₁, it prints the smallest max norm of a mixed cluster
while its mean norm is below ε₁, and the largest max norm of a pure cluster in the first round in
which its mean norm is below ε₁. ε₂ must lie between these two numbers.

    python benchmarks/thresholds.py cfl-mnist-label-swap --data-dir DIR
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedclade import Run
from fedclade.config import Config, read_config
from fedclade.config.toml_files import find_config

LEVELS = (0.4, 0.3, 0.25, 0.2, 0.15, 0.1)


def near_stationary(run: Run, level: float) -> list[tuple[bool, list[dict[str, Any]]]]:
    """Return whether each cluster is mixed, and its rounds with a mean norm below a level.

    Clusters without such rounds are left out.
    """
    truth = {row["client"]: row["true_cluster"] for row in run.client_rows}
    found: list[tuple[bool, list[dict[str, Any]]]] = []
    for node in run.tree.nodes:
        rows = [
            row for row in run.cluster_rows if row["node"] == node.id and row["mean_norm"] < level
        ]
        if rows:
            found.append((len({truth[client] for client in node.members}) > 1, rows))
    return found


def seeded(config: Config, seed: int) -> Config:
    return replace(config, top=replace(config.top, seed=seed, evaluate_every=config.top.rounds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="config of CFL, such as cfl-mnist-label-swap")
    parser.add_argument("--data-dir", type=Path, help="folder with the data set")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    arguments = parser.parse_args()

    config = read_config(find_config(arguments.config))
    runs: list[Run] = []
    for seed in range(arguments.seeds):
        this = seeded(config, seed)
        runs.append(this.run(this.federation(arguments.data_dir)))
        clusters = runs[-1].summary["clusters"]
        splits = [event["round"] for event in runs[-1].events if event["kind"] == "split"]
        print(
            f"seed {seed}: sizes {clusters['sizes']}, ARI {clusters['ari']:.2f}, splits in rounds {splits}"
        )

    table = Table(title=f"{arguments.config}, seeds 0 to {arguments.seeds - 1}")
    for column in (
        "mean norm below",
        "mixed: max norm is at least",
        "pure: first max norm is at most",
    ):
        table.add_column(column, justify="right")
    for level in LEVELS:
        clusters = [cluster for run in runs for cluster in near_stationary(run, level)]
        mixed = [min(row["max_norm"] for row in rows) for is_mixed, rows in clusters if is_mixed]
        pure = [rows[0]["max_norm"] for is_mixed, rows in clusters if not is_mixed]
        table.add_row(
            f"{level:.2f}",
            f"{min(mixed):.2f}" if mixed else "–",
            f"{max(pure):.2f}" if pure else "–",
        )
    Console().print(table)
    for which in (True, False):
        clusters = [
            rows
            for run in runs
            for is_mixed, rows in near_stationary(run, LEVELS[0])
            if is_mixed is which
        ]
        bounds = [row["gamma_bound"] for rows in clusters for row in rows]
        name = "mixed" if which else "pure"
        print(
            f"γ bound of {name} clusters at a mean norm below {LEVELS[0]}: {min(bounds):.2f} to {max(bounds):.2f}"
        )


if __name__ == "__main__":
    main()
