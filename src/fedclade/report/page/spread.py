"""How the clients fared: the score of each, and who lost against another run or against the root's model."""

from __future__ import annotations

from typing import Any

from fedclade.report.formats import NONE, count
from fedclade.report.page import plot
from fedclade.report.page.palette import Key
from fedclade.report.page.run_view import RunView
from fedclade.report.page.section import Figure, Section, Table

LISTED = 25
"""So many clients are listed, those first that lost most."""

MOST = 3000
"""Of more clients than this, every so many are drawn."""


def spread_section(subject: RunView) -> Section | None:
    """Return the score of every client, worst first, and what it was in the run that it is compared with.

    None if no client was evaluated.
    """
    if not subject.scores:
        return None
    caption = f"Test {subject.what} of each client at the end, the worst at the left, in the colour of its cluster."
    tables = [_quantiles(subject)]
    legend = subject.colours.current("dot")
    if subject.before is not None:
        label, scores = subject.before
        losers = _losers(subject, scores)
        tables.append(_table(subject, label, losers))
        n = len(losers)
        lost = "no client is worse off" if not n else f"{count(n, 'client')} {'is' if n == 1 else 'are'} worse off"
        caption += f" Rings: the same clients with {label}; {lost}."
        legend.append(Key("@muted", label, "ring"))
    if len(subject.scores) > MOST:
        caption += f" Of {len(subject.scores):,} clients, {MOST:,} are drawn."
    return Section("clients", "How the clients fared", caption, {"": _figure(subject)}, legend, tables)


def _figure(subject: RunView) -> Figure:
    sign = -1 if subject.language else 1
    ordered = sorted(subject.scores, key=lambda client: (sign * subject.scores[client], client))
    ordered = ordered[:: -(-len(ordered) // MOST)]
    form = "%{y:.1f}" if subject.language else "%{y:.1%}"
    leaf_of = subject.run.tree.leaf_of
    size = 9 if len(ordered) <= 60 else 6 if len(ordered) <= 300 else 4
    traces: list[dict[str, Any]] = []
    if subject.before is not None:
        label, scores = subject.before
        both = [(place, client) for place, client in enumerate(ordered, start=1) if client in scores]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [place for place, _ in both],
                "y": [scores[client] for _, client in both],
                "text": [subject.drawn_name(client) for _, client in both],
                "marker": {"size": size, "color": "rgba(0,0,0,0)", "line": {"color": "@muted", "width": 1.4}},
                "hovertemplate": f"%{{text}} with {plot.escaped(label)}<br>{subject.what} {form}<extra></extra>",
            }
        )
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": list(range(1, len(ordered) + 1)),
            "y": [subject.scores[client] for client in ordered],
            "text": [f"{subject.drawn_name(client)}, cluster {leaf_of.get(client, 0)}" for client in ordered],
            "marker": {"size": size, "color": [subject.colours.of(leaf_of.get(client, 0)) for client in ordered]},
            "hovertemplate": f"%{{text}}<br>{subject.what} {form}<extra></extra>",
        }
    )
    y_axis = plot.axis("test perplexity", type="log") if subject.language else plot.shares("test accuracy")
    x_axis = plot.axis("clients, worst first", tickformat="d", showgrid=False, range=[0, len(ordered) + 1])
    return plot.figure(traces, 380, xaxis=x_axis, yaxis=y_axis)


def _losers(subject: RunView, before: dict[int, float]) -> list[tuple[float, int]]:
    """Return the clients that are worse off than before, with how much, those first that lost most."""
    sign = -1 if subject.language else 1
    losses = [(sign * (now - before[client]), client) for client, now in subject.scores.items() if client in before]
    return sorted((change, client) for change, client in losses if change < 0)


def _table(subject: RunView, label: str, losers: list[tuple[float, int]]) -> Table:
    assert subject.before is not None  # who lost is asked only then
    before, leaf_of = subject.before[1], subject.run.tree.leaf_of
    rows = [
        [
            subject.outcome.name(client),
            str(leaf_of.get(client, NONE)),
            subject.written(before[client]),
            subject.written(subject.scores[client]),
        ]
        for _, client in losers[:LISTED]
    ]
    note = f"{count(len(losers) - LISTED, 'more client')} not listed." if len(losers) > LISTED else ""
    note = note if rows else "Nobody."
    return Table(f"Clients that lost against {label}", ["client", "cluster", "before", "now"], rows, note)


def _quantiles(subject: RunView) -> Table:
    """Return quantiles of the scores."""
    scores = subject.run.summary["perplexity" if subject.language else "accuracy"]
    names = {"min": "least", "p10": "p10", "p25": "p25", "p50": "median", "p75": "p75", "p90": "p90", "max": "most"}
    known = [key for key in names if key in scores]
    rows = [[subject.written(scores[key]) for key in known]]
    return Table(f"Quantiles of the clients’ {subject.what}", [names[key] for key in known], rows)
