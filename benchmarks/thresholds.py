"""What CFL's thresholds must separate: update norms of mixed clusters and of pure ones, once they are near stationary.

Runs CFL on data whose clusters are known and prints, for several ε₁, the smallest max norm that a mixed cluster showed
at a mean norm below ε₁, and the largest that a pure one showed when it first came below. ε₂ has to lie between the two.

    python benchmarks/thresholds.py cfl-mnist-label-swap --data-dir DIR
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedclade import Run
from fedclade.config import Config, find_config, read_config

LEVELS = (0.4, 0.3, 0.25, 0.2, 0.15, 0.1)


def margins(run: Run, level: float) -> tuple[list[float], list[float]]:
    """Return the max norms at a mean norm below a level: of mixed clusters the least, of pure ones the first."""
    truth = {row["client"]: row["true_cluster"] for row in run.clients}
    mixed: list[float] = []
    pure: list[float] = []
    for node in run.tree.nodes:
        norms = [r["max_norm"] for r in run.clusters if r["node"] == node.id and r["mean_norm"] < level]
        if norms and len({truth[client] for client in node.members}) > 1:
            mixed.append(min(norms))
        elif norms:
            pure.append(norms[0])
    return mixed, pure


def seeded(config: Config, seed: int) -> Config:
    return replace(config, top=replace(config.top, seed=seed, evaluate_every=config.top.rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()

    config = read_config(find_config(arguments.config))
    runs: list[Run] = []
    for seed in range(arguments.seeds):
        this = seeded(config, seed)
        runs.append(this.run(this.federation(arguments.data_dir)))
        clusters = runs[-1].summary["clusters"]
        splits = [event["round"] for event in runs[-1].events if event["kind"] == "split"]
        print(f"seed {seed}: sizes {clusters['sizes']}, ARI {clusters['ari']:.2f}, splits in rounds {splits}")

    table = Table(title=f"{arguments.config}, seeds 0 to {arguments.seeds - 1}")
    for column in ("mean norm below", "mixed: max norm at least", "pure: max norm at first at most"):
        table.add_column(column, justify="right")
    for level in LEVELS:
        per_run = [margins(run, level) for run in runs]
        mixed = [norm for norms, _ in per_run for norm in norms]
        pure = [norm for _, norms in per_run for norm in norms]
        table.add_row(f"{level:.2f}", f"{min(mixed):.2f}" if mixed else "–", f"{max(pure):.2f}" if pure else "–")
    Console().print(table)


if __name__ == "__main__":
    main()
