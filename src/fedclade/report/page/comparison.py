"""HTML page that compares several runs: results, scores over the rounds, and differing settings."""

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
"""File name of the page of a single run, in the run's folder."""

BASELINE = "fedavg"
"""Algorithm with whose scores all other runs are compared, if exactly one run used it."""

LISTED = 25
"""Approximate number of rounds that are listed in a table."""


@dataclass(frozen=True)
class Compared:
    """Run in a comparison, with its label, colour and the metric that all compared runs have."""

    label: str
    view: RunView
    entry: LegendEntry
    score: Score
    """Metric that all compared runs have."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """Summary of the run (content of ``summary.json``)."""
        return self.view.run.summary

    @property
    def mean(self) -> float | None:
        """Mean score of the run's clients that have a score; None if no client has a score."""
        return self.score.mean(self.summary)

    @cached_property
    def by_client(self) -> dict[int, float]:
        """Last score of each client that has a finite score, by client id."""
        scores = self.score.by_client(self.view.outcome.rows.values())
        return {client: score for client, score in scores.items() if isfinite(score)}

    @cached_property
    def scores(self) -> list[float]:
        """Last scores of all clients that have a finite score, in ascending order."""
        return sorted(self.by_client.values())


def comparison_page(views: Sequence[RunView], beside: Path) -> Page:
    """Return the HTML page that compares at least two runs.

    Parameters
    ----------
    views
        The runs.
    beside
        Folder of the page, from which relative links lead to the pages of the single runs.

    Raises
    ------
    ConfigError
        If the runs have no metric in common.
    """
    labels = run_labels(views)
    entries = series(labels)
    score = in_common([view.run.summary for view in views])
    runs = [
        Compared(label, view, entry, score)
        for label, view, entry in zip(labels, views, entries, strict=True)
    ]
    sections = [
        _overview_section(runs, beside),
        _scores_section(runs),
        _clusters_section(runs),
        _traffic_section(runs),
        _spread_section(runs),
        _trees_section(runs),
        _settings_section(runs),
    ]
    data = dict.fromkeys(run.summary["data"] for run in runs)
    return Page(
        title=f"Comparison of {len(runs)} runs",
        subtitle="; ".join(data),
        cards=_list_cards(runs),
        sections=[section for section in sections if section is not None],
    )


def run_labels(views: Sequence[RunView]) -> list[str]:
    """Return a unique label for each run: its algorithm and, if necessary, seed and folder."""
    folders = _shorten_paths([view.folder for view in views])
    candidates: list[list[str]] = []
    for view, folder in zip(views, folders, strict=True):
        name = view.run.summary["algorithm"]
        with_seed = f"{name}, seed {view.run.summary['seed']}"
        candidates.append([name, with_seed, f"{with_seed}, {folder}"])
    counts: Counter[tuple[int, str]] = Counter()
    for names in candidates:
        counts.update(enumerate(names))
    labels: list[str] = []
    for i, names in enumerate(candidates, start=1):
        unique = [name for level, name in enumerate(names) if counts[level, name] == 1]
        labels.append(unique[0] if unique else f"{names[-1]} ({i})")
    return labels


def _shorten_paths(folders: Sequence[Path | None]) -> list[str]:
    """Return the paths without the components at the beginning and the end that all have in common.

    Each shortened path has at least one component.
    """
    paths = [(str(folder),) if folder is None else folder.parts for folder in folders]
    for _ in range(2):  # the common beginning, and then, reversed, the common end
        n_shared = _count_shared_parts(paths)
        paths = [path[n_shared:][::-1] for path in paths]
    return ["/".join(path) for path in paths]


def _count_shared_parts(paths: Sequence[tuple[str, ...]]) -> int:
    """Return the number of leading path components that all paths have in common.

    The last component of a path is never counted, so that something of each path remains if the
    common components are removed.
    """
    n_shared = 0
    for parts in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        n_shared += 1
    return n_shared


