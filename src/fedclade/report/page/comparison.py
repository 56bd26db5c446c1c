"""Several runs on one page: what each came to, how it got there, and in what they differ."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedclade.report.colours import series
from fedclade.report.estimates import SCORED, note_of_chosen
from fedclade.report.formats import NONE, duration, number, traffic
from fedclade.report.page.one_run import as_texts, repeat_command
from fedclade.report.page.section import Card, Page, Section, Table, table_by_round
from fedclade.report.page.tree import tree_picture
from fedclade.report.picture import Axis, LegendEntry, Line, Panel, Picture, rounds_axis
from fedclade.report.run_view import RunView
from fedclade.report.score import Score, compared_by, in_common
from fedclade.report.style import FEW_ROUNDS

REPORT = "report.html"
"""A run's own page, in its folder."""

BASELINE = "fedavg"
"""What the others are measured by, if it is among them."""

LISTED = 25
"""About so many rounds are listed in a table."""


@dataclass(frozen=True)
class Compared:
    """A run among others: what to call it, and its colour."""

    label: str
    view: RunView
    entry: LegendEntry
    score: Score
    """What all are compared by."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """The run's summary."""
        return self.view.run.summary

    @property
    def mean(self) -> float | None:
        """The mean score of its clients that have one; None if none has."""
        return self.score.mean(self.summary)

    @cached_property
    def scores(self) -> list[float]:
        """The last score of each client that has one, ascending."""
        return sorted(filter(isfinite, map(self.score.of, self.view.outcome.rows.values())))


def comparison_page(views: Sequence[RunView], beside: Path) -> Page:
    """Return a page that compares at least two runs.

    The page is for the folder ``beside``, from which the runs' own pages are linked.

    Raises
    ------
    ConfigError
        If the runs have no metric in common.
    """
    labels, score = run_labels(views), in_common([view.run.summary for view in views])
    runs = [Compared(*each, score) for each in zip(labels, views, series(labels), strict=True)]
    data = list(dict.fromkeys(view.run.summary["data"] for view in views))
    sections = [_scores(runs), _clusters(runs), _traffic(runs), _spread(runs), _trees(runs), _settings(runs)]
    found = [_overview(runs, beside), *(each for each in sections if each is not None)]
    return Page(f"Comparison of {len(runs)} runs", "; ".join(data), _cards(runs), found)


def run_labels(views: Sequence[RunView]) -> list[str]:
    """Return what to call each of some runs: its algorithm; with seed or folder where that is not enough."""
    algorithms = [view.run.summary["algorithm"] for view in views]
    seeded = [f"{name}, seed {each.run.summary['seed']}" for name, each in zip(algorithms, views, strict=True)]
    folders = [f"{name}, {apart}" for name, apart in zip(seeded, _apart([each.folder for each in views]), strict=True)]
    counts = [Counter(names) for names in (algorithms, seeded, folders)]
    return [
        next((name for name, number in zip(names, counts, strict=True) if number[name] == 1), f"{names[-1]} ({i})")
        for i, names in enumerate(zip(algorithms, seeded, folders, strict=True), start=1)
    ]


def _apart(folders: Sequence[Path | None]) -> list[str]:
    """Return what tells folders apart: their paths without what all begin with, and without what all end in."""
    paths = [(str(folder),) if folder is None else folder.parts for folder in folders]
    for _ in range(2):  # what they begin with, and backwards what they end in
        alike = [len(set(parts)) == 1 for parts in zip(*paths, strict=False)]
        shared = min([*alike, False].index(False), *(len(path) - 1 for path in paths))
        paths = [path[shared:][::-1] for path in paths]
    return ["/".join(path) for path in paths]


def _cards(runs: Sequence[Compared]) -> list[Card]:
    """Return a card for each run: its score, and the difference to FedAvg if that is among them."""
    baselines = [run for run in runs if run.summary["algorithm"] == BASELINE]
    base = baselines[0] if len(baselines) == 1 else None
    cards: list[Card] = []
    for run in runs:
        note, trend = run.score.label, ""
        if base is not None and run is not base and run.mean is not None and base.mean is not None:
            gain, trend = run.score.gain(run.mean, base.mean)
            note = f"{gain} against {base.label}"
        cards.append(Card(run.label, run.score.text(run.mean), note, trend, run.entry.colour))
    return cards


