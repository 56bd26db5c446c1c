"""Several runs on one page: what each came to, how it got there, and in what they differ."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedclade.report.formats import NONE, duration, number, percent, traffic
from fedclade.report.page import plot
from fedclade.report.page.branches import tree_picture
from fedclade.report.page.cards import difference
from fedclade.report.page.palette import Key, series
from fedclade.report.page.run_view import RunView
from fedclade.report.page.section import Card, Figure, Page, Section, Table
from fedclade.report.page.setting import flat, repeat_command

REPORT = "report.html"
"""A run's own page, in its folder."""

BASELINE = "fedavg"
"""What the others are measured by, if it is among them."""


@dataclass(frozen=True)
class Compared:
    """A run among others.

    Parameters
    ----------
    label
        What tells it from the others.
    subject
        The run.
    key
        Its colour.
    """

    label: str
    subject: RunView
    key: Key


def comparison_page(subjects: Sequence[RunView], beside: Path) -> Page:
    """Return a page that compares runs.

    Parameters
    ----------
    subjects
        At least two.
    beside
        The folder that the page is for, to find the runs' own pages from there.
    """
    labels = run_labels(subjects)
    runs = [Compared(*each) for each in zip(labels, subjects, series(labels), strict=True)]
    data = list(dict.fromkeys(subject.run.summary["data"] for subject in subjects))
    found = [
        _overview(runs, beside),
        _scores(runs),
        _clusters(runs),
        _traffic(runs),
        _spread(runs),
        _trees(runs),
        _settings(runs),
    ]
    return Page(f"Comparison of {len(runs)} runs", "; ".join(data), _cards(runs), [each for each in found if each])


def run_labels(subjects: Sequence[RunView]) -> list[str]:
    """Return what to call each of some runs: its algorithm; with seed or folder where that is not enough."""
    algorithms = [subject.run.summary["algorithm"] for subject in subjects]
    seeded = [f"{name}, seed {each.run.summary['seed']}" for name, each in zip(algorithms, subjects, strict=True)]
    folders = [f"{name}, {each.folder}" for name, each in zip(seeded, subjects, strict=True)]
    numbered = [f"{name} ({i})" for i, name in enumerate(folders, start=1)]
    candidates = (algorithms, seeded, folders, numbered)
    counts = [Counter(names) for names in candidates]
    return [
        next(
            (names[i] for names, count in zip(candidates, counts, strict=True) if count[names[i]] == 1),
            numbered[i],
        )
        for i in range(len(subjects))
    ]


def _mean(run: Compared) -> float:
    s = run.subject.run.summary
    return s["perplexity" if run.subject.language else "accuracy"]["mean"]


def _baseline(runs: Sequence[Compared]) -> Compared | None:
    found = [run for run in runs if run.subject.run.summary["algorithm"] == BASELINE]
    return found[0] if len(found) == 1 else None


def _cards(runs: Sequence[Compared]) -> list[Card]:
    """Return a card for each run: its score, and the difference to FedAvg if that is among them."""
    base = _baseline(runs)
    cards: list[Card] = []
    for run in runs:
        note = run.subject.what
        trend = ""
        if base is not None and run is not base and run.subject.what == base.subject.what:
            note, trend = difference(_mean(run), _mean(base), base.label, language=run.subject.language)
        cards.append(Card(run.label, run.subject.written(_mean(run)), note, trend, run.key.colour))
    return cards


def _overview(runs: Sequence[Compared], beside: Path) -> Section:
    rows: list[list[str]] = []
    for run in runs:
        s = run.subject.run.summary
        true = "" if s["clusters"]["true"] is None else f" of {s['clusters']['true']}"
        rows.append(
            [
                run.label,
                run.subject.written(_mean(run)),
                percent(s["accuracy"]["worst10_mean"]),
                f"{s['clusters']['found']}{true}",
                number(s["clusters"]["ari"]),
                traffic(s["bytes_up"] + s["bytes_down"]),
                duration(s["seconds"]["total"]),
                str(s["rounds"]),
            ]
        )
    what = " / ".join(dict.fromkeys(run.subject.what for run in runs))
    columns = ["run", what, "worst tenth", "clusters", "ARI", "traffic", "time", "rounds"]
    links = {run.label: link for run in runs if (link := _report_of(run, beside)) is not None}
    caption = "What each run came to; means over the clients."
    return Section("overview", "The runs", caption, open_tables=[Table("", columns, rows)], links=links)


