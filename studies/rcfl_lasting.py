"""Measure the repeated tests of replicated clustering (rcfl) in long runs: level, power and cost.

The signatures are synthetic, except for ``--measure digits`` (complete runs on scikit-learn's
digits, which are assigned to clients at random) and ``--measure rounding`` (updates of one round on
digits). A synthetic signature of a client's part is the mean of its group, plus a drift that all
clients have in common, plus noise of length 1 in 23 directions. The groups' means have the squared
length ``separation`` and are at right angles to each other.

Each job is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python studies/rcfl_lasting.py --out lasting.jsonl --minutes 20    # jobs that are missing
    python studies/rcfl_lasting.py --out lasting.jsonl --measure cost
    python studies/rcfl_lasting.py --out lasting.jsonl --table         # only print the tables
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonl
import numpy as np
import torch
from rcfl import as_table
from rich.console import Console
from rich.table import Table
from scipy.stats import beta
from torch import nn

import fedclade
from fedclade import LocalTraining, ReplicatedCFL
from fedclade.algorithms.rcfl import method
from fedclade.algorithms.rcfl.changed_data import SplitSketches
from fedclade.algorithms.rcfl.data_splits import DataSplits
from fedclade.algorithms.rcfl.replicate_test import (
    cluster_again_by_splits,
    cluster_by_halves,
    get_split_signatures,
)
from fedclade.clustering import (
    VIEWS,
    RepeatedTest,
    Replicates,
    compute_e_value_by_parts,
    compute_part_similarity,
    compute_rank_e_value,
    find_clusters,
    is_same_partition,
)
from fedclade.clustering.repeated_test import ENOUGH, get_weight
from fedclade.core import Regrouped, Updates
from fedclade.core.queries import RoundPlan
from fedclade.runs.backend import Backend

Line = dict[str, Any]

DIRECTIONS = 23
"""Number of directions of noise, all of the same size."""

DIMENSION = 60
"""Length of a signature."""

PARTS = 4
"""Number of parts of a client's data in a check with an e-value."""

LEVEL = 0.01
"""Level of a run: the default of rcfl. Each kind of later check has a quarter of it."""

LEVELS = (0.01, 0.05, 0.1)
"""Levels for which rejections are counted, in the same sequences of tests."""

FIRST_TESTS = 3
"""Number of first tests that compare p-values, at each of these levels."""

TESTS_BEFORE = {5: 0, 500: 10, 5000: 16}
"""Number of tests at trained models before groups appear, by the round in which they appear.

No data changed before. In a run with ``check_every = 7``, every 14th round is an occasion for such
a test, and the intervals between the tests grow."""


# Synthetic updates.


def draw_signatures(
    groups: np.ndarray, parts: int, separation: float, draw: np.random.Generator
) -> torch.Tensor:
    """Draw signatures ``[n, parts, DIMENSION]`` of clients in these groups ``[n]``."""
    means = np.linalg.qr(draw.normal(size=(DIMENSION, groups.max() + 2)))[0].T
    drift = means[-1] * np.sqrt(0.2)
    noise = np.zeros((len(groups), parts, DIMENSION))
    noise[:, :, :DIRECTIONS] = draw.normal(size=noise[:, :, :DIRECTIONS].shape)
    turn = np.linalg.qr(draw.normal(size=(DIMENSION, DIMENSION)))[0]
    own = means[groups] * np.sqrt(separation)
    signatures = own[:, None] + drift + noise @ turn / np.sqrt(DIRECTIONS)
    return torch.from_numpy(signatures)


def draw_examples(clients: int, draw: np.random.Generator) -> np.ndarray:
    """Draw the contribution of 40 examples of each client to its update, ``[n, 40, DIMENSION]``."""
    turn = np.linalg.qr(draw.normal(size=(DIMENSION, DIMENSION)))[0]
    noise = np.zeros((clients, 40, DIMENSION))
    noise[:, :, :DIRECTIONS] = draw.normal(size=noise[:, :, :DIRECTIONS].shape)
    return noise @ turn / np.sqrt(DIRECTIONS / 10)


