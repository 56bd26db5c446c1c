"""Measure how often rcfl calls the clusters that it found stable groups, and how often it is right.

Some tasks have true groups: MNIST with swapped or permuted labels or rotated images, and the
natural federation landmine, whose fields 1 to 15 and 16 to 29 are two kinds of ground. In other
tasks clients differ gradually, or not at all: images are rotated by an angle between 0° and 180°
that is drawn for each client, label shares are from a Dirichlet distribution, clients are schools
(exam), or have one distribution (iid).

The limits in ``fedclade/clustering/stability.py`` were chosen on seeds 0 to 5; seeds 6 to 15 are
reported separately. Each run is stored as one line of a JSON file, and an interrupted call
continues where it stopped.

    python studies/rcfl_stability.py --data-dir DIR --natural DIR/natural   # seeds 0 to 15
    python studies/rcfl_stability.py --table                                # only print the table
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import numpy as np
import torch
from rcfl import LOCAL
from rich.console import Console
from rich.table import Table

from fedclade import ReplicatedCFL, Run, load_federation, simulate
from fedclade.config import check_config
from fedclade.data import Federation
from fedclade.data.view import rotate_images
from fedclade.runs.stable_groups import find_stable_groups
from fedclade.tasks.metrics import cluster_scores

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from natural_defaults import SETS, copy_without_missing

Line = dict[str, Any]

ROUNDS = 8
"""Number of rounds on MNIST, with checks in rounds 3 and 7."""

NATURAL_ROUNDS = 20
CHOSEN_ON = range(6)
"""Seeds on which the limits of stable groups were chosen."""

GROUPS: Mapping[str, Mapping[str, Any]] = {
    f"{shift} {images}": {"samples_per_client": images, "shift": shift, "clusters": 4}
    for shift in ("label_swap", "label_permutation", "rotation")
    for images in (300, 100, 40)
} | {"label_groups 300": {"samples_per_client": 300, "partition": "label_groups", "clusters": 2}}
"""Settings of tasks on MNIST with true groups."""

NO_GROUPS: Mapping[str, Mapping[str, Any]] = {
    "iid 300": {"samples_per_client": 300},
    "any rotation 300": {"samples_per_client": 300},
    "any rotation 100": {"samples_per_client": 100},
    "40 clients, any rotation 300": {"samples_per_client": 300, "clients": 40},
} | {
    f"Dirichlet({alpha:g}) 300": {
        "samples_per_client": 300,
        "partition": "dirichlet",
        "partition_arguments": {"alpha": alpha},
    }
    for alpha in (0.1, 0.5)
}
"""Settings of tasks on MNIST without groups."""

NATURAL = ("landmine", "exam", "parkinsons", "wisdm")
FIRST_KIND = 15
"""Number of landmine's fields of the first kind, which come first."""


def rotate_clients(federation: Federation, seed: int) -> Federation:
    """Rotate the images of each client by an angle between 0° and 180°, drawn for the client."""
    pool = federation.pool
    images = pool.x.clone()
    angles = np.random.default_rng(seed).uniform(0, 180, len(federation.clients))
    for client, angle in zip(federation.clients, angles, strict=True):
        rows = torch.as_tensor(np.concatenate([client.train, client.validation, client.test]))
        images[rows] = torch.from_numpy(rotate_images(images[rows].numpy(), float(angle)))
    return replace(federation, pool=replace(pool, x=images))


def run_mnist(task: str, seed: int, data_dir: Path | None) -> tuple[Run, dict[int, int] | None]:
    """Run rcfl in a task on MNIST; return the run and the true groups by client."""
    settings: dict[str, Any] = {"clients": 20, "test_samples": 100}
    settings |= GROUPS[task] if task in GROUPS else NO_GROUPS[task]
    federation = load_federation("mnist", seed=seed, data_dir=data_dir, **settings)
    if task.endswith(("any rotation 300", "any rotation 100")):
        federation = rotate_clients(federation, seed)
    run = simulate(
        ReplicatedCFL(),
        "mlp",
        federation,
        local=LOCAL,
        rounds=ROUNDS,
        seed=seed,
        evaluate_every=ROUNDS,
        engine="stacked",
        progress=False,
    )
    truth = federation.true_clusters if task in GROUPS else None
    return run, None if truth is None else dict(truth)


