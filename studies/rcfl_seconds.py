"""Measure the seconds that the server of rcfl needs for a round, for its tests, and for checks.

A run of 20 clients makes four rounds: the third has the first test, and the fourth is a quiet round,
without a test. Then single later checks are made from the same state, as if the rounds between had
been quiet: only the numbers of earlier checks and tests are set. In a check of changed data, all
clients count as changed if their earlier sketches are removed.

All seconds are of processor time on one core. The server's seconds are those of a round or a check
without the seconds in which clients train.

Each job is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python studies/rcfl_seconds.py --data-dir DIR --out seconds.jsonl
    python studies/rcfl_seconds.py --out seconds.jsonl --table    # only print the table
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jsonl
import torch
from rcfl import LOCAL
from torch import nn

from fedclade import ReplicatedCFL, load_federation
from fedclade.algorithms.rcfl.method import ReplicatedState
from fedclade.channel import traffic
from fedclade.clustering import is_due
from fedclade.core.queries import RoundPlan
from fedclade.models import build_model
from fedclade.runs.backend import Backend

Line = dict[str, Any]

CLIENTS = 20
IMAGES = 300
CHECK_EVERY = 7  # the default of rcfl

HIDDEN: Mapping[str, int] = {"cnn": 512, "wide cnn": 1200}
"""Width of the dense layer of each model: 582,026 and 1,294,106 parameters."""

TASKS: Mapping[str, Mapping[str, Any]] = {
    "iid": {},
    "4 label swaps": {"shift": "label_swap", "clusters": 4},
}

CHANGED_IN = (14, 28, 42, 420)
"""Rounds with a check of changed data, which is every second check."""

TRAINED_IN = (7, 441)
"""Rounds with the first and the tenth test at trained models, if nothing changes."""


def build_cnn(hidden: int, seed: int) -> nn.Module:
    """Return the CNN with a dense layer of this width."""
    return build_model(
        "cnn", input_shape=(1, 28, 28), outputs=10, seed=seed, arguments={"hidden": hidden}
    )


class Clock:
    """The rounds of one run, whose processor time is measured.

    Parameters
    ----------
    model
        Name of the model, in :data:`HIDDEN`.
    task
        Name of the task, in :data:`TASKS`.
    seed
        Seed of the run.
    data_dir
        Folder with the data.
    """

    def __init__(self, model: str, task: str, seed: int, data_dir: Path | None) -> None:
        federation = load_federation(
            "mnist",
            clients=CLIENTS,
            samples_per_client=IMAGES,
            test_samples=100,
            seed=seed,
            data_dir=data_dir,
            **TASKS[task],
        )
        self._algorithm = ReplicatedCFL()
        self._backend = Backend.simulated_by(
            federation,
            lambda seed: build_cnn(HIDDEN[model], seed),
            self._algorithm,
            seed=seed,
            engine="loop",
        )
        self._seed = seed

    def begin(self) -> ReplicatedState:
        """Return the state before round 1."""
        return self._algorithm.init(self._backend.initial, self._backend.clients)

    def run_round(self, state: ReplicatedState, number: int) -> tuple[ReplicatedState, Line]:
        """Run one round; return the next state, and the seconds of the clients and the server."""
        clients = self._backend.clients
        plan = RoundPlan(number, LOCAL, self._seed)
        (state, log), line = self._measure(
            lambda: self._algorithm.step(state, clients.ids, clients, plan)
        )
        return state, {**line, "tests": len(log.events)}

    def run_check(self, state: ReplicatedState, number: int) -> Line:
        """Run the check of one round without the round's training; return the seconds."""
        plan = RoundPlan(number, LOCAL, self._seed)
        counted = replace(state, checks=state.checks + 1)
        (_, events), line = self._measure(
            lambda: self._algorithm._check(counted, self._backend.clients, plan)
        )
        return {**line, "tests": len(events)}

    def _measure(self, work: Callable[[], Any]) -> tuple[Any, Line]:
        """Return the result of a function, and the seconds of the clients and the server."""
        trained_before = self._backend.meter.seconds_train
        begun = time.process_time()
        result = work()
        seconds = time.process_time() - begun
        trained = self._backend.meter.seconds_train - trained_before
        return result, {"clients": round(trained, 2), "server": round(seconds - trained, 3)}


def at_changed_data(state: ReplicatedState, number: int, *, is_changed: bool) -> ReplicatedState:
    """Return the state before a check of changed data in this round.

    All earlier checks of this kind have found changed data if ``is_changed`` is set, else none.
    """
    checks = number // CHECK_EVERY - 1
    state = replace(state, checks=checks, trained=CLIENTS * number, asked=CLIENTS * checks)
    if not is_changed:
        return state
    return replace(state, changes=number // (2 * CHECK_EVERY) - 1, tested=(), sketches=None)


def at_trained_model(state: ReplicatedState, number: int) -> ReplicatedState:
    """Return the state before a check at trained models in this round."""
    checks = number // CHECK_EVERY - 1
    occasions = checks // 2
    tests = sum(is_due(occasion) for occasion in range(1, occasions + 1))
    return replace(
        state,
        checks=checks,
        trained=CLIENTS * number,
        asked=CLIENTS * checks,
        occasions=occasions,
        halves=tests,
    )


def measure(*, model: str, task: str, seed: int, data_dir: Path | None) -> Line:
    """Return the seconds of the rounds of a run, by the kind and number of the round."""
    found: Line = {}
    # The meter measures elapsed time, which depends on what else runs on the machine.
    with mock.patch.object(traffic, "perf_counter", time.process_time):
        clock = Clock(model, task, seed, data_dir)
        state = clock.begin()
        for number in range(1, 5):
            state, found[f"round {number}"] = clock.run_round(state, number)
        for number in CHANGED_IN:
            before = at_changed_data(state, number, is_changed=False)
            found[f"unchanged {number}"] = clock.run_check(before, number)
            before = at_changed_data(state, number, is_changed=True)
            found[f"changed {number}"] = clock.run_check(before, number)
        for number in TRAINED_IN:
            before = at_trained_model(state, number)
            found[f"trained {number}"] = clock.run_check(before, number)
    return found


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table with a row for each kind of round, and a column for each run."""
    kinds = [name for name in lines[0] if isinstance(lines[0][name], dict)]
    heads = [f"{line['model']}, {line['task']}" for line in lines]
    text = [f"| round | {' | '.join(heads)} |", "| :-- " + "| --: " * len(lines) + "|"]
    for kind in kinds:
        cells = [f"{line[kind]['server']:.2f} / {line[kind]['clients']:.1f}" for line in lines]
        text.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    """Make missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "seconds.jsonl")
    parser.add_argument("--models", nargs="+", default=[*HIDDEN], choices=[*HIDDEN])
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [
        {"model": model, "task": task, "seed": 0} for model in given.models for task in given.tasks
    ]
    if not given.table:
        jsonl.run_missing(given.out, jobs, lambda **job: measure(**job, data_dir=given.data_dir))
    print("Seconds of the server / of all clients together:\n")
    print(table(jsonl.read(given.out)))


if __name__ == "__main__":
    main()
