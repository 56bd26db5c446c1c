"""Compare methods on seven natural federations, and on MNIST with and without groups of clients.

A natural federation is a data set with real clients, such as hospitals or users. The study has two
parts: "natural", and "groups" with tasks of ``studies/rcfl.py``. All methods of a task have the same
data, model, step size and number of rounds, and are evaluated once, after the last round.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.
The tables are made from this file. They have the mean test scores of the clients and the training
steps of each method, and how far each method is behind the best methods (its regret).

    python studies/natural_methods.py --data-dir DIR --out natural.jsonl
    python studies/natural_methods.py --parts groups --mnist-dir DIR --out natural.jsonl
    python studies/natural_methods.py --out natural.jsonl --table        # only print the tables
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

import jsonl
import torch
from rcfl import LOCAL, ROUNDS, TASKS, as_table
from rich.console import Console
from rich.table import Table

from fedclade import FedcladeError
from fedclade.channel import StepCounting
from fedclade.config import Config, check_config
from fedclade.core import Sink, TrainQuery, Updates
from fedclade.data import Federation
from fedclade.tasks.metrics import mean_and_interval
from fedclade.training import SimulatedClients

Line = dict[str, Any]

NATURAL_ROUNDS = 20
VALIDATION = {"validation_fraction": 0.2}

# The sections [data] and [task] are the ones that "fedclade init" writes for the files. Columns that
# benchmarks/natural_defaults.py leaves out are left out here as well: a number of each student in
# "exam", and a second score from the same examination of the patient in "parkinsons".
NATURAL: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "heart": {
        "task": {"name": "classification"},
        "data": {
            "files": "heart/*.csv",
            "target": "target",
            "missing": "mean",
            "categorical": ["cp", "restecg", "slope", "ca", "thal"],
        },
    },
    "exam": {
        "task": {"name": "regression"},
        "data": {
            "files": "exam/exam.csv",
            "client": "school",
            "target": "normexam",
            "fewest_rows": 10,
            "exclude": ["student"],
        },
    },
    "landmine": {"task": {"name": "binary"}, "data": {"files": "landmine/*.csv", "target": "mine"}},
    "parkinsons": {
        "task": {"name": "regression"},
        "data": {
            "files": "parkinsons/parkinsons_updrs.csv",
            "client": "subject#",
            "target": "total_UPDRS",
            "exclude": ["motor_UPDRS"],
        },
    },
    "student": {
        "task": {"name": "regression"},
        "data": {
            "files": "student/*.csv",
            "target": "G3",
            "categorical": [
                "Medu",
                "Fedu",
                "traveltime",
                "studytime",
                "failures",
                "famrel",
                "freetime",
                "goout",
                "Dalc",
                "Walc",
                "health",
            ],
        },
    },
    "tcga_event": {
        "task": {"name": "binary"},
        "data": {
            "files": "tcga_brca/brca.csv",
            "client": "region",
            "target": "E",
            "exclude": ["pid", "T", "fold"],
        },
    },
    "wisdm": {
        "task": {"name": "classification"},
        "data": {
            "files": "wisdm/wisdm.csv",
            "client": "user",
            "target": "class",
            "missing": "mean",
            "exclude": ["UNIQUE_ID", "XAVG"],
        },
    },
}
"""Sections ``[task]`` and ``[data]`` of the config of each natural federation."""

GROUPS = (
    "iid 300",
    "label_swap 300",
    "label_swap 100",
    "label_permutation 300",
    "label_permutation 100",
    "rotation 300",
)
"""Tasks of ``studies/rcfl.py`` with MNIST; all but the first have four clusters of clients."""

METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "local": {"name": "local"},
    "finetune": {"name": "finetune"},
    "fedper": {"name": "fedper"},
    "ditto": {"name": "ditto"},
    "ifca": {"name": "ifca", "clusters": 3},
    "fl_hc": {"name": "fl_hc"},
    "cfl": {"name": "cfl"},
    "rcfl": {"name": "rcfl"},
    "rcfl, both": {"name": "rcfl", "fallback": True, "personalize": True},
    "auto": {"name": "auto"},
    "oracle": {"name": "oracle"},
}
"""Section ``[algorithm]`` of the config of each method.

