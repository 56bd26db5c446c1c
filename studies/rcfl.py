"""Compare replicated clustering (rcfl) with other methods on MNIST.

The study has four parts: accuracy and clusters in several tasks ("suite"), clusters of unequal
sizes ("sizes"), clusters that change during a run ("drift"), and the cost of a run ("cost").

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.
The tables are made from this file.

    python studies/rcfl.py --data-dir DIR --out rcfl.jsonl            # all parts, 10 seeds
    python studies/rcfl.py --out rcfl.jsonl --table                   # only print the tables
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedclade import (
    CFL,
    FLHC,
    IFCA,
    FedAvg,
    LocalTraining,
    Oracle,
    ReplicatedCFL,
    load_federation,
    simulate,
)
from fedclade.algorithms import Algorithm
from fedclade.channel.signature import Signature
from fedclade.core.queries import RoundPlan
from fedclade.data import Federation
from fedclade.runs.backend import Backend
from fedclade.tasks.metrics import cluster_scores, mean_and_interval

Line = dict[str, Any]
Wanted = Mapping[str, tuple[str, ...]]
"""First letters of names of "methods" and "tasks" to run; empty for all."""

LOCAL = LocalTraining(epochs=3, batch_size=20, lr=0.1)
ROUNDS, BY_ROUND = 40, 15
SHIFTED = ("label_swap", "label_permutation", "rotation")
GRID = tuple(itertools.product((0.1, 0.2, 0.4), (0.3, 0.6, 1.0)))
"""Pairs (ε₁, ε₂) of CFL. The best pair is chosen by accuracy on test data, which is not possible in
practice."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "rcfl, sketches": {"signature": Signature(kind="projected", dim=1024)},
    "rcfl, common body": {"common": "body"},
    "oracle, common body": {"common": "body"},
}
"""Settings of the run for some methods: clients send sketches in place of updates in checks, or all
layers except the last are averaged over all clusters."""

TASKS: Mapping[str, Mapping[str, Any]] = {
    **{f"iid {n}": {"samples_per_client": n} for n in (40, 300, 3000)},
    "label_groups 300": {"samples_per_client": 300, "partition": "label_groups", "clusters": 2},
    **{
        f"{shift} {n}": {"samples_per_client": n, "shift": shift, "clusters": 4}
        for n in (300, 100, 40)
        for shift in SHIFTED
    },
}


def methods(task: str, truth: Mapping[int, int] | None) -> dict[str, Algorithm]:
    """Return the algorithms that run in a task, by name."""
    found: dict[str, Algorithm] = {
        "rcfl": ReplicatedCFL(),
        "tested cfl": CFL(criterion="replicated"),
        "fedavg": FedAvg(),
    }
    if task.endswith((" 40", " 100")):  # updates from few examples have the most noise
        found["rcfl, sketches"] = ReplicatedCFL()
    found["rcfl, common body"] = ReplicatedCFL()
    if truth is not None:
        found |= dict.fromkeys(("oracle", "oracle, common body"), Oracle(truth))
    if task.startswith(SHIFTED):
        found["fl_hc auto"] = FLHC(rounds_before=5, metric="l2", linkage="ward")
        found["ifca, true k"] = IFCA(clusters=4, restarts=4)
    if task.endswith((" 40", " 100")) and truth is not None:
        found |= {f"cfl {eps1} {eps2}": CFL(eps1=eps1, eps2=eps2) for eps1, eps2 in GRID}
    return found


def suite(
    seed: int, data_dir: Path | None, done: set[tuple[str, ...]], wanted: Wanted
) -> Iterator[Line]:
    """Run every method in every task, or only those with the wanted first letters."""
    for task, settings in TASKS.items():
        if not task.startswith(wanted["tasks"] or ""):
            continue
        federation = load_federation(
            "mnist", clients=20, test_samples=500, seed=seed, data_dir=data_dir, **settings
        )
        local = LOCAL if settings["samples_per_client"] < 3000 else replace(LOCAL, epochs=1)
        for name, algorithm in methods(task, federation.true_clusters).items():
            if (
                name.startswith(wanted["methods"] or "")
                and ("suite", task, name, str(seed)) not in done
            ):
                yield {
                    "part": "suite",
                    "task": task,
                    "method": name,
                    "seed": seed,
                    **_run(algorithm, federation, local, seed, SETTINGS.get(name, {})),
                }


