"""Newcomers: who came during the run and who left, and what the models of a finished run were worth to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedclade.report import facts
from fedclade.report.formats import NONE, count, number, percent, shortened
from fedclade.report.page import plot
from fedclade.report.page.palette import series
from fedclade.report.page.run_view import RunView
from fedclade.report.page.section import Figure, Section, Table
from fedclade.runs import ACCURACIES

MODELS = ("the model it got", "the root’s", "its own, trained alone", "the one it got, fine-tuned")
"""What the columns of :data:`ACCURACIES` are."""

DRAWN = 200
"""So many newcomers are drawn and listed."""


def newcomers_section(subject: RunView) -> Section | None:
    """Return what became of newcomers; None if there were none."""
    moves = [event for event in facts.events_of(subject.run, "joined", "left") if event["clients"]]
    if subject.newcomers is None and not moves:
        return None
    rows = [
        [str(e["round"]), e["kind"], str(e["node"]), shortened([str(client) for client in e["clients"]])]
        for e in moves[:DRAWN]
    ]
    tables = [Table("Who came and went", ["round", "", "cluster", "clients"], rows)] if rows else []
    if subject.newcomers is None:
        caption = "Clients that joined during the run, or a cluster that they had waited for, and clients that left."
        return Section("newcomers", "Newcomers", caption, tables=tables)
    figure, legend = _figure(subject.newcomers), series(MODELS)
    return Section(
        "newcomers",
        "Newcomers",
        _caption(subject.newcomers),
        {"": figure},
        legend,
        [_table(subject.newcomers), *tables],
    )


def _caption(newcomers: Mapping[str, Any]) -> str:
    summary = newcomers["summary"]
    told = f"Test accuracy of {count(summary['newcomers'], 'newcomer')} with four models. "
    if summary["assignment_accuracy"] is not None:
        told += f"{percent(summary['assignment_accuracy'], 0)} came into a cluster of their true one. "
    if summary["fit_nowhere"]:
        only_fitting = summary.get("only_fitting", True)  # which it was in earlier versions
        got = "the deepest model that still fits" if only_fitting else "that of the leaf that they came to"
        told += f"{summary['fit_nowhere']} fit nowhere, and got {got}. "
    return told + (f"The first {DRAWN} are drawn." if summary["newcomers"] > DRAWN else "")


def _figure(newcomers: Mapping[str, Any]) -> Figure:
    rows = newcomers["newcomers"][:DRAWN]
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": list(range(1, len(rows) + 1)),
            "y": [row[column] for row in rows],
            "text": [plot.escaped(row["name"]) for row in rows],
            "marker": {"size": 9, "color": key.colour, "symbol": symbol},
            "hovertemplate": f"%{{text}}, {key.label}<br>accuracy %{{y:.1%}}<extra></extra>",
        }
        for column, key, symbol in zip(
            ACCURACIES, series(MODELS), ("circle", "diamond", "square", "cross"), strict=True
        )
    ]
    x_axis = plot.axis("newcomers", tickformat="d", showgrid=False, range=[0, len(rows) + 1], nticks=12)
    return plot.figure(traces, 340, xaxis=x_axis, yaxis=plot.shares("test accuracy"))


def _table(newcomers: Mapping[str, Any]) -> Table:
    rows = [
        [
            row["name"],
            " › ".join(str(node) for node in row["path"]) + ("" if row["fits"] else " (fits nowhere)"),
            number(row["margin"]),
            *(percent(row[column]) for column in ACCURACIES),
        ]
        for row in newcomers["newcomers"][:DRAWN]
    ]
    mean = [percent(newcomers["summary"][column]) for column in ACCURACIES]
    columns = ["client", "path", "margin", "got", "root", "own", "tuned"]
    return Table("Newcomers", columns, [*rows, ["mean", NONE, NONE, *mean]])