The oracle runs only if it is named, and only in tasks with known clusters.
"""

CHOOSING = ("rcfl, both", "auto")
"""Methods that choose a model for each client by validation data, and are no single methods."""

BASELINES = ("fedavg", "local", "finetune")

PARTS: Mapping[str, Sequence[str]] = {"natural": tuple(NATURAL), "groups": GROUPS}


@dataclass(frozen=True)
class Job:
    """One run of the study, with the folder of its data."""

    part: str
    set: str
    method: str
    seed: int
    data_dir: Path | None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Values by which the line of the run is found in the file."""
        return self.part, self.set, self.method, self.seed

    @property
    def config(self) -> Config:
        """The complete config of the run."""
        is_natural = self.part == "natural"
        sections = natural_sections(self.set, self.data_dir) if is_natural else mnist(self.set)
        rounds = NATURAL_ROUNDS if is_natural else ROUNDS
        top = {"seed": self.seed, "rounds": rounds, "evaluate_every": rounds, "engine": "stacked"}
        return check_config({**top, **sections, "algorithm": METHODS[self.method]})


def natural_sections(name: str, folder: Path | None) -> dict[str, Any]:
    """Return the sections of the config of a natural federation whose files are in a folder."""
    if folder is None:
        raise SystemExit("--data-dir is missing: the folder with the natural federations")
    data = NATURAL[name]["data"]
    files = str(folder.absolute() / data["files"])
    return {"task": NATURAL[name]["task"], "data": {**data, **VALIDATION, "files": files}}


def mnist(task: str) -> dict[str, Any]:
    """Return the sections of the config of a task with MNIST.

    Local training has the epochs and the batch size of ``studies/rcfl.py``, and the library's
    default step size, which is the step size of that study.
    """
    data = {"name": "mnist", "clients": 20, "test_samples": 500, **TASKS[task], **VALIDATION}
    local = {"epochs": LOCAL.epochs, "batch_size": LOCAL.batch_size}
    return {"data": data, "model": {"name": "mlp"}, "local": local}


@lru_cache(maxsize=1)
def load(part: str, name: str, seed: int, data_dir: Path | None) -> Federation:
    """Load a federation; the methods of the same set and seed share it."""
    config = Job(part, name, "fedavg", seed, data_dir).config
    return config.federation(None if part == "natural" else data_dir)


# The steps of local training.


@dataclass
class StepCount:
    """Number of local training steps, and of examples in their mini-batches (with repetitions).

    ``spared`` is the number of steps that clients did not take, because they answered a repeated
    query from memory.
    """

    steps: int = 0
    examples: int = 0
    spared: int = 0

    def add(self, query: TrainQuery, size: int) -> None:
        """Add the training of a client with ``size`` training examples for a query."""
        local = query.local
        # The key decides which examples a part contains, but not their number.
        examples = len(query.examples(size, key=0))
        if query.work.is_gradient:
            self.steps += local.batches_per_epoch(examples)
            self.examples += examples
            return
        steps = query.work.steps.count_steps(local, examples)
        self.steps += steps
        # Some kinds of steps repeat the local training.
        self.examples += round(local.passed(examples) * steps / local.steps_with(examples))


@contextmanager
def counted_steps() -> Generator[StepCount]:
    """Count the steps of all clients in all training queries while the context is open.

    The queries are counted where simulated clients carry them out. Queries about several parts of
    the clients' data arrive there as one query for each part, and a query that is sent again to some
    clients arrives again, so that all steps count. A full-batch gradient counts as an epoch. A step
    on a part of the data has fewer examples than other steps if the parts have the same size, so the
    examples are counted as well.
    """
    count = StepCount()
    handle_updates = SimulatedClients.handle_updates
    after = StepCounting.after

    def handle_counted(
        clients: SimulatedClients, query: TrainQuery, sink: Sink | None = None
    ) -> Updates:
        sizes = clients.sizes
        for client in query.ids:
            count.add(query, sizes[client])
        return handle_updates(clients, query, sink)

    def after_counted(counting: StepCounting, query: TrainQuery, reply: Updates) -> Updates:
        counted = counting.meter.steps
        reply = after(counting, query, reply)
        count.spared += counted - counting.meter.steps
        return reply

    with (
        mock.patch.object(SimulatedClients, "handle_updates", handle_counted),
        mock.patch.object(StepCounting, "after", after_counted),
    ):
        yield count