def _overview(runs: Sequence[Compared], beside: Path) -> Section:
    rows: list[list[str]] = []
    others = [each for each in compared_by([run.summary for run in runs]) if each != runs[0].score]
    chosen = any("chosen" in run.summary for run in runs)
    for run in runs:
        s = run.summary
        true = "" if s["clusters"]["true"] is None else f" of {s['clusters']['true']}"
        cells = [run.label, _mean_and_number(run.score, s)]
        cells += [run.score.text(run.score.of_chosen(s))] if chosen else []
        cells += [run.score.text(run.score.worst_tenth(s))]
        cells += [_mean_and_number(each, s) if each.is_of(s) else NONE for each in others]
        cells += [f"{s['clusters']['found']}{true}", number(s["clusters"]["ari"])]
        cells += [traffic(s["bytes_up"] + s["bytes_down"]), duration(s["seconds"]["total"]), str(s["rounds"])]
        rows.append(cells)
    columns = ["run", runs[0].score.label, *(["chosen round"] if chosen else []), "worst tenth"]
    columns += [*(each.label for each in others), "clusters", "ARI", "traffic", "time", "rounds"]
    links = {run.label: link for run in runs if (link := _report_of(run, beside)) is not None}
    caption = "What each run came to; means over the clients."
    caption = f"{caption} {note_of_chosen(run.summary for run in runs)}".rstrip()
    if any(each.clients(run.summary).without for run in runs for each in Score.all_of(run.summary)):
        caption += f" {SCORED}"
    return Section("overview", "The runs", caption, open_tables=[Table("", columns, rows)], links=links)


def _mean_and_number(score: Score, summary: Mapping[str, Any]) -> str:
    """Write the mean score of a run, with the number of clients that have one if others have none."""
    return score.clients(summary).after(score.text(score.mean(summary)))


def _report_of(run: Compared, beside: Path) -> str | None:
    """Return where the run's own page lies, if it has been written, as seen from a folder."""
    if run.view.folder is None or not (page := run.view.folder / REPORT).is_file():
        return None
    return quote(Path(os.path.relpath(page, beside)).as_posix())


def _over_rounds(run: Compared, column: str) -> dict[int, float]:
    return {row["round"]: row[column] for row in run.view.run.metric_rows if row.get(column) is not None}


def _lines(runs: Sequence[Compared], column: str, hover: str, *, steps: bool = False) -> list[Line]:
    return [
        Line(
            x=list(found),
            y=list(found.values()),
            colour=run.entry.colour,
            dash=run.entry.dash,
            dots=run.view.rounds <= FEW_ROUNDS,
            steps=steps,
            name=run.label,
            hover=f"{{name}}, round %{{x}}<br>{hover}",
        )
        for run in runs
        if (found := _over_rounds(run, column))
    ]


def _rounds_axis(runs: Sequence[Compared]) -> Axis:
    return rounds_axis(max(run.view.rounds for run in runs))


def _legend(runs: Sequence[Compared]) -> list[LegendEntry]:
    return [run.entry for run in runs]


def _scores(runs: Sequence[Compared]) -> Section | None:
    score = runs[0].score
    lines = _lines(runs, f"{score.name}_mean", f"{score.label} {score.hover()}")
    if not lines:
        return None
    title = f"{score.title} over the rounds"
    caption = f"Mean test {score.label} over all clients after each round.{score.remark}"
    picture = Picture(title, [Panel(lines, score.axis("mean test"))], _rounds_axis(runs), 400, _legend(runs))
    return Section.of("scores", caption, picture, [_table(runs, f"{score.name}_mean", score.text, title)])


def _table(runs: Sequence[Compared], column: str, written: Callable[[float], str], title: str) -> Table:
    return table_by_round(title, {run.label: _over_rounds(run, column) for run in runs}, written, LISTED)


def _clusters(runs: Sequence[Compared]) -> Section | None:
    """Return the number of clusters over the rounds and, where the truth is known, their ARI."""
    if max(run.summary["clusters"]["found"] for run in runs) < 2:
        return None
    found = _lines(runs, "clusters", "%{y} clusters", steps=True)
    panels = [Panel(found, Axis("clusters", "whole", from_zero=True))]
    tables = [_table(runs, "clusters", str, "Clusters over the rounds")]
    caption = "The number of clusters after each round."
    if right := _lines(runs, "ari", "ARI %{y:.2f}"):
        panels.append(Panel(right, Axis("ARI", range=(-0.08, 1.08))))
        tables.append(_table(runs, "ari", number, "ARI over the rounds"))
        caption += " Below, how well they agree with the true ones: ARI 1 is perfect, 0 no better than chance."
    height = 440 if right else 300
    picture = Picture("Clusters found", panels, _rounds_axis(runs), height, _legend(runs))
    return Section.of("clusters", caption, picture, tables)