def _run(
    algorithm: Algorithm,
    federation: Federation,
    local: LocalTraining,
    seed: int,
    settings: Mapping[str, Any],
) -> Line:
    run = simulate(
        algorithm,
        "mlp",
        federation,
        local=local,
        rounds=ROUNDS,
        seed=seed,
        evaluate_every=ROUNDS,
        engine="stacked",
        **settings,
    )
    return {
        "accuracy": run.summary["accuracy"]["mean"],
        "clusters": run.summary["clusters"]["found"],
        "ari": run.summary["clusters"]["ari"],
        "ari_by_15": run.metric_rows[BY_ROUND - 1]["ari"],
        "parted": any(row["clusters"] > 1 for row in run.metric_rows),
        "checks": [
            {key: event[key] for key in ("round", "p_value", "gain", "gain_before", "gamma")}
            for event in run.events
            if event["kind"] in ("tested", "checked", "regrouped")
        ],
    }


def sizes(
    seed: int, data_dir: Path | None, done: set[tuple[str, ...]], wanted: Wanted
) -> Iterator[Line]:
    """Run rcfl with 2, 4 and 8 clusters of unequal sizes, from 3 clients up.

    The clients also have unequal numbers of examples.
    """
    for k in (2, 4, 8):
        task = f"{k} clusters"
        if ("sizes", task, "rcfl", str(seed)) in done:
            continue
        clients = [3 + round(i * (14 if k == 2 else 5 if k == 4 else 3)) for i in range(k)]
        everybody = load_federation(
            "mnist",
            clients=k * max(clients),
            samples_per_client=300,
            test_samples=200,
            shift="label_permutation",
            clusters=k,
            seed=seed,
            data_dir=data_dir,
        )
        federation = _thinned(everybody, clients, seed)
        found = _run(ReplicatedCFL(), federation, LOCAL, seed, {})
        yield {
            "part": "sizes",
            "task": task,
            "method": "rcfl",
            "seed": seed,
            "wanted": clients,
            **found,
        }


def _thinned(everybody: Federation, wanted: Sequence[int], seed: int) -> Federation:
    """Reduce a federation to some clients of each cluster, each with 50 to 300 examples.

    ``wanted`` is the number of clients of each cluster.
    """
    truth = everybody.true_clusters
    assert truth is not None  # a shift makes clusters
    draw, left = np.random.default_rng(seed), list(wanted)
    kept = []
    for client in everybody.clients:
        cluster = truth[client.id]
        if left[cluster]:
            left[cluster] -= 1
            kept.append(replace(client, train=client.train[: int(draw.integers(50, 301))]))
    return replace(everybody, clients=tuple(kept), true_clusters={c.id: truth[c.id] for c in kept})


def drift(
    seed: int, data_dir: Path | None, done: set[tuple[str, ...]], wanted: Wanted
) -> Iterator[Line]:
    """Change the true clusters in round 20, and measure whether rcfl finds them by round 40."""
    changes: Mapping[str, Callable[[int, int], int]] = {
        "4 clients move": lambda client, cluster: (cluster + 1) % 4 if client < 4 else cluster,
        "2 of 4 clusters merge": lambda client, cluster: 0 if cluster == 1 else cluster,
        "a cluster splits": lambda client, cluster: (
            4 if cluster == 0 and client % 8 == 0 else cluster
        ),
    }
    settings = {"clients": 32, "samples_per_client": 300, "test_samples": 300, "clusters": 5}
    for task, change in changes.items():
        if ("drift", task, "rcfl", str(seed)) in done:
            continue
        pool = load_federation(
            "mnist", shift="label_permutation", seed=seed, data_dir=data_dir, **settings
        )
        truth = pool.true_clusters
        assert truth is not None  # a shift makes clusters
        views = {truth[client.id]: client.label_map for client in pool.clients}
        before = {client.id: client.id % 4 for client in pool.clients}
        after = {client: change(client, cluster) for client, cluster in before.items()}
        yield {
            "part": "drift",
            "task": task,
            "method": "rcfl",
            "seed": seed,
            **_drifting(pool, views, before, after, seed),
        }


