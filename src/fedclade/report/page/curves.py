"""How a run went: scores and separation gaps of the clusters over the rounds, and the norms of their updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from fedclade.clustering import Similarity
from fedclade.core import Check, Checked, ClusterSplit, Regrouped, Tested
from fedclade.report import queries
from fedclade.report.curves import (
    Merges,
    clustering_step,
    compared,
    dendrogram_picture,
    norms_picture,
    score_picture,
    similarity_pictures,
)
from fedclade.report.formats import NONE, count, number
from fedclade.report.page.plot import LONGEST, draw
from fedclade.report.page.section import Section, Table, table_by_round
from fedclade.report.picture import Axis, Dots, LegendEntry, Line, Panel, Picture, rounds_axis
from fedclade.report.queries import Series
from fedclade.report.run_view import RunView
from fedclade.report.tables import CHECK_COLUMNS, check_rows, clusters_text
from fedclade.runs import events_of

# Which clients are alike: the similarities of the last updates in each cluster, in the order of the
# tree.

SIDE = 100
"""A matrix of more clients is drawn as means over neighbours, so many in a row."""

MATRICES = 8
"""So many clusters can be looked at; the largest, and the root first."""


def similarity_section(view: RunView) -> Section | None:
    """Return heat maps of the cosine similarities, one for each cluster that has one; None if there is none."""
    kept = sorted(view.run.similarities, key=lambda s: (s.node != 0, -len(s.clients), s.node))
    if not kept:
        return None
    shown = kept[:MATRICES]
    pictures = similarity_pictures(view, shown, SIDE)
    caption = (
        "Cosine similarity of each pair of clients’ updates, clients in the order of the tree: what lies in one "
        "cluster should be warm, what lies in two cold. "
    )
    caption += "The strip at the left shows each client’s true cluster. " if view.outcome.truth is not None else ""
    if max(len(matrix.clients) for matrix in shown) > SIDE:
        caption += f"Matrices of more than {SIDE} clients are drawn as means over neighbours. "
    caption += f"{count(len(kept) - MATRICES, 'smaller cluster')} not shown." if len(kept) > MATRICES else ""
    figures = {picture.title: draw(picture) for picture in pictures}
    rows = [[str(m.node), str(m.round), str(len(m.clients)), *_extremes(m.alpha)] for m in shown]
    table = Table("Similarities by cluster", ["cluster", "round", "clients", "least", "mean", "most"], rows)
    title = "Similarity of the clients’ updates"
    return Section("similarity", title, caption.strip(), figures, pictures[0].legend, [table])


def _extremes(alpha: Similarity) -> list[str]:
    """Return the least, the mean and the largest similarity of two different clients."""
    pairs = alpha[~np.eye(len(alpha), dtype=bool)]
    return [number(float(value)) for value in (pairs.min(), pairs.mean(), pairs.max())]


# The dendrogram of a step of hierarchical clustering (FL+HC).

MERGES_LISTED = 15
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
    table = Table.first("The last merges", columns, rows or [[NONE, NONE, NONE]], MERGES_LISTED, "lower merge")
    picture = dendrogram_picture(view, at, step)
    return Section("dendrogram", "Dendrogram", caption.strip(), {"": draw(picture)}, picture.legend, [table])


# How the clients fared: the score of each, and which lost against another run or against the root's
# model.

CLIENTS_LISTED = 25
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
    return Table.first(f"Clients that lost against {label}", columns, rows, CLIENTS_LISTED, "more client")


def _quantiles(view: RunView) -> Table:
    """Return quantiles of the scores."""
    scores = view.run.summary[view.score.name]
    names = {"min": "least", "p10": "p10", "p25": "p25", "p50": "median", "p75": "p75", "p90": "p90", "max": "most"}
    known = [key for key in names if key in scores]
    rows = [[view.score.text(scores[key]) for key in known]]
    return Table(f"Quantiles of the clients’ {view.score.label}", [names[key] for key in known], rows)


# The checks of replicated clustering, or of CFL with its test: what was found on parts of the data,
# and how sure.

Checks: TypeAlias = Sequence[tuple[int, Check]]
"""Checks with their rounds."""

SMALLEST = 1e-6
"""p-values below are drawn here: the axis is logarithmic, and a p-value can be as small as one draw in many."""

CHECKS_LISTED = 60
"""So many checks are listed."""


def checks_section(view: RunView) -> Section | None:
    """Return p-value and gain of every check over the rounds; None for a run without checks."""
    checks = events_of(view.run.events, Tested, Checked, Regrouped)
    if not checks:
        return None
    splits = {(at, split.node) for at, split in events_of(view.run.events, ClusterSplit)}
    changes = [isinstance(check, Regrouped) or (at, check.node) in splits for at, check in checks]
    caption = (
        "Checks of the clusters on updates from parts of each client’s data. Above, the chance that clusters as "
        "good as those found come from nothing, which must fall below the level (line); below, the gain of the "
        f"clusters found (dots) and of those kept until then (rings). After {sum(changes)} of {len(checks)} checks "
        f"{'a cluster was split' if splits else 'the clients were regrouped'} (large dots)."
    )
    table = Table.first("Checks", CHECK_COLUMNS, check_rows(checks), CHECKS_LISTED, "later check")
    return Section.of("checks", caption, _checks_picture(view, checks, changes), [table])


def _checks_picture(view: RunView, checks: Checks, changes: Sequence[bool]) -> Picture:
    rounds, levels = [at for at, _ in checks], [check.level for _, check in checks]
    p_values = _dots(checks, changes, [max(check.p_value, SMALLEST) for _, check in checks], "p %{y:.2g}")
    before = _dots(
        checks, changes, [check.gain_before for _, check in checks], "gain until then %{y:.3g}", "@muted", ring=True
    )
    gains = _dots(checks, changes, [check.gain for _, check in checks], "gain %{y:.3g}")
    p_axis = Axis("p-value", log=True)
    panels = [
        Panel([Line(x=rounds, y=levels, colour="@c1", width=1.5, dots=len(checks) == 1), p_values], p_axis),
        Panel([before, gains], Axis("gain")),
    ]
    legend = [
        LegendEntry("@c0", "clusters found", "dot"),
        LegendEntry("@muted", "clusters until then", "ring"),
        LegendEntry("@c1", "level needed"),
    ]
    return Picture("Checks of the clusters", panels, rounds_axis(view.rounds), 440, legend)


def _dots(
    checks: Checks, changes: Sequence[bool], values: Sequence[float], what: str, colour: str = "@c0", ring: bool = False
) -> Dots:
    return Dots(
        x=[at for at, _ in checks],
        y=values,
        colour=colour,
        ring=ring,
        size=[12 if new else 7 for new in changes],
        texts=[clusters_text(check) for _, check in checks],
        hover=f"round %{{x}}, %{{text}}<br>{what}",
    )


LONGEST_TABLE = 30
"""So many clusters or rounds are listed in a table."""


def scores_section(view: RunView) -> Section:
    """Return the score of every cluster over the rounds, and the separation gap g(α); see `score_picture`."""
    picture, scores = score_picture(view), queries.score_series(view.run)
    splits = list(picture.uprights)
    when = ", ".join(str(at) for at in splits[:8])
    parts = [f"Mean test {view.score.label} of the clients in every cluster after each round.{view.score.remark}"]
    if splits:
        parts.append(f"Dotted lines: clusters were split in round {when}{' …' if len(splits) > 8 else ''}.")
    if len(picture.panels) > 1 and view.outcome.truth is not None:
        parts.append("Below, the separation gap: above 0 the best bi-partition of a cluster is right.")
    elif len(picture.panels) > 1:
        parts.append("Below, the largest similarity across the best bi-partition of a cluster.")
    if view.colours.crowded:
        parts.append("There are more clusters than colours: drawn are their mean, and where most of them lie.")
    if view.rounds > LONGEST:
        parts.append(f"Of {view.rounds:,} rounds, at most {LONGEST} are drawn for each line.")
    return Section.of("scores", " ".join(parts), picture, [_score_table(view, scores)])


def norms_section(view: RunView) -> Section | None:
    """Return the two norms that CFL splits by over the rounds; None for a run that compared no updates."""
    picture = norms_picture(view)
    if picture is None:
        return None
    caption = (
        "Norms of the clients’ updates in every cluster: above the largest of one client, below that of their weighted "
        "mean. Where the mean comes to rest and the largest does not, the members of a cluster disagree. "
    )
    eps2, eps1 = queries.norm_thresholds(view.run)
    thresholds = [
        f"{symbol} for the {name} is {'a tenth of the largest mean so far' if isinstance(of, Mapping) else f'{of:g}'}"
        for of, symbol, name in ((eps2, "ε₂", "largest"), (eps1, "ε₁", "mean"))
        if of is not None
    ]
    caption += f"Threshold {' and '.join(thresholds)} (dashed)." if thresholds else ""
    largest, mean = (queries.criterion_series(view.run, column) for column in ("max_norm", "mean_norm"))
    rows = [
        [str(node), number(largest[node].values[-1] if node in largest else None), number(series.values[-1])]
        for node, series in list(mean.items())[:LONGEST_TABLE]
    ]
    table = Table("Norms in the last round of each cluster", ["cluster", "largest", "mean"], rows)
    return Section.of("norms", caption.strip(), picture, [table])


def _score_table(view: RunView, scores: Mapping[int, Series]) -> Table:
    """Return the scores of the current clusters in some rounds."""
    leaves = [leaf for leaf in view.colours.leaves if leaf in scores][:10]
    shown = [node for node in scores if node not in leaves and view.run.tree.nodes[node].split_in][:4] + leaves
    columns = {str(node): dict(zip(scores[node].rounds, scores[node].values, strict=True)) for node in shown}
    more = f"{len(scores) - len(shown)} more clusters are not listed." if len(scores) > len(shown) else ""
    return table_by_round(f"Mean {view.score.label} by cluster", columns, view.score.text, LONGEST_TABLE, more)