def divide_again(examples: np.ndarray, draw: np.random.Generator) -> torch.Tensor:
    """Return signatures of four parts of ten examples each, divided at random."""
    orders = np.argsort(draw.random(examples.shape[:2]), axis=1)
    shuffled = np.take_along_axis(examples, orders[:, :, None], axis=1)
    return torch.from_numpy(shuffled.reshape(len(examples), PARTS, 10, -1).mean(2))


def join_halves(signatures: torch.Tensor) -> Replicates:
    """Return two halves, each the mean of two of four parts."""
    return Replicates(signatures[:, :2].mean(1), signatures[:, 2:].mean(1))


def to_updates(signatures: torch.Tensor) -> Updates:
    """Return updates with these signatures of parts."""
    n, _, dimension = signatures.shape
    ones = torch.ones(n)
    return Updates.of(
        ids=tuple(range(n)),
        sizes=ones,
        losses=ones,
        norms=ones,
        n_parameters=dimension,
        parts=signatures,
    )


# Measures. The parameters of each function are the fields of a job; it returns the job's results.


def simulate_level(checks: int, data: str, seed: int) -> Line:
    """Test 12 clients of one distribution repeatedly; return p-values and the largest sums."""
    draw = np.random.default_rng([seed, checks, len(data)])
    groups = np.zeros(12, dtype=np.int64)
    examples = draw_examples(12, draw)
    p_values: list[float] = []
    added = multiplied = 0.0
    largest = {"added": 0.0, "multiplied": 0.0}
    for number in range(1, checks + 1):
        if data == "new":
            signatures = draw_signatures(groups, PARTS, 0.0, draw)
        else:
            signatures = divide_again(examples, draw)
        if number <= FIRST_TESTS:
            found = find_clusters(join_halves(signatures))
            p_values.append(found.compute_p_value(LEVEL / (number * (number + 1)), draw))
            continue
        # Three parts take less time than four.
        cosines = compute_part_similarity(signatures[:, :3])
        e_value = compute_e_value_by_parts(cosines, 3, draw, is_trained=data != "new")
        weight = get_weight(number - FIRST_TESTS)
        added += weight * e_value
        multiplied = (multiplied + weight) * e_value
        largest["added"] = max(largest["added"], added)
        largest["multiplied"] = max(largest["multiplied"], multiplied)
    return {"p": p_values, **largest}


def simulate_ranks(checks: int, sequences: int, seed: int) -> Line:
    """Draw uniform ranks instead of tests; return the number of sums that reach 1/level."""
    draw = np.random.default_rng([seed, checks])
    shuffles = 10_000 // (PARTS - 1)
    table = np.array([compute_rank_e_value(rank, shuffles) for rank in range(1, ENOUGH + 2)])
    added, multiplied = np.zeros(sequences), np.zeros(sequences)
    most = {"added": np.zeros(sequences), "multiplied": np.zeros(sequences)}
    for number in range(1, checks + 1):
        e_value = np.zeros(sequences)
        for _ in range(PARTS - 1):
            ranks = np.minimum(draw.integers(1, shuffles + 2, sequences), ENOUGH + 1)
            e_value = (e_value + 1 / (PARTS - 1)) * table[ranks - 1]
        added += get_weight(number) * e_value
        multiplied = (multiplied + get_weight(number)) * e_value
        np.maximum(most["added"], added, out=most["added"])
        np.maximum(most["multiplied"], multiplied, out=most["multiplied"])
    return {
        kind: [int((largest >= 1 / level).sum()) for level in LEVELS]
        for kind, largest in most.items()
    }


