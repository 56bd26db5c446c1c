"""Compare alternatives to the choices in replicated clustering (rcfl).

The study has two parts. In "replicates", clients compute updates from halves, thirds and quarters
of their data, at the models of FedAvg in rounds 3 and 11. Several ways to find and to test clusters
(see ``rcfl_ways.py``) are compared on the same updates. In "schedule", rcfl runs with checks in
other rounds.

Each job is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python studies/rcfl_choices.py --data-dir DIR --out choices.jsonl   # both parts, 10 seeds
    python studies/rcfl_choices.py --out choices.jsonl --table          # only print the tables
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from rcfl import BY_ROUND, LOCAL, ROUNDS, SHIFTED, as_table
from rcfl_ways import COMPARED, Line, outcomes, record
from rich.console import Console
from rich.table import Table

from fedclade import ReplicatedCFL, load_federation, simulate
from fedclade.data import Federation
from fedclade.tasks.metrics import mean_and_interval

Job = tuple[str, str, str, int]

SCHEDULES = {f"every {rounds}": rounds for rounds in (7, 4, 10, 14)}
"""Values of ``check_every``; the first is the default, with which the others are compared."""

TASKS = {
    "schedule": [f"{shift} {images}" for images in (40, 100, 300) for shift in SHIFTED],
    "replicates": [
        f"{kind} {images}" for images in (20, 40, 100, 300) for kind in ("iid", *SHIFTED)
    ],
}
METHODS = {"schedule": list(SCHEDULES), "replicates": ["all"]}


def federation_of(task: str, seed: int, data_dir: Path | None) -> Federation:
    """Return the data of a task, which names a shift (or ``iid``) and the images of each client."""
    kind, images = task.split()
    shifted = {"shift": kind, "clusters": 4} if kind in SHIFTED else {}
    return load_federation(
        "mnist",
        clients=20,
        samples_per_client=int(images),
        test_samples=500,
        seed=seed,
        data_dir=data_dir,
        **shifted,
    )


def replicates(task: str, _: str, seed: int, data_dir: Path | None) -> Line:
    """Record the updates of a task, and compare all alternatives on them."""
    federation = federation_of(task, seed, data_dir)
    true_clusters = federation.true_clusters or {}
    truth = np.array([true_clusters.get(client, 0) for client in federation.ids])
    return {"found": outcomes(record(federation, seed), truth, seed)}


def schedule(task: str, method: str, seed: int, data_dir: Path | None) -> Line:
    """Run rcfl with the schedule of checks that ``method`` names."""
    settings = {
        "local": LOCAL,
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "seed": seed,
        "engine": "stacked",
    }
    run = simulate(
        ReplicatedCFL(check_every=SCHEDULES[method]),
        "mlp",
        federation_of(task, seed, data_dir),
        **settings,
    )
    clusters = {
        "ari": run.summary["clusters"]["ari"],
        "ari_by_15": run.metric_rows[BY_ROUND - 1]["ari"],
    }
    return {"accuracy": run.summary["accuracy"]["mean"], **clusters}


PARTS = {"schedule": schedule, "replicates": replicates}


def work(job: tuple[Job, Path | None, Path]) -> str:
    """Run one job, and write its line."""
    (part, task, method, seed), data_dir, out = job
    torch.set_num_threads(1)
    line = {"part": part, "task": task, "method": method, "seed": seed}
    line |= PARTS[part](task, method, seed, data_dir)
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return f"{part}: {task}, {method}, seed {seed}"


def read(out: Path) -> dict[Job, Line]:
    """Return the line of each job that has run."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {(line["part"], line["task"], line["method"], line["seed"]): line for line in lines}


def jobs(
    parts: Sequence[str], endings: Sequence[str], methods: Sequence[str], seeds: int
) -> Iterator[Job]:
    """Yield all jobs of each ending in turn, and for each ending all jobs of each seed in turn.

    Parameters
    ----------
    parts
        Parts of the study.
    endings
        Last words of the names of tasks, such as "40".
    methods
        Schedules, and "all" for the part "replicates".
    seeds
        Number of seeds.
    """
    for part in parts:
        for ending in endings:
            for seed in range(seeds):
                for task in (task for task in TASKS[part] if task.endswith(ending)):
                    yield from (
                        (part, task, method, seed) for method in METHODS[part] if method in methods
                    )