def _report_of(run: Compared, beside: Path) -> str | None:
    """Return where the run's own page lies, if it has been written, as seen from a folder."""
    if run.subject.folder is None or not (page := run.subject.folder / REPORT).is_file():
        return None
    return quote(Path(os.path.relpath(page, beside)).as_posix())


def _legend(runs: Sequence[Compared]) -> list[Key]:
    return [run.key for run in runs]


def _course(run: Compared, column: str) -> list[tuple[int, float]]:
    return [(row["round"], row[column]) for row in run.subject.run.metrics if row.get(column) is not None]


def _lines(runs: Sequence[Compared], column: str, hover: str, **look: Any) -> list[dict[str, Any]]:
    return [
        plot.line(
            [at for at, _ in course],
            [value for _, value in course],
            run.key.colour,
            dashed=run.key.dashed,
            dots=run.subject.rounds <= plot.FEW,
            name=plot.escaped(run.label),
            hovertemplate=f"{plot.escaped(run.label)}, round %{{x}}<br>{hover}<extra></extra>",
            **look,
        )
        for run in runs
        if (course := _course(run, column))
    ]


def _most_rounds(runs: Sequence[Compared]) -> int:
    return max(run.subject.rounds for run in runs)


def _scores(runs: Sequence[Compared]) -> Section | None:
    language = all(run.subject.language for run in runs)
    column, form = ("perplexity_mean", "perplexity %{y:.1f}") if language else ("accuracy_mean", "accuracy %{y:.1%}")
    lines = _lines(runs, column, form)
    if not lines:
        return None
    y_axis = plot.axis("mean test perplexity", type="log") if language else plot.shares("mean test accuracy")
    figure = plot.figure(lines, 400, xaxis=plot.rounds_axis(_most_rounds(runs)), yaxis=y_axis)
    what = "perplexity" if language else "accuracy"
    caption = f"Mean test {what} over all clients after each round."
    table = _some_rounds(runs, column, (lambda v: number(v, 1)) if language else percent, what)
    return Section("accuracy", f"{what.capitalize()} over the rounds", caption, {"": figure}, _legend(runs), [table])