def run_natural(task: str, seed: int, natural: Path) -> tuple[Run, dict[int, int] | None]:
    """Run rcfl on a natural federation; return the run and, for landmine, the kinds of fields."""
    data = {key: value for key, value in SETS[task].items() if key != "task"}
    with tempfile.TemporaryDirectory() as folder:
        copy_without_missing(natural, data["files"], Path(folder))
        data["files"] = f"{folder}/{Path(data['files']).name}"
        raw: dict[str, Any] = {"algorithm": {"name": "rcfl"}, "data": data}
        config = check_config(raw | {"seed": seed, "rounds": NATURAL_ROUNDS})
        run = config.run(config.federation(), device="cpu", progress=False)
    if task != "landmine":
        return run, None
    return run, {client: int(client >= FIRST_KIND) for client in run.tree.leaf_of}


def measure(task: str, seed: int, *, data_dir: Path | None, natural: Path | None) -> Line:
    """Run rcfl in a task; return its clusters, its stable groups, and their agreement."""
    torch.set_num_threads(1)
    if task in NATURAL:
        assert natural is not None  # only then are these tasks among the jobs
        run, truth = run_natural(task, seed, natural)
    else:
        run, truth = run_mnist(task, seed, data_dir)
    clusters = run.summary["clusters"]
    stable = find_stable_groups(run.events)
    groups = stable[1] if stable else []
    line: Line = {
        "clusters": {str(client): leaf for client, leaf in run.tree.leaf_of.items()},
        "found": clusters["found"],
        "stability": clusters.get("stability"),
        "stable": len(groups),
    }
    if groups:
        group_of = {client: i for i, group in enumerate(groups) for client in group}
        line["groups"] = {str(client): group for client, group in group_of.items()}
        if truth is not None:
            known = {client: truth[client] for client in group_of}
            line["ari"] = cluster_scores(group_of, known)["ari"]
    return line


def count_rows(lines: Sequence[Line]) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for task in (*GROUPS, *NATURAL, *NO_GROUPS):
        runs = [line for line in lines if line["task"] == task]
        cells = [task]
        for chosen in (True, False):
            part = [line for line in runs if (line["seed"] in CHOSEN_ON) == chosen]
            right = [line for line in part if line.get("ari") == 1]
            indices = [line["ari"] for line in part if "ari" in line]
            known = [line["stability"] for line in part if line["stability"] is not None]
            cells += [
                f"{sum(line['stable'] > 0 for line in part)} of {len(part)}",
                f"{len(right)}, ARI {mean(indices):.2f}" if indices else "",
                f"{min(known):.2f} to {max(known):.2f}" if known else "",
            ]
        found = [line["found"] for line in runs]
        cells.append(f"{min(found)} to {max(found)}" if found else "")
        cells.append(_agreement(runs) if task in NATURAL else "")
        yield cells


def _agreement(runs: Sequence[Line]) -> str:
    """Return the mean adjusted Rand index between the clusters of two seeds."""
    pairs = itertools.combinations([line["clusters"] for line in runs], 2)
    indices = [cluster_scores(one, other)["ari"] or 0.0 for one, other in pairs]
    return f"{mean(indices):.2f}" if indices else ""


def table(lines: Sequence[Line]) -> Table:
    """Return the table."""
    made = Table(title="stable groups of rcfl")
    for heading in (
        "task",
        "stable, seeds 0-5",
        "right",
        "stability",
        "stable, seeds 6-15",
        "right",
        "stability",
        "clusters",
        "ARI of seeds",
    ):
        made.add_column(heading)
    for row in count_rows(lines):
        made.add_row(*row)
    return made


def main() -> None:
    """Run missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "stability.jsonl")
    parser.add_argument("--natural", type=Path, help="folder with the natural federations")
    parser.add_argument("--only", nargs="*", default=[""], help="first letters of tasks to run")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--last", type=int, default=15, help="last seed (default: 15)")
    given = parser.parse_args()
    if not given.table:
        tasks = (*GROUPS, *NO_GROUPS, *(NATURAL if given.natural else ()))
        wanted = [task for task in tasks if task.startswith(tuple(given.only))]
        seeds = range(given.first, given.last + 1)
        jobs = [{"task": task, "seed": seed} for seed in seeds for task in wanted]
        work = partial(measure, data_dir=given.data_dir, natural=given.natural)
        jsonl.run_missing(given.out, jobs, work)
    Console(width=160).print(table(jsonl.read(given.out)))


if __name__ == "__main__":
    main()