def _drifting(
    pool: Federation,
    views: Mapping[int, torch.Tensor | None],
    before: Mapping[int, int],
    after: Mapping[int, int],
    seed: int,
) -> Line:
    algorithm, state, aris = ReplicatedCFL(), None, []
    for truth, rounds in ((before, range(1, 20)), (after, range(20, 41))):
        clients = tuple(
            replace(client, label_map=views[truth[client.id]]) for client in pool.clients
        )
        world = Backend.simulated_by(
            replace(pool, clients=clients, true_clusters=truth),
            "mlp",
            algorithm,
            seed=seed,
            engine="stacked",
        )
        state = state or algorithm.init(world.initial, world.clients)
        for number in rounds:
            this_round = RoundPlan(number, LOCAL, seed)
            state, _ = algorithm.step(state, world.clients.ids, world.clients, this_round)
            aris.append(cluster_scores(state.tree.leaf_of, truth)["ari"])
    models, rows = state.tree.models([state.tree.leaf_of[client] for client in world.clients.ids])
    accuracy = float(
        world.clients.evaluate(world.clients.ids, models, rows, "test").scores[:, 0].mean()
    )
    return {"accuracy": accuracy, "ari_before": aris[18], "ari_at_40": aris[-1], "aris": aris}


def cost(
    seed: int, data_dir: Path | None, done: set[tuple[str, ...]], wanted: Wanted
) -> Iterator[Line]:
    """Measure the cost of 60 rounds of rcfl, and of the oracle, which has the true clusters."""
    settings = {
        "clients": 20,
        "samples_per_client": 300,
        "test_samples": 500,
        "shift": "label_swap",
        "clusters": 4,
    }
    federation = load_federation("mnist", seed=seed, data_dir=data_dir, **settings)
    truth = federation.true_clusters
    assert truth is not None  # a shift makes clusters
    for name in ("rcfl", "rcfl, sketches", "oracle"):
        if ("cost", "label_swap 300", name, str(seed)) in done:
            continue
        algorithm = Oracle(truth) if name == "oracle" else ReplicatedCFL()
        settings = {
            "local": LOCAL,
            "rounds": 60,
            "seed": seed,
            "engine": "stacked",
            **SETTINGS.get(name, {}),
        }
        run = simulate(algorithm, "mlp", federation, **settings)
        yield {
            **{"part": "cost", "task": "label_swap 300", "method": name, "seed": seed},
            "bytes": run.summary["bytes_up"] + run.summary["bytes_down"],
            "seconds": run.summary["seconds"],
            "checks": sum(
                event["kind"] in ("tested", "checked", "regrouped") for event in run.events
            ),
        }


PARTS = {"suite": suite, "sizes": sizes, "drift": drift, "cost": cost}


def work(job: tuple[str, int, Path | None, Path, set[tuple[str, ...]], Wanted]) -> str:
    """Run one part of the study with one seed, and write its lines."""
    part, seed, data_dir, out, done, wanted = job
    torch.set_num_threads(1)
    for line in PARTS[part](seed, data_dir, done, wanted):
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return f"{part} seed {seed}"


def read(out: Path) -> list[Line]:
    """Return the lines of the file; if several lines are about the same run, the last of them."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return list(
        {
            (line["part"], line["task"], line["method"], line["seed"]): line for line in lines
        }.values()
    )


def tables(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield the tables."""
    by_case: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
    for line in lines:
        by_case[line["part"], line["task"], line["method"]].append(line)
    yield suite_table({case[1:]: found for case, found in by_case.items() if case[0] == "suite"})
    kinds = {
        part: {case[1:]: found for case, found in by_case.items() if case[0] == part}
        for part in PARTS
    }
    yield as_table(
        "unequal clusters",
        ("clusters", "runs", "mean ARI", "lowest ARI", "clients in each cluster"),
        [(task, *_sizes_cells(found)) for (task, _), found in kinds["sizes"].items()],
    )
    yield as_table(
        "drift in round 20",
        ("change", "runs", "ARI in round 19", "ARI in round 40", "lowest ARI", "accuracy, %"),
        [(task, *_drift_cells(found)) for (task, _), found in kinds["drift"].items()],
    )
    yield as_table(
        "cost of 60 rounds",
        ("method", "runs", "checks", "MB", "train, s", "server, s"),
        [(method, *_cost_cells(found)) for (_, method), found in kinds["cost"].items()],
    )


def _sizes_cells(found: Sequence[Line]) -> list[str]:
    aris = [line["ari"] for line in found]
    return [str(len(found)), f"{mean(aris):.3f}", f"{min(aris):.2f}", str(found[0]["wanted"])]


def _drift_cells(found: Sequence[Line]) -> list[str]:
    before, after = ([line[key] for line in found] for key in ("ari_before", "ari_at_40"))
    accuracy = 100 * mean(line["accuracy"] for line in found)
    return [
        str(len(found)),
        f"{mean(before):.3f}",
        f"{mean(after):.3f}",
        f"{min(after):.2f}",
        f"{accuracy:.1f}",
    ]


