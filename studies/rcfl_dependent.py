"""Measure how rcfl treats examples that depend on each other, and examples that are merely equal.

Each run has clients of one distribution, or of known clusters. The examples of each client are
oversampled, have few values, or depend on each other in groups. The script counts the runs in which
``rcfl`` separates clients of one distribution, in the first test (round 3) and in all rounds.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python studies/rcfl_dependent.py --data-dir DIR --out dependent.jsonl   # all runs
    python studies/rcfl_dependent.py --only few --minutes 10                # cases by a part of a name
    python studies/rcfl_dependent.py --out dependent.jsonl --table          # only print the table
    python studies/rcfl_dependent.py --data-dir DIR --order   # how many clients' rows seem ordered
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jsonl
import numpy as np
import torch
from numpy.typing import NDArray
from rcfl import as_table
from rich.console import Console

import fedclade
from fedclade import LocalTraining, ReplicatedCFL, load_federation
from fedclade.core.queries import RoundPlan
from fedclade.data import Federation, FilesSettings, OwnSettings
from fedclade.runs.backend import Backend
from fedclade.training.dependence import have_similar_neighbours

Line = dict[str, Any]
Rows = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]
"""Inputs ``[n, F]``, labels and groups of a client's n rows."""

CLIENTS, ROWS = 14, 100
ROUNDS = 30
HELD_OUT = 0.2
"""Share of the copied rows that are removed afterwards, as if they were held out for tests."""

IMAGES = LocalTraining(epochs=3, batch_size=20, lr=0.1)
TABLES = LocalTraining(epochs=3, batch_size=20, lr=0.1)


# Images, of which some are copied.


def images(source: str, seed: int, data_dir: Path | None, *, shift: str = "none") -> Federation:
    """Return clients with 100 images each, drawn from one distribution unless ``shift`` is set."""
    options: dict[str, Any] = {} if source == "digits" else {"samples_per_client": ROWS}
    return load_federation(
        source,
        clients=20 if shift != "none" else CLIENTS,
        shift=shift,
        seed=seed,
        data_dir=data_dir,
        **options,
    )


def oversampled(
    federation: Federation, share: float, times: int, seed: int, *, some: bool = False
) -> Federation:
    """Repeat a share of each client's examples, and then remove a fifth of all its examples.

    With ``some``, only the examples of every other client are repeated.
    """
    draw = np.random.default_rng([seed, times])
    changed: list[Any] = []
    for place, client in enumerate(federation.clients):
        rows = draw.permutation(client.train)
        if not some or place % 2 == 0:
            copied = rows[: round(share * len(rows))]
            rows = draw.permutation(np.concatenate([rows, np.repeat(copied, times - 1)]))
        changed.append(replace(client, train=rows[round(HELD_OUT * len(rows)) :]))
    return replace(federation, clients=tuple(changed))


def copied_images(
    seed: int,
    data_dir: Path | None,
    *,
    source: str,
    share: float,
    times: int,
    shift: str = "none",
    some: bool = False,
) -> Federation:
    """Return clients with images of which a share is copied."""
    federation = images(source, seed, data_dir, shift=shift)
    return oversampled(federation, share, times, seed, some=some)


# Tables of one distribution.


def table_of(clients: Mapping[str, Rows], *, with_groups: bool) -> Federation:
    """Return a federation of tables, with or without the groups of rows."""
    groups = None
    if with_groups:
        groups = {name: groups for name, (_, _, groups) in clients.items()}
    data = {name: (x, y) for name, (x, y, _) in clients.items()}
    return fedclade.federation(data, labels=2, groups=groups)


def tables(
    seed: int,
    data_dir: Path | None,
    *,
    rows: Callable[[np.random.Generator, np.random.Generator], Rows],
    with_groups: bool = False,
) -> Federation:
    """Return clients with tables.

    ``rows`` draws the rows of a client, given a generator for the distribution, which has the same
    state for each client, and a generator for the client.
    """
    made = {
        f"client-{k}": rows(np.random.default_rng(seed), np.random.default_rng([seed, k]))
        for k in range(CLIENTS)
    }
    return table_of(made, with_groups=with_groups)


def labels_of(
    x: NDArray[np.float64],
    law: np.random.Generator,
    draw: np.random.Generator,
    *,
    is_exact: bool = False,
) -> NDArray[np.int64]:
    """Draw labels that depend on the inputs; ``is_exact``: equal inputs have equal labels."""
    logits = 2 * x @ law.normal(size=x.shape[1])
    threshold = 0.5 if is_exact else draw.random(len(x))
    return (1 / (1 + np.exp(-logits)) > threshold).astype(np.int64)


