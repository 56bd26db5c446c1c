"""Adversaries of a simulation: how honest clients and they fare, and in which clusters they end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fedclade.report.colours import series
from fedclade.report.formats import count, number, percent, shortened
from fedclade.report.page.section import Section, Table
from fedclade.report.picture import FEW_ROUNDS, Axis, Line, Panel, Picture, rounds_axis
from fedclade.report.queries import adversaries, leaves_in_tree_order
from fedclade.report.run_view import RunView

LISTED = 40
"""So many clusters are listed."""


def adversaries_section(view: RunView) -> Section | None:
    """Return scores of honest clients and of adversaries by round, and who is in which cluster; None without any."""
    told = view.run.summary.get("adversary")
    if told is None:
        return None
    clusters = told["clusters"]
    caption = (
        f"Mean test {view.score.label} of honest clients and of {adversaries(len(told['ids']))} {_described(told)}."
        f"{view.score.remark} {count(clusters['of_adversaries'], 'cluster')} without honest clients; "
        f"{adversaries(clusters['adversaries_with_honest'])} in clusters with honest clients."
    )
    if told["ari_honest"] is not None:
        caption += f" ARI of honest clients: {number(told['ari_honest'])}."
    if told["attack_success"] is not None:
        caption += f" The backdoor succeeds with {percent(told['attack_success'])} of their test examples."
    return Section.of("adversaries", caption, _picture(view), [_table(view, frozenset(told["ids"]))])


def _described(told: Mapping[str, Any]) -> str:
    """Return what adversaries do: their kind, and their false statements."""
    words = [f"of kind {told['kind']}"] if told["kind"] else []
    if lies := told.get("lies"):
        words.append(f"with false {', '.join(lies)}")
    return " ".join(words)


def _picture(view: RunView) -> Picture:
    name = view.score.name
    scores = {"honest clients": f"{name}_honest", "adversaries": f"{name}_adversaries"}
    panels = [Panel(_lines(view, scores, view.score.hover()), view.score.axis("mean test"), 2)]
    if success := _lines(view, {"backdoor": "attack_success"}, "%{y:.1%}"):
        panels.append(Panel(success, Axis("success of the backdoor", "share", from_zero=True)))
    return Picture("Adversaries", panels, rounds_axis(view.rounds), 300 if len(panels) == 1 else 440, series([*scores]))


def _lines(view: RunView, columns: dict[str, str], hover: str) -> list[Line]:
    """Return a line for each column of ``metrics.parquet`` that has numbers."""
    lines: list[Line] = []
    for entry, column in zip(series([*columns]), columns.values(), strict=True):
        points = [(row["round"], row[column]) for row in view.run.metric_rows if row.get(column) is not None]
        if points:
            rounds, values = zip(*points, strict=True)
            dots = view.rounds <= FEW_ROUNDS or len(points) == 1
            hint = f"{{name}}, round %{{x}}<br>{hover}"
            lines.append(Line(x=rounds, y=values, colour=entry.colour, name=entry.label, hover=hint, dots=dots))
    return lines


def _table(view: RunView, liars: Collection[int]) -> Table:
    rows: list[list[str]] = []
    for leaf in leaves_in_tree_order(view.run.tree):
        mine = [client for client in leaf.members if client in liars]
        honest = len(leaf.members) - len(mine)
        rows.append([str(leaf.id), f"{honest:,}", f"{len(mine):,}", shortened([view.outcome.name(c) for c in mine])])
    columns = ["cluster", "honest clients", "adversaries", "who they are"]
    return Table.first("Where they end", columns, rows, LISTED, "more cluster")
