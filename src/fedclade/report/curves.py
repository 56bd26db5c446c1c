"""A run over its rounds: scores and separation gaps as in figure 8 of the CFL paper, norms as in its figure 7."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedclade.core import DataChanged
from fedclade.report import queries
from fedclade.report.picture import FEW_ROUNDS, Axis, Band, LegendEntry, Line, Mark, Panel, Picture, Rule, rounds_axis
from fedclade.report.queries import Series
from fedclade.report.run_view import RunView
from fedclade.runs import events_of

BAND = (10, 90)
"""Percentiles between which most of many clusters lie."""


def score_picture(view: RunView) -> Picture:
    """Return the score of every cluster over the rounds, and below it the separation gap g(α) (CFL figure 8).

    Where the true clusters are not known there is no gap, and α_cross^max is drawn instead; where there is neither,
    only the scores.
    """
    scores = queries.joined_series(view.run.tree, queries.score_series(view.run))
    panels = [Panel(_lines(view, scores, f"{view.score.label} {view.score.hover()}"), view.score.axis("mean test"), 2)]
    known = view.outcome.truth is not None
    if gaps := queries.criterion_series(view.run, "separation_gap" if known else "alpha_cross_max"):
        what = "separation gap g(α)" if known else "α cross max"
        panels.append(
            Panel(
                [Rule(0, dashed=False), *_lines(view, gaps, f"{what} %{{y:.3g}}")], Axis("gap g(α)" if known else what)
            )
        )
    return _over_rounds(view, f"{view.score.title} of the clusters", panels, 500 if gaps else 380)


def norms_picture(view: RunView) -> Picture | None:
    """Return the two norms that CFL splits by (eqs. 32 and 33), over the rounds for every cluster (CFL figure 7).

    Members of a cluster disagree where the largest norm of an update stays up while that of the mean update falls.
    Thresholds are dashed. None for a run without norms.
    """
    panels: list[Panel] = []
    eps2, eps1 = queries.norm_thresholds(view.run)
    norms = {what: queries.criterion_series(view.run, f"{what}_norm") for what in ("max", "mean")}
    positive = all(value > 0 for each in norms.values() for series in each.values() for value in series.values)
    for what, title, threshold, symbol in (("max", "largest", eps2, "ε₂"), ("mean", "mean", eps1, "ε₁")):
        marks = _lines(view, norms[what], f"{title} norm %{{y:.3g}}")
        if isinstance(threshold, Mapping):
            marks += _thresholds(view, threshold, symbol)
        elif threshold is not None:
            marks.append(Rule(threshold, f"{symbol} = {threshold:g}"))
        panels.append(Panel(marks, Axis(f"{title} update", log=positive)))
    return _over_rounds(view, "Norms of the updates", panels, 460) if any(norms.values()) else None


def _over_rounds(view: RunView, title: str, panels: list[Panel], height: int) -> Picture:
    splits = queries.splits_by_round(view.run.tree)
    names = {at: ", ".join(map(str, nodes)) for at, nodes in splits.items()}
    uprights = {at: f"split {names[at] if len(nodes) <= 2 else f'{len(nodes)} nodes'}" for at, nodes in splits.items()}
    for at, _ in events_of(view.run.events, DataChanged):
        uprights[at] = f"{uprights[at]}, other data" if at in uprights else "other data"
    return Picture(title, panels, rounds_axis(view.rounds), height, _legend(view), uprights)


def _legend(view: RunView) -> list[LegendEntry]:
    if view.colours.crowded:
        band = "{}th to {}th percentile of the clusters".format(*BAND)
        return [LegendEntry("@c1", "mean of the clusters"), LegendEntry("@accent", band)]
    legend = view.colours.legend()
    return legend if len(legend) > 1 else []


def _lines(view: RunView, found: Mapping[int, Series], what: str) -> list[Mark]:
    """Return a line for every cluster, or for too many of them their mean and a band that most lie in."""
    hover = f"{{name}}, round %{{x}}<br>{what}"
    if view.colours.crowded:
        values = queries.values_by_round(found.values())
        low, high = (queries.over_rounds(values, lambda each, q=q: float(np.percentile(each, q))) for q in BAND)
        mean = queries.mean_series(found.values())
        line = Line(x=mean.rounds, y=mean.values, colour="@c1", name="mean of the clusters", hover=hover)
        return [Band(low.rounds, low.values, high.values, "@accent"), line]
    return [
        Line(
            x=series.rounds,
            y=series.values,
            colour=view.colours.of(node),
            name=f"cluster {node}",
            hover=hover,
            dash=view.colours.dash(node),
            dots=view.rounds <= FEW_ROUNDS or len(series.rounds) == 1,
        )
        for node, series in found.items()
    ]


def _thresholds(view: RunView, found: Mapping[int, Series], symbol: str) -> list[Mark]:
    """Return a dashed line for each cluster that has a threshold of its own; where there are many, their mean."""
    if view.colours.crowded:
        found = {0: queries.mean_series(found.values())}
    return [
        Line(
            x=series.rounds,
            y=series.values,
            colour="@ink",
            dash="dash",
            width=1,
            name=f"{symbol} of {node}",
            hover="{name}, round %{x}<br>%{y:.3g}",
        )
        for node, series in found.items()
    ]
