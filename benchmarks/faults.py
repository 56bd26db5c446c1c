"""Measure how drop-outs and corrupt updates affect ARI and accuracy of clustered methods.

The script runs each config with every seed twice, without faults and with random faults, and prints
a table.

    python benchmarks/faults.py --data-dir DIR
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from fedclade import Run
from fedclade.channel.retry import Faults
from fedclade.config import Config, read_config
from fedclade.config.toml_files import find_config

CONFIGS = tuple(f"{name}-mnist-label-swap" for name in ("cfl", "fl_hc", "fedgroup", "ifca"))


def runs_of(config: Config, seeds: int, faults: Faults, data_dir: Path | None) -> list[Run]:
    """Run a config with each seed, with an evaluation only after the last round."""
    found: list[Run] = []
    for seed in range(seeds):
        top = replace(config.top, seed=seed, evaluate_every=config.top.rounds)
        this = replace(config, top=top, faults=faults)
        found.append(this.run(this.federation(data_dir)))
    return found


def left_out(runs: Sequence[Run]) -> Counter[str]:
    """Count the clients that were left out because they dropped out, and for other reasons."""
    events = [event for run in runs for event in run.events if event["kind"] == "left_out"]
    return Counter(
        "absent" if why == "dropped out" else "bad" for e in events for why in e["clients"].values()
    )


def row(name: str, runs: Sequence[Run]) -> list[str]:
    """Return a row of the table."""
    accuracies = [run.summary["accuracy"]["mean"] for run in runs]
    recovered = [run.summary["clusters"]["ari"] for run in runs]
    lost = left_out(runs)
    cells = [
        f"{min(recovered):.2f}",
        " ".join(f"{100 * a:.2f}" for a in accuracies),
        f"{100 * mean(accuracies):.2f}",
    ]
    return [name, *cells, str(lost["absent"]), str(lost["bad"])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", default=CONFIGS, help="configs to run")
    parser.add_argument("--data-dir", type=Path, help="folder with the data set")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="probability of a drop-out (default: 0.1)"
    )
    parser.add_argument(
        "--corrupt",
        type=float,
        default=0.01,
        help="probability of a corrupt update (default: 0.01)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of the configs, as for fedclade run",
    )
    arguments = parser.parse_args()

    faults = Faults(dropout=arguments.dropout, corrupt=arguments.corrupt)
    table = Table(title=f"seeds 0 to {arguments.seeds - 1}; faults: {faults}")
    for column in (
        "config",
        "lowest ARI",
        "accuracy by seed, %",
        "mean, %",
        "dropped out",
        "corrupt",
    ):
        table.add_column(column, justify="left" if column == "config" else "right")
    for name in arguments.configs:
        config = read_config(find_config(name), arguments.set)
        table.add_row(*row(name, runs_of(config, arguments.seeds, Faults(), arguments.data_dir)))
        table.add_row(
            *row("  with faults", runs_of(config, arguments.seeds, faults, arguments.data_dir))
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
