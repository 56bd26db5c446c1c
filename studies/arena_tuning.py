"""Choose hyper-parameters of the methods in the arena (``configs/arena/mnist.toml``).

All methods have the same budget: at most three settings, each of which runs once in two cells of
the arena, P(Y|X) and P(X) at level 5. The runs have a seed that the arena does not use, and a
quarter of the examples. Batches are also a quarter as large, so that the number of steps is the
same. With fewer steps, LeNet-5 would have learnt nothing after ten rounds, and norms of updates
would differ from those in the arena.

The setting with the highest mean accuracy on validation data after the last round is chosen; if
several are equal, the first of them. Test data and true clusters are not used. The first setting of
each method is the one without tuning. FedAvg, local training and the oracle have no
hyper-parameters to tune, and rcfl runs with its defaults.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.
Several processes can run different methods at the same time and write to one file.

    python studies/arena_tuning.py --data-dir DIR --out arena_tuning.jsonl --methods ifca fesem
    python studies/arena_tuning.py --out arena_tuning.jsonl --table
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import jsonl
import torch
from rcfl import as_table
from rich.console import Console
from rich.table import Table

from fedclade.config import Config, check_config, find_configs, read_scenarios
from fedclade.core import ConfigError
from fedclade.runs import column_of

Options = Mapping[str, Any]
Line = dict[str, Any]

SEED, SHARE = 100, 4
CELLS = ("mnist P(Y|X) 5", "mnist P(X) 5")
IMAGES = 60_000
"""Number of training images of MNIST."""

MOST = 3
"""Largest number of settings of a method."""

CUTS: Sequence[Options] = ({}, {"n_clusters": 4}, {"n_clusters": 8})
"""Ways to cut a dendrogram: fedclade's default, and into a given number of clusters."""

SETTINGS: Mapping[str, Sequence[Options]] = {
    "apfl": ({"alpha": 0.5}, {"alpha": 0.25}, {"alpha": 0.75}),
    # The rule of thumb of the paper's journal version, thresholds of public implementations, and
    # splits in fixed rounds as in the paper's figure 8.
    "cfl": (
        {"eps1": "auto", "eps2": 1.0},
        {"eps1": 0.4, "eps2": 1.6},
        {"split_rounds": [3, 5, 7, 9], "eps2": 0.5},
    ),
    "ditto": ({"lam": 1.0}, {"lam": 0.1}, {"lam": 2.0}),
    "feddrift": ({"step_rounds": 1}, {"step_rounds": 1, "delta": 0.1}, {"step_rounds": 3}),
    "fedem": ({"clusters": 3}, {"clusters": 2}, {"clusters": 4}),  # each client trains all of them
    "fedgroup": tuple({"groups": groups, "pretrain_scale": 1} for groups in (4, 2, 8)),
    "fedrc": ({"clusters": 3}, {"clusters": 2}, {"clusters": 4}),
    "fedsoft": tuple({"clusters": clusters, "selection": 10} for clusters in (4, 2, 8)),
    "fesem": tuple({"clusters": clusters} for clusters in (4, 2, 8)),
    "finetune": ({"epochs": 1}, {"epochs": 2}, {"epochs": 5}),
    "fl_hc": tuple({"rounds_before": 3, "metric": "l2", "linkage": "ward", **cut} for cut in CUTS),
    "flexcfl": tuple({"groups": groups, "pretrain_scale": 1} for groups in (4, 2, 8)),
    "flux": ({"eps_scaling": 1.0}, {"eps_scaling": 0.8}, {"eps_scaling": 1.2}),
    "ifca": tuple({"clusters": clusters} for clusters in (4, 2, 8)),
    "pacfl": tuple({"distance": "per_label", **cut} for cut in CUTS),  # the variant of fedclade
    "per_fedavg": ({"alpha": 0.005}, {"alpha": 0.02}, {"alpha": 0.05}),
    "pfedme": ({"personal_lr": 0.09}, {"personal_lr": 0.03}, {"personal_lr": 0.01}),
    "stocfl": ({"tau": 0.65}, {"tau": 0.3}, {"tau": 0.9}),
}
"""Settings of each method; the first is the one without tuning."""


def tasks(cells: Sequence[str], scale: str | None) -> dict[str, Config]:
    """Return the config of FedAvg in each cell, with scores on validation data, by cell name."""
    (path,) = (path for path in find_configs("arena") if path.stem == "mnist")
    scenarios = {
        each.name: each for each in read_scenarios(path, ["evaluate_validation=true"], scale)
    }
    if unknown := [cell for cell in cells if cell not in scenarios]:
        raise SystemExit(f"unknown cell {unknown[0]!r}; known cells: {', '.join(scenarios)}")
    return {cell: scenarios[cell].configs["fedavg"] for cell in cells}