def drawn_from(
    x: NDArray[np.float64],
    p: NDArray[np.float64],
    law: np.random.Generator,
    draw: np.random.Generator,
    *,
    is_exact: bool,
) -> Rows:
    """Draw 125 rows (100 for training) from the distinct rows ``x`` with the probabilities ``p``."""
    chosen = x[draw.choice(len(x), 125, p=p / p.sum())]
    y = labels_of(chosen, law, draw, is_exact=is_exact)
    return chosen.astype(np.float32), y, np.arange(125)


def one_hot(*numbers: int) -> NDArray[np.float64]:
    """Return all combinations of categories, one-hot, for columns with numbers of categories."""
    grid = np.stack(np.meshgrid(*map(np.arange, numbers)), -1).reshape(-1, len(numbers))
    parts = [np.eye(number)[grid[:, k]] for k, number in enumerate(numbers)]
    return np.concatenate(parts, 1)


def few_values(
    law: np.random.Generator,
    draw: np.random.Generator,
    *,
    numbers: tuple[int, ...],
    even: bool,
    is_exact: bool = False,
) -> Rows:
    """Draw rows of columns with few categories; ``even``: all combinations are equally likely."""
    x = one_hot(*numbers)
    p = np.ones(len(x)) if even else law.gamma(1.0, size=len(x))
    return drawn_from(x, p, law, draw, is_exact=is_exact)


def zipf(
    law: np.random.Generator, draw: np.random.Generator, *, exponent: float, is_exact: bool = False
) -> Rows:
    """Draw rows of 2,000 different items, whose frequencies follow Zipf's law."""
    x = law.normal(size=(2000, 10))
    return drawn_from(x, np.arange(1.0, 2001) ** -exponent, law, draw, is_exact=is_exact)


def some_frequent(
    law: np.random.Generator, draw: np.random.Generator, *, values: int, is_exact: bool = False
) -> Rows:
    """Draw rows of which a third has one of a few frequent values; all others are different."""
    frequent = law.normal(size=(values, 10))
    x = draw.normal(size=(125, 10))
    is_frequent = draw.random(125) < 1 / 3
    x[is_frequent] = frequent[draw.integers(values, size=int(is_frequent.sum()))]
    y = labels_of(x, law, draw, is_exact=is_exact)
    return x.astype(np.float32), y, np.arange(125)


# Rows that depend on each other in groups.


def near_copies(law: np.random.Generator, draw: np.random.Generator, *, times: int) -> Rows:
    """Draw rows that are each copied several times, with noise of 0.001, next to each other."""
    count = 125 // times
    x = draw.normal(size=(count, 10))
    y = np.repeat(labels_of(x, law, draw), times)
    groups = np.repeat(np.arange(count), times)
    x = np.repeat(x, times, axis=0) + 1e-3 * draw.normal(size=(count * times, 10))
    return x.astype(np.float32), y, groups


def visits(law: np.random.Generator, draw: np.random.Generator) -> Rows:
    """Draw five visits of each of 25 patients; half of the variance is between patients."""
    patients = draw.normal(size=(25, 10))
    y = np.repeat(labels_of(patients, law, draw), 5)
    x = np.repeat(patients, 5, axis=0) + draw.normal(size=(125, 10))
    return x.astype(np.float32), y, np.repeat(np.arange(25), 5)


def series(law: np.random.Generator, draw: np.random.Generator) -> Rows:
    """Draw a time series of 500 steps with a correlation of 0.95 between two steps.

    The labels also depend on a hidden variable of the same correlation. The groups are blocks of
    50 steps.
    """
    steps, correlation = 500, 0.95
    x = draw.normal(size=(steps, 4))
    for step in range(1, steps):
        x[step] = correlation * x[step - 1] + np.sqrt(1 - correlation**2) * x[step]
    y = labels_of(x, law, draw)
    return x[:, :3].astype(np.float32), y, np.arange(steps) // 50


@dataclass(frozen=True)
class Case:
    """Federations of a case, by a seed and a folder of data, and settings of the runs."""

    build: Callable[[int, Path | None], Federation]
    rounds: int = ROUNDS
    runs: int = 30
    local: LocalTraining = TABLES


def _copied(source: str, share: float, times: int, runs: int, **options: Any) -> Case:
    build = partial(copied_images, source=source, share=share, times=times, **options)
    return Case(build, runs=runs, local=IMAGES)


def _table(rows: Callable[..., Rows], **options: Any) -> Case:
    return Case(partial(tables, rows=partial(rows, **options)))


OVERSAMPLING = ((0.05, 20), (0.02, 50), (0.2, 5))

