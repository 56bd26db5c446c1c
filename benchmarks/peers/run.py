"""Measure the same federated averaging in fedclade and in other simulators (*peers*).

    python benchmarks/peers/run.py --prepare     # environments and data in .peers/, about 8 GB
    python benchmarks/peers/run.py --check       # count the steps of each simulator, without timing
    python benchmarks/peers/run.py               # make all missing measurements
    python benchmarks/peers/run.py --table       # print the results
    python benchmarks/peers/run.py --page        # write results.json and docs/speed.md

Each peer has an environment of its own, and each measurement is a process. A peer that can use the
cores in several ways is measured in each way in the first repeat; further repeats use the fastest
way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
from page import page
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE / "shared"))
import work  # noqa: E402

Line = dict[str, Any]
SECONDS = 300
"""Time after which a measurement counts as failed."""


@dataclass(frozen=True)
class Peer:
    """A simulator: one row of the tables.

    Parameters
    ----------
    title
        Name in tables.
    folder
        Folder of its ``train.py`` and ``requirements.txt``.
    ways
        Ways to use two cores.
    source, commit, parts
        Repository, commit and folders to check out, if the simulator is not a package.
    """

    title: str
    folder: str
    ways: tuple[str, ...]
    source: str = ""
    commit: str = ""
    parts: tuple[str, ...] = ()

    def python(self, where: Path) -> str:
        """Return the interpreter; it is the present one if the simulator has no requirements."""
        own = (HERE / self.folder / "requirements.txt").exists()
        return str(where / self.folder / "bin" / "python") if own else sys.executable


BASE = "fedclade"
PEERS = {
    BASE: Peer("fedclade, plain module", "fedclade", ("plain module",)),
    "fedclade-own": Peer("fedclade, its own model", "fedclade", ("its own model",)),
    "flower": Peer("Flower", "flower", ("2 actors",)),
    "pfl": Peer("pfl-research", "pfl", ("2 processes", "1 process")),
    "fluke": Peer("fluke", "fluke", ("1 thread", "2 threads")),
    "pfllib": Peer(
        *("PFLlib", "pfllib", ("1 thread", "2 threads"), "https://github.com/TsingZ0/PFLlib"),
        *("d832e76f6a23b833038949ec1e4fdefe63a4d350", ("system",)),
    ),
    "flbench": Peer(
        *(
            "FL-bench",
            "flbench",
            ("2 workers", "1 worker"),
            "https://github.com/KarhouTam/FL-bench",
        ),
        *("06e658bca5af6ce732e25bb7c0f8be321e14a85e", ("config", "data", "src")),
    ),
    "central": Peer(
        "no federation: large batches", "central", ("batch 512", "batch 128", "batch 32")
    ),
}


def prepare(
    where: Path, only: Sequence[str], sources: Mapping[str, str], data_dir: Path | None
) -> None:
    """Make missing environments, checkouts and arrays."""
    (where / "data").mkdir(parents=True, exist_ok=True)
    if not (where / "data" / "test_y.npy").exists():
        write_data(where / "data", data_dir)
    for key, peer in PEERS.items():
        requirements = HERE / peer.folder / "requirements.txt"
        ready = where / f"{peer.folder}.ready"
        if key not in only or not requirements.exists() or ready.exists():
            continue
        Console().print(f"{peer.title}: installing")
        venv.create(where / peer.folder, with_pip=True, clear=True)
        pip = [
            peer.python(where),
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            str(ROOT / "constraints.txt"),
        ]
        commands = [[*pip, "-r", str(requirements)]]
        if peer.source:
            checkout = where / f"{peer.folder}-source"
            if not checkout.exists():
                commands.append(
                    [
                        "git",
                        "clone",
                        "-q",
                        "--no-checkout",
                        sources.get(key, peer.source),
                        str(checkout),
                    ]
                )
            commands.append(
                ["git", "-C", str(checkout), "checkout", "-q", peer.commit, "--", *peer.parts]
            )
        failed = [done for command in commands if (done := subprocess.run(command)).returncode]
        if failed:
            Console().print(f"{peer.title}: could not be installed, see above", style="red")
        else:
            ready.touch()


def write_data(folder: Path, data_dir: Path | None) -> None:
    """Assign MNIST's training images to clients at random, and write them as arrays."""
    from fedclade.data import load_pool

    pool = load_pool("mnist", data_dir=data_dir)
    clients = max(task.clients for task in work.TASKS.values())
    mine = (
        np.random.default_rng(0)
        .permutation(pool.train)[: clients * work.IMAGES]
        .reshape(clients, work.IMAGES)
    )
    arrays = {
        "x": pool.x[mine],
        "y": pool.y[mine],
        "test_x": pool.x[pool.test],
        "test_y": pool.y[pool.test],
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array.numpy())


