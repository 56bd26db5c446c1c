"""Measure how much accuracy one malicious client costs the honest clients, with Flower's processes.

There are a SuperLink and a SuperNode for each client. Each client has its data in a file: MNIST if
``--data-dir`` is given, otherwise scikit-learn's digits. One client claims 10⁹ examples, or
multiplies its update by 1,000. The limits are the defaults of a network. The accuracy of the other
clients after the last round is compared with two other runs: one in which this client is honest,
and one in which it does not train, because a cluster that loses a member also loses accuracy if
this member is honest.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python benchmarks/network_liars.py --data-dir DIR --out network_liars.jsonl
    python benchmarks/network_liars.py --data-dir DIR --out network_liars.jsonl --one-process   # over a LocalGrid
    python benchmarks/network_liars.py --out network_liars.jsonl --table
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import shutil
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import jsonl
import numpy as np
import tomli_w
from flwr.app import Context, RecordDict
from network_liars_app import answer, server

from fedclade import Federation, Run, load_federation
from fedclade.core.arguments import flat
from fedclade.flower import LocalGrid, LocalNode
from fedclade.report.comparison_files import markdown_table

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "flower"
sys.path.insert(0, str(EXAMPLE))

from deployment import Deployment  # noqa: E402  (from examples/flower)

LIAR = 3
KINDS = ("honest", "10⁹ examples", "1,000 times its update", "does not train")
"""Kinds of behaviour of client LIAR; see ``network_liars_app.py``."""
TASKS: Mapping[str, Mapping[str, Any]] = {
    "two label swaps": {"shift": "label_swap", "clusters": 2},
    "one distribution": {},
}
SUBJECTS = (
    ("rcfl", "two label swaps"),
    ("fedavg", "two label swaps"),
    ("fedavg", "one distribution"),
)
SIZES = {"mnist": (1000, 2000), "digits": (100, 300)}
"""Training examples of each client, and test examples of the clients, by data set."""
COLUMNS = (
    "processes",
    "method",
    "distributions",
    "attack",
    "mean accuracy",
    "mean change",
    "largest change",
    "largest change from a run without it",
)


def main() -> None:
    """Make missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "network_liars.jsonl")
    parser.add_argument("--clients", type=int, default=8, help="number of clients (default: 8)")
    parser.add_argument("--rounds", type=int, default=4, help="number of rounds (default: 4)")
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="use a LocalGrid, whose results are equal up to rounding",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=KINDS,
        choices=KINDS,
        help="kinds of behaviour to run (default: all)",
    )
    given = parser.parse_args()
    source = "mnist" if given.data_dir else "digits"
    processes = "one" if given.one_process else "real"
    head = {
        "data": source,
        "clients": given.clients,
        "rounds": given.rounds,
        "processes": processes,
    }
    jobs = [
        {**head, "method": m, "task": t, "kind": k} for (m, t), k in product(SUBJECTS, given.kinds)
    ]
    missing = [
        job
        for job in jobs
        if not any(job.items() <= line.items() for line in jsonl.read(given.out))
    ]
    if missing and not given.table:
        with TemporaryDirectory() as folder:
            app = made_app(Path(folder) / "app", head)
            with started(
                Path(folder) / "it", app, given.clients, one_process=given.one_process
            ) as deployment:
                for job in missing:
                    jsonl.add(given.out, {**job, **run_of(deployment, job, given.data_dir)})
    print(markdown_table(COLUMNS, rows_of(jsonl.read(given.out)), COLUMNS[:4]))


