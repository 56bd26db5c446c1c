"""Measure the virtual time in which FedAvg and FedBuff reach an accuracy of 90 %.

The data are MNIST on 100 clients, with label shares from Dirichlet(0.5). Each training of a client
takes |z| virtual seconds, where z is a new draw from the standard normal distribution. A round of
FedAvg takes as long as the slowest client of its cohort. With FedBuff, 20 clients train at any
time.

    python benchmarks/fedbuff.py --data-dir DIR --seeds 3
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from fedclade import (
    Clients,
    FedAvg,
    FedBuff,
    LocalTraining,
    RoundLog,
    RoundPlan,
    Run,
    State,
    load_federation,
    simulate,
)
from fedclade.algorithms import Algorithm

CLIENTS, AT_ONCE, TARGET = 100, 20, 0.9
UPDATES = 800
"""Number of updates of all clients in each run."""
LOCAL = LocalTraining(epochs=2, batch_size=20, lr=0.05)
CLOCK = FedBuff(concurrency=AT_ONCE)


@dataclass(frozen=True)
class Timed(FedAvg):
    """FedAvg that records the virtual seconds of each round."""

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Run a round, and record the time of the slowest client."""
        state, log = super().step(state, cohort, clients, this_round)
        slowest = max(CLOCK.seconds_of(cohort, clients.sizes, this_round))
        return state, replace(log, numbers={"virtual_seconds": slowest})


METHODS: Mapping[str, tuple[Algorithm, int]] = {
    **{f"fedavg, cohort of {n}": (Timed(), n) for n in (AT_ONCE, 5)},
    **{f"fedbuff, K = {k}": (replace(CLOCK, buffer_size=k), k) for k in (5, 10, 20)},
}
"""The methods, each with the number of updates in a round."""


def run(algorithm: Algorithm, updates: int, seed: int, data_dir: Path | None) -> Run:
    """Run a method for ``UPDATES`` updates; ``updates`` is the number in each round."""
    federation = load_federation(
        "mnist",
        clients=CLIENTS,
        samples_per_client=200,
        test_samples=1000,
        partition="dirichlet",
        partition_arguments={"alpha": 0.5},
        seed=seed,
        data_dir=data_dir,
    )
    settings: dict[str, Any] = {
        "rounds": UPDATES // updates,
        "client_fraction": updates / CLIENTS,
        "seed": seed,
    }
    return simulate(
        algorithm, "mlp", federation, local=LOCAL, target=TARGET, engine="stacked", **settings
    )


def seconds_at(run: Run) -> list[float]:
    """Return the virtual time after each round, in seconds."""
    of_rounds = [row["virtual_seconds"] for row in run.metric_rows]
    return list(accumulate(of_rounds)) if run.summary["algorithm"].endswith("Timed") else of_rounds


def main() -> None:
    """Print a table of the virtual seconds and updates until each seed reaches the target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    args = parser.parse_args()
    print(
        "| method | virtual seconds to target | updates to target | staleness, mean | accuracy at the end |"
    )
    print("| :-- | --: | --: | --: | --: |")
    for name, (algorithm, updates) in METHODS.items():
        runs = [run(algorithm, updates, seed, args.data_dir) for seed in range(args.seeds)]
        reached = [done.summary["target"]["rounds_to_target"] for done in runs]
        seconds = [
            f"{seconds_at(d)[r - 1]:.1f}" if r else "—" for d, r in zip(runs, reached, strict=True)
        ]
        needed = [str(r * updates) if r else "—" for r in reached]
        stale = mean(row.get("staleness_mean", 0.0) for done in runs for row in done.metric_rows)
        accuracy = mean(done.summary["accuracy"]["mean"] for done in runs)
        cells = (
            name,
            ", ".join(seconds),
            ", ".join(needed),
            f"{stale:.2f}",
            f"{100 * accuracy:.1f} %",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