def _traffic(runs: Sequence[Compared]) -> Section | None:
    """Return the score against the bytes that it took."""
    score = runs[0].score
    lines: list[Line] = []
    for run in runs:
        rows = run.view.run.metric_rows
        spent = list(accumulate((row["bytes_up"] + row["bytes_down"]) / 1e6 for row in rows))
        values = [row.get(f"{score.name}_mean") for row in rows]
        points = [(x, y) for x, y in zip(spent, values, strict=True) if y is not None]
        if any(spent):
            line = Line(
                x=[x for x, _ in points],
                y=[y for _, y in points],
                colour=run.entry.colour,
                dash=run.entry.dash,
                name=run.label,
                hover=f"{{name}}<br>%{{x:,.3g}} MB, {score.hover()}",
            )
            lines.append(line)
    if not lines:
        return None
    x_axis = Axis("MB sent and received by all clients")
    picture = Picture("What it took", [Panel(lines, score.axis("mean test"))], x_axis, 380, _legend(runs))
    rows = [[r.label, *(traffic(r.view.run.summary[key]) for key in ("bytes_up", "bytes_down"))] for r in runs]
    caption = "The same scores against the traffic until then. Methods that send nothing have no line."
    return Section.of("traffic", caption, picture, [Table("Traffic", ["run", "up", "down"], rows)])


def _spread(runs: Sequence[Compared]) -> Section:
    """Return the clients' scores of each run in order: the share of clients that have at most each."""
    score = runs[0].score
    x_axis = score.axis("test")
    if not x_axis.log and (scores := [each for run in runs for each in run.scores]):
        margin = 0.02 if score.share else 0.02 * (max(scores) - min(scores) or 1)
        x_axis = replace(x_axis, range=(min(scores) - margin, max(scores) + margin))
    panel = Panel([_curve(run) for run in runs], Axis("share of the clients", "share"))
    picture = Picture("How the clients fared", [panel], x_axis, 380, _legend(runs))
    caption = f"How many of the clients have at most a given test {score.label} at the end."
    caption += score.remark and f"{score.remark[:-1]}: the further left a line, the better."
    quantiles = {"min": "least", "p10": "p10", "p50": "median", "p90": "p90", "max": "most"}
    rows = [[run.label, *(score.text(run.summary[score.name][key]) for key in quantiles)] for run in runs]
    table = Table("Quantiles over the clients", ["run", *quantiles.values()], rows)
    return Section.of("clients", caption, picture, [table])


def _curve(run: Compared) -> Line:
    scores = run.scores
    return Line(
        x=scores,
        y=[(i + 1) / len(scores) for i in range(len(scores))],
        colour=run.entry.colour,
        dash=run.entry.dash,
        steps=True,
        name=run.label,
        hover=f"{{name}}<br>%{{y:.0%}} of the clients have at most {run.score.hover('x')}",
    )


def _trees(runs: Sequence[Compared]) -> Section:
    caption = (
        "The parameter tree of each run: a bar for each cluster, from its first round to its split. Choose one with a "
        "click, or with Tab and the arrow keys. Colours tell the clusters of one run apart."
    )
    return Section("tree", "Parameter trees", caption, trees={run.label: tree_picture(run.view) for run in runs})


def _settings(runs: Sequence[Compared]) -> Section:
    """Return in what the configs differ, and the command that repeats each run."""
    settings = [as_texts(run.view.run.config) for run in runs]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    rows = [[key, *values] for key in keys if len(set(values := [each.get(key, NONE) for each in settings])) > 1]
    caption = "The settings in which the runs differ; all others are the same."
    if not rows:
        caption = "The runs have the same settings."
    tables = [Table("", ["setting", *(run.label for run in runs)], rows)] if rows else []
    commands = [command for run in runs if (command := repeat_command(run.view)) is not None]
    texts = {"The commands that repeat the runs": "\n".join(dict.fromkeys(commands))} if commands else {}
    return Section("config", "Settings", caption, open_tables=tables, texts=texts)
