"""Compare rules by which the options fallback and personalize of rcfl choose models for clients.

For each task and seed, rcfl is run once with a model for all clients in addition to the clusters'
models, and at the end each client fine-tunes copies of both. The options do not change how the
models are trained. So the scores of all clients with the four models, on validation and on test
data, determine the accuracy with each combination of the options, and by each rule:

- "by one example": all clients together start from the model with the best total score, even if it
  is better by one example only (the rule of fedclade up to version 1.0);
- "paired": clients leave the clusters' models together only if other models are better by one
  standard error of the paired difference over clients;
- "bound": the same with a bound of the standard error, from the numbers of examples on which two
  models can differ;
- "library": the same with the paired standard error for the model for all clients, and the bound for
  fine-tuned copies (the rule of fedclade). It was chosen by the results of seeds 0 to 2.

The later steps, in which clusters and single clients deviate, are the same for all rules.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python studies/model_choice.py --data-dir DIR --out model_choice.jsonl
    python studies/model_choice.py --out model_choice.jsonl --table        # only print the tables
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import jsonl
import torch

from fedclade import LocalTraining, ReplicatedCFL, load_federation, simulate
from fedclade.algorithms import fallback
from fedclade.algorithms.fallback import LEAF, ROOT, Scores, Served
from fedclade.core import OWN, ClientWork, FromStored, LocalModel, NoReply, Split
from fedclade.core.queries import Round
from fedclade.runs import module_for
from fedclade.training import SimulatedClients

Line = dict[str, Any]

LOCAL = LocalTraining(epochs=3, batch_size=20, lr=0.1)
ROUNDS = 40
DIRICHLET = "partition", "dirichlet"
TASKS: Mapping[str, Mapping[str, Any]] = {
    "iid": {},
    "Dirichlet(0.1)": {"partition": "dirichlet", "partition_arguments": {"alpha": 0.1}},
    "Dirichlet(0.5)": {"partition": "dirichlet", "partition_arguments": {"alpha": 0.5}},
    "4 label swaps": {"shift": "label_swap", "clusters": 4},
    "4 rotations": {"shift": "rotation", "clusters": 4},
    "4 levels of blur": {"shift": "blur", "clusters": 4},
    "4 rotations, 100 images": {"shift": "rotation", "clusters": 4, "samples_per_client": 100},
    "4 levels of blur, 100 images": {"shift": "blur", "clusters": 4, "samples_per_client": 100},
    "4 label swaps, 100 images": {"shift": "label_swap", "clusters": 4, "samples_per_client": 100},
    "anda, P(X) 5": {
        "shift": "anda",
        "shift_arguments": {"kind": "P(X)", "level": 5},
        "scaling": "unit",
    },
}
"""Tasks with MNIST: with label skew, with other labels, and with a covariate shift (rotations,
blurs, and FLUX's rotations and colours)."""

MODELS = ("root", "leaf", "tuned root", "tuned leaf")
ROOT_MODEL, LEAF_MODEL, TUNED_ROOT, TUNED_LEAF = range(4)
OPTIONS: Mapping[str, Sequence[int]] = {
    "fallback": (ROOT_MODEL, LEAF_MODEL),
    "personalize": (LEAF_MODEL, TUNED_LEAF),
    "both": (ROOT_MODEL, LEAF_MODEL, TUNED_ROOT, TUNED_LEAF),
}
"""Models between which clients choose, by option of rcfl."""

SLACK = 0.1
"""Percentage points by which a choice may be less accurate than the clusters' models."""


def run(task: str, seed: int, data_dir: Path | None) -> Line:
    """Run rcfl on a task with a seed, and return the scores of all clients with the four models."""
    settings = {
        "clients": 20,
        "samples_per_client": 300,
        "test_samples": 500,
        "validation_fraction": 0.2,
        **TASKS[task],
    }
    federation = load_federation("mnist", **settings, seed=seed, data_dir=data_dir)
    done = simulate(
        ReplicatedCFL(fallback=True),
        "mlp",
        federation,
        local=LOCAL,
        rounds=ROUNDS,
        evaluate_every=ROUNDS,
        seed=seed,
        engine="stacked",
    )
    module = module_for("mlp", federation.pool.schema, seed)
    clients = SimulatedClients(federation, module, engine="stacked")
    tree = done.tree
    ids = list(clients.ids)
    scores: dict[str, list[list[float]]] = {"validation": [], "test": []}
    splits: tuple[Split, ...] = ("validation", "test")
    tuning = Round(ROUNDS, LOCAL, seed, purpose="finetune")
    work = ClientWork(start=FromStored(latest=True), store=LocalModel(state=False), reply=NoReply())
    shared = {
        start: tree.models([tree.path(client)[start].id for client in ids], served=True)
        for start in (ROOT, LEAF)
    }
    for models, rows in shared.values():
        for split in splits:
            found = clients.evaluate(ids, models, rows, split)
            scores[split].append(found.scores[:, 0].tolist())
    for models, rows in shared.values():
        clients.train(ids, models, rows, tuning, work, sent_before=True)
        for split in splits:
            found = clients.evaluate(ids, models, [OWN] * len(ids), split)
            scores[split].append(found.scores[:, 0].tolist())
    return {
        "clusters": done.summary["clusters"]["found"],
        "leaves": [tree.leaf_of[client] for client in ids],
        "examples": [len(client.validation) for client in federation.clients],
        **scores,
    }


def start_by_one_example(first: Served, others: Sequence[Served], scores: Scores) -> Served:
    """Return the common choice with the best total score, the most general one if some are equal."""
    ways = sorted([first, *others], key=lambda way: next(iter(way.values())))
    return max(ways, key=scores.total)


def start_by_error(
    error: Callable[[Scores, Served, Served], float],
    first: Served,
    others: Sequence[Served],
    scores: Scores,
) -> Served:
    """Return the first common choice, unless another is better by more than one standard error."""
    better: list[Served] = []
    for way in others:
        gain = scores.total(way) - scores.total(first)
        if gain > (1 + 1e-4) * error(scores, way, first):
            better.append(way)
    return max(better, key=scores.total, default=first)


RULES = {
    "by one example": start_by_one_example,
    "paired": partial(start_by_error, Scores.paired_error),
    "bound": partial(start_by_error, Scores.error),
    "library": fallback.choose_together,
}


@contextmanager
def rule_in_use(rule: str) -> Any:
    """Have the library choose the first common models by a rule."""
    with mock.patch.object(fallback, "choose_together", RULES[rule]):
        yield


def accuracy(line: Line, option: str, rule: str) -> float:
    """Return the mean test accuracy of the clients with an option of rcfl, in percent."""
    chosen = choose(line, OPTIONS[option], rule)
    if option == "both":  # clients that use no copy choose between the other models by themselves
        shared = choose(line, OPTIONS["fallback"], rule)
        chosen = {c: k if k >= TUNED_ROOT else shared[c] for c, k in chosen.items()}
    return 100 * mean(line["test"][k][client] for client, k in chosen.items())


def choose(line: Line, numbers: Sequence[int], rule: str) -> dict[int, int]:
    """Return the number of each client's model, among some models."""
    if line["clusters"] == 1:  # rcfl then has no model for all clients in addition
        numbers = [k for k in numbers if k in (LEAF_MODEL, TUNED_LEAF)]
    leaf_of = dict(enumerate(line["leaves"]))
    merits = {
        (client, k): value for k in numbers for client, value in enumerate(line["validation"][k])
    }
    scores = Scores(merits, dict(enumerate(line["examples"])), are_shares=True)
    with rule_in_use(rule):
        return fallback.choose_models(scores, numbers, leaf_of, LEAF_MODEL)


def tables(lines: Sequence[Line]) -> str:
    """Return Markdown tables: accuracies of the models, and of the options by each rule."""
    of_task: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        of_task[line["task"]].append(line)
    text = ["Accuracies in % of the models.", ""]
    text += head(["task", "runs", "clusters", *MODELS])
    for task, found in of_task.items():
        clusters = f"{mean(line['clusters'] for line in found):.1f}"
        of_models = [
            f"{100 * mean(mean(line['test'][k]) for line in found):.1f}" for k in range(len(MODELS))
        ]
        text.append(row([task, str(len(found)), clusters, *of_models]))
    for option in OPTIONS:
        text += ["", f"Accuracies in % with {option}, by rule; difference of the worst run", ""]
        text[-2] += " from the clusters' models in brackets, in points."
        text += head(["task", *RULES])
        for task, found in of_task.items():
            text.append(row([task, *(cell(found, option, rule) for rule in RULES)]))
    text.append("")
    for rule in RULES:
        changes = [
            accuracy(line, option, rule) - 100 * mean(line["test"][LEAF_MODEL])
            for line in lines
            for option in OPTIONS
        ]
        text.append(
            f"{rule}: worst change from the clusters' models {min(changes):+.2f}, "
            f"mean {mean(changes):+.2f}; below {-SLACK} in "
            f"{sum(change < -SLACK for change in changes)} of {len(changes)} cases"
        )
    return "\n".join(text)


def cell(found: Sequence[Line], option: str, rule: str) -> str:
    """Return the mean accuracy, and the worst difference from the clusters' models."""
    values = [accuracy(line, option, rule) for line in found]
    worst = min(
        value - 100 * mean(line["test"][LEAF_MODEL])
        for value, line in zip(values, found, strict=True)
    )
    return f"{mean(values):.1f} ({worst:+.1f})"


def head(names: Sequence[str]) -> list[str]:
    """Return the first two rows of a Markdown table."""
    return [row(names), "| :-- |" + " --: |" * (len(names) - 1)]


def row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Make missing runs, and print the tables."""
    parser = jsonl.parser(__doc__, "model_choice.jsonl")
    parser.add_argument("--seeds", type=int, default=6, help="end of the seeds (default: 6)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.table:
        jobs = [
            {"task": task, "seed": seed}
            for seed in range(given.first, given.seeds)
            for task in TASKS
        ]
        jsonl.run_missing(given.out, jobs, lambda task, seed: run(task, seed, given.data_dir))
    lines = jsonl.read(given.out)
    print(tables([line for line in lines if given.first <= line["seed"] < given.seeds]))


if __name__ == "__main__":
    main()
