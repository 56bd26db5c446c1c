"""Newcomers: which came during the run and which left, and what the models of a finished run were worth to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from fedclade.core import Joined, Left
from fedclade.report.colours import series
from fedclade.report.formats import NONE, count, number, percent, shortened
from fedclade.report.page.section import Section, Table
from fedclade.report.picture import Axis, Dots, Panel, Picture
from fedclade.report.run_view import RunView
from fedclade.report.score import Score
from fedclade.runs import Row, events_of, score_columns
from fedclade.tasks import OLD_METRIC, RIGHT

MODELS = ("the model it got", "the root’s", "its own, trained alone", "the one it got, fine-tuned")
"""What the columns of scores are."""

SYMBOLS: Mapping[str, Literal["circle", "diamond", "square", "cross"]] = {
    **{"dot": "circle", "diamond": "diamond", "box": "square", "cross": "cross"}
}
"""Of each model's points, by the shape of its legend's entry."""

DRAWN = 200
"""So many newcomers are drawn and listed."""

NAMED = 30
"""So many have their names below the picture; of more, each point tells its own."""


def newcomers_section(view: RunView) -> Section | None:
    """Return what became of newcomers; None if there were none."""
    moves = [(at, event) for at, event in events_of(view.run.events, Joined, Left) if event.clients]
    rows = [
        [str(at), event.kind, str(event.node), shortened([str(client) for client in event.clients])]
        for at, event in moves[:DRAWN]
    ]
    tables = [Table("Who came and went", ["round", "", "cluster", "clients"], rows)] if rows else []
    if view.newcomers is not None:
        summary, rows = view.newcomers["summary"], view.newcomers["newcomers"]
        score = Score.named(summary.get("metric", OLD_METRIC), view.run.summary)
        tables = [_table(summary, rows, score), *tables]
        return Section.of("newcomers", _caption(summary, score), _picture(rows[:DRAWN], score), tables)
    caption = "Clients that joined during the run, or a cluster that they had waited for, and clients that left."
    return Section("newcomers", "Newcomers", caption, tables=tables) if tables else None


def _caption(summary: Row, score: Score) -> str:
    text = f"Test {score.label} of {count(summary['newcomers'], 'newcomer')} with four models. "
    if summary[RIGHT] is not None:
        text += f"{percent(summary[RIGHT], 0)} came into a cluster of their true one. "
    if without := summary.get("without_score", 0):
        have = "has" if without == 1 else "have"
        text += f"{without} of {summary['newcomers']} {have} no score: it is undefined for their test data. "
    if summary["fit_nowhere"]:
        only_fitting = summary.get("only_fitting")
        got = "the deepest model that still fits" if only_fitting else "that of the leaf that they came to"
        text += f"{summary['fit_nowhere']} fit nowhere, and got {got}. "
    return text + (f"The first {DRAWN} are drawn." if summary["newcomers"] > DRAWN else "")


def _picture(rows: Sequence[Row], score: Score) -> Picture:
    legend = [replace(entry, shape=shape) for entry, shape in zip(series(MODELS), SYMBOLS, strict=True)]
    dots: list[Dots] = []
    for column, entry in zip(score_columns(score.name), legend, strict=True):
        scored = {place: row for place, row in enumerate(rows, start=1) if row[column] is not None}
        points = Dots(
            x=list(scored),
            y=[row[column] for row in scored.values()],
            texts=[row["name"] for row in scored.values()],
            colour=entry.colour,
            size=9,
            symbol=SYMBOLS[entry.shape],
            name=entry.label,
            hover=f"%{{text}}, {{name}}<br>{score.label} {score.hover()}",
        )
        dots.append(points)
    names = {float(at): row["name"] for at, row in enumerate(rows, 1)} if len(rows) <= NAMED else None
    x_axis = Axis("newcomers", "whole", range=(0, len(rows) + 1), grid=False, ticks=names)
    return Picture("Newcomers", [Panel(dots, score.axis("test"))], x_axis, 340, legend)


def _table(summary: Row, rows: Sequence[Row], score: Score) -> Table:
    lines = [
        [
            row["name"],
            " › ".join(str(node) for node in row["path"]) + ("" if row["fits"] else " (fits nowhere)"),
            number(row["margin"]),
            *(score.text(row[column]) for column in score_columns(score.name)),
        ]
        for row in rows[:DRAWN]
    ]
    mean = [score.text(summary[column]) for column in score_columns(score.name)]
    columns = ["client", "path", "margin", "got", "root", "own", "tuned"]
    return Table("Newcomers", columns, [*lines, ["mean", NONE, NONE, *mean]])
