"""Compare replicated clustering (rcfl) with personal models with other methods.

In most tasks, the clients differ, but form no clusters. In the last task, a share of each client's
images is turned upside down, and the shares of the clients are evenly spread from 0 to 100 %.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python benchmarks/personal.py --data-dir DIR --out personal.jsonl
    python benchmarks/personal.py --out personal.jsonl --table
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import numpy as np
import torch
from fallback import LOCAL, ROUNDS, federation_of

from fedclade import (
    Ditto,
    FedAvg,
    Federation,
    FineTune,
    Local,
    ReplicatedCFL,
    load_federation,
    simulate,
)
from fedclade import federation as federation_from
from fedclade.algorithms import Algorithm

Line = dict[str, Any]

METHODS: Mapping[str, Algorithm] = {
    "fedavg": FedAvg(),
    "local": Local(),
    "finetune": FineTune(epochs=LOCAL.epochs or 1),
    "ditto": Ditto(),
    "rcfl": ReplicatedCFL(),
    "rcfl, own": ReplicatedCFL(personalize=True),
    "rcfl, own, fallback": ReplicatedCFL(personalize=True, fallback=True),
}
"""Methods; personal models are trained for as many epochs as a round has."""

TURNED = "turned upside down, 0 to 100 %"
TASKS = ("iid", "Dirichlet(0.1)", "Dirichlet(0.5)", "Dirichlet(5)", "4 label swaps", TURNED)
OURS = "rcfl, own, fallback"


def turned(seed: int, data_dir: Path | None) -> Federation:
    """Return 20 clients with 300 images, of which a fifth is validation data.

    Client k, from 0, has a share of about k/19 of its images turned upside down.
    """
    made = load_federation(
        "mnist", clients=20, samples_per_client=300, test_samples=500, seed=seed, data_dir=data_dir
    )
    pool, draw, held = made.pool, np.random.default_rng(seed), dict[str, Any]()
    for number, client in enumerate(made.clients):
        splits = list[tuple[torch.Tensor, torch.Tensor]]()
        for indices in (client.train[:240], client.test, client.train[240:]):
            rows = torch.as_tensor(np.asarray(indices))
            x, y = pool.x[rows].clone(), pool.y[rows]
            upside = torch.from_numpy(draw.random(len(rows)) < number / 19)
            x[upside] = x[upside].flip(-1, -2)
            splits.append((x, y))
        held[f"client-{number:02d}"] = tuple(splits)
    return federation_from(held, name="mnist", labels=10)


def run(task: str, method: str, seed: int, data_dir: Path | None) -> Line:
    """Run a method; return its accuracy, and the number of clusters that it found."""
    federation = turned(seed, data_dir) if task == TURNED else federation_of(task, seed, data_dir)
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "seed": seed,
        "engine": "stacked",
    }
    done = simulate(METHODS[method], "mlp", federation, local=LOCAL, **settings)
    return {
        "accuracy": done.summary["accuracy"]["mean"],
        "clusters": done.summary["clusters"]["found"],
    }


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table of accuracies in %.

    The last column is the difference of rcfl with personal models and fall-back from the best of
    the first four methods: the mean, and the worst run.
    """
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        found[line["task"]][line["method"]][line["seed"]] = 100 * line["accuracy"]
    head = ["task", "runs", *METHODS, f"{OURS} − best of the first four, worst run"]
    text = [f"| {' | '.join(head)} |", "| :-- |" + " --: |" * (len(head) - 1)]
    for task in (task for task in TASKS if task in found):
        of = found[task]
        cells = [task, str(len(of[OURS]))]
        cells += [f"{mean(of[method].values()):.1f}" if of[method] else "" for method in METHODS]
        best = max(
            tuple(METHODS)[:4], key=lambda method: mean(of[method].values()) if of[method] else 0.0
        )
        apart = [mine - of[best][seed] for seed, mine in of[OURS].items() if seed in of[best]]
        cells.append(f"{mean(apart):+.1f}, {min(apart):+.1f} ({best})" if apart else "")
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Make missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "personal.jsonl")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = {(line["task"], line["method"], line["seed"]) for line in jsonl.read(given.out)}
    jobs = [
        (task, method, seed) for seed in range(given.seeds) for task in TASKS for method in METHODS
    ]
    for task, method, seed in jobs if not given.table else ():
        if (task, method, seed) in done:
            continue
        line = {
            "task": task,
            "method": method,
            "seed": seed,
            **run(task, method, seed, given.data_dir),
        }
        jsonl.add(given.out, line)
        print(line, flush=True)
    print(table(jsonl.read(given.out)))


if __name__ == "__main__":
    main()