def measure(key: str, task: str, way: str, where: Path, out: Path, **more: str) -> None:
    """Run one measurement in a process, which appends a line to ``out``, also if it fails."""
    peer = PEERS[key]
    environment = {
        name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
    } | {
        "PYTHONPATH": os.pathsep.join(
            map(str, (HERE / "shared", *[ROOT / "src"] * (peer.folder == "fedclade")))
        ),
        "FEDCLADE_CACHE_DIR": str(where / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "PEERS_DATA": str(where / "data"),
        "PEERS_TASK": task,
        "PEERS_CHECKOUT": str(where / f"{peer.folder}-source"),
        "PEERS_COMMIT": peer.commit[:7],
        **more,
    }
    log = where / "last.log"
    command = [peer.python(where), str(HERE / peer.folder / "train.py"), key, task, way, str(out)]
    before = len(read(out))
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=where,
                start_new_session=True,
            )
            process.wait(SECONDS)
        except OSError as error:
            file.write(f"{error.strerror}: no environment; see --prepare\n")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            file.write(f"not done after {SECONDS} s\n")
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if len(read(out)) == before:
        why = ([line for line in log.read_text().splitlines() if line.strip()] or ["no output"])[-1]
        with out.open("a") as file:
            file.write(
                json.dumps({"peer": key, "task": task, "way": way, "failed": why[:300]}) + "\n"
            )
        Console().print(f"{key} {task} {way}: {why}", style="red")


def read(out: Path) -> list[Line]:
    """Return the lines of all measurements."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def of(lines: Sequence[Line], key: str, task: str, way: str | None = None) -> list[Line]:
    """Return the lines of a simulator and a task in one way.

    If no way is given, return the successful lines in its fastest way.
    """
    if way is None:
        each = (
            [line for line in of(lines, key, task, way) if "failed" not in line]
            for way in PEERS[key].ways
        )
        return min(filter(None, each), key=lambda mine: median(mine[0]["seconds"]), default=[])
    return [line for line in lines if (line["peer"], line["task"], line["way"]) == (key, task, way)]


def missing(
    repeats: int, only: Sequence[str], tasks: Sequence[str], out: Path
) -> Iterator[tuple[str, str, str]]:
    """Yield missing measurements, one repeat after another, each in a random order."""
    for repeat in range(repeats):
        for task in tasks:
            for key in Random(f"{repeat} {task}").sample(list(only), len(only)):
                for way in PEERS[key].ways:
                    lines = read(out)
                    fastest = of(lines, key, task)
                    wanted = repeat == 0 or (fastest and fastest[0]["way"] == way)
                    if wanted and len(of(lines, key, task, way)) <= repeat:
                        yield key, task, way


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the results: medians, smallest and largest values over the repeats.

    Relative times are multiples of the time of fedclade in the same repeat.
    """
    tasks: dict[str, dict[str, Line]] = {}
    for name, task in work.TASKS.items():
        base = [median(line["seconds"]) for line in of(lines, BASE, name)]
        for key in PEERS:
            if not (mine := of(lines, key, name)):
                continue
            seconds = [median(line["seconds"]) for line in mine]
            ratios = [mine / ours for mine, ours in zip(seconds, base, strict=False)]
            tasks.setdefault(name, {})[key] = {
                "title": PEERS[key].title,
                "way": mine[0].get("engine") or mine[0]["way"],
                "repeats": len(mine),
                "seconds": spread(seconds),
                "samples_per_second": round(task.clients * work.IMAGES / median(seconds)),
                "times_fedclade": spread(ratios) if ratios else None,
                "accuracy": spread([line["accuracy"] for line in mine]),
                "megabytes": round(median(line["memory"] for line in mine) / 1e6),
                "version": mine[0]["version"],
            }
    failed = {
        f"{PEERS[line['peer']].title}, {line['way']}": line["failed"]
        for line in lines
        if "failed" in line
    }
    return {
        "machine": {
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
            "torch": next((line["torch"] for line in lines if "torch" in line), None),
        },
        "work": {"images": work.IMAGES, "batch": work.BATCH, "lr": work.LR},
        "rounds": {name: task.rounds for name, task in work.TASKS.items()},
        "tasks": tasks,
        "failed": failed,
    }


