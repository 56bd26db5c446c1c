"""Rows and claims of FL+HC's tables, and the curves of its figures."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from fedclade.algorithms import FLHC, FedAvg
from fedclade.reproduce.experiment import Bench, Settings
from fedclade.reproduce.fl_hc_claims import Cell, claim_of_curve, claims_of_fractions, claims_of_linkages
from fedclade.reproduce.fl_hc_runs import Found, partitions, run_of
from fedclade.reproduce.outcome import Claim, Outcome, Row

Cells = Mapping[str, tuple[float | None, float | None, float | None, float | None]]
"""A table of the paper, all in %: accuracy post cluster and in round 50, share of clients at the target likewise."""

COLUMNS = ("accuracy post cluster", "accuracy at the end", "clients at the target post cluster", "at the end")

REMARKS = (
    "Algorithm 1 starts every cluster from the joint model, and throws the updates of the clustering step away. The "
    "rows 'from their mean' show the accuracy of the joint model moved by the mean of these updates, by cluster.",
    "The clustering step is not counted as a round, as in the paper.",
)

OF_SETTING = {
    "pathological": "Two labels each means two shards of the images sorted by label, as in McMahan et al. 2017.",
    "label-swapped": "Directly after clustering the paper is within a point of its accuracy at the end, even where a "
    "round has two or three clients of a cluster: it seems to keep the updates of the clustering step.",
    "by writer": "The clients are the writers with the most images; the paper draws them at random.",
}


def remarks_on(settings: Settings) -> tuple[str, ...]:
    """Return what departs from the paper in a setting."""
    return (*REMARKS, OF_SETTING[settings["setting"]])


def measure_fractions(table: Cells, bench: Bench, settings: Settings) -> Outcome:
    """Measure Tables I to III: every client fraction with every number of rounds before clustering."""
    rows, cells, series = list[Row](), list[Cell](), dict[str, Any]()
    for fraction in settings["client_fractions"]:
        averaged = [_averaged(bench, settings, fraction, seed) for seed in settings["seeds"]]
        rows += _rows_of_averaging(f"cf {fraction:.1f}", averaged)
        for n in settings["rounds_before"]:
            key = f"cf {fraction:.1f}, n {n}"
            algorithm = FLHC(rounds_before=n, metric="l2", linkage="ward", threshold=settings["threshold"])
            found = [
                run_of(
                    *(bench, settings, f"{key}, seed {seed}", algorithm),
                    fraction=fraction,
                    seed=seed,
                    evaluate_every=n + 2,
                )
                for seed in settings["seeds"]
            ]
            cells.append(Cell(key, n, found, averaged))
            rows += _rows_of_cell(cells[-1], table)
            series[key] = _shown(cells[-1], table)
    counts = {run["clusters"] for cell in cells for run in cell.runs}
    many = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    made = f"T = {settings['threshold']} made {many} clusters; the paper does not tell how many."
    return Outcome(tuple(rows), claims_of_fractions(cells, settings), {"cells": series}, (*remarks_on(settings), made))


def measure_linkages(table: Cells, bench: Bench, settings: Settings) -> Outcome:
    """Measure Tables IV to VI: every metric with every linkage, each at the cut that comes out best.

    Runs of equal partitions are the same run, and measured once.
    """
    hows = [(metric, linkage) for metric, linkage in (key.split() for key in table)]
    fraction, n = settings["client_fraction"], settings["rounds_before"]
    averaged = [_averaged(bench, settings, fraction, seed) for seed in settings["seeds"]]
    rows, cells, series = _rows_of_averaging("", averaged), list[Cell](), dict[str, Any]()
    labels = {seed: partitions(bench, settings, hows, seed) for seed in settings["seeds"]}
    for metric, linkage in hows:
        tried = {
            count: [
                _run_of_partition(bench, settings, labels[seed], f"{metric} {linkage} {count}", seed)
                for seed in settings["seeds"]
            ]
            for count in settings["cuts"]
        }
        best = max(tried, key=lambda count: fmean(run["accuracy"][-1] for run in tried[count]))
        cells.append(Cell(f"{metric} {linkage}", n, tried[best], averaged))
        rows += _rows_of_cell(cells[-1], table)
        series[cells[-1].key] = {**_shown(cells[-1], table), "cut": best}
    chosen = ", ".join(f"{key} {cell['cut']}" for key, cell in series.items())
    remark = (
        "The paper cuts at the best of some thresholds, by test accuracy, and names none; ours are numbers of clusters,"
        f" the best of {settings['cuts']}: {chosen}."
    )
    return Outcome(tuple(rows), claims_of_linkages(cells, settings), {"cells": series}, (*remarks_on(settings), remark))


def _averaged(bench: Bench, settings: Settings, fraction: float, seed: int) -> Found:
    return run_of(bench, settings, f"FL, cf {fraction:.1f}, seed {seed}", FedAvg(), fraction=fraction, seed=seed)


def _run_of_partition(bench: Bench, settings: Settings, labels: dict[str, list[int]], key: str, seed: int) -> Found:
    """Run FL+HC at a cut; of those with the same partition the first."""
    key = next(other for other in labels if labels[other] == labels[key])
    metric, linkage, count = key.split()
    n = settings["rounds_before"]
    algorithm = FLHC(rounds_before=n, metric=metric, linkage=linkage, n_clusters=int(count))
    fraction = settings["client_fraction"]
    return run_of(bench, settings, f"{key}, seed {seed}", algorithm, fraction=fraction, seed=seed, evaluate_every=n + 2)


def _rows_of_averaging(what: str, runs: list[Found]) -> list[Row]:
    """Return what FL comes to at the end; the paper tells only ratios to it."""
    shown = {"accuracy": "accuracy at the end", "reached": "clients at the target at the end"}
    name = f"{what}, FL" if what else "FL"
    return [_row(f"{name} · {words}", None, [run[key][-1] for run in runs]) for key, words in shown.items()]


def _rows_of_cell(cell: Cell, table: Cells) -> list[Row]:
    paper = table.get(cell.key, (None,) * len(COLUMNS))
    values = (cell.after("accuracy"), cell.last("accuracy"), cell.after("reached"), cell.last("reached"))
    rows = [_row(f"{cell.key} · {what}", told, ours) for what, told, ours in zip(COLUMNS, paper, values, strict=True)]
    moved = [run["at_the_mean"] for run in cell.runs if run["at_the_mean"] is not None]
    if len(moved) == len(cell.runs):
        rows.insert(1, _row(f"{cell.key} · {COLUMNS[0]}, from their mean", paper[0], moved))
    return rows


def _row(what: str, paper: float | None, shares: list[float]) -> Row:
    values = tuple(round(100 * share, 4) for share in shares)
    return Row(what, paper, fmean(values), "%", values, "at least")


def _shown(cell: Cell, table: Cells) -> dict[str, Any]:
    """Return what the picture of a table shows of a cell, in %."""
    paper = table.get(cell.key, (None,) * len(COLUMNS))
    averaged = [run["accuracy"][-1] for run in cell.averaged], [run["reached"][-1] for run in cell.averaged]
    return {
        "paper": [paper[1], paper[3]],
        "ours": [100 * fmean(cell.last("accuracy")), 100 * fmean(cell.last("reached"))],
        "averaged": [100 * fmean(values) for values in averaged],
        "clusters": [run["clusters"] for run in cell.runs],
    }


def measure_curves(bench: Bench, settings: Settings) -> Outcome:
    """Measure figures 1 to 6, those whose data is there: FL and FL+HC, evaluated in every round."""
    rows, claims, series, remarks = list[Row](), list[Claim](), dict[str, Any](), [REMARKS[1]]
    for name, figure in settings["figures"].items():
        of_it = settings["settings"][figure["setting"]]
        if not (bench.has(of_it["images"]) or bench.data_dir is None):
            remarks.append(f"{name} was not measured: {of_it['images']} is not at hand.")
            continue
        metric, linkage = figure["how"].split()
        where = {"threshold": of_it["threshold"]} if linkage == "ward" else {"n_clusters": settings["cut"]}
        algorithm = FLHC(rounds_before=figure["rounds_before"], metric=metric, linkage=linkage, **where)
        fraction, seed = figure["client_fraction"], settings["seeds"][0]
        averaged = run_of(
            *(bench, of_it, f"{figure['setting']}, FL, cf {fraction:.1f}", FedAvg()), fraction=fraction, seed=seed
        )
        clustered = run_of(bench, of_it, name, algorithm, fraction=fraction, seed=seed)
        series[name] = {**figure, "FL": averaged, "FL+HC": clustered}
        for which, run in (("FL", averaged), ("FL+HC", clustered)):
            rows += [
                _row(f"{name} · {which}, accuracy at the end", None, run["accuracy"][-1:]),
                _row(f"{name} · {which}, clients at the target at the end", None, run["reached"][-1:]),
            ]
        claims.append(claim_of_curve(name, Cell(name, figure["rounds_before"], [clustered], [averaged])))
    return Outcome(tuple(rows), tuple(claims), series, tuple(remarks))
