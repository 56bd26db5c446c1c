"""Measure the cost of rcfl as multiples of FedAvg's: training steps, examples, upload and download.

The runs differ in their numbers of rounds and clients, and in the size of the model: signatures, by
which the server compares updates, add more to the upload of a small model. In task "iid" all clients have one
distribution; in task "4 label swaps" they form four clusters, which rcfl finds and then checks
again. Steps and examples are counted where simulated clients carry out their training, so that
training on parts of the data, checks, and repeated queries are included. FedAvg costs the same in
every round, and is therefore run for a single round.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python studies/rcfl_cost.py --data-dir DIR --out rcfl_cost.jsonl
    python studies/rcfl_cost.py --out rcfl_cost.jsonl --table        # only print the table
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import torch
from natural_methods import counted_steps
from rcfl import LOCAL

from fedclade import FedAvg, Federation, ReplicatedCFL, load_federation, simulate
from fedclade.algorithms import Algorithm

Line = dict[str, Any]

MODEL = "mlp"
SIZES = (
    (10, 20, MODEL),
    (20, 20, MODEL),
    (40, 20, MODEL),
    (100, 20, MODEL),
    (40, 6, MODEL),
    (40, 60, MODEL),
    (40, 20, "mclr"),
)
"""Number of rounds, number of clients, and model; mlp has 101,770 parameters, and mclr 7,850."""
TASKS: Mapping[str, Mapping[str, Any]] = {
    "iid": {},
    "4 label swaps": {"shift": "label_swap", "clusters": 4},
}
METHODS: Mapping[str, Algorithm] = {
    "rcfl": ReplicatedCFL(),
    "rcfl, fallback": ReplicatedCFL(fallback=True),
    "rcfl, personalize": ReplicatedCFL(personalize=True),
}
SIZE_OF_OPTIONS = (40, 20, MODEL)
"""Rounds, clients and model of the runs of methods with an option."""
COSTS = ("steps", "spared", "examples", "bytes_up", "bytes_down")
"""Costs in the table. ``spared`` are the steps of repeated checks, which clients answer from memory.
They are not among the ``steps``."""


def cost_of(
    algorithm: Algorithm, model: str, federation: Federation, rounds: int, seed: int
) -> Line:
    """Run a method, and return its costs."""
    settings = {"rounds": rounds, "evaluate_every": rounds, "seed": seed, "engine": "stacked"}
    with counted_steps() as count:
        done = simulate(algorithm, model, federation, local=LOCAL, **settings)
    if done.summary["steps"]["total"] != count.steps:
        raise SystemExit(
            f"the summary has {done.summary['steps']['total']} steps, counted were {count.steps}"
        )
    return {
        "steps": count.steps,
        "spared": count.spared,
        "examples": count.examples,
        "bytes_up": done.summary["bytes_up"],
        "bytes_down": done.summary["bytes_down"],
        "clusters": done.summary["clusters"]["found"],
    }


def run(
    *,
    method: str,
    task: str,
    rounds: int,
    clients: int,
    model: str,
    seed: int,
    data_dir: Path | None,
) -> Line:
    """Return the costs of a run as multiples of FedAvg's, and the number of clusters found."""
    federation = load_federation(
        "mnist",
        clients=clients,
        samples_per_client=300,
        test_samples=500,
        validation_fraction=0.2,
        seed=seed,
        data_dir=data_dir,
        **TASKS[task],
    )
    fedavg = cost_of(FedAvg(), model, federation, 1, seed)
    found = cost_of(METHODS[method], model, federation, rounds, seed)
    ratios = {
        name: found[name] / (rounds * fedavg["steps" if name == "spared" else name])
        for name in COSTS
    }
    return {**ratios, "clusters": found["clusters"]}


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table of the mean costs over seeds."""
    of: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        key = [line[name] for name in ("method", "model", "rounds", "clients", "task")]
        of[tuple(key)].append(line)
    head = ["method", "model", "rounds", "clients", "task", "runs", "clusters", *COSTS]
    text = [f"| {' | '.join(head)} |", "| :-- " + "| --: " * (len(head) - 1) + "|"]
    for key, found in sorted(of.items()):
        cells = [*(str(value) for value in key), str(len(found))]
        cells.append(f"{mean(line['clusters'] for line in found):.1f}")
        cells += [f"{mean(line[name] for line in found):.2f}" for name in COSTS]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Make missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "rcfl_cost.jsonl")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds (default: 2)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [
        {"method": method, "task": task, "seed": seed, **size}
        for seed in range(given.seeds)
        for size in (dict(zip(("rounds", "clients", "model"), each, strict=True)) for each in SIZES)
        for task in TASKS
        for method in METHODS
        if method == "rcfl" or tuple(size.values()) == SIZE_OF_OPTIONS
    ]
    if not given.table:
        jsonl.run_missing(given.out, jobs, lambda **job: run(**job, data_dir=given.data_dir))
    print(table(jsonl.read(given.out)))


if __name__ == "__main__":
    main()
