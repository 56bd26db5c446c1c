"""Page sections on a run's scores, update norms, similarities, dendrogram, clients and checks."""

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
from fedclade.report.tables import (
    CHECK_COLUMNS,
    SMALLEST_GROUP_NOTE,
    UNIT_OF_GAIN,
    check_rows,
    clusters_text,
)
from fedclade.runs import events_of

# Similarities of the last updates in each cluster, with clients in the order of the tree.

SIDE = 100
"""Largest number of rows of a drawn matrix; for more clients, means over neighbours are drawn."""

MATRICES = 8
"""Largest number of clusters whose matrix is drawn: first the root, then the largest clusters."""


def similarity_section(view: RunView) -> Section | None:
    """Return the page section with a heat map of cosine similarities for each cluster.

    None for a run without recorded similarities.
    """
    matrices = sorted(
        view.run.similarities,
        key=lambda matrix: (matrix.node != 0, -len(matrix.clients), matrix.node),
    )
    if not matrices:
        return None
    shown = matrices[:MATRICES]
    pictures = similarity_pictures(view, shown, SIDE)
    sentences = [
        "Cosine similarity of each pair of clients’ updates, with clients in the order of the "
        "tree. Updates should be similar (warm colours) within a cluster and dissimilar (cold) "
        "between clusters. The similarity of an update to itself, which is 1, is not drawn."
    ]
    if view.outcome.truth is not None:
        sentences.append("The strip at the left shows each client’s true cluster.")
    if max(len(matrix.clients) for matrix in shown) > SIDE:
        sentences.append(
            f"Matrices of more than {SIDE} clients are drawn as means over neighbours."
        )
    if len(matrices) > MATRICES:
        sentences.append(f"{count(len(matrices) - MATRICES, 'smaller cluster')} not shown.")
    rows: list[list[str]] = []
    for matrix in shown:
        sizes = [str(matrix.node), str(matrix.round), str(len(matrix.clients))]
        rows.append([*sizes, *_summarize_similarities(matrix.alpha)])
    columns = ["cluster", "round", "clients", "minimum", "mean", "maximum"]
    return Section(
        "similarity",
        "Similarity of the clients’ updates",
        " ".join(sentences),
        {picture.title: draw(picture) for picture in pictures},
        legend=pictures[0].legend,
        tables=[Table("Similarities by cluster", columns, rows)],
    )


def _summarize_similarities(alpha: Similarity) -> list[str]:
    """Return the minimum, mean and maximum similarity of two different clients as texts."""
    pairs = alpha[~np.eye(len(alpha), dtype=bool)]
    return [number(float(value)) for value in (pairs.min(), pairs.mean(), pairs.max())]


# The dendrogram of a step of hierarchical clustering (FL+HC).

MERGES_LISTED = 15
"""Largest number of merges that are listed, the last merges first."""


def dendrogram_section(view: RunView) -> Section | None:
    """Return the page section with the dendrogram of the last hierarchical clustering.

    None for a run without hierarchical clustering.
    """
    last_step = clustering_step(view.run)
    if last_step is None:
        return None
    round_number, step = last_step
    merges = Merges(view.run, round_number, step)
    clusters = count(len(step.sizes), "cluster")
    sentences = [
        f"Hierarchical clustering of {count(merges.m, 'client')} by their {compared(step)} in "
        f"round {round_number}: every bridge joins two clusters at the height of their distance."
    ]
    if step.threshold is None:
        sentences.append(f"Not cut: {clusters}.")
    else:
        sentences.append(f"Cut at {step.threshold:.4g} (dashed): {clusters}.")
    if view.outcome.truth is not None:
        sentences.append("The strip below shows each client’s true cluster.")
    sizes = merges.cluster_sizes
    rows = [
        [f"{height:.4g}", str(sizes[a]), str(sizes[b])] for a, b, height in reversed(step.merges)
    ]
    if not rows:
        rows = [[NONE, NONE, NONE]]
    columns = ["distance", "clients in first cluster", "clients in second cluster"]
    table = Table.first("The last merges", columns, rows, limit=MERGES_LISTED, noun="lower merge")
    picture = dendrogram_picture(view, round_number, step)
    return Section(
        "dendrogram",
        "Dendrogram",
        " ".join(sentences),
        {"": draw(picture)},
        legend=picture.legend,
        tables=[table],
    )


# The score of each client, compared with another run or with the root's model.

CLIENTS_LISTED = 25
"""Largest number of clients that are listed, the clients with the largest loss first."""

MOST = 3000
"""Largest number of clients that are drawn; of more clients, a regular sample is drawn."""


