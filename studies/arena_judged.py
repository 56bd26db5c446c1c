"""Choose the settings of all methods of the arena with one budget, and judge the methods on other folds.

    python studies/arena_judged.py --data-dir DIR --minutes 30    # repeat until it says that all runs are done
    python studies/arena_judged.py --data-dir DIR --share 1/2     # half of the runs; another process makes 2/2
    python studies/arena_judged.py --table

Setting. The scenarios of ``configs/arena`` are made smaller, for all methods alike, so that all runs
together take about four hours of one core: each client has ``IMAGES`` images; in place of the levels 8,
5, 3 and 1 of the four shifts of MNIST there is level 3; and CIFAR-10 has LeNet-5, momentum and ten
rounds. This was decided before any score was seen, except FedAvg's on fold 101, which was run to
measure the time.

Choice. On MNIST each method has five candidates, each of which runs once in each cell of
``TUNING_CELLS``, on a fold (a random draw of the data) that is not judged. The first three are three
step sizes with the method's first setting of ``SETTINGS``; then the other two settings, with the best
of these step sizes. Methods without hyper-parameters have two further step sizes instead. On
CIFAR-10 each method has three candidates: the step sizes, with the options chosen on MNIST. The best
mean accuracy on validation data after the last round decides, and the first of equals. Test data
and true clusters are not used.

Judgement. Each method runs with its chosen setting on the folds ``FOLDS`` in each cell of
``JUDGED_CELLS``.

Each run is stored as one line of ``arena_judged.jsonl``, and a call continues where the last one
stopped. ``studies/arena_page.py`` writes the page from this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import arena_tuning
import jsonl
import torch

from fedclade import Run
from fedclade.config import Config, check_config, find_configs, read_scenarios
from fedclade.runs import column_of

Options = Mapping[str, Any]
Line = dict[str, Any]
Setting = dict[str, Any]
"""A step size ``lr``, and the ``options`` of a method."""

RESULTS = Path(__file__).with_suffix(".jsonl")

TUNING_FOLD = 100
FOLDS = (2, 3, 4)

TUNING_CELLS: Mapping[str, Sequence[str]] = {
    "mnist": ("mnist P(Y|X) 5", "mnist P(X) 5"),
    "cifar10": ("cifar10",),
}
"""Cells in which settings are chosen, by data set."""

JUDGED_CELLS: Mapping[str, Sequence[str]] = {
    "mnist": ("mnist P(Y|X) 3", "mnist P(X) 3", "mnist P(X|Y) 3", "mnist P(Y) 3"),
    "cifar10": ("cifar10",),
}
"""Cells in which methods are judged, by data set."""

IMAGES: Mapping[str, int] = {"mnist": 300, "cifar10": 200}
"""Number of images of each client; with MNIST they are all for training and validation."""

STEP_SIZES = (0.01, 0.02, 0.05)
FURTHER_STEP_SIZES = (0.03, 0.1)
"""Step sizes of methods without hyper-parameters, in addition to ``STEP_SIZES``."""

BUDGET: Mapping[str, int] = {"mnist": 5, "cifar10": 3}
"""Number of candidates of each method."""

SETTINGS: Mapping[str, Sequence[Options]] = {
    "rcfl": (),
    "cfl": arena_tuning.SETTINGS["cfl"],
    "fl_hc": arena_tuning.SETTINGS["fl_hc"],
    "fedgroup": arena_tuning.SETTINGS["fedgroup"],
    "flexcfl": arena_tuning.SETTINGS["flexcfl"],
    "ifca": arena_tuning.SETTINGS["ifca"],
    "clove": tuple({"clusters": clusters} for clusters in (4, 2, 8)),
    "fesem": arena_tuning.SETTINGS["fesem"],
    "pacfl": arena_tuning.CUTS,
    "stocfl": arena_tuning.SETTINGS["stocfl"],
    "ocfl": ({}, {"method": "hdbscan"}, {"method": "hdbscan", "min_cluster_size": 2}),
    "feddrift": arena_tuning.SETTINGS["feddrift"],
    "flux": arena_tuning.SETTINGS["flux"],
    "fedem": arena_tuning.SETTINGS["fedem"],
    "fedrc": arena_tuning.SETTINGS["fedrc"],
    "fedsoft": arena_tuning.SETTINGS["fedsoft"],
    "apfl": arena_tuning.SETTINGS["apfl"],
    "ditto": arena_tuning.SETTINGS["ditto"],
    "auto": (),
    "local": (),
    "fedavg": (),
    "oracle": (),
}
"""Settings of each method, the first of which has no tuning; none for methods without hyper-parameters."""

UNKNOWN_CLUSTERS = ("oracle",)
"""Methods that need true clusters, which CIFAR-10 does not have here."""


def methods_of(data: str) -> list[str]:
    """Return the methods that run on a data set."""
    return [name for name in SETTINGS if data == "mnist" or name not in UNKNOWN_CLUSTERS]


@cache
def cell_config(cell: str) -> Config:
    """Return the config of FedAvg in a cell of the arena, at the size of the present runs."""
    data = cell.split()[0]
    (path,) = (path for path in find_configs("arena") if path.stem == data)
    found = {scenario.name: scenario for scenario in read_scenarios(path)}
    given = found[cell].configs["fedavg"].as_dict()
    sizes: dict[str, Any] = {"samples_per_client": IMAGES[data]}
    if data == "mnist":
        sizes["test_samples"] = 100
    else:
        sizes["validation_fraction"] = 0.2
        given["model"] = {"name": "lenet"}
    given["rounds"] = 10
    given["evaluate_every"] = 1
    given["data"] = {**given["data"], **sizes}
    batch_size = 16 if data == "mnist" else 10
    given["local"] = {**given["local"], "batch_size": batch_size, "momentum": 0.9}
    return check_config(given)


def run_config(cell: str, method: str, setting: Setting, fold: int, *, tuning: bool) -> Config:
    """Return the config of one run."""
    given = cell_config(cell).as_dict()
    options = dict(setting["options"])
    if method == "fedsoft":
        options["selection"] = given["data"]["clients"]
    return check_config(
        {
            **given,
            "seed": fold,
            "engine": "loop",
            "evaluate_validation": tuning,
            "evaluate_every": given["rounds"] if tuning else 1,
            "local": {**given["local"], "lr": setting["lr"]},
            "algorithm": {"name": method, **options},
        }
    )


def candidates(lines: Sequence[Line], method: str, data: str) -> list[Setting]:
    """Return the candidates of a method on a data set, as far as the runs so far determine them.

    They are fewer than the budget if further candidates depend on runs that are missing.
    """
    if data != "mnist":
        chosen = chosen_setting(lines, method, "mnist")
        return [] if chosen is None else [{**chosen, "lr": lr} for lr in STEP_SIZES]
    scores = scores_of(lines, method, data)
    first, *others = SETTINGS[method] or ({},)
    settings: list[Setting] = [{"lr": lr, "options": dict(first)} for lr in STEP_SIZES]
    if not others:
        return settings + [{"lr": lr, "options": {}} for lr in FURTHER_STEP_SIZES]
    if all(json.dumps(setting) in scores for setting in settings):
        lr = best_of(settings, scores)["lr"]
        settings += [{"lr": lr, "options": dict(options)} for options in others]
    return settings


def best_of(settings: Sequence[Setting], scores: Mapping[str, float]) -> Setting:
    """Return the setting with the best score, and of equals the first."""
    return max(settings, key=lambda setting: scores[json.dumps(setting)])


def scores_of(lines: Sequence[Line], method: str, data: str) -> dict[str, float]:
    """Return the mean validation accuracy of each setting that has run in all tuning cells."""
    by_setting: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["stage"] == "tuning" and line["method"] == method and line["data"] == data:
            setting = json.dumps(line["setting"])
            by_setting.setdefault(setting, {})[line["cell"]] = line["accuracy"]
    cells = TUNING_CELLS[data]
    return {
        setting: mean(found[cell] for cell in cells)
        for setting, found in by_setting.items()
        if found.keys() == set(cells)
    }


def chosen_setting(lines: Sequence[Line], method: str, data: str) -> Setting | None:
    """Return the setting that was chosen for a method on a data set; None until all have run."""
    scores = scores_of(lines, method, data)
    settings = candidates(lines, method, data)
    complete = len(settings) == BUDGET[data] and all(
        json.dumps(each) in scores for each in settings
    )
    return best_of(settings, scores) if complete else None


def missing_jobs(lines: Sequence[Line], data: str) -> list[Line]:
    """Return the next runs on a data set: first of the tuning, then of the judgement.

    After these runs there may be further ones, since the best step sizes determine candidates. The
    result is empty if all runs have been made.
    """
    done = {job_key(line) for line in lines}
    tuning = [job for job in tuning_jobs(lines, data) if job_key(job) not in done]
    if tuning:
        return tuning
    return [job for job in judging_jobs(lines, data) if job_key(job) not in done]


def tuning_jobs(lines: Sequence[Line], data: str) -> Iterator[Line]:
    """Yield the runs that choose settings, as far as they are known."""
    for method in methods_of(data):
        for setting in candidates(lines, method, data):
            for cell in TUNING_CELLS[data]:
                yield {
                    "stage": "tuning",
                    "data": data,
                    "method": method,
                    "cell": cell,
                    "fold": TUNING_FOLD,
                    "setting": setting,
                }


def judging_jobs(lines: Sequence[Line], data: str) -> Iterator[Line]:
    """Yield the judged runs of the methods whose settings have been chosen, fold by fold."""
    chosen = {method: chosen_setting(lines, method, data) for method in methods_of(data)}
    for fold in FOLDS:
        for cell in JUDGED_CELLS[data]:
            for method, setting in chosen.items():
                if setting is not None:
                    yield {
                        "stage": "judged",
                        "data": data,
                        "method": method,
                        "cell": cell,
                        "fold": fold,
                        "setting": setting,
                    }


def job_key(line: Line) -> str:
    """Return the text that identifies a run."""
    return json.dumps([line[key] for key in ("stage", "method", "cell", "fold", "setting")])


def is_in_share(job: Line, share: tuple[int, int]) -> bool:
    """Return whether a run belongs to the share ``(k, n)``: the k-th of n processes makes it."""
    which, processes = share
    return int(hashlib.sha256(job_key(job).encode()).hexdigest(), 16) % processes == which - 1


def parse_share(text: str) -> tuple[int, int]:
    """Return the share ``(k, n)`` that is written as ``k/n``."""
    which, _, processes = text.partition("/")
    share = int(which), int(processes)
    if not 1 <= share[0] <= share[1]:
        raise ValueError(text)
    return share


def make_run(job: Line, data_dir: Path | None) -> Line:
    """Make one run; return its line."""
    tuning = job["stage"] == "tuning"
    config = run_config(job["cell"], job["method"], job["setting"], job["fold"], tuning=tuning)
    begun = time.process_time()
    run = config.run(config.federation(data_dir), progress=False)
    return {
        **job,
        **results_of(run, tuning=tuning),
        "seconds": round(time.process_time() - begun, 1),
    }


def results_of(run: Run, *, tuning: bool) -> Line:
    """Return the results of a run: accuracy in the last round, clusters, and costs.

    The accuracy is on validation data in the tuning, and on test data in the judgement.
    """
    column = column_of("accuracy") if tuning else "accuracy_mean"
    curve = {row["round"]: row[column] for row in run.metric_rows if column in row}
    scored = {number: score for number, score in curve.items() if math.isfinite(score)}
    last = scored.get(max(curve), 0.0)  # a model that diverged is never right
    found = run.summary["clusters"]
    return {
        "accuracy": round(last, 5),
        "rounds_to_best": max(scored, key=lambda number: scored[number], default=None),
        "ari": None if found["ari"] is None else round(found["ari"], 4),
        "clusters": found["found"],
        "true": found["true"],
        "steps": run.summary["steps"]["total"],
        "bytes_up": run.summary["bytes_up"],
        "bytes_down": run.summary["bytes_down"],
    }


def print_table(lines: Sequence[Line]) -> None:
    """Print the chosen settings, and how many runs are missing."""
    for data in TUNING_CELLS:
        for method in methods_of(data):
            setting = chosen_setting(lines, method, data)
            judged = [
                line
                for line in lines
                if (line["stage"], line["data"], line["method"]) == ("judged", data, method)
            ]
            needed = len(FOLDS) * len(JUDGED_CELLS[data])
            print(f"{data} {method}: {json.dumps(setting)}, {len(judged)} of {needed} judged runs")


def main() -> None:
    """Make the missing runs, or print a table of the runs so far."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST and CIFAR-10")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"JSON lines ({RESULTS.name})")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="time after which no run is started"
    )
    parser.add_argument(
        "--share",
        type=parse_share,
        default=(1, 1),
        metavar="K/N",
        help="which of N processes, which share one file of results, this process is (1/1)",
    )
    parser.add_argument("--table", action="store_true", help="run nothing, print the choices")
    given = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * given.minutes
    for data in () if given.table else TUNING_CELLS:
        while jobs := missing_jobs(jsonl.read(given.out), data):
            own_jobs = [job for job in jobs if is_in_share(job, given.share)]
            if not own_jobs:
                if time.monotonic() > until:
                    return
                time.sleep(5)  # further runs depend on those that other processes make now
            for job in own_jobs:
                if time.monotonic() > until:
                    print("stopped; the same call continues")
                    return
                jsonl.add(given.out, make_run(job, given.data_dir))
    print_table(jsonl.read(given.out))


if __name__ == "__main__":
    main()
