"""Measure how early replicated clustering (rcfl) finds the true clusters, for four kinds of shift.

The setting is that of FLUX (static mode, MNIST), as in ``configs/arena/mnist.toml``: ten clients
and ten rounds. The levels are chosen so that some clients have equal distributions and some do not.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python studies/rcfl_rounds.py --data-dir DIR --out rounds.jsonl
    python studies/rcfl_rounds.py --out rounds.jsonl --table
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import torch
from rcfl import as_table
from rich.console import Console
from rich.table import Table

from fedclade import FedAvg, LocalTraining, Oracle, ReplicatedCFL, load_federation, simulate
from fedclade.data import Federation
from fedclade.tasks.metrics import mean_and_interval

Line = dict[str, Any]
CLIENTS, ROUNDS = 10, 10
LOCAL = LocalTraining(epochs=2, batch_size=64, lr=0.005, momentum=0.9)
METHODS = ("rcfl", "fedavg", "oracle")
LEVELS: Mapping[str, tuple[int, ...]] = {
    "P(X)": (1, 3),
    "P(Y)": (6,),
    "P(Y|X)": (2,),
    "P(X|Y)": (1,),
}
"""Levels of each shift. At them, some clients have equal distributions, and others do not."""


def dealt(kind: str, level: int, fold: int, data_dir: Path | None) -> Federation:
    """Divide all of MNIST among ten clients, whose data differ by a shift."""
    return load_federation(
        "mnist",
        clients=CLIENTS,
        shift="anda",
        shift_arguments={"kind": kind, "level": level},
        partition_arguments={"tests": "parts"},
        validation_fraction=0.2,
        scaling="unit",
        seed=fold,
        data_dir=data_dir,
    )


def run(method: str, federation: Federation, fold: int) -> Line:
    """Run a method; return accuracy and clusters at the end, and the ARI after round 3."""
    truth = federation.true_clusters or {}
    made = {"rcfl": ReplicatedCFL(), "fedavg": FedAvg(), "oracle": Oracle(truth)}[method]
    done = simulate(
        made, "lenet", federation, local=LOCAL, rounds=ROUNDS, seed=fold, evaluate_every=ROUNDS
    )
    found = done.summary["clusters"]
    clusters = {"clusters": found["found"], "true": len(set(truth.values())), "ari": found["ari"]}
    return {
        "accuracy": done.summary["accuracy"]["mean"],
        **clusters,
        "ari_3": done.metric_rows[2]["ari"],
    }


def table(lines: Sequence[Line]) -> Table:
    """Return a table with a row for each shift and level."""
    rows: dict[tuple[str, int], dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        rows[line["shift"], line["level"]][line["method"]].append(line)
    columns = (
        "shift",
        "level",
        "runs",
        "true clusters",
        "rcfl",
        "ARI",
        "right after round 3",
        "FedAvg",
        "oracle",
        "rcfl − oracle",
    )
    cells = [
        (shift, str(level), *_cells(rows[shift, level]))
        for shift in LEVELS
        for level in LEVELS[shift]
        if rows[shift, level]
    ]
    return as_table("ten clients, ten rounds", columns, cells)


def _cells(found: Mapping[str, list[Line]]) -> Iterator[str]:
    rcfl = found["rcfl"]
    yield str(len(rcfl))
    yield ", ".join(str(line["true"]) for line in rcfl)
    yield _accuracy(rcfl)
    yield f"{mean(line['ari'] for line in rcfl):.2f}" if rcfl else ""
    yield f"{sum(line['ari_3'] == 1 for line in rcfl)} of {len(rcfl)}"
    yield _accuracy(found["fedavg"])
    yield _accuracy(found["oracle"])
    known = {line["fold"]: line["accuracy"] for line in found["oracle"]}
    ahead = [
        100 * (line["accuracy"] - known[line["fold"]]) for line in rcfl if line["fold"] in known
    ]
    middle, half = mean_and_interval(ahead) if ahead else (None, None)
    yield "" if middle is None else f"{middle:+.1f}" + ("" if half is None else f" ± {half:.1f}")


def _accuracy(lines: Sequence[Line]) -> str:
    return f"{100 * mean(line['accuracy'] for line in lines):.1f}" if lines else ""


def main() -> None:
    """Run missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "rounds.jsonl")
    parser.add_argument(
        "--folds", type=int, default=3, help="number of random draws of the data (default: 3)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=METHODS,
        choices=METHODS,
        help="methods to run (default: all)",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=160)
    jobs = [
        (fold, shift, level, method)
        for fold in range(0 if given.table else given.folds)
        for method in given.methods
        for shift, levels in LEVELS.items()
        for level in levels
    ]
    done = {
        (line["fold"], line["shift"], line["level"], line["method"])
        for line in jsonl.read(given.out)
    }
    for fold, shift, level, method in [job for job in jobs if job not in done]:
        federation = dealt(shift, level, fold, given.data_dir)
        head = {"shift": shift, "level": level, "fold": fold, "method": method}
        line = {**head, **run(method, federation, fold)}
        jsonl.add(given.out, line)
        console.print(line)
    console.print(table(jsonl.read(given.out)))


if __name__ == "__main__":
    main()