def _some_rounds(runs: Sequence[Compared], column: str, written: Callable[[float], str], what: str) -> Table:
    courses = [dict(_course(run, column)) for run in runs]
    rounds = sorted({at for course in courses for at in course})
    step = max(1, -(-len(rounds) // 25))
    kept = [at for i, at in enumerate(rounds) if i % step == 0 or at == rounds[-1]]
    rows = [[str(at), *(written(course[at]) if at in course else NONE for course in courses)] for at in kept]
    return Table(f"{what[0].upper()}{what[1:]} over the rounds", ["round", *(run.label for run in runs)], rows)


def _clusters(runs: Sequence[Compared]) -> Section | None:
    """Return the number of clusters over the rounds and, where the truth is known, their ARI."""
    if max(run.subject.run.summary["clusters"]["found"] for run in runs) < 2:
        return None
    found = _lines(runs, "clusters", "%{y} clusters", shape="hv")
    right = _lines(runs, "ari", "ARI %{y:.2f}", yaxis="y2")
    panels = {"yaxis": plot.axis("clusters", tickformat="d", rangemode="tozero")}
    if right:
        panels["yaxis"] |= {"domain": [0.56, 1]}
        panels["yaxis2"] = plot.axis("ARI", domain=[0, 0.44], range=[-0.08, 1.08])
    x_axis = plot.rounds_axis(_most_rounds(runs), anchor="y2" if right else "y")
    figure = plot.figure([*found, *right], 440 if right else 300, xaxis=x_axis, **panels)
    caption = "The number of clusters after each round."
    caption += (
        " Below, how well they agree with the true ones: ARI 1 is perfect, 0 no better than chance." if right else ""
    )
    tables = [_some_rounds(runs, "clusters", str, "clusters")]
    tables += [_some_rounds(runs, "ari", number, "ARI")] if right else []
    return Section("clusters", "Clusters found", caption, {"": figure}, _legend(runs), tables)


def _traffic(runs: Sequence[Compared]) -> Section | None:
    """Return the score against the bytes that it took."""
    language = all(run.subject.language for run in runs)
    column = "perplexity_mean" if language else "accuracy_mean"
    traces: list[dict[str, Any]] = []
    for run in runs:
        points, spent = list[tuple[float, float]](), 0.0
        for row in run.subject.run.metrics:
            spent += row["bytes_up"] + row["bytes_down"]
            if row.get(column) is not None:
                points.append((spent / 1e6, row[column]))
        if spent:
            form = "%{y:.1f}" if language else "%{y:.1%}"
            hover = f"{plot.escaped(run.label)}<br>%{{x:,.3g}} MB, {form}<extra></extra>"
            x, y = [x for x, _ in points], [y for _, y in points]
            traces.append(plot.line(x, y, run.key.colour, dashed=run.key.dashed, hovertemplate=hover))
    if not traces:
        return None
    y_axis = plot.axis("mean test perplexity", type="log") if language else plot.shares("mean test accuracy")
    figure = plot.figure(traces, 380, xaxis=plot.axis("MB sent and received by all clients"), yaxis=y_axis)
    rows = [[r.label, *(traffic(r.subject.run.summary[key]) for key in ("bytes_up", "bytes_down"))] for r in runs]
    caption = "The same scores against the traffic until then. Methods that send nothing have no line."
    table = Table("Traffic", ["run", "up", "down"], rows)
    return Section("traffic", "What it took", caption, {"": figure}, _legend(runs), [table])


def _spread(runs: Sequence[Compared]) -> Section:
    """Return the clients' scores of each run in order: the share of clients that do no better."""
    figure = plot.figure([_curve(run) for run in runs], 380, yaxis=plot.axis("share of the clients", tickformat=".0%"))
    language = all(run.subject.language for run in runs)
    what = "perplexity" if language else "accuracy"
    figure["layout"]["xaxis"] = plot.axis("test perplexity", type="log") if language else plot.shares("test accuracy")
    if not language:
        scores = [score for run in runs for score in run.subject.scores.values()]
        figure["layout"]["xaxis"]["range"] = [min(scores) - 0.02, max(scores) + 0.02]
    caption = f"How many of the clients have at most a given test {what} at the end."
    keys = {"min": "least", "p10": "p10", "p50": "median", "p90": "p90", "max": "most"}
    rows = [
        [run.label, *(run.subject.written(run.subject.run.summary[what][key]) for key in keys)]
        for run in runs
        if what in run.subject.run.summary
    ]
    table = Table("Quantiles over the clients", ["run", *keys.values()], rows)
    return Section("clients", "How the clients fared", caption, {"": figure}, _legend(runs), [table])


def _curve(run: Compared) -> Figure:
    scores = sorted(run.subject.scores.values())
    shares = [(i + 1) / len(scores) for i in range(len(scores))]
    form = "%{x:.1f}" if run.subject.language else "%{x:.1%}"
    hover = f"{plot.escaped(run.label)}<br>%{{y:.0%}} of the clients have at most {form}<extra></extra>"
    look = {"mode": "lines", "hovertemplate": hover}
    return plot.line(scores, shares, run.key.colour, dashed=run.key.dashed, shape="hv", **look)


def _trees(runs: Sequence[Compared]) -> Section:
    caption = (
        "The parameter tree of each run: a bar for each cluster, from its first round to its split. Choose one with a "
        "click, or with Tab and the arrow keys. Colours tell the clusters of one run apart."
    )
    return Section("tree", "Parameter trees", caption, trees={run.label: tree_picture(run.subject) for run in runs})


def _settings(runs: Sequence[Compared]) -> Section:
    """Return in what the configs differ, and the command that repeats each run."""
    settings = [flat(run.subject.run.config) for run in runs]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    rows = [[key, *values] for key in keys if len(set(values := [each.get(key, NONE) for each in settings])) > 1]
    caption = "The settings in which the runs differ; all others are the same."
    if not rows:
        caption = "The runs have the same settings."
    tables = [Table("", ["setting", *(run.label for run in runs)], rows)] if rows else []
    commands = [command for run in runs if (command := repeat_command(run.subject)) is not None]
    texts = {"The commands that repeat the runs": "\n".join(dict.fromkeys(commands))} if commands else {}
    return Section("config", "Settings", caption, open_tables=tables, texts=texts)