FEW: Sequence[tuple[str, Callable[..., Rows], dict[str, Any]]] = (
    ("8 rows", few_values, {"numbers": (2, 2, 2), "even": False}),
    ("25 rows, equally frequent", few_values, {"numbers": (5, 5), "even": True}),
    ("25 rows", few_values, {"numbers": (5, 5), "even": False}),
    ("100 rows, equally frequent", few_values, {"numbers": (10, 10), "even": True}),
    ("100 rows", few_values, {"numbers": (10, 10), "even": False}),
    ("Zipf's law, exponent 1", zipf, {"exponent": 1.0}),
    ("Zipf's law, exponent 1.5", zipf, {"exponent": 1.5}),
    ("Zipf's law, exponent 2", zipf, {"exponent": 2.0}),
    ("a third has one value", some_frequent, {"values": 1}),
    ("a third has 8 values", some_frequent, {"values": 8}),
)
"""Tables of one distribution with frequent rows: a title, and the function that draws them."""

CASES: Mapping[str, Case] = {
    **{
        f"copies: {source}, {share:.0%} of the rows {times} times": _copied(
            source, share, times, 15
        )
        for source in ("digits", "mnist")
        for share, times in OVERSAMPLING
    },
    "copies: digits, all rows 4 times": _copied("digits", 1.0, 4, 15),
    "copies: digits, 10% of the rows 3 times": _copied("digits", 0.1, 3, 15),
    "copies: digits, 5% of the rows 20 times, at every other client": _copied(
        "digits", 0.05, 20, 15, some=True
    ),
    **{
        f"few: {title}{', equal labels' if is_exact else ''}": _table(
            rows, **options, is_exact=is_exact
        )
        for title, rows, options in FEW
        for is_exact in (False, True)
    },
    **{
        f"groups: {title}{', with groups' if with_groups else ''}": Case(
            partial(tables, rows=rows, with_groups=with_groups)
        )
        for title, rows in (
            ("near-copies, 5 of each row", partial(near_copies, times=5)),
            ("5 visits of each patient", visits),
            ("time series", series),
        )
        for with_groups in (False, True)
    },
    "clusters: mnist, label swap": Case(
        partial(images, "mnist", shift="label_swap"), rounds=15, runs=5, local=IMAGES
    ),
    **{
        f"clusters: mnist, label swap, {share:.0%} of the rows {times} times": replace(
            _copied("mnist", share, times, 5, shift="label_swap"), rounds=15
        )
        for share, times in OVERSAMPLING
    },
}


class _Warnings(logging.Handler):
    """Handler that records the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run(case: str, seed: int, data_dir: Path | None, *, are_known: bool = True) -> Line:
    """Make a run, without the rule for copies if ``are_known`` is false.

    Returns
    -------
    dict
        Numbers of clusters; whether the run warned; and whether the clusters are the true ones.
    """
    if are_known:
        return _run(case, seed, data_dir)
    with mock.patch("fedclade.training.data.are_copies", return_value=False):
        return _run(case, seed, data_dir)


def _run(case: str, seed: int, data_dir: Path | None) -> Line:
    """Make a run; return the numbers of clusters, the warnings, and whether clusters are true."""
    torch.set_num_threads(1)
    settings = CASES[case]
    federation = settings.build(seed, data_dir)
    algorithm = ReplicatedCFL()
    warnings = _Warnings()
    log = logging.getLogger("fedclade")
    log.addHandler(warnings)
    try:
        world = Backend.simulated_by(federation, "mlp", algorithm, seed=seed, engine="stacked")
        state = algorithm.init(world.initial, world.clients)
        clusters: list[int] = []
        for number in range(1, settings.rounds + 1):
            plan = RoundPlan(number, settings.local, seed)
            state, _ = algorithm.step(state, world.clients.ids, world.clients, plan)
            clusters.append(sum(bool(leaf.members) for leaf in state.tree.leaves))
    finally:
        log.removeHandler(warnings)
    line: Line = {
        "first": clusters[2],
        "most": max(clusters),
        "warned_of_equal": any("equal to other examples" in text for text in warnings.texts),
        "warned_of_order": any("adjacent training examples" in text for text in warnings.texts),
    }
    truth = federation.true_clusters
    if case.startswith("clusters"):
        assert truth is not None
        found = state.tree.leaf_of
        pairs = {(found[client], truth[client]) for client in federation.ids}
        same = len(pairs) == len(set(found.values())) == len(set(truth.values()))
        line["true"] = bool(same)
    return line


def rows_of(lines: Sequence[Line]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each case that was run."""
    by_case: dict[tuple[str, bool], list[Line]] = defaultdict(list)
    for line in lines:
        by_case[line["case"], line["are_known"]].append(line)
    for case, are_known in itertools.product(CASES, (False, True)):
        found = by_case[case, are_known]
        if not found:
            continue
        separated = [sum(line[key] > 1 for line in found) for key in ("first", "most")]
        yield (
            case if are_known else f"{case}; no rule",
            str(len(found)),
            *map(str, separated),
            str(sum(line["warned_of_equal"] for line in found)),
            str(sum(line["warned_of_order"] for line in found)),
            str(sum(line["true"] for line in found)) if "true" in found[0] else "",
        )


