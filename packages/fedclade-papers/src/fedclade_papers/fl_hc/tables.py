"""Rows of FL+HC's tables, the paper's statements on IID clients, and curves of the figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade import FLHC, FedAvg
from fedclade.clustering import count_clusters_by_gap
from fedclade.tasks import cluster_scores
from fedclade_papers.cache import ResultCache, Settings
from fedclade_papers.experiment import Paper
from fedclade_papers.fl_hc.claims import (
    Cell,
    claim_on_curve,
    claim_on_speed,
    claims_on,
    claims_on_iid,
    count,
    percent,
    points,
    why_differ,
)
from fedclade_papers.fl_hc.runs import CLUSTERS, WAYS, Found, Merges, Runs, clusters_at, labels_of
from fedclade_papers.outcome import Claim, Outcome, Row

COLUMNS = (
    "accuracy post cluster",
    "accuracy at the end",
    "clients at the target post cluster",
    "at the end",
)

WARD = ("l2", "ward")

AUTO = "T = auto"
"""Name of the threshold at the largest gap between merges.

It is not in the paper, and is chosen without any accuracy.
"""

TRUTH = ", the true number"
"""Suffix of a cut at the true number of groups."""

READINGS = {"of_all": "K is all clients", "of_cluster": "K is the cluster's clients"}
"""Readings of K in m = max(α·K, 1), Algorithm 1, line 19."""


def measure_fractions(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure Tables I to III: every client fraction and number of rounds before clustering.

    ``cohort``, a reading of Algorithm 1, line 19, is used for the cells; ``other_cohorts`` give
    additional quantities that are not in the paper.
    """
    usual = settings["cohort"]
    runs = Runs(cache, settings)
    printed = paper.numbers["cells"]
    rows = list[Row]()
    cells = list[Cell]()
    beside = list[Cell]()
    remarks = list[str]()
    for fraction in settings["client_fractions"]:
        averaged = runs.of(FedAvg(), fraction)
        rows += _rows_of_averaging(f"cf {fraction:.1f}, FL", averaged)
        for n in (
            n for n in settings["rounds_before"] if [fraction, n] not in settings["left_out"]
        ):
            found = runs.of(_ward(n, threshold=settings["threshold"], cohort=usual), fraction)
            key = f"cf {fraction:.1f}, n {n}"
            cells.append(Cell(key, n, found, averaged, printed.get(key, Cell.paper)))
            beside.append(cells[-1])
            if settings["setting"] == "label-swapped" and any(
                run["clusters"] != CLUSTERS for run in found
            ):
                # The result of FL+HC if it is cut into the four true groups, and the T of this cut.
                at_four = runs.of(_ward(n, n_clusters=CLUSTERS, cohort=usual), fraction)
                beside.append(
                    replace(
                        cells[-1], key=f"{key}, cut at {CLUSTERS} clusters{TRUTH}", runs=at_four
                    )
                )
                heights = [_heights(merges["l2 ward"]) for merges in runs.merges(n, fraction)]
                low = max(each[-CLUSTERS] for each in heights)
                high = min(each[-CLUSTERS + 1] for each in heights)
                remarks.append(
                    f"{key}: every T from {low:.3g} to {high:.3g} makes {CLUSTERS} clusters."
                )
            for reading in settings["other_cohorts"]:
                again = runs.of(_ward(n, threshold=settings["threshold"], cohort=reading), fraction)
                beside.append(replace(cells[-1], key=f"{key}, {READINGS[reading]}", runs=again))
        rows += [
            row
            for cell in beside
            if cell.averaged is averaged
            for row in _rows_of(cell, own=cell not in cells)
        ]
    made = "; ".join(
        f"{cell.key}: {', '.join(str(run['clusters']) for run in cell.runs)}" for cell in cells
    )
    remark = f"Clusters that T = {settings['threshold']} made (the paper does not tell): {made}."
    return _outcome(
        paper,
        settings,
        rows,
        cells,
        {cell.key: _shown(cell) for cell in beside},
        [remark, *remarks],
    )


