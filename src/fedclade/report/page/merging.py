"""The dendrogram of a step of hierarchical clustering (FL+HC)."""

from __future__ import annotations

from typing import Any

from fedclade.report import facts
from fedclade.report.formats import NONE, count
from fedclade.report.merges import Merges, metric_in_words
from fedclade.report.page import plot
from fedclade.report.page.palette import Key, truth_colour
from fedclade.report.page.run_view import RunView
from fedclade.report.page.section import Section, Table

NAMED = 40
"""Up to so many clients are told by name under their leaves."""

STRIP = 0.05
"""Height of the strip of true clusters, as a share of the figure's."""

LISTED = 15
"""So many merges are listed, the last ones first."""


def dendrogram_section(subject: RunView) -> Section | None:
    """Return which clusters merged at what distance, and where that was cut; None for a run without such a step."""
    step = facts.clustering_step(subject.run)
    if step is None:
        return None
    merges = Merges(subject.run, step)
    compared = "data" if step["metric"] == "angle" else "updates"
    found, cut = count(len(step["sizes"]), "cluster"), step["threshold"]
    truth = subject.outcome.truth
    caption = (
        f"How the {count(merges.m, 'client')} were clustered by their {compared} in round {step['round']}: every "
        f"bridge joins two clusters at the height of their distance. "
        + (f"Cut at {cut:.4g} (dashed): {found}. " if cut is not None else f"Not cut: {found}. ")
        + ("" if truth is None else "The strip below shows each client’s true cluster.")
    )
    legend = [*subject.colours.current("line"), Key("@muted", "above the cut")]
    parts = reversed(step["merges"][-LISTED:])
    sizes = _sizes(merges)
    rows = [[f"{height:.4g}", str(sizes[a]), str(sizes[b])] for a, b, height in parts]
    left_out = f"{merges.m - 1 - LISTED:,} lower merges are not listed." if merges.m - 1 > LISTED else ""
    table = Table("The last merges", ["distance", "clients", "and"], rows or [[NONE, NONE, NONE]], left_out)
    figure = _figure(subject, merges)
    return Section("dendrogram", "Dendrogram", caption.strip(), {"": figure}, legend, [table])


def _sizes(merges: Merges) -> list[int]:
    """Return the number of clients in every cluster, as :class:`Merges` numbers them."""
    sizes = [1] * merges.m
    for a, b in merges.parts:
        sizes.append(sizes[a] + sizes[b])
    return sizes


def _figure(subject: RunView, merges: Merges) -> dict[str, Any]:
    step, m = merges.step, merges.m
    clients = [step["clients"][place] for place in merges.order]
    names = [subject.drawn_name(client) for client in clients] if m <= NAMED else []
    shapes: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    if step["threshold"] is not None:
        shapes.append(plot.level(step["threshold"]))
        text, place = f"cut at {step['threshold']:.4g}", {"yref": "y", "xanchor": "right", "yanchor": "bottom"}
        labels.append(plot.note(text, 1, step["threshold"], **place))
    low, truth = 0.0, subject.outcome.truth
    if truth is not None:
        low = -1.5 * STRIP * merges.top
        for start, size, label in facts.truth_blocks(clients, truth):
            place = {"x0": start - 0.5, "x1": start + size - 0.5, "y0": -1.4 * STRIP * merges.top, "y1": low / 3.75}
            shapes.append({"type": "rect", "fillcolor": truth_colour(label), "line": {"width": 0}, **place})
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "tickangle": -90 if m > 12 else 0}
    x_title = "" if names else count(m, "client")
    return plot.figure(
        _bridges(subject, merges),
        440,
        xaxis=plot.axis(x_title, range=[-1, m], showgrid=False, **ticks),
        yaxis=plot.axis(f"{metric_in_words(step['metric'])}, {step['linkage']} linkage", range=[low, merges.top]),
        shapes=shapes,
        annotations=labels,
    )


def _bridges(subject: RunView, merges: Merges) -> list[dict[str, Any]]:
    """Draw the bridges of each cluster as one broken line, in its colour; above the cut in grey."""
    nodes = merges.nodes[merges.m :]
    traces: list[dict[str, Any]] = []
    for node in sorted(set(nodes), key=lambda node: -1 if node is None else node):
        x: list[float | None] = []
        y: list[float | None] = []
        for own, bridge in zip(nodes, merges.bridges, strict=True):
            if own == node:
                x += [*(place for place, _ in bridge), None]
                y += [*(height for _, height in bridge), None]
        within = "above the cut" if node is None else f"in cluster {node}"
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": x,
                "y": y,
                "line": {"color": "@muted" if node is None else subject.colours.of(node), "width": 1.6},
                "hovertemplate": f"{within}<br>distance %{{y:.4g}}<extra></extra>",
            }
        )
    return traces
