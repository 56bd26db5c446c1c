"""Rows of FL+HC's tables, what the text says of IID clients, and the curves of the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.algorithms import FLHC, FedAvg
from fedclade.clustering import cut_height
from fedclade.papers.cache import ResultCache, Settings
from fedclade.papers.experiment import Paper
from fedclade.papers.fl_hc.claims import (
    Cell,
    claim_on_curve,
    claims_on,
    claims_on_iid,
    count,
    percent,
    points,
    why_differ,
)
from fedclade.papers.fl_hc.runs import CLUSTERS, WAYS, Found, Merges, Runs, clusters_at, labels_of
from fedclade.papers.outcome import Claim, Outcome, Row
from fedclade.tasks import cluster_scores

COLUMNS = ("accuracy post cluster", "accuracy at the end", "clients at the target post cluster", "at the end")

WARD = ("l2", "ward")

READINGS = {"of_all": "K is all clients", "of_cluster": "K is the cluster's clients"}
"""What K is in m = max(α·K, 1), Algorithm 1, line 19."""


def measure_fractions(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure Tables I to III: every client fraction with every number of rounds before clustering.

    The first of ``cohorts``, the readings of Algorithm 1, line 19, makes the cells; the others are shown below them.
    """
    usual, *other_readings = settings["cohorts"]
    runs, printed = Runs(cache, settings), paper.numbers["cells"]
    rows, cells, beside, remarks = list[Row](), list[Cell](), list[Cell](), list[str]()
    for fraction in settings["client_fractions"]:
        averaged = runs.of(FedAvg(), fraction)
        rows += _rows_of_averaging(f"cf {fraction:.1f}, FL", averaged)
        for n in (n for n in settings["rounds_before"] if [fraction, n] not in settings["left_out"]):
            found = runs.of(_ward(n, threshold=settings["threshold"], cohort=usual), fraction)
            key = f"cf {fraction:.1f}, n {n}"
            cells.append(Cell(key, n, found, averaged, printed.get(key, Cell.paper)))
            beside.append(cells[-1])
            if settings["setting"] == "label-swapped" and any(run["clusters"] != CLUSTERS for run in found):
                # What FL+HC comes to if it is cut where the four groups are, and by which T that would be.
                at_four = runs.of(_ward(n, n_clusters=CLUSTERS, cohort=usual), fraction)
                beside.append(replace(cells[-1], key=f"{key}, cut at {CLUSTERS} clusters", runs=at_four))
                heights = [_heights(merges["l2 ward"]) for merges in runs.merges(n, fraction)]
                low, high = max(each[-CLUSTERS] for each in heights), min(each[-CLUSTERS + 1] for each in heights)
                remarks.append(f"{key}: every T from {low:.3g} to {high:.3g} makes {CLUSTERS} clusters.")
            for reading in other_readings:
                again = runs.of(_ward(n, threshold=settings["threshold"], cohort=reading), fraction)
                beside.append(replace(cells[-1], key=f"{key}, {READINGS[reading]}", runs=again))
        rows += [row for cell in beside if cell.averaged is averaged for row in _rows_of(cell)]
    made = "; ".join(f"{cell.key}: {', '.join(str(run['clusters']) for run in cell.runs)}" for cell in cells)
    remark = f"Clusters that T = {settings['threshold']} made (the paper does not tell): {made}."
    return _outcome(paper, settings, rows, cells, {cell.key: _shown(cell) for cell in beside}, [remark, *remarks])


