"""The dendrogram of a step of hierarchical clustering (FL+HC)."""

from __future__ import annotations

from fedclade.report.dendrogram import Merges, clustering_step, compared, dendrogram_picture
from fedclade.report.formats import NONE, count
from fedclade.report.page.plot import draw
from fedclade.report.page.section import Section, Table
from fedclade.report.run_view import RunView

LISTED = 15
"""So many merges are listed, the last ones first."""


def dendrogram_section(view: RunView) -> Section | None:
    """Return which clusters merged at what distance, and where that was cut; None for a run without such a step."""
    found = clustering_step(view.run)
    if found is None:
        return None
    at, step = found
    merges = Merges(view.run, at, step)
    clusters, cut = count(len(step.sizes), "cluster"), step.threshold
    caption = (
        f"How the {count(merges.m, 'client')} were clustered by their {compared(step)} in round {at}: every "
        f"bridge joins two clusters at the height of their distance. "
        + (f"Cut at {cut:.4g} (dashed): {clusters}. " if cut is not None else f"Not cut: {clusters}. ")
        + ("" if view.outcome.truth is None else "The strip below shows each client’s true cluster.")
    )
    sizes = merges.cluster_sizes
    rows = [[f"{height:.4g}", str(sizes[a]), str(sizes[b])] for a, b, height in reversed(step.merges)]
    columns = ["distance", "clients", "and"]
    table = Table.first("The last merges", columns, rows or [[NONE, NONE, NONE]], LISTED, "lower merge")
    picture = dendrogram_picture(view, at, step)
    return Section("dendrogram", "Dendrogram", caption.strip(), {"": draw(picture)}, picture.legend, [table])