def configured(task: Config, method: str, setting: Options) -> Config:
    """Return the config of a run; on MNIST with a quarter of the examples and of the batch size."""
    given = {**task.as_dict(), "seed": SEED, "algorithm": {"name": method, **setting}}
    if task.data["name"] == "mnist":
        given["data"] = {
            **given["data"],
            "samples_per_client": IMAGES // given["data"]["clients"] // SHARE,
        }
        given["local"] = {**given["local"], "batch_size": given["local"]["batch_size"] // SHARE}
    return check_config(given)


def run(config: Config, data_dir: Path | None) -> Line:
    """Run a config; return the mean validation score of the last round, clusters and seconds."""
    start = perf_counter()
    done = config.run(config.federation(data_dir), progress=False)
    score, clusters = done.metric_rows[-1][column_of("accuracy")], done.summary["clusters"]["found"]
    return {"validation": score, "clusters": clusters, "seconds": round(perf_counter() - start, 1)}


def by_setting(lines: Sequence[Line]) -> dict[str, dict[str, list[Line]]]:
    """Return the lines of each method and each of its settings; settings are JSON texts."""
    by_method: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        by_method[line["method"]][json.dumps(line["setting"])].append(line)
    return by_method


def means(of_method: Mapping[str, Sequence[Line]], cells: Sequence[str]) -> dict[str, float]:
    """Return the mean score over the cells, for each setting that has run in all cells."""
    done = {
        setting: {line["cell"]: line["validation"] for line in lines}
        for setting, lines in of_method.items()
    }
    return {
        setting: mean(of[cell] for cell in cells)
        for setting, of in done.items()
        if {*cells} <= of.keys()
    }


def best(method: str, found: Mapping[str, float]) -> str | None:
    """Return the best setting of a method; None until all settings have run.

    If several settings are equally good, the result is the first of them in ``SETTINGS``.
    """
    # The lines may be in another order.
    ordered = [json.dumps(setting) for setting in SETTINGS[method]]
    return max(ordered, key=lambda setting: found[setting]) if {*ordered} <= found.keys() else None


def table(lines: Sequence[Line], cells: Sequence[str]) -> Table:
    """Return a table with a row for each setting of each method; the best settings are marked."""
    rows: list[tuple[str, ...]] = []
    for method, settings in by_setting(lines).items():
        found = means(settings, cells)
        for setting, of_setting in settings.items():
            of_cell = {line["cell"]: line for line in of_setting}
            each = [
                f"{100 * of_cell[cell]['validation']:.1f}" if cell in of_cell else ""
                for cell in cells
            ]
            clusters = ", ".join(
                str(of_cell[cell]["clusters"]) for cell in cells if cell in of_cell
            )
            both = f"{100 * found[setting]:.1f}" if setting in found else ""
            written = ", ".join(f"{key} = {value}" for key, value in json.loads(setting).items())
            rows.append(
                (
                    method,
                    written,
                    *each,
                    both,
                    clusters,
                    "best" if setting == best(method, found) else "",
                )
            )
    headings = ("method", "setting", *cells, "mean", "clusters", "")
    return as_table("accuracy on validation data after the last round, %", headings, rows)


def chosen(lines: Sequence[Line], cells: Sequence[str]) -> list[str]:
    """Return lines for the section ``[algorithms]`` of a config: the best setting of each method.

    Methods with settings that have not run are left out.
    """
    written: list[str] = []
    for method, settings in by_setting(lines).items():
        if (setting := best(method, means(settings, cells))) is not None:
            inside = ", ".join(
                f"{key} = {json.dumps(value)}" for key, value in json.loads(setting).items()
            )
            written.append(f"{method} = {{ {inside} }}" if inside else f"{method} = {{}}")
    return written


def main() -> None:
    """Run missing settings, and print the table and the lines for the scenario."""
    parser = jsonl.parser(__doc__, "arena_tuning.jsonl")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(SETTINGS),
        choices=SETTINGS,
        help="methods to tune (default: all)",
    )
    parser.add_argument(
        "--cells", nargs="+", default=CELLS, metavar="CELL", help="cells of the arena to run in"
    )
    parser.add_argument("--scale", help="scale of the scenario, such as smoke")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=160)
    assert all(len(settings) <= MOST for settings in SETTINGS.values())
    configs = {} if given.table else tasks(given.cells, given.scale)
    jobs = [
        (m, setting, cell) for m in given.methods for setting in SETTINGS[m] for cell in configs
    ]
    for method, setting, cell in jobs:
        head = {"method": method, "setting": setting, "cell": cell, "seed": SEED}
        if any(head.items() <= line.items() for line in jsonl.read(given.out)):
            continue
        try:
            config = configured(configs[cell], method, setting)
        except ConfigError as error:  # with a small scale, there may be more clusters than clients
            console.print(f"{method} {setting} left out: {error}", markup=False)
            continue
        line = {**head, **run(config, given.data_dir)}
        jsonl.add(given.out, line)
        console.print(
            f"{method} {setting} in {cell}: {line['validation']:.3f}, {line['seconds']:.0f} s",
            markup=False,
        )
    lines = jsonl.read(given.out)
    console.print(table(lines, given.cells))
    console.print("\n".join(chosen(lines, given.cells)), markup=False, highlight=False)


if __name__ == "__main__":
    main()