def run(job: Job) -> Line:
    """Run one method on one set with one seed, and return its results."""
    federation = load(job.part, job.set, job.seed, job.data_dir)
    began = time.perf_counter()
    with counted_steps() as count:
        done = job.config.run(federation, device="cpu", progress=False, references=False)
    metric = done.summary["metrics"][0]
    rows = done.clients[done.clients["round"] == done.clients["round"].max()]
    scores = dict(zip(rows["client"], rows[metric["name"]], strict=True))
    return {
        "metric": metric["name"],
        "higher_is_better": metric["higher_is_better"],
        "scores": [score_of(scores.get(client)) for client in federation.ids],
        "n_test": [len(client.test) for client in federation.clients],
        "clusters": done.summary["clusters"]["found"],
        "seconds": round(time.perf_counter() - began, 2),
        "steps": count.steps,
        "examples": count.examples,
        "spared": count.spared,
    }


def score_of(value: Any) -> float | None:
    """Return a client's score; None without a score, as the AUC of a client with one label."""
    return None if value is None or math.isnan(value) else float(value)


def work(task: tuple[Job, Path]) -> str:
    """Run a job, and write its line."""
    job, out = task
    torch.set_num_threads(1)
    name = f"{job.set}: {job.method}, seed {job.seed}"
    try:
        results = run(job)
    except FedcladeError as error:  # the other jobs can go on
        return f"{name}: FAILED: {error}"
    names = {"part": job.part, "set": job.set, "method": job.method, "seed": job.seed}
    jsonl.add(out, {**names, **results})
    return f"{name}: {results['seconds']} s"


# Tables.


@dataclass(frozen=True)
class Results:
    """Results of all methods on one set."""

    name: str
    metric: str
    higher_is_better: bool
    scores: Mapping[str, Mapping[int, float]]  # mean score of the clients, by method and seed
    steps: Mapping[str, Mapping[int, int]]  # by method and seed
    examples: Mapping[str, Mapping[int, int]]  # by method and seed
    clusters: Mapping[str, Mapping[int, int]]  # by method and seed

    @classmethod
    def of(cls, name: str, lines: Sequence[Line]) -> Results:
        """Collect the results from the lines of one set."""
        scores: dict[str, dict[int, float]] = defaultdict(dict)
        steps: dict[str, dict[int, int]] = defaultdict(dict)
        examples: dict[str, dict[int, int]] = defaultdict(dict)
        clusters: dict[str, dict[int, int]] = defaultdict(dict)
        for line in lines:
            method, seed = line["method"], line["seed"]
            scores[method][seed] = mean(score for score in line["scores"] if score is not None)
            steps[method][seed] = line["steps"]
            examples[method][seed] = line["examples"]
            clusters[method][seed] = line["clusters"]
        first = lines[0]
        return cls(
            name=name,
            metric=first["metric"],
            higher_is_better=first["higher_is_better"],
            scores=scores,
            steps=steps,
            examples=examples,
            clusters=clusters,
        )

    @property
    def factor(self) -> float:
        """Factor by which scores are shown: accuracies in per cent, errors as they are."""
        return 100.0 if self.higher_is_better else 1.0

    def mean_score(self, method: str) -> float:
        """Return the mean score of a method over its seeds."""
        return mean(self.scores[method].values())

    def best(self, methods: Sequence[str]) -> str | None:
        """Return the method with the best mean score; None if none of the methods has run."""
        present = [method for method in methods if method in self.scores]
        if not present:
            return None
        choose = max if self.higher_is_better else min
        return choose(present, key=self.mean_score)

    def regrets(self, method: str, best: str) -> list[float]:
        """Return how far a method is behind another one, for each seed that both have run.

        The unit is points for accuracies and other scores of which higher is better. For errors it
        is per cent of the other method's mean error.
        """
        if method not in self.scores:
            return []
        own, other = self.scores[method], self.scores[best]
        shared = sorted(set(own) & set(other))
        if self.higher_is_better:
            return [100 * (other[seed] - own[seed]) for seed in shared]
        unit = mean(other[seed] for seed in shared) / 100 if shared else 1.0
        return [(own[seed] - other[seed]) / unit for seed in shared]


