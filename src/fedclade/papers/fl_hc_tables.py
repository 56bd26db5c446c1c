"""Rows and claims of FL+HC's tables, and the curves of its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from fedclade.algorithms import FLHC, FedAvg
from fedclade.clustering import cut_height
from fedclade.papers.experiment import ResultCache, Settings
from fedclade.papers.fl_hc_claims import (
    Cell,
    claim_of_curve,
    claims_of_fractions,
    claims_of_iid,
    claims_of_linkages,
    summary_of_cells,
    summary_of_curves,
    summary_of_iid,
)
from fedclade.papers.fl_hc_runs import (
    CLUSTERS,
    HOWS,
    Found,
    Merges,
    clusters_at,
    labels_of,
    merges_of,
    run_of,
)
from fedclade.papers.outcome import Claim, Outcome, Row
from fedclade.tasks import cluster_scores

Cells = Mapping[str, tuple[float | None, float | None, float | None, float | None]]
"""A table of the paper, all in %: accuracy post cluster and in round 50, share of clients at the target likewise."""

COLUMNS = ("accuracy post cluster", "accuracy at the end", "clients at the target post cluster", "at the end")

REMARKS = (
    "Algorithm 1 starts every cluster from the joint model, and throws the updates of the clustering step away. The "
    "rows 'from their mean' show the accuracy of the joint model moved by the mean of these updates, by cluster.",
    "The clustering step is not counted as a round, as in the paper.",
    "Pixels are in [0, 1]: the paper does not say how it scales them, and the threshold T = 3.0 depends on it.",
)

OF_SETTING = {
    "iid": "The paper has no table for IID clients, only the text of section III.",
    "pathological": "Two labels each means two shards of the images sorted by label, as in McMahan et al. 2017.",
    "label-swapped": "Directly after clustering the paper is within a point of its accuracy at the end, even where a "
    "round has two or three clients of a cluster: it seems to keep the updates of the clustering step.",
    "by writer": "The clients are the writers with the most images; the paper draws them at random.",
}


def remarks_on(settings: Settings) -> tuple[str, ...]:
    """Return what departs from the paper in a setting."""
    return (*REMARKS, OF_SETTING[settings["setting"]])


def measure_fractions(table: Cells, bench: ResultCache, settings: Settings) -> Outcome:
    """Measure Tables I to III: every client fraction with every number of rounds before clustering."""
    rows, cells, series, remarks = list[Row](), list[Cell](), dict[str, Any](), list[str]()
    for fraction in settings["client_fractions"]:
        averaged = [_averaged(bench, settings, fraction, seed) for seed in settings["seeds"]]
        rows += _rows_of_averaging(f"cf {fraction:.1f}", averaged)
        for n in (n for n in settings["rounds_before"] if [fraction, n] not in settings["left_out"]):
            algorithm = FLHC(rounds_before=n, metric="l2", linkage="ward", threshold=settings["threshold"])
            found = [run_of(bench, settings, algorithm, fraction=fraction, seed=seed) for seed in settings["seeds"]]
            key = f"cf {fraction:.1f}, n {n}"
            cells.append(Cell(key, n, found, averaged))
            rows += _rows_of_cell(cells[-1], table)
            series[key] = _shown(cells[-1], table)
            if settings["setting"] == "label-swapped" and any(run["clusters"] != CLUSTERS for run in found):
                cell, told = _at_the_true_number(bench, settings, fraction, n, averaged)
                asked = {cell.key: table[key]} if key in table else {}
                rows += _rows_of_cell(cell, asked)
                series[cell.key] = _shown(cell, asked)
                remarks.append(told)
    made = "; ".join(f"{cell.key}: {', '.join(str(run['clusters']) for run in cell.runs)}" for cell in cells)
    remark = f"Clusters that T = {settings['threshold']} made (the paper does not tell): {made}."
    return Outcome(
        tuple(rows),
        claims_of_fractions(cells, settings),
        {"cells": series},
        (*remarks_on(settings), remark, *remarks),
        summary_of_cells(cells, table, settings),
    )


def _at_the_true_number(
    bench: ResultCache, settings: Settings, fraction: float, n: int, averaged: list[Found]
) -> tuple[Cell, str]:
    """Return what FL+HC comes to if it is cut where the four groups are, and by which T that would be."""
    algorithm = FLHC(rounds_before=n, metric="l2", linkage="ward", n_clusters=CLUSTERS)
    runs = [run_of(bench, settings, algorithm, fraction=fraction, seed=seed) for seed in settings["seeds"]]
    heights = [
        _heights(merges_of(bench, settings, rounds_before=n, fraction=fraction, seed=seed)["l2 ward"])
        for seed in settings["seeds"]
    ]
    low, high = max(each[-CLUSTERS] for each in heights), min(each[-CLUSTERS + 1] for each in heights)
    cell = Cell(f"cf {fraction:.1f}, n {n}, cut at {CLUSTERS} clusters", n, runs, averaged)
    return cell, f"cf {fraction:.1f}, n {n}: every T from {low:.3g} to {high:.3g} makes {CLUSTERS} clusters."


def measure_linkages(table: Cells, bench: ResultCache, settings: Settings) -> Outcome:
    """Measure Tables IV to VI: metrics with linkages, each at the cut that comes out best.

    Runs of equal partitions are the same run, and measured once.
    """
    hows = [(metric, linkage) for metric, linkage in (key.split() for key in settings["hows"])]
    fraction, n = settings["client_fraction"], settings["rounds_before"]
    averaged = [_averaged(bench, settings, fraction, seed) for seed in settings["seeds"]]
    rows, cells, series = _rows_of_averaging("", averaged), list[Cell](), dict[str, Any]()
    merges = {
        seed: merges_of(bench, settings, rounds_before=n, fraction=fraction, seed=seed) for seed in settings["seeds"]
    }
    for metric, linkage in hows:
        tried = {
            count: [
                _run_of_partition(bench, settings, merges[seed], hows, (metric, linkage, count), seed)
                for seed in settings["seeds"]
            ]
            for count in settings["cuts"]
        }
        best = max(tried, key=lambda count: fmean(run["accuracy"][-1] for run in tried[count]))
        cells.append(Cell(f"{metric} {linkage}", n, tried[best], averaged))
        rows += _rows_of_cell(cells[-1], table)
        at = cut_height(_heights(merges[settings["seeds"][0]][f"{metric} {linkage}"]), best)
        series[cells[-1].key] = {**_shown(cells[-1], table), "cut": best, "threshold": at}
    chosen = ", ".join(f"{key} {cell['cut']} (T ≈ {cell['threshold'] or 0:.3g})" for key, cell in series.items())
    remarks = [
        "The paper cuts at the best of some thresholds, by test accuracy, and names none; ours are cuts at numbers of "
        f"clusters, the best of {settings['cuts']}: {chosen}."
    ]
    if settings["setting"] == "label-swapped":
        remarks.append(_of_parameters(merges, settings))
    return Outcome(
        tuple(rows),
        claims_of_linkages(cells, settings),
        {"cells": series},
        (*remarks_on(settings), *remarks),
        summary_of_cells(cells, table, settings),
    )


def _of_parameters(merges: Mapping[int, Merges], settings: Settings) -> str:
    """Say what cosine distances find if the trained models are compared, in place of the updates."""
    truth = {client: client % CLUSTERS for client in range(settings["clients"])}

    def ari(way: str) -> float:
        scores = [
            cluster_scores(dict(enumerate(labels_of(each[way], CLUSTERS))), truth)["ari"] for each in merges.values()
        ]
        return fmean(score for score in scores if score is not None)

    updates, parameters = ari("cosine complete"), ari("cosine complete, parameters")
    return (
        "Section I-C has 'the parameters of the local model' for the vectors that are clustered. Cosine distances of "
        f"parameters, cut at {CLUSTERS} clusters with complete linkage, have an ARI of {parameters:.2f}; those of "
        f"updates {updates:.2f}."
    )


def measure_iid(bench: ResultCache, settings: Settings) -> Outcome:
    """Measure what section III says of IID clients: how many clusters there are at a threshold, and what they cost."""
    fraction, seeds, T = settings["client_fraction"], settings["seeds"], settings["threshold"]
    rows, found, heights = list[Row](), dict[str, list[int]](), dict[str, list[float]]()
    first, last = min(settings["rounds_before"]), max(settings["rounds_before"])
    for n in settings["rounds_before"]:
        merges = [merges_of(bench, settings, rounds_before=n, fraction=fraction, seed=seed) for seed in seeds]
        ways = [f"{metric} {linkage}" for metric, linkage in HOWS] if n == last else ["l2 ward"]
        for way in ways:
            name = f"n {n}, {way}"
            found[name] = [clusters_at(each[way], T) for each in merges]
            told = None if way.startswith("l1") or n == 1 else 1.0
            several = "more than 1" if told is None else "1"
            counts = tuple(float(count) for count in found[name])
            rows.append(Row(f"{name} · clusters at T = {T}", told, fmean(counts), "", counts, within=0.0, told=several))
        heights[f"n {n}"] = _heights(merges[0]["l2 ward"]).round(3).tolist()
    other = {**settings, "scaling": settings["other_scaling"]}
    merges = [merges_of(bench, other, rounds_before=last, fraction=fraction, seed=seed) for seed in seeds]
    counts = tuple(float(clusters_at(each["l2 ward"], T)) for each in merges)
    name = f"n {last}, l2 ward, pixels of mean 0 and variance 1 · clusters at T = {T}"
    rows.append(Row(name, 1.0, fmean(counts), "", counts, within=0.0, told="1"))
    averaged = [_averaged(bench, settings, fraction, seed) for seed in seeds]
    algorithm = FLHC(rounds_before=first, metric="l2", linkage="ward", threshold=T)
    clustered = [run_of(bench, settings, algorithm, fraction=fraction, seed=seed) for seed in seeds]
    cell = Cell(f"n {first}", first, clustered, averaged)
    rows.append(_row("FL · accuracy at the end", 99.1, [run["accuracy"][-1] for run in averaged]))
    rows.append(_row(f"FL+HC, n {first}, l2 ward · accuracy at the end", None, cell.last("accuracy")))
    return Outcome(
        tuple(rows),
        claims_of_iid(found, cell, settings),
        {"heights": heights, "threshold": T, "found": found},
        remarks_on(settings),
        summary_of_iid(found, cell, settings),
    )


def _heights(merges: Sequence[Sequence[float]]) -> Any:
    return np.asarray(merges)[:, 2]


def _averaged(bench: ResultCache, settings: Settings, fraction: float, seed: int) -> Found:
    return run_of(bench, settings, FedAvg(), fraction=fraction, seed=seed)


def _run_of_partition(
    bench: ResultCache,
    settings: Settings,
    merges: Merges,
    hows: Sequence[tuple[str, str]],
    asked: tuple[str, str, int],
    seed: int,
) -> Found:
    """Run FL+HC at a cut; of those with the same partition the first."""
    metric, linkage, count = asked
    wanted = labels_of(merges[f"{metric} {linkage}"], count)
    metric, linkage = next(how for how in hows if labels_of(merges[" ".join(how)], count) == wanted)
    algorithm = FLHC(rounds_before=settings["rounds_before"], metric=metric, linkage=linkage, n_clusters=count)
    return run_of(bench, settings, algorithm, fraction=settings["client_fraction"], seed=seed)


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


def measure_curves(bench: ResultCache, settings: Settings) -> Outcome:
    """Measure figures 1 to 6, those whose data is there: FL and FL+HC, evaluated in every round."""
    claims, series, remarks = list[Claim](), dict[str, Any](), list[str](REMARKS[1:])
    for name, figure in settings["figures"].items():
        of_it = settings["settings"][figure["setting"]]
        if not (bench.has(of_it["images"]) or bench.data_dir is None):
            remarks.append(f"{name} was not measured: {of_it['images']} is not at hand.")
            continue
        metric, linkage = figure["how"].split()
        n, fraction, seed = figure["rounds_before"], figure["client_fraction"], settings["seeds"][0]
        ways = (
            [{"threshold": of_it["threshold"]}] if linkage == "ward" else [{"n_clusters": k} for k in settings["cuts"]]
        )
        tried = [
            run_of(
                *(bench, of_it, FLHC(rounds_before=n, metric=metric, linkage=linkage, **way)),
                fraction=fraction,
                seed=seed,
            )
            for way in ways
        ]
        clustered = max(tried, key=lambda run: run["accuracy"][-1])
        averaged = _averaged(bench, of_it, fraction, seed)
        series[name] = {**figure, "FL": averaged, "FL+HC": clustered}
        claims.append(claim_of_curve(name, Cell(name, n, [clustered], [averaged])))
    rows = [
        _row(f"{name} · {which}, {words} at the end", None, shown[which][key][-1:])
        for name, shown in series.items()
        for which in ("FL", "FL+HC")
        for key, words in (("accuracy", "accuracy"), ("reached", "clients at the target"))
    ]
    return Outcome(tuple(rows), tuple(claims), series, tuple(remarks), summary_of_curves(series, settings))