def _list_cards(runs: Sequence[Compared]) -> list[Card]:
    """Return a card for each run: its score, and the difference to FedAvg if FedAvg is included."""
    baselines = [run for run in runs if run.summary["algorithm"] == BASELINE]
    baseline = baselines[0] if len(baselines) == 1 else None
    cards: list[Card] = []
    for run in runs:
        note = run.score.label
        trend = ""
        if baseline is not None and run is not baseline:
            difference, trend = run.score.compare(run.by_client, baseline.by_client)
            if difference:
                note = f"{difference} against {baseline.label}"
        value = run.score.text(run.mean)
        cards.append(Card(run.label, value, note, trend=trend, colour=run.entry.colour))
    return cards


def _overview_section(runs: Sequence[Compared], beside: Path) -> Section:
    """Return the page section with the results of each run, in a table."""
    summaries = [run.summary for run in runs]
    score = runs[0].score
    others = [other for other in compared_by(summaries) if other != score]
    has_chosen = any("chosen" in summary for summary in summaries)
    columns = ["run", score.label]
    if has_chosen:
        columns.append("chosen round")
    columns.append("worst tenth")
    columns += [other.label for other in others]
    columns += ["clusters", "ARI", "traffic", "time", "rounds"]
    rows = [_overview_row(run, others, has_chosen=has_chosen) for run in runs]
    sentences = ["Results of each run; means over the clients."]
    if note := note_of_chosen(summaries):
        sentences.append(note)
    if any(_has_missing_scores(summary) for summary in summaries):
        sentences.append(SCORED)
    table = Table("", columns, rows)
    caption = " ".join(sentences)
    links = _link_pages(runs, beside)
    return Section("overview", "The runs", caption, open_tables=[table], links=links)


def _link_pages(runs: Sequence[Compared], beside: Path) -> dict[str, str]:
    """Return the links to the pages of the runs that have one, by the runs' labels."""
    pages = {run.label: _find_page(run, beside) for run in runs}
    return {label: page for label, page in pages.items() if page is not None}


def _overview_row(run: Compared, others: Sequence[Score], *, has_chosen: bool) -> list[str]:
    """Return the cells of a run in the table of results.

    Parameters
    ----------
    run
        The run.
    others
        Metrics other than the common metric of the compared runs.
    has_chosen
        Whether the table has a column for the round that is best on validation data.
    """
    summary = run.summary
    clusters = summary["clusters"]
    if clusters["true"] is None:
        true = ""
    else:
        true = f" of {clusters['true']}"
    cells = [run.label, _write_mean(run.score, summary)]
    if has_chosen:
        cells.append(run.score.text(run.score.of_chosen(summary)))
    cells.append(run.score.text(run.score.worst_tenth(summary)))
    cells += [_write_mean(other, summary) for other in others]
    cells += [f"{clusters['found']}{true}", number(clusters["ari"])]
    cells.append(traffic(summary["bytes_up"] + summary["bytes_down"]))
    cells += [duration(summary["seconds"]["total"]), str(summary["rounds"])]
    return cells


def _has_missing_scores(summary: Mapping[str, Any]) -> bool:
    """Return whether at least one metric of a run is undefined for at least one client."""
    return any(score.clients(summary).without for score in Score.all_of(summary))


def _write_mean(score: Score, summary: Mapping[str, Any]) -> str:
    """Return a run's mean score as text, with the number of clients that have a score.

    The number is left out if all clients have a score. The text is a dash if the run lacks the
    metric.
    """
    if not score.is_of(summary):
        return NONE
    return score.clients(summary).after(score.text(score.mean(summary)))


def _find_page(run: Compared, beside: Path) -> str | None:
    """Return the link from a folder to the page of a single run; None if there is no such page."""
    if run.view.folder is None:
        return None
    page = run.view.folder / REPORT
    if not page.is_file():
        return None
    return quote(Path(os.path.relpath(page, beside)).as_posix())