# Warnings of the order of rows.

NATURAL: Mapping[str, dict[str, Any]] = {
    "exam": {
        "files": "exam/exam.csv",
        "client": "school",
        "target": "normexam",
        "drop": ("student",),
    },
    "heart": {"files": "heart/*.csv", "target": "target"},
    "landmine": {"files": "landmine/*.csv", "target": "mine"},
    "parkinsons": {
        "files": "parkinsons/parkinsons_updrs.csv",
        "client": "subject#",
        "target": "total_UPDRS",
        "drop": ("motor_UPDRS",),
    },
    "student": {"files": "student/*.csv", "target": "G3"},
    "tcga_brca": {
        "files": "tcga_brca/brca.csv",
        "client": "region",
        "target": "E",
        "drop": ("pid", "T", "fold"),
    },
    "wisdm": {
        "files": "wisdm/wisdm.csv",
        "client": "user",
        "target": "class",
        "drop": ("UNIQUE_ID",),
    },
}
"""Settings of the files of natural federations, whose clients are real."""

SHUFFLES = 20


def natural(name: str, data_dir: Path) -> Federation:
    """Return a natural federation, with empty cells filled by the mean."""
    settings = {**NATURAL[name], "files": str(data_dir / "natural" / NATURAL[name]["files"])}
    files = FilesSettings(**settings, missing="mean", fewest_rows=2)
    return files.federation(OwnSettings(), "regression" if name == "student" else None)


def ordered(federation: Federation, draw: np.random.Generator) -> tuple[int, int, int]:
    """Count the clients whose rows are similar to adjacent rows, in their order and in shuffles.

    Returns
    -------
    tuple
        Number of clients, of clients whose rows seem ordered, and of shuffles that seem ordered.
    """
    found = shuffled = 0
    for client in federation.clients:
        x, y = federation.examples(client.id, "train")
        in_order = torch.from_numpy(np.argsort(client.train, kind="stable"))
        labels = None if y.is_floating_point() else y
        found += have_similar_neighbours(x[in_order], None if labels is None else labels[in_order])
        for _ in range(SHUFFLES):
            some = torch.from_numpy(draw.permutation(len(x)))
            shuffled += have_similar_neighbours(x[some], None if labels is None else labels[some])
    return len(federation.clients), found, shuffled


def order_rows(data_dir: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table of orders for each data set."""
    draw = np.random.default_rng(0)
    federations = {
        "digits": lambda: images("digits", 0, data_dir),
        "MNIST": lambda: images("mnist", 0, data_dir),
        **{name: partial(natural, name, data_dir) for name in NATURAL},
    }
    for name, build in federations.items():
        clients, found, shuffled = ordered(build(), draw)
        yield name, str(clients), str(found), f"{shuffled} of {SHUFFLES * clients}"


def main() -> None:
    """Make the missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "dependent.jsonl")
    parser.add_argument("--only", default="", help="run only cases with this text in their name")
    parser.add_argument("--runs", type=int, help="number of runs of each case")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument(
        "--order", action="store_true", help="make no runs; examine the order of rows of data sets"
    )
    given = parser.parse_args()
    console = Console(width=170)
    if given.order:
        columns = ("data", "clients", "seem ordered", "seem ordered if shuffled")
        console.print(as_table("order of rows", columns, list(order_rows(given.data_dir))))
        return
    if not given.table:
        jobs = [
            {"case": name, "seed": seed, "are_known": are_known}
            for name, case in CASES.items()
            if given.only in name
            for are_known in ((False, True) if name.startswith("copies") else (True,))
            for seed in range(given.runs or case.runs)
        ]
        jsonl.run_missing(given.out, jobs, partial(run, data_dir=given.data_dir), given.minutes)
    columns = (
        "case",
        "runs",
        "separated in round 3",
        "in any round",
        "warned of equal rows",
        "warned of the order",
        "true clusters",
    )
    console.print(as_table("rcfl", columns, list(rows_of(jsonl.read(given.out)))))


if __name__ == "__main__":
    main()