def _cost_cells(found: Sequence[Line]) -> list[str]:
    checks, bytes_sent = (mean(line[key] for line in found) for key in ("checks", "bytes"))
    train, server = (mean(line["seconds"][key] for line in found) for key in ("train", "server"))
    return [
        str(len(found)),
        f"{checks:g}",
        f"{bytes_sent / 1e6:.0f}",
        f"{train:.1f}",
        f"{server:.2f}",
    ]


def suite_table(by_case: Mapping[tuple[str, str], Sequence[Line]]) -> Table:
    """Return the table of the part "suite", with a row for each task and method.

    The columns are the accuracy with its 95 % interval, the ARI after the last round and after
    round 15, the share of runs that ever had more than one cluster, and the mean difference in
    accuracy from the best method of the task (other than the oracle).
    """
    rows: list[tuple[str, ...]] = []
    for task in dict.fromkeys(task for task, _ in by_case):
        found = {method: lines for (each, method), lines in by_case.items() if each == task}
        tuned = {method: lines for method, lines in found.items() if method.startswith("cfl ")}
        shown = {method: lines for method, lines in found.items() if method not in tuned}
        if tuned:
            best = max(tuned, key=lambda method: mean(line["accuracy"] for line in tuned[method]))
            shown[f"cfl, best of 9 thresholds ({best.removeprefix('cfl ')})"] = tuned[best]
        best = max(
            (lines for method, lines in shown.items() if method != "oracle"), key=_mean_accuracy
        )
        for method, lines in shown.items():
            aris = [line["ari"] for line in lines if line["ari"] is not None]
            by_15 = [line["ari_by_15"] for line in lines if line["ari_by_15"] is not None]
            rows.append(
                (
                    task,
                    method,
                    str(len(lines)),
                    _estimate([100 * line["accuracy"] for line in lines]),
                    f"{mean(aris):.3f}" if aris else "",
                    f"{mean(by_15):.3f}" if by_15 else "",
                    f"{mean(line['parted'] for line in lines):.2f}",
                    "best" if lines is best else _behind(lines, best),
                )
            )
    columns = (
        "task",
        "method",
        "runs",
        "accuracy, %",
        "ARI",
        "ARI in round 15",
        "split",
        "points behind the best",
    )
    return as_table("tasks", columns, rows)


def _mean_accuracy(lines: Sequence[Line]) -> float:
    return mean(line["accuracy"] for line in lines)


def _behind(lines: Sequence[Line], best: Sequence[Line]) -> str:
    """Return the mean difference in accuracy from the best method over seeds that both have run.

    The text ends with "tied" if the 95 % interval of the difference contains 0.
    """
    first = {line["seed"]: line["accuracy"] for line in best}
    behind = [
        100 * (first[line["seed"]] - line["accuracy"]) for line in lines if line["seed"] in first
    ]
    middle, half = mean_and_interval(behind)
    return (
        f"{middle:.1f}"
        if half is None
        else f"{middle:.1f} ± {half:.1f}" + (", tied" if middle <= half else "")
    )


def _estimate(values: Sequence[float]) -> str:
    middle, half = mean_and_interval(values)
    return f"{middle:.1f}" if half is None else f"{middle:.1f} ± {half:.1f}"


def as_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table for the terminal."""
    table = Table(title=title, box=None)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST")
    parser.add_argument("--out", type=Path, required=True, help="JSON file, with one line per run")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (default: 10)")
    parser.add_argument(
        "--parts",
        nargs="*",
        default=list(PARTS),
        choices=list(PARTS),
        help="parts of the study to run (default: all)",
    )
    parser.add_argument(
        "--methods",
        nargs="*",
        default=[],
        help="first letters of the methods of the suite to run (default: all methods)",
    )
    parser.add_argument(
        "--tasks",
        nargs="*",
        default=[],
        help="first letters of the tasks of the suite to run (default: all tasks)",
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--table", action="store_true", help="run nothing, only print the tables")
    arguments = parser.parse_args()

    if not arguments.table:
        done = {
            (line["part"], line["task"], line["method"], str(line["seed"]))
            for line in read(arguments.out)
        }
        wanted = {"methods": tuple(arguments.methods), "tasks": tuple(arguments.tasks)}
        jobs = [
            (part, seed, arguments.data_dir, arguments.out, done, wanted)
            for seed in range(arguments.seeds)
            for part in arguments.parts
        ]
        with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
            for finished in pool.imap_unordered(work, jobs):
                print(finished, flush=True)
    console = Console(width=140)
    for table in tables(read(arguments.out)):
        console.print(table)


if __name__ == "__main__":
    main()