def made_app(folder: Path, head: Mapping[str, Any]) -> Path:
    """Write the Flower app that server and clients run; return its folder."""
    folder.mkdir()
    shutil.copy(HERE / "network_liars_app.py", folder / "fedclade_app.py")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    project["tool"]["flwr"]["app"]["config"] = {
        "rounds": head["rounds"],
        "evaluate_every": head["rounds"],
        "data": {"name": head["data"], "clients": head["clients"]},
        "model": {"name": "mlp"},
        "local": {"epochs": 3, "batch_size": 20, "lr": 0.1},
        "algorithm": {"name": "fedavg"},
        "network": {"clients": head["clients"], "deadline": 1800.0, "out": "runs"},
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    return folder


def started(
    folder: Path, app: Path, clients: int, *, one_process: bool
) -> AbstractContextManager[Any]:
    """Return a federation as a context manager that starts it."""
    if one_process:
        return nullcontext(OneProcess(folder, app, clients))
    deployment = Deployment(folder, app, clients)
    # Seconds; polling more often costs CPU time.
    deployment.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "2"
    return deployment


class OneProcess:
    """The methods of :class:`Deployment` that this script uses, with a grid in this process."""

    def __init__(self, folder: Path, app: Path, clients: int) -> None:
        self._folder = folder
        sections = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
            "flwr"
        ]["app"]["config"]
        self._config = flat(sections)
        self._nodes = {
            100 + k: {"partition-id": k, "folder": str(self.node_folder(k))} for k in range(clients)
        }

    def node_folder(self, node: int) -> Path:
        """Return the folder of a client."""
        folder = self._folder / f"node-{node}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def run(self, settings: Mapping[str, Any]) -> None:
        """Run the app."""
        config = {**self._config, **settings}
        grid = LocalGrid(
            {node: LocalNode(answer, each) for node, each in self._nodes.items()}, config
        )
        server(grid, Context(1, 0, {}, RecordDict(), config))


def run_of(deployment: Any, job: Mapping[str, Any], data_dir: Path | None) -> dict[str, Any]:
    """Write the data and the behaviour of each client, run the app, and return the results."""
    start = time.monotonic()
    for client, arrays in dealt(job, data_dir):
        folder = deployment.node_folder(client)
        np.savez(folder / "data.npz", **arrays)
        (folder / "lies").write_text(job["kind"] if client == LIAR else "honest", encoding="utf-8")
    with TemporaryDirectory() as out:
        deployment.run({"algorithm.name": job["method"], "network.out": f"{out}/run"})
        run = Run.load(Path(out) / "run")
    return {
        "accuracy": {
            str(r["client"]): r["accuracy"] for r in run.client_rows if r["round"] == job["rounds"]
        },
        "clusters": [list(leaf.members) for leaf in run.tree.leaves],
        "left_out": {
            f"round {event['round']}, {event['query']}, client {client}": why
            for event in run.events
            if event["kind"] == "left_out"
            for client, why in event["clients"].items()
        },
        "seconds": round(time.monotonic() - start),
    }


def dealt(
    job: Mapping[str, Any], data_dir: Path | None
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield each client with the arrays of its examples."""
    train, test = SIZES[job["data"]]
    sizes = {"clients": job["clients"], "samples_per_client": train, "test_samples": test}
    federation: Federation = load_federation(
        job["data"], **sizes, **TASKS[job["task"]], data_dir=data_dir
    )
    pool = federation.pool
    for client in federation.clients:
        yield (
            client.id,
            {
                "x": pool.x[client.train].numpy(),
                "y": client.labels(pool.y[client.train]).numpy(),
                "tests": pool.x[client.test].numpy(),
                "labels": client.labels(pool.y[client.test]).numpy(),
                "scale": np.array([pool.mean, pool.std]),
            },
        )


def rows_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of the table, with changes of the honest clients' accuracy in points.

    The changes are differences from the runs in which client LIAR is honest and does not train.
    """
    for line in lines:
        head = {
            name: line[name]
            for name in ("data", "clients", "rounds", "processes", "method", "task")
        }
        beside = {each["kind"]: honest_of(each) for each in lines if head.items() <= each.items()}
        mine = honest_of(line)
        told = [change(mine, beside.get(kind)) for kind in ("honest", "does not train")]
        cells = ["" if each is None else f"{each[0]:+.2f}" for each in told[:1]]
        cells += ["" if each is None else f"{each[1]:.2f}" for each in told]
        accuracy = f"{100 * mean(mine.values()):.1f} %"
        yield [
            line["processes"],
            line["method"],
            line["task"],
            line["kind"],
            accuracy,
            *(cell.replace("-", "−") for cell in cells),
        ]


def honest_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracy of the clients that are honest in all runs."""
    return {client: score for client, score in line["accuracy"].items() if client != str(LIAR)}


def change(
    mine: Mapping[str, float], other: Mapping[str, float] | None
) -> tuple[float, float] | None:
    """Return the mean change, and the largest absolute change of a client, in points."""
    if other is None:
        return None
    changes = [100 * (mine[client] - other[client]) for client in mine if client in other]
    return mean(changes), max(map(abs, changes))


if __name__ == "__main__":
    main()