def ratio_to_fedavg(numbers: Mapping[str, Mapping[int, int]], method: str) -> str:
    """Return the mean ratio of a method's number to fedavg's with the same seed, as text."""
    other = numbers.get("fedavg", {})
    ratios = [number / other[seed] for seed, number in numbers[method].items() if seed in other]
    return f"{mean(ratios):.2f}" if ratios else "?"


def collect(lines: Sequence[Line], part: str) -> list[Results]:
    """Return the results of each set of a part; a later line replaces an earlier one."""
    last = {
        (line["set"], line["method"], line["seed"]): line for line in lines if line["part"] == part
    }
    by_set: dict[str, list[Line]] = defaultdict(list)
    for line in last.values():
        by_set[line["set"]].append(line)
    return [Results.of(name, by_set[name]) for name in PARTS[part] if name in by_set]


def tables(lines: Sequence[Line], part: str) -> Iterator[Table]:
    """Yield the tables of a part."""
    results = collect(lines, part)
    if not results:
        return
    shown = [method for method in METHODS if any(method in each.scores for each in results)]
    names = [f"{each.name}, {unit(each)}" for each in results]
    yield score_table(f"{part}: mean score of the clients (± 95 %, over seeds)", results, shown)
    yield as_table(
        f"{part}: steps of local training; examples in these steps (multiples of fedavg's); clusters",
        ("method", *(each.name for each in results)),
        [(method, *(cost_cell(each, method) for each in results)) for method in shown],
    )
    single = [method for method in METHODS if method not in (*CHOOSING, "oracle")]
    for title, candidates in (
        (f"best single method (all but {' and '.join(CHOOSING)})", single),
        (f"best of {', '.join(BASELINES)}", BASELINES),
    ):
        yield regret_table(f"{part}: behind the {title}", results, shown, candidates, names)


def unit(results: Results) -> str:
    """Return the unit of the regrets of a set."""
    return "points" if results.higher_is_better else "%"


def score_table(title: str, results: Sequence[Results], methods: Sequence[str]) -> Table:
    """Return the table with the mean score of each method on each set."""
    heads = [f"{each.name}, {each.metric}" for each in results]
    rows = [(method, *(score_cell(each, method) for each in results)) for method in methods]
    seeds = [str(max(len(of_method) for of_method in each.scores.values())) for each in results]
    return as_table(title, ("method", *heads), [*rows, ("seeds", *seeds)])


def score_cell(results: Results, method: str) -> str:
    """Return a method's mean score with its interval."""
    if method not in results.scores:
        return ""
    values = [results.factor * score for score in results.scores[method].values()]
    digits = 1 if results.higher_is_better else 3
    return estimate(values, digits)


def cost_cell(results: Results, method: str) -> str:
    """Return a method's steps and examples, as multiples of fedavg's, and its mean clusters."""
    if method not in results.scores:
        return ""
    steps = ratio_to_fedavg(results.steps, method)
    examples = ratio_to_fedavg(results.examples, method)
    return f"{steps}; {examples}; {mean(results.clusters[method].values()):g}"