def find_after(
    tests_before: int, groups: Sequence[int], separation: float, kind: str, seed: int
) -> Line:
    """Test new groups up to five times; return the first test that finds groups.

    The result also states whether the groups that this test finds are exactly the true groups.

    ``kind`` is "trained" (four parts or two halves at a trained model) or "changed" (three parts at
    the initial model). Noise is new in each test.
    """
    truth = np.array(groups)
    draw = np.random.default_rng([seed, tests_before, len(kind), round(100 * separation)])
    views = VIEWS if kind == "changed" else 1
    repeated = RepeatedTest(LEVEL / 4, tests=tests_before, views=views)
    present = np.zeros_like(truth)
    for number in range(1, 6):
        if kind == "changed":
            signatures = draw_signatures(truth, 3, separation, draw)
            cosines = torch.from_numpy(compute_part_similarity(signatures))
            verdict = cluster_again_by_splits(
                cosines, 3, present, repeated=repeated, generator=draw, level_inside=LEVEL
            )
        else:
            signatures = draw_signatures(truth, PARTS, separation, draw)
            if repeated.is_by_p_value:
                halves = join_halves(signatures)
                signatures = torch.stack([halves.first, halves.second], dim=1)
            verdict = cluster_by_halves(to_updates(signatures), present, repeated, draw)
        if verdict.labels.any():
            right = is_same_partition(verdict.labels, truth)
            return {"found": number, "right": bool(right)}
        assert verdict.repeated is not None
        repeated = verdict.repeated
    return {"found": None, "right": False}


class CountingGenerator(np.random.Generator):
    """Random generator that counts the shuffles that are drawn with it."""

    def __init__(self, seed: int) -> None:
        super().__init__(np.random.PCG64(seed))
        self.shuffles = 0

    def random(self, size=None, *arguments, **options):
        """Draw numbers, and count their rows: each row becomes a shuffle."""
        if isinstance(size, tuple):
            self.shuffles += size[0]
        return super().random(size, *arguments, **options)


def measure_cost(kind: str, number: int, groups: int, clients: int) -> Line:
    """Return shuffles and processor seconds of the j-th test, with separate groups or with one."""
    truth = np.arange(clients) % groups
    draw = CountingGenerator(number)
    parts = 3 if kind == "changed" else PARTS
    views = VIEWS if kind == "changed" else 1
    repeated = RepeatedTest(LEVEL / 4, tests=number - 1, views=views)
    signatures = draw_signatures(truth, parts, 1.0, np.random.default_rng(0))
    present = np.zeros(clients, dtype=np.int64)
    begun = time.process_time()
    if kind == "changed":
        cosines = torch.from_numpy(compute_part_similarity(signatures))
        cluster_again_by_splits(
            cosines, parts, present, repeated=repeated, generator=draw, level_inside=LEVEL
        )
    else:
        if repeated.is_by_p_value:
            halves = join_halves(signatures)
            signatures = torch.stack([halves.first, halves.second], dim=1)
        cluster_by_halves(to_updates(signatures), present, repeated, draw)
    return {"shuffles": draw.shuffles, "seconds": round(time.process_time() - begun, 3)}


