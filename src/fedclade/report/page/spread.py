"""How the clients fared: the score of each, and which lost against another run or against the root's model."""

from __future__ import annotations

from fedclade.report.formats import NONE, count
from fedclade.report.page.section import Section, Table
from fedclade.report.picture import Axis, Dots, LegendEntry, Panel, Picture
from fedclade.report.run_view import RunView

LISTED = 25
"""So many clients are listed, those first that lost most."""

MOST = 3000
"""Of more clients than this, every so many are drawn."""


def spread_section(view: RunView) -> Section | None:
    """Return the score of every client, worst first, and what it was in the run that it is compared with.

    None if no client has a score.
    """
    if not view.scores:
        return None
    caption = f"Test {view.score.label} of each client at the end, the worst at the left, in the colour of its cluster."
    if without := view.score.clients(view.run.summary).without:
        caption += f" {count(without, 'more client')} {'has' if without == 1 else 'have'} no score: it is undefined"
        caption += " for their test data."
    tables = [_quantiles(view)]
    if view.before is not None:
        label, scores = view.before
        losers = _losers(view, scores)
        tables.append(_loser_table(view, label, scores, losers))
        n = len(losers)
        lost = "no client is worse off" if not n else f"{count(n, 'client')} {'is' if n == 1 else 'are'} worse off"
        caption += f" Rings: the same clients with {label}; {lost}."
    if len(view.scores) > MOST:
        caption += f" Of {len(view.scores):,} clients, {MOST:,} are drawn."
    return Section.of("clients", caption, _picture(view), tables)


def _picture(view: RunView) -> Picture:
    ordered = sorted(view.scores, key=lambda client: (view.score.sign * view.scores[client], client))
    ordered = ordered[:: -(-len(ordered) // MOST)]
    form = view.score.hover()
    leaf_of = view.run.tree.leaf_of
    size = 9 if len(ordered) <= 60 else 6 if len(ordered) <= 300 else 4
    marks: list[Dots] = []
    legend = view.colours.current("dot")
    if view.before is not None:
        label, scores = view.before
        both = {place: client for place, client in enumerate(ordered, start=1) if client in scores}
        rings = Dots(
            x=list(both),
            y=[scores[client] for client in both.values()],
            texts=[view.outcome.name(client) for client in both.values()],
            colour="@muted",
            size=size,
            ring=True,
            name=label,
            hover=f"%{{text}} with {{name}}<br>{view.score.label} {form}",
        )
        marks.append(rings)
        legend.append(LegendEntry("@muted", label, "ring"))
    dots = Dots(
        x=range(1, len(ordered) + 1),
        y=[view.scores[client] for client in ordered],
        texts=[f"{view.outcome.name(client)}, cluster {leaf_of.get(client, 0)}" for client in ordered],
        colour=[view.colours.of(leaf_of.get(client, 0)) for client in ordered],
        size=size,
        hover=f"%{{text}}<br>{view.score.label} {form}",
    )
    x_axis = Axis("clients, worst first", "whole", range=(0, len(ordered) + 1), grid=False)
    return Picture("How the clients fared", [Panel([*marks, dots], view.score.axis("test"))], x_axis, 380, legend)


def _losers(view: RunView, before: dict[int, float]) -> list[tuple[float, int]]:
    """Return the clients that are worse off than before, with how much, those first that lost most."""
    sign, now = view.score.sign, view.scores
    gains = [(sign * (now[client] - before[client]), client) for client in now if client in before]
    return sorted((gain, client) for gain, client in gains if gain < 0)


def _loser_table(view: RunView, label: str, before: dict[int, float], losers: list[tuple[float, int]]) -> Table:
    leaf_of, columns = view.run.tree.leaf_of, ["client", "cluster", "before", "now"]
    rows = [
        [
            view.outcome.name(client),
            str(leaf_of.get(client, NONE)),
            *(view.score.text(scores[client]) for scores in (before, view.scores)),
        ]
        for _, client in losers
    ]
    if not rows:
        return Table(f"Clients that lost against {label}", columns, [], "Nobody.")
    return Table.first(f"Clients that lost against {label}", columns, rows, LISTED, "more client")


def _quantiles(view: RunView) -> Table:
    """Return quantiles of the scores."""
    scores = view.run.summary[view.score.name]
    names = {"min": "least", "p10": "p10", "p25": "p25", "p50": "median", "p75": "p75", "p90": "p90", "max": "most"}
    known = [key for key in names if key in scores]
    rows = [[view.score.text(scores[key]) for key in known]]
    return Table(f"Quantiles of the clients’ {view.score.label}", [names[key] for key in known], rows)