def measure_linkages(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure Tables IV to VI: each metric and linkage at several thresholds, and at T = auto.

    As in the paper (section III-B), a cell shows the threshold with the best accuracy. A threshold
    is a share of the distance of the last merge, as distances of different metrics have different
    units. Thresholds, metrics and linkages with equal partitions have the same run, which is
    measured and counted once.
    """
    runs = Runs(cache, settings)
    fraction = settings["client_fraction"]
    n = settings["rounds_before"]
    averaged = runs.of(FedAvg(), fraction)
    merges = runs.merges(n, fraction)
    rows = _rows_of_averaging("FL", averaged)
    cells = list[Cell]()
    series = dict[str, Any]()
    shown_by = dict[str, str]()
    for how in settings["hows"]:
        tried = {
            name: [
                runs.run(_first_alike(of_seed, settings, how, count), fraction, seed)
                for seed, of_seed, count in zip(settings["seeds"], merges, counts, strict=True)
            ]
            for name, counts in cuts_of(merges, settings, how).items()
        }
        chosen = [name for name in tried if name != AUTO]
        last = {name: fmean(run["accuracy"][-1] for run in found) for name, found in tried.items()}
        best = max(chosen, key=last.__getitem__)
        cell = Cell(how, n, tried[best], averaged, paper.numbers["cells"].get(how, Cell.paper))
        cells.append(cell)
        # Runs with equal partitions are equal, which is detected by equal numbers of all rounds in
        # their JSON form.
        first = shown_by.setdefault(json.dumps(tried[best], sort_keys=True), how)
        rows += _rows_of(
            cell, name=f"{how}, {best}" if best.endswith(TRUTH) else how, repeats=first
        )
        rows += [
            _row(
                f"{how}, {name} · accuracy at the end",
                None,
                [run["accuracy"][-1] for run in tried[name]],
            )
            for name in tried
            if name != best
        ]
        series[how] = {**_shown(cell), "cut": best, "tried": last}
    remarks = [
        "The paper shows the best of some thresholds by test accuracy, and names none. Ours are "
        "shares of the distance of the last merge; each cell is the best of them by test "
        "accuracy, as in the paper, and the spread over them stands below: "
        + "; ".join(
            f"{how} {each['cut']}, {_spread(each['tried'])}" for how, each in series.items()
        )
        + "."
    ]
    repeated = [row for row in rows if row.repeats]
    if repeated:
        remarks.append(
            f"{len(repeated)} rows show a run that is shown above already, and do not count again."
        )
    if settings["setting"] == "label-swapped":
        remarks.append(_on_parameters(paper, merges, settings))
    return _outcome(paper, settings, rows, cells, series, remarks)


def cuts_of(merges: Sequence[Merges], settings: Settings, how: str) -> dict[str, list[int]]:
    """Return the cuts that are tried for a metric and linkage.

    The result has the number of clusters for each seed, by the name of the cut.
    """
    heights = [_heights(of_seed[how]) for of_seed in merges]
    cuts: dict[str, list[int]] = {}
    for share in settings["threshold_shares"]:
        cuts[f"T = {share:g} of the last merge"] = [
            clusters_at(of_seed[how], share * each[-1])
            for of_seed, each in zip(merges, heights, strict=True)
        ]
    for clusters in settings["cuts"]:
        is_truth = settings["setting"] == "label-swapped" and clusters == CLUSTERS
        cuts[f"cut at {clusters} clusters{TRUTH if is_truth else ''}"] = [clusters] * len(merges)
    cuts[AUTO] = [count_clusters_by_gap(each) for each in heights]
    return cuts


def _spread(tried: Mapping[str, float]) -> str:
    """Return the range of final accuracies in %."""
    return f"{100 * min(tried.values()):.1f} to {100 * max(tried.values()):.1f} %"


def _first_alike(merges: Merges, settings: Settings, how: str, count: int) -> FLHC:
    """Return FL+HC with the first metric and linkage that give the same partition at a cut."""
    wanted = labels_of(merges[how], count)
    metric, linkage = next(
        way for way in settings["hows"] if labels_of(merges[way], count) == wanted
    ).split()
    return _fl_hc(settings, metric, linkage, n_clusters=count)


def _fl_hc(settings: Settings, metric: str, linkage: str, **cut: Any) -> FLHC:
    return FLHC(
        rounds_before=settings["rounds_before"],
        metric=metric,
        linkage=linkage,
        cohort=settings["cohort"],
        **cut,
    )


def _on_parameters(paper: Paper, merges: Sequence[Merges], settings: Settings) -> str:
    """Return a remark on cosine distances between trained models instead of updates."""
    truth = {client: client % CLUSTERS for client in range(settings["clients"])}
    ways = {"updates": "cosine complete", "parameters": "cosine complete, parameters"}
    found = {
        what: [
            cluster_scores(dict(enumerate(labels_of(each[way], CLUSTERS))), truth)["ari"]
            for each in merges
        ]
        for what, way in ways.items()
    }
    ari = {
        what: fmean(score for score in scores if score is not None)
        for what, scores in found.items()
    }
    return paper.texts["parameters"].format(clusters=CLUSTERS, **ari)


def _outcome(
    paper: Paper,
    settings: Settings,
    rows: list[Row],
    cells: list[Cell],
    series: Settings,
    remarks: list[str],
) -> Outcome:
    """Return the outcome of a table."""
    last = [value for cell in cells for value in cell.last("accuracy")]
    averaged = [run["accuracy"][-1] for cell in cells for run in cell.averaged]
    printed = [cell.paper[1] for cell in cells if cell.paper[1] is not None]
    theirs = f" (paper {min(printed):.1f} to {max(printed):.1f} %)" if printed else ""
    sentence = f"FL+HC ends at {percent(last)}{theirs}, FL at {percent(averaged)}; {points([c.gain for c in cells])}."
    remarks = [paper.texts["setting"], *remarks]
    because = why_differ(paper, cells, settings)
    claims = claims_on(paper, cells, settings)
    return paper.outcome(
        rows, claims, {"cells": series}, sentence, because=because, remarks=remarks
    )


def measure_iid(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure section III on IID clients: number of clusters at a threshold, and its cost.

    The cost is the loss of accuracy against FL.
    """
    runs = Runs(cache, settings)
    fraction = settings["client_fraction"]
    T = settings["threshold"]
    rows, found, heights = list[Row](), dict[str, list[int]](), dict[str, list[float]]()
    first = min(settings["rounds_before"])
    last = max(settings["rounds_before"])

    def add(name: str, counts: Sequence[int], one: bool, *, own: bool = False) -> None:
        paper_says = (1.0, "1") if one else (None, "more than 1")
        what = f"{name} · clusters at T = {T}"
        rows.append(
            Row.of(what, paper_says[0], counts, "", within=0.0, told=paper_says[1], own=own)
        )

    for n in settings["rounds_before"]:
        merges = runs.merges(n, fraction)
        for metric, linkage in WAYS if n == last else [WARD]:
            way = f"{metric} {linkage}"
            found[f"n {n}, {way}"] = [clusters_at(each[way], T) for each in merges]
            add(f"n {n}, {way}", found[f"n {n}, {way}"], one=metric != "l1" and n != 1)
        heights[f"n {n}"] = _heights(merges[0]["l2 ward"]).round(3).tolist()
    other = Runs(cache, {**settings, "scaling": settings["other_scaling"]}).merges(last, fraction)
    counts = [clusters_at(each["l2 ward"], T) for each in other]
    add(f"n {last}, l2 ward, pixels of mean 0 and variance 1", counts, one=True, own=True)
    averaged = runs.of(FedAvg(), fraction)
    at_first = runs.of(_ward(first, threshold=T, cohort=settings["cohort"]), fraction)
    cell = Cell(f"n {first}", first, at_first, averaged)
    rows.append(_row("FL · accuracy at the end", 99.1, [run["accuracy"][-1] for run in averaged]))
    rows.append(
        _row(f"FL+HC, n {first}, l2 ward · accuracy at the end", None, cell.last("accuracy"))
    )
    wards = ", ".join(
        f"{count(found[f'n {n}, l2 ward'])} (n = {n})" for n in settings["rounds_before"]
    )
    sentence = (
        f"Clusters at T = {T} with Ward's linkage: {wards}; FL ends at "
        f"{percent([run['accuracy'][-1] for run in averaged])}, FL+HC with n = {first} at "
        f"{percent(cell.last('accuracy'))}."
    )
    claims = claims_on_iid(paper, found, cell, settings)
    series = {"heights": heights, "threshold": T, "found": found}
    return paper.outcome(rows, claims, series, sentence, remarks=[paper.texts["setting"]])


def measure_curves(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figures 1 to 6 with FL and FL+HC, evaluated in every round.

    Figures without available data are omitted.
    """
    claims = list[Claim]()
    series = dict[str, Any]()
    remarks = list[str]()
    for name, figure in settings["figures"].items():
        of_it = settings["settings"][figure["setting"]]
        if not cache.may_have(of_it["images"]):
            remarks.append(f"{name} was not measured: {of_it['images']} is not at hand.")
            continue
        runs = Runs(cache, of_it)
        fraction = figure["client_fraction"]
        seed = settings["seeds"][0]
        (metric, linkage), n = figure["how"].split(), figure["rounds_before"]
        # Figures 5 and 6 cut where the best of several thresholds is, see measure_linkages.
        if linkage == "ward":
            cuts = [{"threshold": of_it["threshold"]}]
        else:
            (merges,) = Runs(cache, {**of_it, "seeds": [seed]}).merges(n, fraction)
            of_shares = cuts_of([merges], {**of_it, **settings}, figure["how"])
            cuts = [{"n_clusters": count} for name, (count,) in of_shares.items() if name != AUTO]
        of_figure = {"rounds_before": n, "cohort": of_it["cohort"]}
        tried = [
            runs.run(_fl_hc(of_figure, metric, linkage, **cut), fraction, seed) for cut in cuts
        ]
        clustered = max(tried, key=lambda run: run["accuracy"][-1])
        averaged = runs.run(FedAvg(), fraction, seed)
        series[name] = {**figure, "FL": averaged, "FL+HC": clustered}
        cell = Cell(name, n, [clustered], [averaged])
        # The paper's text states this only for these two settings.
        if figure["setting"] in ("pathological", "label-swapped"):
            claims.append(claim_on_curve(paper, cell))
        if figure["setting"] == "pathological":
            claims.append(claim_on_speed(paper, cell))
    rows = [
        _row(f"{name} · {which}, {words} at the end", None, shown[which][key][-1:])
        for name, shown in series.items()
        for which in ("FL", "FL+HC")
        for key, words in (("accuracy", "accuracy"), ("reached", "clients at the target"))
    ]
    last = {
        name: [each[which]["accuracy"][-1] for which in ("FL+HC", "FL")]
        for name, each in series.items()
    }
    ends = "; ".join(
        f"{name} {100 * ours:.1f} % beside {100 * fl:.1f} %" for name, (ours, fl) in last.items()
    )
    because = [] if len(series) == len(settings["figures"]) else ["FEMNIST is not at hand."]
    because += [paper.because] if any(ours < fl for ours, fl in last.values()) else []
    sentence = f"At the end FL+HC beside FL: {ends or 'nothing was measured'}."
    return paper.outcome(rows, claims, series, sentence, because=" ".join(because), remarks=remarks)


def _ward(rounds_before: int, **cut: Any) -> FLHC:
    return FLHC(rounds_before=rounds_before, metric="l2", linkage="ward", **cut)


def _heights(merges: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.asarray(merges)[:, 2]


def _rows_of_averaging(name: str, runs: list[Found]) -> list[Row]:
    """Return the final results of FL; the paper prints only ratios to them."""
    shown = {"accuracy": "accuracy at the end", "reached": "clients at the target at the end"}
    return [
        _row(f"{name} · {words}", None, [run[key][-1] for run in runs])
        for key, words in shown.items()
    ]


def _rows_of(cell: Cell, *, name: str = "", own: bool = False, repeats: str = "") -> list[Row]:
    """Return the rows of a cell, named by its key or by ``name``.

    ``repeats`` is the first cell with the same run.
    """
    name = name or cell.key
    repeats = "" if repeats == cell.key else repeats
    values = (
        cell.after("accuracy"),
        cell.last("accuracy"),
        cell.after("reached"),
        cell.last("reached"),
    )
    rows = [
        _row(f"{name} · {what}", *each, own=own, repeats=repeats)
        for what, each in zip(COLUMNS, zip(cell.paper, values, strict=True), strict=True)
    ]
    moved = [run["at_the_mean"] for run in cell.runs if run["at_the_mean"] is not None]
    if len(moved) == len(cell.runs):
        rows.insert(
            1, _row(f"{name} · {COLUMNS[0]}, from their mean", cell.paper[0], moved, own=True)
        )
    return rows


def _row(what: str, paper: float | None, shares: Sequence[float], **more: Any) -> Row:
    return Row.of(
        what, paper, [round(100 * share, 4) for share in shares], wanted="at least", **more
    )


def _shown(cell: Cell) -> dict[str, Any]:
    """Return the data of a cell that the table's figure shows, in %."""
    return {
        "paper": [cell.paper[1], cell.paper[3]],
        "ours": [100 * fmean(cell.last(what)) for what in ("accuracy", "reached")],
        "averaged": [
            100 * fmean(run[what][-1] for run in cell.averaged) for what in ("accuracy", "reached")
        ],
        "clusters": [run["clusters"] for run in cell.runs],
    }
