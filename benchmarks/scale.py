"""Measure time and peak memory of the parts of a run with 10³ to 10⁶ clients, by the command line.

The clients are synthetic, form four clusters, have 10 to 200 examples each (Zipf), and are stored
in folders of Arrow files. In each round, 1 % or 100 % of the clients train logistic regression, one
epoch in batches of 10, and 1,000 clients are evaluated. The time of a round is the median over all
rounds except the first. Larger cohorts than ``--largest`` are left out. Each command runs in a
separate process, whose peak memory the system reports, with pages of mapped files. The script fits
a model of the cost to the rows.

    python benchmarks/scale.py --out DIR                          # table, and model of the cost
    python benchmarks/scale.py --out DIR --clients 1000 10000     # fewer rows
    python benchmarks/scale.py --out DIR --actors 1 2             # also on one and two Ray actors
    python benchmarks/scale.py --out DIR --goal    # rcfl: 10⁶ clients, cohorts of 1,000, 50 rounds

Data and runs are stored in DIR, and an interrupted call continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tomli_w
from rich.console import Console
from rich.table import Table

Line = dict[str, Any]

CLIENTS = (1_000, 10_000, 100_000, 1_000_000)
SHARES = (0.01, 1.0)
ROUNDS, EVALUATED = 5, 1_000
GOAL_CLIENTS, GOAL_ROUNDS = 1_000_000, 50
BIGGER = (10**7, 10**8)
"""Numbers of clients that are not run, for which the model predicts the cost."""

PARTS = ("seconds_train", "seconds_evaluate", "seconds_server")

LOCAL = {"epochs": 1, "batch_size": 10, "lr": 0.05}
GOAL_LOCAL = {**LOCAL, "epochs": 5}


def fedclade(*arguments: str | Path) -> tuple[float, int]:
    """Run a command of fedclade; return its time in seconds, and its peak memory in bytes."""
    start = perf_counter()
    command = [sys.executable, "-m", "fedclade", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{said}")
    return perf_counter() - start, usage.ru_maxrss * 1024


def once(file: Path, make: Any) -> Line:
    """Return the measurement that is stored in a file; if there is none, measure and store it."""
    if not file.exists():
        file.write_text(json.dumps(make()) + "\n")
    return json.loads(file.read_text())


def build(clients: int, folder: Path) -> Line:
    seconds, peak = fedclade(
        "data", "build", "planted", "--out", folder, "--set", f"data.clients={clients}", "--quiet"
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    return {"build_seconds": seconds, "build_peak": peak, "bytes": size}


def run(data: Path, folder: Path, settings: Mapping[str, Any], actors: int = 0) -> Line:
    """Run a config; return times, peak memory and clusters."""
    config = folder.with_suffix(".toml")
    shared = {"model": {"name": "mclr"}, "local": LOCAL, "data": {"folder": str(data)}}
    config.write_text(tomli_w.dumps({**shared, **settings}))
    on_ray = ["--engine", "ray", "--actors", str(actors)] if actors else []
    seconds, peak = fedclade("run", config, "--out", folder, "--quiet", *on_ray)
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    summary = json.loads((folder / "summary.json").read_text())
    later = rows[1:] or rows
    return {
        "seconds": seconds,
        "peak": peak,
        "outside_rounds": seconds - sum(row["seconds"] for row in rows),
        "first_round": rows[0]["seconds"],
        **{part: median(row[part] for row in later) for part in PARTS},
        "trained": sum(row["clients_trained"] for row in rows),
        "clusters": summary["clusters"],
        "ari_assigned": rows[-1]["ari_assigned"],
    }


def report(folder: Path) -> Line:
    page = folder.with_suffix(".html")
    seconds, peak = fedclade("report", folder, "--out", page)
    return {"report_seconds": seconds, "report_peak": peak, "page_bytes": page.stat().st_size}


def measured(clients: int, share: float, actors: int, out: Path) -> Line:
    data = out / f"planted-{clients}"
    made = once(data.with_suffix(".json"), lambda: build(clients, data))
    name = f"run-{clients}-{share}" + (f"-{actors}-actors" if actors else "")
    settings = {
        "rounds": ROUNDS,
        "client_fraction": share,
        "evaluate_clients": EVALUATED,
        "algorithm": {"name": "fedavg"},
    }
    line = once(
        out / f"{name}.json", lambda: run(data, out / name, settings, actors) | report(out / name)
    )
    return {"clients": clients, "cohort": round(share * clients), "actors": actors, **made, **line}


def goal(out: Path, cohort: int) -> Line:
    """Run rcfl with a million clients, and write a report; return the measurements."""
    data = out / f"planted-{GOAL_CLIENTS}"
    made = once(data.with_suffix(".json"), lambda: build(GOAL_CLIENTS, data))
    every = {"evaluate_every": GOAL_ROUNDS // 5, "evaluate_clients": EVALUATED}
    settings = {
        "rounds": GOAL_ROUNDS,
        "client_fraction": cohort / GOAL_CLIENTS,
        **every,
        "local": GOAL_LOCAL,
    }
    settings["algorithm"] = {"name": "rcfl"}
    return made | once(
        out / "goal.json", lambda: run(data, out / "goal", settings) | report(out / "goal")
    )


def fitted(lines: Sequence[Line]) -> dict[str, tuple[float, float, float]]:
    """Fit the model ``a + b · clients + c · cohort`` to each cost, by least squares of ratios.

    Returns
    -------
    dict
        The coefficients (a, b, c) of each cost, which are not negative.
    """
    of = {
        "outside rounds, s": lambda line: line["outside_rounds"],
        "a round, s": lambda line: sum(line[part] for part in PARTS),
        "peak memory, bytes": lambda line: line["peak"],
    }
    found: dict[str, tuple[float, float, float]] = {}
    for name, cost in of.items():
        measured = np.array([cost(line) for line in lines])
        terms = (
            np.array([[1.0, line["clients"], line["cohort"]] for line in lines]) / measured[:, None]
        )
        constants = _least_squares(terms)
        found[name] = (float(constants[0]), float(constants[1]), float(constants[2]))
    return found


def _least_squares(terms: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls

    scale = terms.max(axis=0)
    return nnls(terms / scale, np.ones(len(terms)))[0] / scale


def shown(lines: Sequence[Line]) -> Table:
    table = Table(
        title=f"fedavg on logistic regression, {ROUNDS} rounds, {EVALUATED:,} clients evaluated"
    )
    heads = (
        "clients",
        "cohort",
        "actors",
        "build, s",
        "start and end, s",
        "first round, s",
        "train, s",
        "evaluate, s",
    )
    for column in (*heads, "server, s", "report, s", "peak, GB"):
        table.add_column(column, justify="right")
    for line in lines:
        numbers = ("build_seconds", "outside_rounds", "first_round", *PARTS, "report_seconds")
        table.add_row(
            *(f"{line['clients']:,}", f"{line['cohort']:,}", str(line["actors"] or "")),
            *(f"{line[name]:.2f}" for name in numbers),
            f"{line['peak'] / 1e9:.2f}",
        )
    return table


def model(lines: Sequence[Line]) -> Table:
    table = Table(title="model of the cost: a + b × clients + c × cohort")
    for column in ("cost", "a", "b", "c", *(f"{n:.0e} clients, cohort 1,000" for n in BIGGER)):
        table.add_column(column, justify="left" if column == "cost" else "right")
    for name, (a, b, c) in fitted(lines).items():
        table.add_row(
            name,
            *(f"{each:.3g}" for each in (a, b, c)),
            *(f"{a + b * n + c * 1000:.3g}" for n in BIGGER),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for data, runs and measurements"
    )
    parser.add_argument(
        "--clients",
        nargs="*",
        type=int,
        default=CLIENTS,
        help="numbers of clients (default: 1000 10000 100000 1000000)",
    )
    parser.add_argument(
        "--shares",
        nargs="*",
        type=float,
        default=SHARES,
        help="shares of the clients in a cohort (default: 0.01 1)",
    )
    parser.add_argument(
        "--largest", type=int, default=100_000, help="largest cohort that runs (default: 100000)"
    )
    parser.add_argument(
        "--actors",
        nargs="*",
        type=int,
        default=(),
        help="numbers of Ray actors, on which runs are made in addition",
    )
    parser.add_argument("--goal", action="store_true", help="only run rcfl with a million clients")
    parser.add_argument(
        "--cohort", type=int, default=1_000, help="cohort of --goal (default: 1000)"
    )
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=160)
    if arguments.goal:
        console.print_json(json.dumps(goal(out, arguments.cohort)))
        return
    every = (
        (n, share, actors)
        for n in arguments.clients
        for share in arguments.shares
        for actors in (0, *arguments.actors)
    )
    cases = [case for case in every if case[0] * case[1] <= arguments.largest]
    lines = [measured(*case, out) for case in cases]
    console.print(shown(lines))
    if len({line["clients"] for line in lines}) > 2:
        console.print(model([line for line in lines if not line["actors"]]))


if __name__ == "__main__":
    main()