def regret_table(
    title: str,
    results: Sequence[Results],
    methods: Sequence[str],
    candidates: Sequence[str],
    names: Sequence[str],
) -> Table:
    """Return the table of regrets against the best of some methods on each set.

    A regret above 0 is worse than this method. It is marked "worse" if its 95 % interval over seeds
    is above 0, and "better" if the interval is below 0.
    """
    bests = [each.best(candidates) for each in results]
    rows: list[tuple[str, ...]] = []
    for method in methods:
        regrets = [
            each.regrets(method, best) if best else []
            for each, best in zip(results, bests, strict=True)
        ]
        means = [mean(values) for values in regrets if values]
        lacking = len(results) - len(means)
        together = f"{mean(means):.2f}" if means else ""
        if means and lacking:
            together += f" ({lacking} sets missing)"
        middle = f"{median(means):.2f}" if means else ""
        largest = f"{max(means):.2f}" if means else ""
        cells = [
            "best" if method == best else regret_cell(values)
            for values, best in zip(regrets, bests, strict=True)
        ]
        rows.append((method, together, middle, largest, *cells))
    best_row = ("(best method)", "", "", "", *(best or "" for best in bests))
    return as_table(title, ("method", "mean", "median", "largest", *names), [*rows, best_row])


def regret_cell(values: Sequence[float]) -> str:
    """Return the mean regret over seeds, its interval, and whether it is beyond noise."""
    if not values:
        return ""
    middle, half = mean_and_interval(values)
    text = estimate(values, 2)
    if half is None or abs(middle) <= half:
        return text
    return f"{text} {'worse' if middle > 0 else 'better'}"


def estimate(values: Sequence[float], digits: int) -> str:
    """Return a mean with the half width of its 95 % interval by Student's t."""
    middle, half = mean_and_interval(values)
    return f"{middle:.{digits}f}" if half is None else f"{middle:.{digits}f} ± {half:.{digits}f}"


def seed_range(text: str) -> range:
    """Return the seeds A, ..., B - 1 of a text "A:B"."""
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def options() -> argparse.ArgumentParser:
    """Return the options of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with the natural federations")
    parser.add_argument("--mnist-dir", type=Path, help="folder with MNIST")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("natural.jsonl"),
        help="JSON file, one line per run (default: natural.jsonl)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["natural"],
        choices=list(PARTS),
        help="parts of the study (default: natural)",
    )
    parser.add_argument(
        "--seeds",
        type=seed_range,
        default=range(10),
        metavar="A:B",
        help="seeds A to B - 1 (default: 0:10)",
    )
    parser.add_argument("--only", nargs="+", default=(), help="sets to run (default: all)")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[method for method in METHODS if method not in ("auto", "oracle")],
        choices=list(METHODS),
        help="methods to run (default: all but auto and oracle)",
    )
    parser.add_argument("--processes", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument(
        "--table", action="store_true", help="run nothing, only print the tables of stored runs"
    )
    return parser


def missing_jobs(given: argparse.Namespace) -> list[Job]:
    """Return the jobs that have no line yet; the runs that share data follow each other."""
    lines = jsonl.read(given.out)
    done = {(line["part"], line["set"], line["method"], line["seed"]) for line in lines}
    jobs = [
        Job(part, name, method, seed, given.data_dir if part == "natural" else given.mnist_dir)
        for part in given.parts
        for seed in given.seeds
        for name in PARTS[part]
        if not given.only or name in given.only
        for method in given.methods
    ]
    return [job for job in jobs if job.key not in done]


def main() -> None:
    """Run missing jobs, and print the tables."""
    parser = options()
    given = parser.parse_args()
    known = [name for part in given.parts for name in PARTS[part]]
    for name in given.only:
        if name not in known:
            parser.error(f"--only {name!r} is no set of the parts; choose from {', '.join(known)}")
    if not given.table:
        if "natural" in given.parts and given.data_dir is None:
            parser.error("--data-dir is missing: the folder with the natural federations")
        tasks = [(job, given.out) for job in missing_jobs(given)]
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            for finished in pool.imap_unordered(work, tasks):
                print(finished, flush=True)
    console = Console(width=240)
    lines = [line for line in jsonl.read(given.out) if line["seed"] in given.seeds]
    for part in given.parts:
        for table in tables(lines, part):
            console.print(table)


if __name__ == "__main__":
    main()