def spread(values: Sequence[float]) -> list[float]:
    """Return median, smallest and largest, with four digits."""
    return [float(f"{value:.4g}") for value in (median(values), min(values), max(values))]


def show(results: Mapping[str, Any]) -> None:
    """Print all tables."""
    for name, rows in results["tasks"].items():
        table = Table(title=f"{name}: medians (smallest to largest)")
        for column in (
            "simulator",
            "seconds per round",
            "samples/s",
            "relative time",
            "accuracy",
            "memory, MB",
            "way",
            "repeats",
        ):
            table.add_column(
                column, no_wrap=True, justify="left" if column in ("simulator", "way") else "right"
            )
        for row in rows.values():
            seconds, ratio, score = row["seconds"], row["times_fedclade"], row["accuracy"]
            table.add_row(
                *(row["title"], f"{seconds[0]:.3f} ({seconds[1]:.3f} to {seconds[2]:.3f})"),
                f"{row['samples_per_second']:,}",
                f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})" if ratio else "",
                *(f"{score[0]:.2%} ({score[1]:.2%} to {score[2]:.2%})", f"{row['megabytes']:,}"),
                *(row["way"], str(row["repeats"])),
            )
        Console(width=160).print(table)
    for who, why in results["failed"].items():
        Console().print(f"{who}: {why}", style="red", markup=False)


def check(only: Sequence[str], where: Path) -> None:
    """Count the training steps of the first task, for every simulator and way."""
    name, task = next(iter(work.TASKS.items()))
    steps, out = where / "steps", where / "check.jsonl"
    out.unlink(missing_ok=True)
    should = task.clients * work.IMAGES // work.BATCH
    for key in only:
        for way in PEERS[key].ways:
            steps.write_bytes(b"")
            measure(key, name, way, where, out, PEERS_STEPS=str(steps))
            rounds = task.rounds + (2 if PEERS[key].folder == "fedclade" else 1)
            Console().print(
                f"{key}, {way}: {steps.stat().st_size / rounds:g} steps per round, "
                f"should be {should}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--where",
        type=Path,
        default=ROOT / ".peers",
        help="folder for environments, data and measurements (default: .peers)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PEERS,
        default=list(PEERS),
        help="simulators to measure (default: all)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=work.TASKS,
        default=list(work.TASKS),
        help="tasks to measure (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats (default: 5)")
    parser.add_argument(
        "--data-dir", type=Path, help="folder with MNIST (default: FEDCLADE_DATA_DIR)"
    )
    parser.add_argument(
        "--source",
        nargs="+",
        default=[],
        metavar="PEER=REPOSITORY",
        help="other repository from which a peer is cloned",
    )
    for action in ("--prepare", "--check", "--table", "--page"):
        parser.add_argument(action, action="store_true", help="see above")
    arguments = parser.parse_args()
    where = arguments.where.resolve()
    out = where / "runs.jsonl"
    if arguments.prepare:
        sources = dict(pair.split("=", 1) for pair in arguments.source)
        return prepare(where, arguments.only, sources, arguments.data_dir)
    if arguments.check:
        return check(arguments.only, where)
    if not (arguments.table or arguments.page):
        for key, task, way in missing(arguments.repeats, arguments.only, arguments.tasks, out):
            Console().print(f"{task}: {PEERS[key].title}, {way}")
            measure(key, task, way, where, out)
    results = summary(read(out))
    show(results)
    if arguments.page:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (ROOT / "docs" / "speed.md").write_text(page(results))
    return None


if __name__ == "__main__":
    main()