def spread_section(view: RunView) -> Section | None:
    """Return the page section with the score of every client, the worst first.

    If the report compares the run with another run, or with the model of the parameter tree's root,
    the section includes the clients' scores in that run or with that model. None if no client has a
    score.
    """
    if not view.scores:
        return None
    sentences = [
        f"Test {view.score.label} of each client at the end, the worst at the left, in the colour "
        "of its cluster."
    ]
    if without := view.score.clients(view.run.summary).without:
        have = "has" if without == 1 else "have"
        more = count(without, "more client")
        sentences.append(f"{more} {have} no score: it is undefined for their test data.")
    tables = [_quantile_table(view)]
    if view.before is not None:
        label, before = view.before
        losers = _find_losers(view, before)
        tables.append(_loser_table(view, label, before, losers))
        lost = "no client is worse off"
        if losers:
            lost = f"{count(len(losers), 'client')} {'is' if len(losers) == 1 else 'are'} worse off"
        sentences.append(f"Rings: the same clients with {label}; {lost}.")
    if len(view.scores) > MOST:
        sentences.append(f"Of {len(view.scores):,} clients, {MOST:,} are drawn.")
    return Section.of("clients", " ".join(sentences), _spread_picture(view), tables)


def _spread_picture(view: RunView) -> Picture:
    """Return a picture with a dot for the score of every client, and a ring for comparison.

    If the report compares the run with another run, or with the model of the parameter tree's root,
    the ring is the client's score in that run or with that model.
    """
    ordered = sorted(
        view.scores, key=lambda client: (view.score.sign * view.scores[client], client)
    )
    step = -(-len(ordered) // MOST)
    ordered = ordered[::step]
    size = _dot_size(len(ordered))
    hover = f"<br>{view.score.label} {view.score.hover()}"
    legend = view.colours.current("dot")
    marks: list[Dots] = []
    if view.before is not None:
        label, before = view.before
        marks.append(_draw_rings(view, ordered, label, before))
        legend.append(LegendEntry("@muted", label, "ring"))
    nodes = [view.run.tree.leaf_of.get(client, 0) for client in ordered]
    names = [view.outcome.name(client) for client in ordered]
    dots = Dots(
        x=range(1, len(ordered) + 1),
        y=[view.scores[client] for client in ordered],
        texts=[f"{name}, cluster {node}" for name, node in zip(names, nodes, strict=True)],
        colour=[view.colours.of(node) for node in nodes],
        size=size,
        hover=f"%{{text}}{hover}",
    )
    marks.append(dots)
    x_axis = Axis("clients, worst first", "whole", range=(0, len(ordered) + 1), grid=False)
    panel = Panel(marks, view.score.axis("test"))
    return Picture("Scores of the clients", [panel], x_axis, height=380, legend=legend)


def _draw_rings(
    view: RunView, ordered: Sequence[int], label: str, before: Mapping[int, float]
) -> Dots:
    """Return rings for the scores to compare with, at the horizontal positions of the clients.

    ``before`` has these scores by client id, and ``label`` is the name of their run or model.
    """
    places = [place for place, client in enumerate(ordered, start=1) if client in before]
    clients = [client for client in ordered if client in before]
    return Dots(
        x=places,
        y=[before[client] for client in clients],
        texts=[view.outcome.name(client) for client in clients],
        colour="@muted",
        size=_dot_size(len(ordered)),
        ring=True,
        name=label,
        hover=f"%{{text}} with {{name}}<br>{view.score.label} {view.score.hover()}",
    )


def _dot_size(n_dots: int) -> int:
    """Return a diameter in pixels at which this number of dots hardly overlaps."""
    if n_dots <= 60:
        return 9
    return 6 if n_dots <= 300 else 4


def _find_losers(view: RunView, before: Mapping[int, float]) -> list[tuple[float, int]]:
    """Return the clients whose score is worse than the score to compare with, largest loss first.

    Parameters
    ----------
    view
        The run.
    before
        Scores to compare with, by client id: of another run, or of the model of the parameter
        tree's root.

    Returns
    -------
    list of tuple
        The client's gain, which is negative, and the client's id.
    """
    losers: list[tuple[float, int]] = []
    for client, score in view.scores.items():
        if client in before:
            gain = view.score.sign * (score - before[client])
            if gain < 0:
                losers.append((gain, client))
    return sorted(losers)


def _loser_table(
    view: RunView, label: str, before: Mapping[int, float], losers: Sequence[tuple[float, int]]
) -> Table:
    """Return a table of the clients whose score is worse than the score to compare with.

    Parameters
    ----------
    view
        The run.
    label
        Name of the run or model that the run is compared with.
    before
        Scores to compare with, by client id.
    losers
        Clients to list: gain and id, as :func:`_find_losers` returns them.
    """
    title = f"Clients with a worse score than with {label}"
    metric = view.score.label
    columns = ["client", "cluster", f"{metric} with {label}", f"{metric} in this run"]
    rows: list[list[str]] = []
    for _, client in losers:
        cluster = str(view.run.tree.leaf_of.get(client, NONE))
        scores = [view.score.text(before[client]), view.score.text(view.scores[client])]
        rows.append([view.outcome.name(client), cluster, *scores])
    if not rows:
        return Table(title, columns, [], f"No client has a worse score than with {label}.")
    return Table.first(title, columns, rows, limit=CLIENTS_LISTED, noun="more client")


def _quantile_table(view: RunView) -> Table:
    """Return a table with quantiles of the clients' scores."""
    spread = view.run.summary[view.score.name]
    names = {
        "min": "minimum",
        "p10": "p10",
        "p25": "p25",
        "p50": "median",
        "p75": "p75",
        "p90": "p90",
        "max": "maximum",
    }
    keys = [key for key in names if key in spread]
    rows = [[view.score.text(spread[key]) for key in keys]]
    title = f"Quantiles of the clients’ {view.score.label}"
    return Table(title, [names[key] for key in keys], rows)


# The checks of replicated clustering, or of CFL with its test.

Checks: TypeAlias = Sequence[tuple[int, Check]]
"""Checks (tests of the clusters) with their rounds."""

SMALLEST = 1e-6
"""Smallest p-value on the logarithmic axis; smaller p-values are drawn at this value."""

CHECKS_LISTED = 60
"""Largest number of checks that are listed."""


def checks_section(view: RunView) -> Section | None:
    """Return the page section with the p-value and the gain of every check, over the rounds.

    A check is a statistical test of whether the clients have different distributions. Its gain
    measures how well the clusters found, and the current clusters, separate the clients. None for a
    run without checks.
    """
    checks = events_of(view.run.events, Tested, Checked, Regrouped)
    if not checks:
        return None
    splits = events_of(view.run.events, ClusterSplit)
    split_at = {(round_number, split.node) for round_number, split in splits}
    changes: list[bool] = []
    for round_number, check in checks:
        is_split = (round_number, check.node) in split_at
        changes.append(is_split or isinstance(check, Regrouped))
    change = "a cluster was split" if splits else "the clients were regrouped"
    caption = (
        "Checks of the clusters on updates from parts of each client’s data. Above: the p-value, "
        "the probability of such clusters if all clients have the same distribution. It must be "
        "at most the significance level (line). Below: the gain of the clusters found (dots) and of "
        f"the current clusters (rings). {UNIT_OF_GAIN} After {sum(changes)} of {len(checks)} checks "
        f"{change} (large dots). {SMALLEST_GROUP_NOTE}"
    )
    rows = check_rows(checks)
    table = Table.first("Checks", CHECK_COLUMNS, rows, limit=CHECKS_LISTED, noun="later check")
    return Section.of("checks", caption, _checks_picture(view, checks, changes), [table])


def _checks_picture(view: RunView, checks: Checks, changes: Sequence[bool]) -> Picture:
    """Return a picture of p-values and gains of checks over the rounds.

    Parameters
    ----------
    view
        The run.
    checks
        Checks (tests of the clusters) with their rounds.
    changes
        Whether the clusters were changed after each check.
    """
    rounds = [round_number for round_number, _ in checks]
    levels = [check.level for _, check in checks]
    p_values = [max(check.p_value, SMALLEST) for _, check in checks]
    gains = [check.gain for _, check in checks]
    gains_before = [check.gain_before for _, check in checks]
    level_line = Line(x=rounds, y=levels, colour="@c1", width=1.5, dots=len(checks) == 1)
    found_dots = _check_dots(checks, changes, p_values, "p-value %{y:.2g}")
    gain_dots = _check_dots(checks, changes, gains, "gain %{y:.3g}")
    current_dots = _check_dots(
        checks,
        changes,
        gains_before,
        "gain of current clusters %{y:.3g}",
        colour="@muted",
        ring=True,
    )
    panels = [
        Panel([level_line, found_dots], Axis("p-value", log=True)),
        Panel([current_dots, gain_dots], Axis("gain")),
    ]
    legend = [
        LegendEntry("@c0", "clusters found", "dot"),
        LegendEntry("@muted", "current clusters", "ring"),
        LegendEntry("@c1", "significance level"),
    ]
    x_axis = rounds_axis(view.rounds)
    return Picture("Checks of the clusters", panels, x_axis, height=440, legend=legend)


def _check_dots(
    checks: Checks,
    changes: Sequence[bool],
    values: Sequence[float],
    label: str,
    *,
    colour: str = "@c0",
    ring: bool = False,
) -> Dots:
    """Return one dot for each check, at its value. Dots of checks that changed clusters are larger.

    Parameters
    ----------
    checks
        Checks (tests of the clusters) with their rounds.
    changes
        Whether the clusters were changed after each check.
    values
        Value of each check, such as its p-value.
    label
        Plotly's template for the text that is shown at the mouse pointer.
    colour
        Colour of the dots.
    ring
        Whether to draw rings in place of dots.
    """
    return Dots(
        x=[round_number for round_number, _ in checks],
        y=values,
        colour=colour,
        ring=ring,
        size=[12 if is_change else 7 for is_change in changes],
        texts=[clusters_text(check) for _, check in checks],
        hover=f"round %{{x}}, %{{text}}<br>{label}",
    )


# Scores and norms over the rounds.

LONGEST_TABLE = 30
"""Largest number of clusters or rounds that are listed in a table."""

SPLITS_NAMED = 8
"""Largest number of rounds with splits that a caption names."""

LEAVES_LISTED = 10
SPLIT_CLUSTERS_LISTED = 4
"""Largest numbers of current and of split clusters with a column in the table of scores."""


def scores_section(view: RunView) -> Section:
    """Return the page section with each cluster's score and separation gap g(α) over the rounds."""
    picture = score_picture(view)
    sentences = [
        f"Mean test {view.score.label} of the clients in every cluster after each "
        f"round.{view.score.remark}"
    ]
    splits = list(picture.uprights)
    if splits:
        rounds = ", ".join(str(round_number) for round_number in splits[:SPLITS_NAMED])
        more = " …" if len(splits) > SPLITS_NAMED else ""
        sentences.append(f"Dotted lines: clusters were split in round {rounds}{more}.")
    has_gaps = len(picture.panels) > 1
    if has_gaps and view.outcome.truth is not None:
        sentences.append(
            "Below, the separation gap: above 0, the best bi-partition of a cluster is correct."
        )
    elif has_gaps:
        sentences.append("Below, the largest similarity across the best bi-partition of a cluster.")
    if view.colours.crowded:
        sentences.append(
            "There are more clusters than colours, so their mean and a band with most of them are "
            "drawn."
        )
    if view.rounds > LONGEST:
        sentences.append(f"Of {view.rounds:,} rounds, at most {LONGEST} are drawn for each line.")
    table = _score_table(view, queries.score_series(view.run))
    return Section.of("scores", " ".join(sentences), picture, [table])


def norms_section(view: RunView) -> Section | None:
    """Return the page section with the two update norms of CFL over the rounds.

    None for a run without recorded norms.
    """
    picture = norms_picture(view)
    if picture is None:
        return None
    caption = (
        "Norms of the clients’ updates in every cluster: above, the largest norm of one client’s "
        "update; below, the norm of their weighted mean. If the mean converges and the largest "
        "norm does not, the members of a cluster have different distributions."
    )
    eps2, eps1 = queries.norm_thresholds(view.run)
    thresholds: list[str] = []
    if eps2 is not None:
        thresholds.append(f"ε₂ for the largest is {eps2:g}")
    if isinstance(eps1, Mapping):
        thresholds.append("ε₁ for the mean is a tenth of the largest mean so far")
    elif eps1 is not None:
        thresholds.append(f"ε₁ for the mean is {eps1:g}")
    if thresholds:
        caption += f" Threshold {' and '.join(thresholds)} (dashed)."
    largest = queries.criterion_series(view.run, "max_norm")
    mean = queries.criterion_series(view.run, "mean_norm")
    rows: list[list[str]] = []
    for node, series in list(mean.items())[:LONGEST_TABLE]:
        if node in largest:
            largest_norm = largest[node].values[-1]
        else:
            largest_norm = None
        rows.append([str(node), number(largest_norm), number(series.values[-1])])
    columns = ["cluster", "largest norm", "norm of the mean"]
    table = Table("Norms in the last round of each cluster", columns, rows)
    return Section.of("norms", caption, picture, [table])


def _score_table(view: RunView, scores: Mapping[int, Series]) -> Table:
    """Return a table of mean scores, with one row per round and one column per cluster.

    The columns are up to ``LEAVES_LISTED`` current clusters, and up to ``SPLIT_CLUSTERS_LISTED``
    clusters that were split.
    """
    leaves = [leaf for leaf in view.colours.leaves if leaf in scores][:LEAVES_LISTED]
    nodes = view.run.tree.nodes
    split = [node for node in scores if node not in leaves and nodes[node].split_in]
    shown = split[:SPLIT_CLUSTERS_LISTED] + leaves
    columns: dict[str, dict[int, float]] = {}
    for node in shown:
        series = scores[node]
        columns[str(node)] = dict(zip(series.rounds, series.values, strict=True))
    more = ""
    if len(scores) > len(shown):
        more = f"{len(scores) - len(shown)} more clusters are not listed."
    title = f"Mean {view.score.label} by cluster"
    return table_by_round(title, columns, view.score.text, longest=LONGEST_TABLE, more=more)