def run_digits(seed: int, rounds: int) -> Line:
    """Run rcfl with a check in every round, on digits that are assigned to 14 clients at random.

    Every check at a trained model is a test, even if nothing changed: the rule that lets the
    intervals between tests grow is disabled.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))[: 14 * 100]
    clients = {}
    for number, rows in enumerate(np.split(order, 14)):
        inputs = (images[rows] / 16).astype(np.float32)
        train, test = (inputs[:80], labels[rows][:80]), (inputs[80:], labels[rows][80:])
        clients[f"client {number}"] = (train, test)
    federation = fedclade.federation(clients, "classification", labels=10)
    algorithm = ReplicatedCFL(check_every=1)
    world = Backend.simulated_by(
        federation, make_perceptron, algorithm, seed=seed, engine="stacked"
    )
    state = algorithm.init(world.initial, world.clients)
    local = LocalTraining(epochs=1, batch_size=20, lr=0.1)
    splits = 0
    doubling, method.is_due = method.is_due, lambda occasion: True
    for number in range(1, rounds + 1):
        plan = RoundPlan(number, local, seed)
        state, log = algorithm.step(state, world.clients.ids, world.clients, plan)
        splits += sum(isinstance(event, Regrouped) for event in log.events)
    method.is_due = doubling
    return {"changes of clusters": splits, "tests": state.halves, "sum": state.halves_evidence}


def make_perceptron(seed: int) -> nn.Module:
    """Return a small perceptron for digits."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def make_convolutional(seed: int) -> nn.Module:
    """Return a small convolutional network for digits."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def measure_rounding(changed: float, perturbation: float, seed: int) -> Line:
    """Return how far the updates of parts move if the initial model or the data change.

    The initial model is perturbed by the relative size ``perturbation``, as rounding would do, or a
    share ``changed`` of every client's training examples is replaced. Moves are shares of the
    usual distance between two parts of one client.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    spare = order[1400:]
    sketches: list[SplitSketches] = []
    for replaced in (0.0, changed):
        clients = {}
        for number, rows in enumerate(np.split(order[:1400], 14)):
            rows = rows.copy()
            count = round(replaced * 80)
            places = np.random.default_rng(number).permutation(80)[:count]
            rows[places] = np.random.default_rng(100 + number).choice(spare, count)
            inputs = (images[rows] / 16).astype(np.float32)
            train, test = (inputs[:80], labels[rows][:80]), (inputs[80:], labels[rows][80:])
            clients[f"client {number}"] = (train, test)
        federation = fedclade.federation(clients, "classification", labels=10)
        algorithm = ReplicatedCFL()
        world = Backend.simulated_by(
            federation, make_convolutional, algorithm, seed=seed, engine="loop"
        )
        model = world.initial
        if sketches:
            noise = torch.randn(model.shape, generator=torch.Generator().manual_seed(seed))
            model = model * (1 + perturbation * noise)
        plan = RoundPlan(1, LocalTraining(epochs=5, batch_size=20, lr=0.1), seed)
        splits = DataSplits(3, 26)
        updates = splits.request_updates(world.clients, list(world.clients.ids), model[None], plan)
        sketches.append(SplitSketches.of(updates.ids, get_split_signatures(updates)))
    before, now = sketches
    moved = 1 - (before.sketches * now.sketches).sum(2).mean(1)
    usual = now._measure_usual_distance()
    return {
        "moved": float(moved.mean() / usual),
        "most": float(moved.max() / usual),
        "counted": len(before.find_changed(now)),
    }


# Jobs.


