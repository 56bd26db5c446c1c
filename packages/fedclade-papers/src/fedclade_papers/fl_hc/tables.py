"""Tables I to VI, figures 1 to 6 and the statements on IID clients of the FL+HC paper.

FL is federated averaging with one model for all clients. FL+HC is the paper's method: after n
rounds of FL, the clients are clustered once by hierarchical clustering of their updates, and each
cluster then trains its own model. T is the distance at which merging stops.
"""

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
"""Name of an automatic threshold, which cuts the dendrogram at the largest gap between merges.

This threshold is not in the paper, and its choice uses no accuracies.
"""

TRUTH = ", the true number"
"""Suffix for the name of a cut that gives the true number of clusters."""

READINGS = {"of_all": "K is all clients", "of_cluster": "K is the cluster's clients"}
"""Two ways to read the number K in Algorithm 1, line 19, m = max(α·K, 1).

α is the client fraction, and m the number of clients that train in a round.
"""


def measure_fractions(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure Tables I to III: FL+HC by client fraction and rounds before clustering.

    The setting ``cohort`` is the reading of Algorithm 1, line 19, that the cells use. The readings
    in ``other_cohorts`` give additional rows that are not in the paper.
    """
    usual = settings["cohort"]
    runs = Runs(cache, settings)
    printed = paper.numbers["cells"]
    rows = list[Row]()
    cells = list[Cell]()
    shown = list[Cell]()  # the cells, and the additional quantities
    remarks = list[str]()
    for fraction in settings["client_fractions"]:
        averaged = runs.of(FedAvg(), fraction)
        rows += _make_averaging_rows(f"cf {fraction:.1f}, FL", averaged)
        for n in settings["rounds_before"]:
            if [fraction, n] in settings["left_out"]:
                continue
            found = runs.of(
                _make_ward_flhc(n, threshold=settings["threshold"], cohort=usual), fraction
            )
            key = f"cf {fraction:.1f}, n {n}"
            cell = Cell(
                key=key,
                rounds_before=n,
                runs=found,
                averaged=averaged,
                paper=printed.get(key, Cell.paper),
            )
            cells.append(cell)
            shown.append(cell)
            counts = {run["clusters"] for run in found}
            if settings["setting"] == "label-swapped" and counts != {CLUSTERS}:
                # The result of FL+HC if it is cut into the four true groups, and the T of this cut.
                at_four = runs.of(_make_ward_flhc(n, n_clusters=CLUSTERS, cohort=usual), fraction)
                name = f"{key}, cut at {CLUSTERS} clusters{TRUTH}"
                shown.append(replace(cell, key=name, runs=at_four))
                remarks.append(_remark_on_thresholds(key, runs.merges(n, fraction)))
            for reading in settings["other_cohorts"]:
                again = runs.of(
                    _make_ward_flhc(n, threshold=settings["threshold"], cohort=reading), fraction
                )
                shown.append(replace(cell, key=f"{key}, {READINGS[reading]}", runs=again))
        for cell in shown:
            if cell.averaged is averaged:
                rows += _make_rows(cell, own=cell not in cells)
    made = "; ".join(f"{cell.key}: {_list_clusters(cell)}" for cell in cells)
    remark = f"Clusters that T = {settings['threshold']} made (the paper does not tell): {made}."
    return _make_outcome(
        paper,
        settings,
        rows=rows,
        cells=cells,
        series={cell.key: _collect_series(cell) for cell in shown},
        remarks=[remark, *remarks],
    )


def _remark_on_thresholds(key: str, merges: Sequence[Merges]) -> str:
    """Write a remark on the range of thresholds T that give the true number of clusters.

    The range is valid for every seed.
    """
    heights = [_get_heights(of_seed["l2 ward"]) for of_seed in merges]
    low = max(of_seed[-CLUSTERS] for of_seed in heights)
    high = min(of_seed[-CLUSTERS + 1] for of_seed in heights)
    return f"{key}: every T from {low:.3g} to {high:.3g} makes {CLUSTERS} clusters."


def _list_clusters(cell: Cell) -> str:
    """Write the numbers of clusters that the runs of a cell found, separated by commas."""
    return ", ".join(str(run["clusters"]) for run in cell.runs)


def measure_linkages(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure Tables IV to VI: FL+HC with each distance metric and linkage, at several thresholds.

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
    rows = _make_averaging_rows("FL", averaged)
    cells = list[Cell]()
    series = dict[str, Any]()
    shown_by = dict[str, str]()
    for how in settings["hows"]:
        tried: dict[str, list[Found]] = {}
        for name, counts in cuts_of(merges, settings, how).items():
            tried[name] = [
                runs.run(_find_first_alike(of_seed, settings, how, count), fraction, seed)
                for seed, of_seed, count in zip(settings["seeds"], merges, counts, strict=True)
            ]
        last = {name: fmean(_final_accuracies(found)) for name, found in tried.items()}
        chosen = [name for name in tried if name != AUTO]
        best = max(chosen, key=last.__getitem__)
        cell = Cell(
            key=how,
            rounds_before=n,
            runs=tried[best],
            averaged=averaged,
            paper=paper.numbers["cells"].get(how, Cell.paper),
        )
        cells.append(cell)
        # Runs with equal partitions are equal, which is detected by equal numbers of all rounds in
        # their JSON form.
        first = shown_by.setdefault(json.dumps(tried[best], sort_keys=True), how)
        shown_name = how
        if best.endswith(TRUTH):
            shown_name = f"{how}, {best}"
        rows += _make_rows(cell, name=shown_name, repeats=first)
        for name, found in tried.items():
            if name != best:
                what = f"{how}, {name} · accuracy at the end"
                rows.append(_make_row(what, None, _final_accuracies(found)))
        series[how] = {**_collect_series(cell), "cut": best, "tried": last}
    remarks = [
        "The paper shows the best of some thresholds by test accuracy, and names none. Ours are "
        "shares of the distance of the last merge; each cell is the best of them by test "
        "accuracy, as in the paper, and the spread over them stands below: "
        + "; ".join(
            f"{how} {each['cut']}, {_write_range(each['tried'])}" for how, each in series.items()
        )
        + "."
    ]
    repeated = [row for row in rows if row.repeats]
    if repeated:
        remarks.append(
            f"{len(repeated)} rows show a run that is shown above already, and do not count again."
        )
    if settings["setting"] == "label-swapped":
        remarks.append(_remark_on_parameters(paper, merges, settings))
    return _make_outcome(paper, settings, rows=rows, cells=cells, series=series, remarks=remarks)


def _final_accuracies(runs: Sequence[Found]) -> list[float]:
    """Return the accuracy of each run in its last round."""
    return [run["accuracy"][-1] for run in runs]


def cuts_of(merges: Sequence[Merges], settings: Settings, how: str) -> dict[str, list[int]]:
    """List the cuts of the dendrogram that are tried for a distance metric and linkage.

    Parameters
    ----------
    merges
        Merges of the clients for each seed.
    settings
        Settings of the experiment.
    how
        Metric and linkage, such as ``"l2 ward"``.

    Returns
    -------
    dict
        Number of clusters for each seed, by the name of the cut.
    """
    heights = [_get_heights(of_seed[how]) for of_seed in merges]
    cuts: dict[str, list[int]] = {}
    for share in settings["threshold_shares"]:
        cuts[f"T = {share:g} of the last merge"] = [
            clusters_at(of_seed[how], share * each[-1])
            for of_seed, each in zip(merges, heights, strict=True)
        ]
    for clusters in settings["cuts"]:
        name = f"cut at {clusters} clusters"
        if settings["setting"] == "label-swapped" and clusters == CLUSTERS:
            name += TRUTH
        cuts[name] = [clusters] * len(merges)
    cuts[AUTO] = [count_clusters_by_gap(each) for each in heights]
    return cuts


def _write_range(tried: Mapping[str, float]) -> str:
    """Write the range of final accuracies over all tried cuts, in percent."""
    return f"{100 * min(tried.values()):.1f} to {100 * max(tried.values()):.1f} %"


def _find_first_alike(merges: Merges, settings: Settings, how: str, count: int) -> FLHC:
    """Return FL+HC with the first metric and linkage that give the same clusters as ``how``.

    Metrics and linkages with equal clusters thus share one run. ``count`` is the number of
    clusters.
    """
    wanted = labels_of(merges[how], count)
    metric, linkage = next(
        way for way in settings["hows"] if labels_of(merges[way], count) == wanted
    ).split()
    return _make_flhc(settings, metric, linkage, n_clusters=count)


def _make_flhc(settings: Settings, metric: str, linkage: str, **cut: Any) -> FLHC:
    return FLHC(
        rounds_before=settings["rounds_before"],
        metric=metric,
        linkage=linkage,
        cohort=settings["cohort"],
        **cut,
    )


def _remark_on_parameters(paper: Paper, merges: Sequence[Merges], settings: Settings) -> str:
    """Write a remark on clusters by cosine distances between trained models instead of updates."""
    truth = {client: client % CLUSTERS for client in range(settings["clients"])}
    ways = {"updates": "cosine complete", "parameters": "cosine complete, parameters"}
    ari: dict[str, float] = {}
    for what, way in ways.items():
        clusterings = [dict(enumerate(labels_of(of_seed[way], CLUSTERS))) for of_seed in merges]
        scores = [cluster_scores(clustering, truth)["ari"] for clustering in clusterings]
        ari[what] = fmean(score for score in scores if score is not None)
    return paper.texts["parameters"].format(clusters=CLUSTERS, **ari)


def _make_outcome(
    paper: Paper,
    settings: Settings,
    *,
    rows: list[Row],
    cells: list[Cell],
    series: Settings,
    remarks: list[str],
) -> Outcome:
    """Return the outcome of a table from its rows, cells, data of the figure, and remarks."""
    last = [value for cell in cells for value in cell.last("accuracy")]
    averaged = [value for cell in cells for value in _final_accuracies(cell.averaged)]
    printed = [cell.paper[1] for cell in cells if cell.paper[1] is not None]
    theirs = ""
    if printed:
        theirs = f" (paper {min(printed):.1f} to {max(printed):.1f} %)"
    gains = points([cell.gain for cell in cells])
    sentence = f"FL+HC ends at {percent(last)}{theirs}, FL at {percent(averaged)}; {gains}."
    remarks = [paper.texts["setting"], *remarks]
    because = why_differ(paper, cells, settings)
    claims = claims_on(paper, cells, settings)
    return paper.outcome(
        rows, claims, {"cells": series}, sentence, because=because, remarks=remarks
    )


def measure_iid(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure the statements of section III on IID clients, whose data should form one cluster.

    The rows have the number of clusters at the paper's threshold T, and the accuracies of FL and
    FL+HC, which show how much accuracy is lost by clusters that are not needed.
    """
    runs = Runs(cache, settings)
    fraction = settings["client_fraction"]
    T = settings["threshold"]
    rows = list[Row]()
    found = dict[str, list[int]]()
    heights = dict[str, list[float]]()
    first = min(settings["rounds_before"])
    last = max(settings["rounds_before"])

    def add(name: str, counts: Sequence[int], one: bool, *, own: bool = False) -> None:
        if one:
            figure = 1.0
            printed = "1"
        else:
            figure = None
            printed = "more than 1"
        what = f"{name} · clusters at T = {T}"
        rows.append(Row.of(what, figure, counts, "", within=0.0, told=printed, own=own))

    for n in settings["rounds_before"]:
        merges = runs.merges(n, fraction)
        ways = WAYS if n == last else [WARD]
        for metric, linkage in ways:
            way = f"{metric} {linkage}"
            found[f"n {n}, {way}"] = [clusters_at(each[way], T) for each in merges]
            add(f"n {n}, {way}", found[f"n {n}, {way}"], one=metric != "l1" and n != 1)
        heights[f"n {n}"] = _get_heights(merges[0]["l2 ward"]).round(3).tolist()
    other = Runs(cache, {**settings, "scaling": settings["other_scaling"]}).merges(last, fraction)
    counts = [clusters_at(each["l2 ward"], T) for each in other]
    add(f"n {last}, l2 ward, pixels of mean 0 and variance 1", counts, one=True, own=True)
    averaged = runs.of(FedAvg(), fraction)
    at_first = runs.of(_make_ward_flhc(first, threshold=T, cohort=settings["cohort"]), fraction)
    cell = Cell(f"n {first}", first, at_first, averaged)
    accuracy = cell.last("accuracy")
    rows.append(_make_row("FL · accuracy at the end", 99.1, _final_accuracies(averaged)))
    rows.append(_make_row(f"FL+HC, n {first}, l2 ward · accuracy at the end", None, accuracy))
    wards = ", ".join(
        f"{count(found[f'n {n}, l2 ward'])} (n = {n})" for n in settings["rounds_before"]
    )
    sentence = (
        f"Clusters at T = {T} with Ward's linkage: {wards}; FL ends at "
        f"{percent(_final_accuracies(averaged))}, FL+HC with n = {first} at {percent(accuracy)}."
    )
    claims = claims_on_iid(paper, found, cell, settings)
    series = {"heights": heights, "threshold": T, "found": found}
    return paper.outcome(rows, claims, series, sentence, remarks=[paper.texts["setting"]])


def measure_curves(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figures 1 to 6: FL and FL+HC over the rounds.

    Figures whose data set is not available are omitted.
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
        metric, linkage = figure["how"].split()
        n = figure["rounds_before"]
        # Figures 5 and 6 cut where the best of several thresholds is, see measure_linkages.
        if linkage == "ward":
            cuts = [{"threshold": of_it["threshold"]}]
        else:
            (merges,) = Runs(cache, {**of_it, "seeds": [seed]}).merges(n, fraction)
            of_shares = cuts_of([merges], {**of_it, **settings}, figure["how"])
            cuts = [{"n_clusters": count} for name, (count,) in of_shares.items() if name != AUTO]
        of_figure = {"rounds_before": n, "cohort": of_it["cohort"]}
        tried = [
            runs.run(_make_flhc(of_figure, metric, linkage, **cut), fraction, seed) for cut in cuts
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
        _make_row(f"{name} · {which}, {words} at the end", None, shown[which][key][-1:])
        for name, shown in series.items()
        for which in ("FL", "FL+HC")
        for key, words in (("accuracy", "accuracy"), ("reached", "clients at the target"))
    ]
    last = {
        name: _final_accuracies([figure["FL+HC"], figure["FL"]]) for name, figure in series.items()
    }
    ends = "; ".join(
        f"{name} {100 * ours:.1f} % beside {100 * fl:.1f} %" for name, (ours, fl) in last.items()
    )
    because = list[str]()
    if len(series) != len(settings["figures"]):
        because.append("FEMNIST is not at hand.")
    if any(ours < fl for ours, fl in last.values()):
        because.append(paper.because)
    sentence = f"At the end FL+HC beside FL: {ends or 'nothing was measured'}."
    return paper.outcome(rows, claims, series, sentence, because=" ".join(because), remarks=remarks)


def _make_ward_flhc(rounds_before: int, **cut: Any) -> FLHC:
    return FLHC(rounds_before=rounds_before, metric="l2", linkage="ward", **cut)


def _get_heights(merges: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    return np.asarray(merges)[:, 2]


def _make_averaging_rows(name: str, runs: list[Found]) -> list[Row]:
    """Return rows with the final results of FL, for which the paper prints only ratios."""
    shown = {"accuracy": "accuracy at the end", "reached": "clients at the target at the end"}
    rows = list[Row]()
    for key, words in shown.items():
        shares = [run[key][-1] for run in runs]
        rows.append(_make_row(f"{name} · {words}", None, shares))
    return rows


def _make_rows(cell: Cell, *, name: str = "", own: bool = False, repeats: str = "") -> list[Row]:
    """Return the rows of a table cell: accuracy and clients at the target, at two times.

    Parameters
    ----------
    cell
        The cell.
    name
        First part of the rows' names; the cell's key if empty.
    own
        Whether the quantities are not in the paper.
    repeats
        Key of the first cell that shows the same run; empty if there is none.
    """
    name = name or cell.key
    if repeats == cell.key:
        repeats = ""
    values = (
        cell.after("accuracy"),
        cell.last("accuracy"),
        cell.after("reached"),
        cell.last("reached"),
    )
    rows = [
        _make_row(f"{name} · {what}", printed, shares, own=own, repeats=repeats)
        for what, printed, shares in zip(COLUMNS, cell.paper, values, strict=True)
    ]
    moved = [run["at_the_mean"] for run in cell.runs if run["at_the_mean"] is not None]
    if len(moved) == len(cell.runs):
        rows.insert(
            1, _make_row(f"{name} · {COLUMNS[0]}, from their mean", cell.paper[0], moved, own=True)
        )
    return rows


def _make_row(what: str, paper: float | None, shares: Sequence[float], **more: Any) -> Row:
    percentages = [round(100 * share, 4) for share in shares]
    return Row.of(what, paper, percentages, wanted="at least", **more)


def _collect_series(cell: Cell) -> dict[str, Any]:
    """Collect the data of a cell that the table's figure shows, in percent."""
    accuracy = fmean(_final_accuracies(cell.averaged))
    return {
        "paper": [cell.paper[1], cell.paper[3]],
        "ours": [100 * fmean(cell.last(what)) for what in ("accuracy", "reached")],
        "averaged": [100 * accuracy, 100 * cell.averaged_reached],
        "clusters": [run["clusters"] for run in cell.runs],
    }