def _select_column(run: Compared, column: str) -> dict[int, float]:
    """Return the values of a column of ``metrics.parquet`` by round, without missing values."""
    rows = run.view.run.metric_rows
    return {row["round"]: row[column] for row in rows if row.get(column) is not None}


def _draw_lines(
    runs: Sequence[Compared], column: str, hover: str, *, steps: bool = False
) -> list[Line]:
    """Return a line over the rounds for each run that has numbers in a column.

    Parameters
    ----------
    runs
        Compared runs.
    column
        Column of ``metrics.parquet``.
    hover
        Plotly's template for the text that is shown at the mouse pointer.
    steps
        Whether a value is drawn as a horizontal line up to the next round, instead of a slope.
    """
    lines: list[Line] = []
    for run in runs:
        values = _select_column(run, column)
        if values:
            line = Line(
                x=list(values),
                y=list(values.values()),
                colour=run.entry.colour,
                dash=run.entry.dash,
                dots=run.view.rounds <= FEW_ROUNDS,
                steps=steps,
                name=run.label,
                hover=f"{{name}}, round %{{x}}<br>{hover}",
            )
            lines.append(line)
    return lines


def _draw_panels(
    runs: Sequence[Compared],
    title: str,
    panels: Sequence[Panel],
    *,
    height: int,
    x: Axis | None = None,
) -> Picture:
    """Return a picture with a legend of the runs, over the rounds unless an axis ``x`` is given."""
    x_axis = x or rounds_axis(max(run.view.rounds for run in runs))
    return Picture(title, panels, x_axis, height, legend=[run.entry for run in runs])


def _rounds_table(
    runs: Sequence[Compared], column: str, write: Callable[[float], str], title: str
) -> Table:
    """Return a table of a column of ``metrics.parquet`` by round, with one column per run."""
    columns = {run.label: _select_column(run, column) for run in runs}
    return table_by_round(title, columns, write, longest=LISTED)


def _scores_section(runs: Sequence[Compared]) -> Section | None:
    """Return the page section with mean scores over the rounds; None if no run has a score."""
    score = runs[0].score
    column = f"{score.name}_mean"
    lines = _draw_lines(runs, column, f"{score.label} {score.hover()}")
    if not lines:
        return None
    title = f"{score.title} over the rounds"
    caption = f"Mean test {score.label} over all clients after each round.{score.remark}"
    panel = Panel(lines, score.axis("mean test"))
    picture = _draw_panels(runs, title, [panel], height=400)
    table = _rounds_table(runs, column, score.text, title)
    return Section.of("scores", caption, picture, [table])


def _clusters_section(runs: Sequence[Compared]) -> Section | None:
    """Return the page section with the number of clusters over the rounds.

    If the true clusters are known, it includes the ARI. None if no run has two clusters.
    """
    if max(run.summary["clusters"]["found"] for run in runs) < 2:
        return None
    cluster_lines = _draw_lines(runs, "clusters", "%{y} clusters", steps=True)
    ari_lines = _draw_lines(runs, "ari", "ARI %{y:.2f}")
    panels = [Panel(cluster_lines, Axis("clusters", "whole", from_zero=True))]
    tables = [_rounds_table(runs, "clusters", str, "Clusters over the rounds")]
    caption = "The number of clusters after each round."
    if ari_lines:
        panels.append(Panel(ari_lines, Axis("ARI", range=(-0.08, 1.08))))
        tables.append(_rounds_table(runs, "ari", number, "ARI over the rounds"))
        caption += (
            " Below, their agreement with the true clusters: an ARI of 1 is perfect, 0 is that of a "
            "random partition."
        )
    height = 440 if ari_lines else 300
    picture = _draw_panels(runs, "Clusters found", panels, height=height)
    return Section.of("clusters", caption, picture, tables)