def measure_linkages(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure Tables IV to VI: metrics with linkages, each at the cut that comes out best.

    Runs of equal partitions are the same run, and measured once.
    """
    runs, fraction, n = Runs(cache, settings), settings["client_fraction"], settings["rounds_before"]
    averaged, merges = runs.of(FedAvg(), fraction), runs.merges(n, fraction)
    rows, cells, series = _rows_of_averaging("FL", averaged), list[Cell](), dict[str, Any]()
    for how in settings["hows"]:
        tried = {
            count: [
                runs.run(_first_alike(of_seed, settings, how, count), fraction, seed)
                for seed, of_seed in zip(settings["seeds"], merges, strict=True)
            ]
            for count in settings["cuts"]
        }
        best = max(tried, key=lambda count: fmean(run["accuracy"][-1] for run in tried[count]))
        cell = Cell(how, n, tried[best], averaged, paper.numbers["cells"].get(how, Cell.paper))
        cells.append(cell)
        rows += _rows_of(cell)
        series[how] = {**_shown(cell), "cut": best, "threshold": cut_height(_heights(merges[0][how]), best)}
    chosen = ", ".join(f"{key} {cell['cut']} (T ≈ {cell['threshold'] or 0:.3g})" for key, cell in series.items())
    remarks = [
        "The paper cuts at the best of some thresholds, by test accuracy, and names none; ours are cuts at numbers of "
        f"clusters, the best of {settings['cuts']}: {chosen}."
    ]
    if settings["setting"] == "label-swapped":
        remarks.append(_on_parameters(paper, merges, settings))
    return _outcome(paper, settings, rows, cells, series, remarks)


def _first_alike(merges: Merges, settings: Settings, how: str, count: int) -> FLHC:
    """Return FL+HC at a cut; of the ways that make the same partition the first."""
    wanted = labels_of(merges[how], count)
    metric, linkage = next(way for way in settings["hows"] if labels_of(merges[way], count) == wanted).split()
    return FLHC(rounds_before=settings["rounds_before"], metric=metric, linkage=linkage, n_clusters=count)


def _on_parameters(paper: Paper, merges: Sequence[Merges], settings: Settings) -> str:
    """Say what cosine distances find if the trained models are compared, in place of the updates."""
    truth = {client: client % CLUSTERS for client in range(settings["clients"])}
    ways = {"updates": "cosine complete", "parameters": "cosine complete, parameters"}
    found = {
        what: [cluster_scores(dict(enumerate(labels_of(each[way], CLUSTERS))), truth)["ari"] for each in merges]
        for what, way in ways.items()
    }
    ari = {what: fmean(score for score in scores if score is not None) for what, scores in found.items()}
    return paper.texts["parameters"].format(clusters=CLUSTERS, **ari)


def _outcome(
    paper: Paper, settings: Settings, rows: list[Row], cells: list[Cell], series: Settings, remarks: list[str]
) -> Outcome:
    """Return the outcome of a table."""
    last = [value for cell in cells for value in cell.last("accuracy")]
    averaged = [run["accuracy"][-1] for cell in cells for run in cell.averaged]
    printed = [cell.paper[1] for cell in cells if cell.paper[1] is not None]
    theirs = f" (paper {min(printed):.1f} to {max(printed):.1f} %)" if printed else ""
    sentence = f"FL+HC ends at {percent(last)}{theirs}, FL at {percent(averaged)}; {points([c.gain for c in cells])}."
    remarks, because = [paper.texts["setting"], *remarks], why_differ(paper, cells, settings)
    claims = claims_on(paper, cells, settings)
    return paper.outcome(rows, claims, {"cells": series}, sentence, because=because, remarks=remarks)


def measure_iid(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure what section III says of IID clients: how many clusters there are at a threshold, and what they cost."""
    runs, fraction, T = Runs(cache, settings), settings["client_fraction"], settings["threshold"]
    rows, found, heights = list[Row](), dict[str, list[int]](), dict[str, list[float]]()
    first, last = min(settings["rounds_before"]), max(settings["rounds_before"])

    def add(name: str, counts: Sequence[int], one: bool) -> None:
        paper_says = (1.0, "1") if one else (None, "more than 1")
        rows.append(Row.of(f"{name} · clusters at T = {T}", paper_says[0], counts, "", within=0.0, told=paper_says[1]))

    for n in settings["rounds_before"]:
        merges = runs.merges(n, fraction)
        for metric, linkage in WAYS if n == last else [WARD]:
            way = f"{metric} {linkage}"
            found[f"n {n}, {way}"] = [clusters_at(each[way], T) for each in merges]
            add(f"n {n}, {way}", found[f"n {n}, {way}"], one=metric != "l1" and n != 1)
        heights[f"n {n}"] = _heights(merges[0]["l2 ward"]).round(3).tolist()
    other = Runs(cache, {**settings, "scaling": settings["other_scaling"]}).merges(last, fraction)
    counts = [clusters_at(each["l2 ward"], T) for each in other]
    add(f"n {last}, l2 ward, pixels of mean 0 and variance 1", counts, one=True)
    averaged = runs.of(FedAvg(), fraction)
    cell = Cell(f"n {first}", first, runs.of(_ward(first, threshold=T), fraction), averaged)
    rows.append(_row("FL · accuracy at the end", 99.1, [run["accuracy"][-1] for run in averaged]))
    rows.append(_row(f"FL+HC, n {first}, l2 ward · accuracy at the end", None, cell.last("accuracy")))
    wards = ", ".join(f"{count(found[f'n {n}, l2 ward'])} (n = {n})" for n in settings["rounds_before"])
    sentence = (
        f"Clusters at T = {T} with Ward's linkage: {wards}; FL ends at "
        f"{percent([run['accuracy'][-1] for run in averaged])}, FL+HC with n = {first} at "
        f"{percent(cell.last('accuracy'))}."
    )
    claims, series = claims_on_iid(paper, found, cell, settings), {"heights": heights, "threshold": T, "found": found}
    return paper.outcome(rows, claims, series, sentence, remarks=[paper.texts["setting"]])


def measure_curves(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figures 1 to 6, those whose data is there: FL and FL+HC, evaluated in every round."""
    claims, series, remarks = list[Claim](), dict[str, Any](), list[str]()
    for name, figure in settings["figures"].items():
        of_it = settings["settings"][figure["setting"]]
        if not cache.may_have(of_it["images"]):
            remarks.append(f"{name} was not measured: {of_it['images']} is not at hand.")
            continue
        runs, fraction, seed = Runs(cache, of_it), figure["client_fraction"], settings["seeds"][0]
        (metric, linkage), n = figure["how"].split(), figure["rounds_before"]
        # Figures 5 and 6 cut where the best of several thresholds is: here at the best of ``cuts``.
        ward = [{"threshold": of_it["threshold"]}] if linkage == "ward" else []
        tried = [
            runs.run(FLHC(rounds_before=n, metric=metric, linkage=linkage, **cut), fraction, seed)
            for cut in ward or [{"n_clusters": k} for k in settings["cuts"]]
        ]
        clustered = max(tried, key=lambda run: run["accuracy"][-1])
        averaged = runs.run(FedAvg(), fraction, seed)
        series[name] = {**figure, "FL": averaged, "FL+HC": clustered}
        claims.append(claim_on_curve(paper, Cell(name, n, [clustered], [averaged])))
    rows = [
        _row(f"{name} · {which}, {words} at the end", None, shown[which][key][-1:])
        for name, shown in series.items()
        for which in ("FL", "FL+HC")
        for key, words in (("accuracy", "accuracy"), ("reached", "clients at the target"))
    ]
    last = {name: [each[which]["accuracy"][-1] for which in ("FL+HC", "FL")] for name, each in series.items()}
    ends = "; ".join(f"{name} {100 * ours:.1f} % beside {100 * fl:.1f} %" for name, (ours, fl) in last.items())
    because = [] if len(series) == len(settings["figures"]) else ["FEMNIST is not at hand."]
    because += [paper.because] if any(ours < fl for ours, fl in last.values()) else []
    sentence = f"At the end FL+HC beside FL: {ends or 'nothing was measured'}."
    return paper.outcome(rows, claims, series, sentence, because=" ".join(because), remarks=remarks)


def _ward(rounds_before: int, **cut: Any) -> FLHC:
    return FLHC(rounds_before=rounds_before, metric="l2", linkage="ward", **cut)


def _heights(merges: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.asarray(merges)[:, 2]


def _rows_of_averaging(name: str, runs: list[Found]) -> list[Row]:
    """Return what FL comes to at the end; the paper gives only ratios to it."""
    shown = {"accuracy": "accuracy at the end", "reached": "clients at the target at the end"}
    return [_row(f"{name} · {words}", None, [run[key][-1] for run in runs]) for key, words in shown.items()]


def _rows_of(cell: Cell) -> list[Row]:
    values = (cell.after("accuracy"), cell.last("accuracy"), cell.after("reached"), cell.last("reached"))
    rows = [
        _row(f"{cell.key} · {what}", *each)
        for what, each in zip(COLUMNS, zip(cell.paper, values, strict=True), strict=True)
    ]
    moved = [run["at_the_mean"] for run in cell.runs if run["at_the_mean"] is not None]
    if len(moved) == len(cell.runs):
        rows.insert(1, _row(f"{cell.key} · {COLUMNS[0]}, from their mean", cell.paper[0], moved))
    return rows


def _row(what: str, paper: float | None, shares: Sequence[float]) -> Row:
    return Row.of(what, paper, [round(100 * share, 4) for share in shares], wanted="at least")


def _shown(cell: Cell) -> dict[str, Any]:
    """Return what the figure of a table shows of a cell, in %."""
    return {
        "paper": [cell.paper[1], cell.paper[3]],
        "ours": [100 * fmean(cell.last(what)) for what in ("accuracy", "reached")],
        "averaged": [100 * fmean(run[what][-1] for run in cell.averaged) for what in ("accuracy", "reached")],
        "clusters": [run["clusters"] for run in cell.runs],
    }