def findings_table(found: Sequence[Line]) -> Table:
    """Return a table of alternatives by numbers of images.

    A cell has the share of runs in which all clusters are found and pass the test, and the mean ARI
    of the clusters after the test.
    """
    runs: dict[str, dict[tuple[str, int], Line]] = defaultdict(dict)
    for line in found:
        for way, score in line["found"].items():
            runs[way][line["task"], line["seed"]] = score
    rows: list[tuple[str, ...]] = []
    for way, scores in runs.items():
        of_iid = [score["parted"] for (task, _), score in scores.items() if task.startswith("iid")]
        cells = [_share_and_ari(scores, images) for images in ("20", "40", "100", "300")]
        less = [_estimate(_less(scores, runs[usual_of(way)], images)) for images in ("20", "40")]
        rows.append((way, *cells, *less, f"{sum(of_iid)} of {len(of_iid)}" if of_iid else ""))
    columns = (
        "round, way",
        "20 images",
        "40",
        "100",
        "300",
        "ARI minus rcfl's, 20",
        "40",
        "iid: split",
    )
    return as_table("share of runs with all clusters right · mean ARI", columns, rows)


def usual_of(way: str) -> str:
    """Return the way with which a way is compared: that of rcfl in the same round."""
    number, name = way.split(maxsplit=1)
    return f"{number.rstrip(',')} {'within' if name in COMPARED else 'average'}"


def _shifted(scores: Mapping[tuple[str, int], Line], images: str) -> dict[tuple[str, int], Line]:
    return {
        case: score
        for case, score in scores.items()
        if case[0].startswith(SHIFTED) and case[0].endswith(f" {images}")
    }


def _share_and_ari(scores: Mapping[tuple[str, int], Line], images: str) -> str:
    some = _shifted(scores, images).values()
    return (
        f"{mean(each['right'] for each in some):.2f} · {mean(each['ari'] for each in some):.3f}"
        if some
        else ""
    )


def _less(
    scores: Mapping[tuple[str, int], Line], usual: Mapping[tuple[str, int], Line], images: str
) -> list[float]:
    """Return the mean difference in ARI from the usual way, for each seed.

    Tasks with the same seed are not independent, so they are averaged.
    """
    by_seed: dict[int, list[float]] = defaultdict(list)
    for case, score in _shifted(scores, images).items():
        by_seed[case[1]].append(score["ari"] - usual[case]["ari"])
    return [mean(some) for some in by_seed.values()]


def schedule_table(found: Sequence[Line]) -> Table:
    """Return a table of tasks and schedules.

    The columns contain the accuracy, its difference from the default schedule with the same seeds,
    and the ARI.
    """
    by_case: dict[tuple[str, str], dict[int, Line]] = defaultdict(dict)
    for line in found:
        by_case[line["task"], line["method"]][line["seed"]] = line
    rows: list[tuple[str, ...]] = []
    for (task, method), runs in sorted(
        by_case.items(), key=lambda case: TASKS["schedule"].index(case[0][0])
    ):
        usual = by_case[task, next(iter(SCHEDULES))]
        pairs = [(line, usual[seed]) for seed, line in runs.items() if seed in usual]
        rows.append(
            (
                task,
                method,
                str(len(runs)),
                f"{100 * mean(line['accuracy'] for line in runs.values()):.1f}",
                _estimate([100 * (line["accuracy"] - other["accuracy"]) for line, other in pairs]),
                f"{mean(line['ari'] for line in runs.values()):.3f}",
                f"{mean(line['ari_by_15'] for line in runs.values()):.3f}",
            )
        )
    return as_table(
        "schedules",
        ("task", "checks", "runs", "accuracy, %", "difference", "ARI", "ARI in round 15"),
        rows,
    )


def _estimate(values: Sequence[float]) -> str:
    if not values:
        return ""
    middle, half = mean_and_interval(values)
    return f"{middle:+.2f}" if half is None else f"{middle:+.2f} ± {half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, with one line per job")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (default: 10)")
    parser.add_argument(
        "--parts",
        nargs="*",
        default=list(PARTS),
        choices=list(PARTS),
        help="parts of the study to run (default: both)",
    )
    parser.add_argument(
        "--tasks",
        nargs="*",
        default=["40", "20", "100", "300"],
        help="endings of the names of tasks to run, in this order",
    )
    parser.add_argument(
        "--methods",
        nargs="*",
        default=["all", *SCHEDULES],
        help='schedules to run; "all" for the part replicates',
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--table", action="store_true", help="run nothing, only print the tables")
    arguments = parser.parse_args()

    if not arguments.table:
        done = read(arguments.out)
        wanted = jobs(arguments.parts, arguments.tasks, arguments.methods, arguments.seeds)
        left = [(job, arguments.data_dir, arguments.out) for job in wanted if job not in done]
        with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
            for finished in pool.imap_unordered(work, left):
                print(finished, flush=True)
    found: dict[str, list[Line]] = defaultdict(list)
    for (part, *_), line in read(arguments.out).items():
        found[part].append(line)
    console = Console(width=140)
    console.print(findings_table(found["replicates"]))
    console.print(schedule_table(found["schedule"]))


if __name__ == "__main__":
    main()
