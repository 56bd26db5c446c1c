"""Newcomers in the terminal: where each went, by what, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedclade.report.formats import count, number
from fedclade.report.score import Score
from fedclade.report.terminal import new_table
from fedclade.runs import Newcomers, Run, score_columns
from fedclade.tasks import RIGHT


def newcomer_table(newcomers: Newcomers, run: Run) -> Table:
    """Return a line for each newcomer to a run, and their means in the last."""
    table = new_table("Newcomers", show_footer=True)
    summary, score = newcomers.summary, Score.named(newcomers.metric, run.summary)
    by = next((row["by"] for row in newcomers.rows if row["by"]), "similarity")
    table.add_column("client", footer="mean", no_wrap=True)
    assigned = summary[RIGHT]
    table.add_column("path", footer="" if assigned is None else f"assigned right {number(assigned)}")
    for column in (by, "other side", "margin"):
        table.add_column(escape(column), justify="right")
    columns = score_columns(score.name)
    for name, column in zip((score.label, "root", "own", "tuned"), columns, strict=True):
        table.add_column(name, justify="right", no_wrap=True, footer=score.text(summary[column]))
    for row in newcomers.rows:
        cells = [escape(row["name"]), _path(row), _numbers(row["scores"]), _numbers(row["others"])]
        table.add_row(*cells, number(row["margin"]), *(score.text(row[column]) for column in columns))
    alone = count(summary["rounds_alone"], "round")
    table.caption = f"own: trained alone for {alone}, as many as the run's; "
    table.caption += "tuned: the model it got after one epoch on its data"
    if without := summary["without_score"]:
        table.caption += f"\n{_without_score(without, summary['newcomers'])}, and are left out of the means"
    if summary["fit_nowhere"]:
        misfits = count(summary["fit_nowhere"], "newcomer")
        got = "the deepest node that still fits" if summary["only_fitting"] else "the leaf that they came to"
        table.caption += f"\n{misfits} of {summary['newcomers']} fit nowhere, and got {got}"
    return table


def _without_score(without: int, newcomers: int) -> str:
    have = "has" if without == 1 else "have"
    return f"{without} of {count(newcomers, 'newcomer')} {have} no score: undefined for their test data"


def _path(row: Mapping[str, Any]) -> Text:
    text = Text(" > ".join(str(node) for node in row["path"]))
    if not row["fits"]:
        text.append(" fits nowhere", style="bold yellow")
    if row["right"] is False:
        text.append(" wrong", style="bold red")
    return text


def _numbers(values: Sequence[float | None]) -> str:
    return " ".join(number(value) for value in values) if values else number(None)