def list_jobs(sequences: int, digits: int) -> Iterator[Line]:
    """Yield all jobs, the most important first."""
    for number in (1, 2, 3, 4, 5, 10, 16, 34, 100, 1000):
        for kind in ("trained", "changed"):
            for groups in (4, 1):
                yield {
                    "measure": "cost",
                    "kind": kind,
                    "number": number,
                    "groups": groups,
                    "clients": 20,
                }
    for clients in (60, 128, 200):
        yield {"measure": "cost", "kind": "trained", "number": 10, "groups": 4, "clients": clients}
    for checks in (50, 500):
        yield {"measure": "ranks", "checks": checks, "sequences": 100_000, "seed": 0}
    for seed in range(2):
        for perturbation in (1e-7, 1e-5):
            yield {
                "measure": "rounding",
                "changed": 0.0,
                "perturbation": perturbation,
                "seed": seed,
            }
        for changed in (0.1, 0.25, 0.5, 1.0):
            yield {"measure": "rounding", "changed": changed, "perturbation": 0.0, "seed": seed}
    # The other measures take turns, so that a call that is stopped has run some jobs of each.
    for seed in range(sequences):
        if seed % 10 == 0 and seed < 200:
            yield from _list_power_jobs(seed // 10)
        yield {"measure": "level", "checks": 50, "data": "new", "seed": seed}
        if seed % 10 == 0:
            yield {"measure": "level", "checks": 50, "data": "divided again", "seed": seed}
        if seed % 2 == 0:
            yield {"measure": "level", "checks": 500, "data": "new", "seed": seed // 2}
        if seed % 10 == 5 and seed // 10 < digits:
            yield {"measure": "digits", "seed": seed // 10, "rounds": 53}


def _list_power_jobs(seed: int) -> Iterator[Line]:
    """Yield the jobs of one seed that measure how often groups are found."""
    four = {"name": "4 of 5", "groups": np.repeat(np.arange(4), 5).tolist()}
    pair = {"name": "18 and 2", "groups": [0] * 18 + [1] * 2, "separation": 1.0}
    for separation in (0.1, 0.15, 0.2, 0.3):
        for before in TESTS_BEFORE.values():
            job = {"kind": "trained", "tests_before": before, "separation": separation}
            yield {"measure": "power", **four, **job, "seed": seed}
    for before in (0, 9):
        for separation in (0.1, 0.2):
            job = {"kind": "changed", "tests_before": before, "separation": separation}
            yield {"measure": "power", **four, **job, "seed": seed}
        for kind in ("trained", "changed"):
            yield {"measure": "power", **pair, "kind": kind, "tests_before": before, "seed": seed}


def run_job(measure: str, **job: Any) -> Line:
    """Run a job of one of the measures; return its results."""
    if measure == "level":
        return simulate_level(**job)
    if measure == "ranks":
        return simulate_ranks(**job)
    if measure == "cost":
        return measure_cost(**job)
    if measure == "digits":
        return run_digits(**job)
    if measure == "rounding":
        return measure_rounding(**job)
    job.pop("name")
    return find_after(**job)


# Tables.


def describe_share(count: int, total: int) -> str:
    """Return a share with its exact 95 % interval (Clopper and Pearson)."""
    low = float(beta.ppf(0.025, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(0.975, count + 1, total - count)) if count < total else 1.0
    return f"{count} of {total} ({low:.2%} to {high:.2%})"


def make_level_table(lines: Sequence[Line]) -> Table:
    """Return a table of the sequences in which a test rejects, for clients of one distribution."""
    rows: list[tuple[str, ...]] = []
    by_case: dict[tuple[str, int], list[Line]] = defaultdict(list)
    for line in lines:
        if line["measure"] == "level":
            by_case[line["data"], line["checks"]].append(line)
    for (data, checks), of_case in by_case.items():
        kinds = ("added", "multiplied") if data == "new" else ("added",)
        for kind in kinds:
            cells = [
                describe_share(
                    sum(_is_rejected(line, kind, level) for line in of_case), len(of_case)
                )
                for level in LEVELS
            ]
            name = "new data" if data == "new" else f"the same data, {data}"
            rows.append((f"{name}, {kind}", str(checks), *cells))
    for line in lines:
        if line["measure"] == "ranks":
            for kind in ("added", "multiplied"):
                cells = [describe_share(count, line["sequences"]) for count in line[kind]]
                rows.append((f"exact ranks, {kind}", str(line["checks"]), *cells))
    heads = [f"rejections at {level:g}" for level in LEVELS]
    return as_table("sequences with a rejection", ("simulated data", "checks", *heads), rows)


def _is_rejected(line: Mapping[str, Any], kind: str, level: float) -> bool:
    by_p = any(p <= level / (number * (number + 1)) for number, p in enumerate(line["p"], start=1))
    return by_p or line[kind] >= (FIRST_TESTS + 1) / level


def make_power_table(lines: Sequence[Line]) -> Table:
    """Return a table of the shares of runs that find groups in the first 1, 3 or 5 tests."""
    by_case: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        if line["measure"] == "power":
            case = (line["name"], line["kind"], line["tests_before"], line["separation"])
            by_case[case].append(line)
    rows: list[tuple[str, ...]] = []
    for (name, kind, tests_before, separation), of_case in sorted(by_case.items()):
        shares = [
            f"{np.mean([line['found'] is not None and line['found'] <= most for line in of_case]):.0%}"
            for most in (1, 3, 5)
        ]
        found = [line["right"] for line in of_case if line["found"]]
        right = f"{np.mean(found):.0%}" if found else ""
        rows.append(
            (
                name,
                kind,
                str(tests_before + 1),
                f"{separation:g}",
                *shares,
                right,
                str(len(of_case)),
            )
        )
    heads = (
        "groups of 20 clients",
        "check",
        "test",
        "separation",
        "found, 1 test",
        "found, 3 tests",
        "found, 5 tests",
        "exactly right",
        "runs",
    )
    return as_table("groups that are found", heads, rows)


def make_cost_table(lines: Sequence[Line]) -> Table:
    """Return a table of the shuffles and seconds of the j-th test."""
    rows = [
        (
            line["kind"],
            str(line["clients"]),
            str(line["groups"]),
            str(line["number"]),
            str(line["shuffles"]),
            f"{line['seconds']:.2f}",
        )
        for line in lines
        if line["measure"] == "cost"
    ]
    heads = ("check", "clients", "groups", "test", "shuffles", "seconds")
    return as_table("cost of a check", heads, rows)


def make_rounding_table(lines: Sequence[Line]) -> Table:
    """Return a table of the moves of updates by rounding and by changed data."""
    by_case: dict[tuple[float, float], list[Line]] = defaultdict(list)
    for line in lines:
        if line["measure"] == "rounding":
            by_case[line["changed"], line["perturbation"]].append(line)
    rows = [
        (
            f"{changed:.0%}",
            f"{perturbation:g}",
            f"{np.mean([line['moved'] for line in of_case]):.4f}",
            f"{max(line['most'] for line in of_case):.4f}",
            str(sum(line["counted"] for line in of_case)),
            str(14 * len(of_case)),
        )
        for (changed, perturbation), of_case in sorted(by_case.items())
    ]
    heads = (
        "examples replaced",
        "initial model perturbed by",
        "move, mean",
        "move, largest",
        "counted as changed",
        "clients",
    )
    return as_table("moves of updates", heads, rows)


def make_digits_table(lines: Sequence[Line]) -> Table:
    """Return a table of the number of runs on digits that changed their clusters."""
    runs = [line for line in lines if line["measure"] == "digits"]
    changed = sum(line["changes of clusters"] > 0 for line in runs)
    largest = max((line["sum"] for line in runs), default=0.0)
    rows = [(describe_share(changed, len(runs)), f"{largest:.3g}")] if runs else []
    return as_table("digits, one distribution", ("runs with a split", "largest sum"), rows)


def main() -> None:
    """Run missing jobs, and print the tables."""
    parser = jsonl.parser(__doc__, "lasting.jsonl")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="start no job after this time (default: 20)"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=1000,
        help="number of sequences of 50 checks on new data (default: 1000); half as many "
        "sequences have 500 checks",
    )
    parser.add_argument(
        "--digits", type=int, default=20, help="largest number of runs on digits (default: 20)"
    )
    parser.add_argument(
        "--measure", help="run only this measure: cost, ranks, rounding, power, level or digits"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.table:
        jobs = [
            job
            for job in list_jobs(given.sequences, given.digits)
            if given.measure in (None, job["measure"])
        ]
        jsonl.run_missing(given.out, jobs, run_job, given.minutes)
    lines = jsonl.read(given.out)
    console = Console(width=160)
    for make in (
        make_level_table,
        make_power_table,
        make_cost_table,
        make_rounding_table,
        make_digits_table,
    ):
        console.print(make(lines))


if __name__ == "__main__":
    main()
