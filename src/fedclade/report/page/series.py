"""How a run went: scores and separation gaps of the clusters over the rounds, and the norms of their updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedclade.report import facts
from fedclade.report.facts import Series
from fedclade.report.formats import NONE, number
from fedclade.report.page import plot
from fedclade.report.page.palette import Key
from fedclade.report.page.run_view import RunView
from fedclade.report.page.section import Section, Table

LONGEST_TABLE = 30
"""So many rounds are listed in a table, spread over the run."""

BAND = (10, 90)
"""Percentiles between which most of many clusters lie."""


def accuracy_section(subject: RunView) -> Section:
    """Return the score of every cluster over the rounds, and below it the separation gap g(α) (CFL figure 8).

    Where the true clusters are not known there is no gap, and α_cross^max is drawn instead.
    """
    run, known = subject.run, subject.outcome.truth is not None
    scores = facts.score_courses(run)
    gaps = facts.criterion_courses(run, "separation_gap" if known else "alpha_cross_max")
    traces = _lines(subject, facts.joined_courses(run.tree, scores), subject.what)
    y_axis = plot.axis(f"mean test {subject.what}") if subject.language else plot.shares("mean test accuracy")
    below = "separation gap g(α)" if known else "α cross max"
    if gaps:
        traces += _lines(subject, gaps, below, yaxis="y2")
        panels = {
            "yaxis": y_axis | {"domain": [0.4, 1]},
            "yaxis2": plot.axis("g(α)" if known else "α cross max", domain=[0, 0.31]),
        }
    else:
        panels = {"yaxis": y_axis}
    marks, labels, room = plot.split_marks(facts.splits_by_round(run.tree), subject.rounds)
    zero = [plot.level(0, "y2", dash="solid")] if gaps else []
    figure = plot.figure(
        traces,
        500 if gaps else 380,
        xaxis=plot.rounds_axis(subject.rounds, anchor="y2" if gaps else "y"),
        shapes=marks + zero,
        annotations=labels,
        margin={"l": 60, "r": 16, "t": 16 + room, "b": 44},
        **panels,
    )
    if subject.language:
        figure["layout"]["yaxis"]["type"] = "log"
    return Section(
        "accuracy",
        f"{subject.what.capitalize()} of the clusters",
        _accuracy_caption(subject, gaps, known=known),
        {"": figure},
        _legend(subject),
        [_course_table(subject, scores)],
    )


def norms_section(subject: RunView) -> Section | None:
    """Return the two norms that CFL splits by (eqs. 32 and 33), over the rounds (CFL figure 7).

    Thresholds are drawn as dashed lines. None for a run that compared no updates.
    """
    run = subject.run
    largest, mean = (facts.criterion_courses(run, column) for column in ("max_norm", "mean_norm"))
    if not largest and not mean:
        return None
    traces = _lines(subject, largest, "largest norm") + _lines(subject, mean, "mean norm", yaxis="y2")
    marks, labels, room = plot.split_marks(facts.splits_by_round(run.tree), subject.rounds)
    told: list[str] = []
    eps2, eps1 = facts.thresholds_of_norms(run)
    for axis, threshold, symbol, name in (("y", eps2, "ε₂", "largest"), ("y2", eps1, "ε₁", "mean")):
        if isinstance(threshold, Mapping):
            of_all = {0: facts.mean_course(threshold.values())} if subject.colours.crowded else threshold
            look = {"dashed": True, "width": 1, "yaxis": axis}
            for node, course in of_all.items():
                hover = f"{symbol} of cluster {node}, round %{{x}}<br>%{{y:.3g}}"
                traces.append(plot.course(course, "@ink", hover, name=f"{symbol} of {node}", **look))
            told.append(f"{symbol} for the {name} is a tenth of the largest mean so far")
        elif threshold is not None:
            marks.append(plot.level(threshold, axis))
            place = {"yref": axis, "xanchor": "right", "yanchor": "bottom"}
            labels.append(plot.note(f"{symbol} = {threshold:g}", 1, _log10(threshold), **place))
            told.append(f"{symbol} for the {name} is {threshold:g}")
    figure = plot.figure(
        traces,
        460,
        xaxis=plot.rounds_axis(subject.rounds, anchor="y2"),
        yaxis=plot.axis("largest update", type="log", domain=[0.54, 1], dtick="D2"),
        yaxis2=plot.axis("mean update", type="log", domain=[0, 0.46], dtick="D2"),
        shapes=marks,
        annotations=labels,
        margin={"l": 60, "r": 16, "t": 16 + room, "b": 44},
    )
    caption = (
        "Norms of the clients’ updates in every cluster: above the largest of one client, below that of their weighted "
        "mean. Where the mean comes to rest and the largest does not, the members of a cluster disagree. "
    )
    caption += f"Threshold {' and '.join(told)} (dashed)." if told else ""
    rows = [
        [str(node), number(largest[node].values[-1] if node in largest else None), number(course.values[-1])]
        for node, course in list(mean.items())[:LONGEST_TABLE]
    ]
    table = Table("Norms in the last round of each cluster", ["cluster", "largest", "mean"], rows)
    return Section("norms", "Norms of the updates", caption.strip(), {"": figure}, _legend(subject), [table])


def _log10(value: float) -> float:
    """Return a place on a logarithmic axis, as annotations want it."""
    return float(np.log10(max(value, 1e-12)))


def _lines(subject: RunView, courses: Mapping[int, Series], what: str, **look: Any) -> list[dict[str, Any]]:
    """Draw a line for every cluster, or for too many of them their mean and a band that most lie in."""
    colours = subject.colours
    form = "%{y:.1%}" if what == "accuracy" else "%{y:.3g}"
    if colours.crowded:
        return _band(list(courses.values()), what, form, **look)
    return [
        plot.course(
            course,
            colours.of(node),
            f"cluster {node}, round %{{x}}<br>{what} {form}",
            dashed=colours.dashed(node),
            dots=subject.rounds <= plot.FEW or len(course.rounds) == 1,
            name=f"cluster {node}",
            **look,
        )
        for node, course in courses.items()
    ]


def _band(courses: list[Series], what: str, form: str, **look: Any) -> list[dict[str, Any]]:
    """Draw the mean of many courses, and the band from their 10th to their 90th percentile."""
    values: dict[int, list[float]] = {}
    for course in courses:
        for at, value in zip(course.rounds, course.values, strict=True):
            values.setdefault(at, []).append(value)
    rounds = sorted(values)
    low, high = (tuple(float(np.percentile(values[at], q)) for at in rounds) for q in BAND)
    mean = facts.mean_course(courses)
    hidden = {"hoverinfo": "skip", "width": 0, "mode": "lines", **look}
    filled = {**hidden, "fill": "tonexty", "fillcolor": "@accent/0.25"}
    hover = f"{what} %{{text}} of the clusters, round %{{x}}<br>{form}<extra></extra>"
    return [
        plot.line(rounds, low, "@accent", **hidden),
        plot.line(rounds, high, "@accent", **filled),
        plot.course(mean, "@c1", hover.replace("%{text}", "mean").removesuffix("<extra></extra>"), **look),
    ]


def _legend(subject: RunView) -> list[Key]:
    keys = subject.colours.legend()
    if subject.colours.crowded:
        return [Key("@c1", "mean of the clusters"), Key("@accent", "10th to 90th percentile of the clusters")]
    return keys if len(keys) > 1 else []


def _accuracy_caption(subject: RunView, gaps: Mapping[int, Series], *, known: bool) -> str:
    splits = facts.splits_by_round(subject.run.tree)
    when = ", ".join(str(number) for number in list(splits)[:8])
    parts = [f"Mean test {subject.what} of the clients in every cluster after each round."]
    if splits:
        parts.append(f"Dotted lines: clusters were split in round {when}{' …' if len(splits) > 8 else ''}.")
    if gaps and known:
        parts.append("Below, the separation gap: above 0 the best bi-partition of a cluster is right.")
    elif gaps:
        parts.append("Below, the largest similarity across the best bi-partition of a cluster.")
    if subject.colours.crowded:
        parts.append("There are more clusters than colours: drawn are their mean, and where most of them lie.")
    if subject.rounds > plot.LONGEST:
        parts.append(f"Of {subject.rounds:,} rounds, at most {plot.LONGEST} are drawn for each line.")
    return " ".join(parts)


def _course_table(subject: RunView, courses: Mapping[int, Series]) -> Table:
    """Return the scores of the current clusters in some rounds."""
    leaves = [leaf for leaf in subject.colours.leaves if leaf in courses][:10]
    shown = [node for node in courses if node not in leaves and subject.run.tree.nodes[node].split_in][:4] + leaves
    of = {node: dict(zip(courses[node].rounds, courses[node].values, strict=True)) for node in shown}
    rounds = sorted({number for node in shown for number in of[node]})
    step = max(1, -(-len(rounds) // LONGEST_TABLE))
    kept = [number for i, number in enumerate(rounds) if i % step == 0 or number == rounds[-1]]
    rows = [[str(at), *(subject.written(of[node][at]) if at in of[node] else NONE for node in shown)] for at in kept]
    note = f"Every {step} rounds." if step > 1 else ""
    note += f" {len(courses) - len(shown)} more clusters are not listed." if len(courses) > len(shown) else ""
    return Table(f"Mean {subject.what} by cluster", ["round", *(str(node) for node in shown)], rows, note.strip())
