"""The checks of replicated clustering (rcfl): what was found on halves of the data, and how sure it was."""

from __future__ import annotations

from typing import Any

from fedclade.report import facts
from fedclade.report.formats import number
from fedclade.report.page import plot
from fedclade.report.page.palette import Key
from fedclade.report.page.run_view import RunView
from fedclade.report.page.section import Section, Table
from fedclade.report.tables import CHECKS
from fedclade.runs import Row

SMALLEST = 1e-6
"""p-values below are drawn here: the axis is logarithmic, and a p-value can be as small as one draw in many."""


def checks_section(subject: RunView) -> Section | None:
    """Return p-value and gain of every check over the rounds; None for a run without checks."""
    checks = facts.events_of(subject.run, *CHECKS)
    if not checks:
        return None
    regrouped = sum(event["kind"] == "regrouped" for event in checks)
    caption = (
        "Checks of the clusters on updates from two halves of each client’s data. Above, the chance that clusters as "
        "good as those found come from nothing, which must fall below the level (line); below, the gain of the "
        f"clusters found (dots) and of those kept until then (rings). In {regrouped} of {len(checks)} checks the "
        "clients were regrouped (large dots)."
    )
    figure = plot.figure(
        [*_p_values(checks), *_gains(checks)],
        440,
        xaxis=plot.rounds_axis(subject.rounds, anchor="y2"),
        yaxis=plot.axis("p-value", type="log", domain=[0.55, 1], dtick="D2"),
        yaxis2=plot.axis("gain", domain=[0, 0.45]),
    )
    legend = [
        Key("@c0", "clusters found", "dot"),
        Key("@muted", "clusters until then", "ring"),
        Key("@c1", "level needed"),
    ]
    return Section("checks", "Checks of the clusters", caption, {"": figure}, legend, [_table(checks)])


def _p_values(checks: list[Row]) -> list[dict[str, Any]]:
    rounds = [event["round"] for event in checks]
    return [
        plot.line(rounds, [event["level"] for event in checks], "@c1", width=1.5, hoverinfo="skip", mode="lines"),
        _dots(checks, [max(event["p_value"], SMALLEST) for event in checks], "p %{y:.2g}", "y"),
    ]


def _gains(checks: list[Row]) -> list[dict[str, Any]]:
    before = _dots(checks, [event["gain_before"] for event in checks], "gain until then %{y:.3g}", "y2")
    before["marker"] |= {"color": "rgba(0,0,0,0)", "line": {"color": "@muted", "width": 1.5}}
    return [before, _dots(checks, [event["gain"] for event in checks], "gain %{y:.3g}", "y2")]


def _dots(checks: list[Row], values: list[float], what: str, axis: str) -> dict[str, Any]:
    sizes = [12 if event["kind"] == "regrouped" else 7 for event in checks]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [event["round"] for event in checks],
        "y": values,
        "yaxis": axis,
        "text": [f"{'regrouped' if e['kind'] == 'regrouped' else 'kept'}: {_sizes(e)}" for e in checks],
        "marker": {"size": sizes, "color": "@c0", "opacity": 1},
        "hovertemplate": f"round %{{x}}, %{{text}}<br>{what}<extra></extra>",
    }


def _sizes(event: Row) -> str:
    return " + ".join(str(len(cluster)) for cluster in event["clusters"][:12])


def _table(checks: list[Row]) -> Table:
    rows = [
        [
            str(event["round"]),
            f"{'now' if event['kind'] == 'regrouped' else 'still'} {_sizes(event)}",
            *(f"{event[key]:.2g}" for key in ("p_value", "level", "gain", "gain_before")),
            "∞" if event["gamma"] is None else number(event["gamma"]),
        ]
        for event in checks
    ]
    columns = ["round", "clusters", "p", "needed", "gain", "gain before", "median γ"]
    return Table("Checks", columns, rows[:60], f"{len(rows) - 60} later ones are not listed." if rows[60:] else "")
