"""Compare the overhead of a round in two versions of fedclade: 1,000 rounds of 20 tiny clients.

Each client has ten examples of eight numbers and takes one step of a linear model in a round, so
that a round consists mostly of the library's work around the training. Each process imports one
version. The two versions run alternately, so that changes of the machine's speed affect both; the
result is the best of all turns.

    git worktree add ../before COMMIT
    python benchmarks/tiny_rounds.py ../before/src --turns 3
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import process_time

import numpy as np
from two_versions import HERE, run_script

from fedclade import FedAvg, LocalTraining, federation, simulate

CLIENTS = 20
EXAMPLES = 10
FEATURES = 8


def measure(rounds: int) -> float:
    """Return the processor time of a run, in seconds, without its first rounds."""
    draw = np.random.default_rng(0)
    data = {}
    for client in range(CLIENTS):
        inputs = draw.normal(size=(2 * EXAMPLES, FEATURES)).astype(np.float32)
        data[f"c{client}"] = (inputs, draw.integers(2, size=2 * EXAMPLES))
    clients = federation(data, labels=2)
    local = LocalTraining(epochs=1, batch_size=EXAMPLES, lr=0.01)
    seconds: list[float] = []
    for count in (10, rounds + 10):
        start = process_time()
        simulate(FedAvg(), "mclr", clients, local=local, rounds=count, evaluate_every=rounds + 10)
        seconds.append(process_time() - start)
    return seconds[1] - seconds[0]


def main() -> None:
    """Measure one version, or both versions alternately."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="folder src of another version")
    parser.add_argument(
        "--turns", type=int, default=3, help="measurements of each version (default: 3)"
    )
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of a run (default: 1000)")
    parser.add_argument(
        "--measure", action="store_true", help="only measure the version that Python imports"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        print(measure(arguments.rounds))
        return
    others: list[float] = []
    these: list[float] = []
    for _ in range(arguments.turns):
        for source, seconds in ((arguments.other.resolve(), others), (HERE, these)):
            rounds = str(arguments.rounds)
            found = run_script(__file__, source, "--rounds", rounds, OMP_NUM_THREADS="1")
            seconds.append(float(found))
    other = min(others)
    this = min(these)
    print(f"other version: {other:.2f} s for {arguments.rounds} rounds, best of {arguments.turns}")
    print(f"this version:  {this:.2f} s, {100 * (1 - this / other):.0f} % less")


if __name__ == "__main__":
    main()