def _traffic_section(runs: Sequence[Compared]) -> Section | None:
    """Return the page section with the score over the transferred bytes; None without any bytes."""
    score = runs[0].score
    lines: list[Line] = []
    for run in runs:
        metric_rows = run.view.run.metric_rows
        megabytes = [(row["bytes_up"] + row["bytes_down"]) / 1e6 for row in metric_rows]
        totals = list(accumulate(megabytes))
        if not any(totals):
            continue
        values = [row.get(f"{score.name}_mean") for row in metric_rows]
        points = [(x, y) for x, y in zip(totals, values, strict=True) if y is not None]
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
    panel = Panel(lines, score.axis("mean test"))
    x_axis = Axis("MB sent and received by all clients")
    title = f"{score.title} over the traffic"
    picture = _draw_panels(runs, title, [panel], height=380, x=x_axis)
    rows: list[list[str]] = []
    for run in runs:
        summary = run.summary
        rows.append([run.label, traffic(summary["bytes_up"]), traffic(summary["bytes_down"])])
    table = Table("Traffic", ["run", "from clients", "to clients"], rows)
    caption = (
        f"Mean test {score.label} after the traffic of all rounds so far. Methods without traffic "
        "have no line."
    )
    return Section.of("traffic", caption, picture, [table])


def _spread_section(runs: Sequence[Compared]) -> Section:
    """Return the page section with the distribution of the clients' scores in each run."""
    score = runs[0].score
    x_axis = score.axis("test")
    scores: list[float] = []
    for run in runs:
        scores += run.scores
    if scores and not x_axis.log:
        if score.share:
            width = 1
        else:
            width = max(scores) - min(scores) or 1
        margin = 0.02 * width
        x_axis = replace(x_axis, range=(min(scores) - margin, max(scores) + margin))
    panel = Panel([_draw_distribution(run) for run in runs], Axis("share of the clients", "share"))
    picture = _draw_panels(runs, "Scores of the clients", [panel], height=380, x=x_axis)
    caption = f"Share of the clients with at most a given test {score.label} at the end."
    if score.remark:
        caption += f"{score.remark[:-1]}: the further left a line, the better."
    names = {"min": "minimum", "p10": "p10", "p50": "median", "p90": "p90", "max": "maximum"}
    rows: list[list[str]] = []
    for run in runs:
        spread = run.summary[score.name]
        rows.append([run.label, *(score.text(spread[key]) for key in names)])
    table = Table("Quantiles over the clients", ["run", *names.values()], rows)
    return Section.of("clients", caption, picture, [table])


def _draw_distribution(run: Compared) -> Line:
    """Return the cumulative distribution of a run's scores over its clients, as a line."""
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


def _trees_section(runs: Sequence[Compared]) -> Section:
    """Return the page section with the parameter tree of each run."""
    caption = (
        "The parameter tree of each run: a bar for each cluster, from its first round to its "
        "split. Select one with a click, or with Tab and the arrow keys. Colours distinguish the "
        "clusters of one run."
    )
    trees = {run.label: tree_picture(run.view) for run in runs}
    return Section("tree", "Parameter trees", caption, trees=trees)


def _settings_section(runs: Sequence[Compared]) -> Section:
    """Return the page section with differing settings, and the commands that repeat the runs."""
    settings = [as_texts(run.view.run.config) for run in runs]
    keys: dict[str, None] = {}
    for config in settings:
        keys.update(dict.fromkeys(config))
    rows: list[list[str]] = []
    for key in keys:
        values = [config.get(key, NONE) for config in settings]
        if len(set(values)) > 1:
            rows.append([key, *values])
    caption = "The runs have the same settings."
    tables: list[Table] = []
    if rows:
        caption = "The settings in which the runs differ; all others are the same."
        tables = [Table("", ["setting", *(run.label for run in runs)], rows)]
    commands = dict.fromkeys(repeat_command(run.view) for run in runs)
    known = [command for command in commands if command is not None]
    texts: dict[str, str] = {}
    if known:
        texts["The commands that repeat the runs"] = "\n".join(known)
    return Section("config", "Settings", caption, open_tables=tables, texts=texts)
