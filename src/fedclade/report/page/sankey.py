"""Sankey diagram of the clients' moves between clusters over the rounds.

A stage is a column of the diagram: the cluster of each client in one round, or its true cluster. A
band connects clusters of two consecutive stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedclade.report.colours import truth_colour
from fedclade.report.formats import count
from fedclade.report.page.plot import Figure, figure, note
from fedclade.report.page.section import Section, Table
from fedclade.report.run_view import RunView

STAGES = 7
"""Largest number of drawn rounds: the first, the last, and regularly selected rounds between."""

WIDEST = 12
"""Largest number of clusters in a column; the smallest clusters of a larger column are merged."""

LISTED = 60
"""Largest number of bands that are listed in a table."""

REST = -1
"""Id that stands for the merged smallest clusters of a column."""

GAP = 0.04
"""Gap between two clusters, as a share of the height; all gaps take at most a third of it."""


@dataclass(frozen=True)
class Stage:
    """Column of a Sankey diagram: the cluster of each client in one round, or its true cluster."""

    name: str
    place: Mapping[int, int]
    """Cluster by client id."""
    truth: bool = False
    """Whether the clusters are the true clusters."""


def sankey_section(view: RunView) -> Section | None:
    """Return the page section with the moves of clients between clusters.

    None for a run that never had two clusters.
    """
    stages, n_left_out = _list_stages(view)
    numbers_of_clusters = [len(set(stage.place.values())) for stage in stages if not stage.truth]
    if len(stages) < 2 or max(numbers_of_clusters) < 2:
        return None
    drawn = [_merge_small_clusters(stage) for stage in stages]
    sentences = [
        "The clients of each cluster, from left to right over the rounds with moves. The height of "
        "a band is the number of clients in it."
    ]
    if stages[-1].truth:
        sentences.append("At the right, their true clusters.")
    if n_left_out:
        sentences.append(f"{count(n_left_out, 'further round')} with moves not drawn.")
    if any(REST in stage.place.values() for stage in drawn):
        sentences.append(f"Clusters beyond the {WIDEST - 1} largest of a column are merged.")
    return Section(
        "flow",
        "Moves between clusters",
        " ".join(sentences),
        {"": _draw_moves(view, drawn)},
        tables=[_moves_table(drawn)],
    )


def _list_stages(view: RunView) -> tuple[list[Stage], int]:
    """Return the columns of a Sankey diagram: rounds in which clients changed their cluster.

    If the true clusters are known, they are the last column.

    Returns
    -------
    tuple
        The stages (columns), and the number of rounds with changes that are left out.
    """
    places: dict[int, dict[int, int]] = defaultdict(dict)
    for row in view.run.client_rows:
        places[row["round"]][row["client"]] = row["cluster"]
    changes: list[int] = []
    before: Mapping[int, int] = {}
    for round_number in sorted(places):
        current = places[round_number]
        if any(before.get(client) != cluster for client, cluster in current.items()):
            changes.append(round_number)
        before = current
    kept = _select_regularly(changes, STAGES)
    stages = [Stage(f"round {round_number}", places[round_number]) for round_number in kept]
    if (truth := view.outcome.truth) is not None:
        known = {client: truth[client] for client in view.outcome.rows if client in truth}
        stages.append(Stage("truth", known, truth=True))
    return stages, len(changes) - len(kept)


def _select_regularly(numbers: Sequence[int], limit: int) -> list[int]:
    """Return at most ``limit`` regularly spaced entries, including the first and the last."""
    if len(numbers) <= limit:
        return list(numbers)
    return [numbers[round(i * (len(numbers) - 1) / (limit - 1))] for i in range(limit)]


def _merge_small_clusters(stage: Stage) -> Stage:
    """Return a stage (column of a Sankey diagram) in which the smallest clusters are merged.

    The result has at most ``WIDEST`` clusters.
    """
    sizes = Counter(stage.place.values())
    if len(sizes) <= WIDEST:
        return stage
    kept = {cluster for cluster, _ in sizes.most_common(WIDEST - 1)}
    place = dict(stage.place)
    for client, cluster in stage.place.items():
        if cluster not in kept:
            place[client] = REST
    return Stage(stage.name, place, stage.truth)


@dataclass(frozen=True)
class _Link:
    """Band of a Sankey diagram: clients that moved from a cluster to a cluster of the next stage.

    A stage is a column of the diagram, with the clusters of one round. ``stage`` is the index of
    the stage on the left, and ``clients`` is the number of clients.
    """

    stage: int
    source: int
    target: int
    clients: int


def _list_links(stages: Sequence[Stage]) -> list[_Link]:
    """Return the bands of a Sankey diagram from each stage to the next."""
    links: list[_Link] = []
    for i, (stage, following) in enumerate(pairwise(stages)):
        both = [client for client in stage.place if client in following.place]
        moves = Counter((stage.place[client], following.place[client]) for client in both)
        for (source, target), n in sorted(moves.items()):
            links.append(_Link(i, source, target, clients=n))
    return links


def _draw_moves(view: RunView, stages: Sequence[Stage]) -> Figure:
    """Return the Sankey diagram of these stages (columns) as a Plotly figure."""
    nodes: list[tuple[int, int]] = []
    heights: list[float] = []
    for i, stage in enumerate(stages):
        column = _order_clusters(view, stage)
        places = _place_clusters(stage, column)
        for cluster in column:
            nodes.append((i, cluster))
            heights.append(places[cluster])
    index = {node: n for n, node in enumerate(nodes)}
    links = _list_links(stages)
    last = len(stages) - 1
    sankey = {
        "type": "sankey",
        "arrangement": "fixed",
        "node": {
            "label": [_write_label(stages[i], cluster) for i, cluster in nodes],
            "color": [_choose_colour(view, stages[i], cluster) for i, cluster in nodes],
            "x": [0.001 + 0.998 * i / last for i, _ in nodes],
            "y": heights,
            "thickness": 14,
            "pad": 8,
            "line": {"width": 0},
            "hovertemplate": "%{label}<br>%{value:d} clients<extra></extra>",
        },
        "link": {
            "source": [index[link.stage, link.source] for link in links],
            "target": [index[link.stage + 1, link.target] for link in links],
            "value": [link.clients for link in links],
            "color": [
                f"{_choose_colour(view, stages[link.stage], link.source)}/0.28" for link in links
            ],
            "hovertemplate": "%{value:d} clients<br>from %{source.label}<br>to %{target.label}<extra></extra>",
        },
    }
    anchors = ["left", *["center"] * (last - 1), "right"]
    heads = [
        note(stage.name, i / last, 1.0, yanchor="bottom", yshift=6, xanchor=anchor)
        for i, (stage, anchor) in enumerate(zip(stages, anchors, strict=True))
    ]
    return figure([sankey], 400, annotations=heads, margin={"l": 8, "r": 8, "t": 32, "b": 12})


def _order_clusters(view: RunView, stage: Stage) -> list[int]:
    """Return the clusters of a Sankey diagram's column in the order of the parameter tree.

    With this order, few bands between columns cross.
    """
    leaves = view.colours.leaves
    rank = {leaf: place for place, leaf in enumerate(leaves)}
    leaf_of = view.run.tree.leaf_of

    def mean_place(cluster: int) -> tuple[float, int]:
        """Return a cluster's sort key: mean position of its clients' leaves in the tree, id."""
        members = [client for client, place in stage.place.items() if place == cluster]
        ranks = [rank.get(leaf_of.get(client, 0), 0) for client in members]
        return sum(ranks) / len(ranks), cluster

    return sorted(set(stage.place.values()), key=mean_place)


def _place_clusters(stage: Stage, column: Sequence[int]) -> dict[int, float]:
    """Return the vertical middle of each cluster in a column, from 0 at the top to 1.

    Parameters
    ----------
    stage
        Column of the Sankey diagram.
    column
        Clusters of the stage from top to bottom.
    """
    sizes = Counter(stage.place.values())
    gap = min(GAP, 1 / (3 * len(column)))
    scale = (1 - gap * (len(column) - 1)) / sum(sizes.values())
    places: dict[int, float] = {}
    top = 0.0
    for cluster in column:
        height = sizes[cluster] * scale
        places[cluster] = min(0.999, max(0.001, top + height / 2))
        top += height + gap
    return places


def _write_label(stage: Stage, cluster: int) -> str:
    """Return the label of a cluster in a Sankey diagram."""
    if cluster == REST:
        return "others"
    if stage.truth:
        return f"true {cluster}"
    return str(cluster)


def _choose_colour(view: RunView, stage: Stage, cluster: int) -> str:
    """Return the colour name of a cluster in a Sankey diagram."""
    if stage.truth:
        return truth_colour(cluster)
    if cluster == REST:
        return "@muted"
    return view.colours.of(cluster)


def _moves_table(stages: Sequence[Stage]) -> Table:
    """Return a table of the bands of a Sankey diagram, with their numbers of clients."""
    rows: list[list[str]] = []
    for link in _list_links(stages):
        stage = stages[link.stage]
        following = stages[link.stage + 1]
        source = f"{stage.name}: {_write_label(stage, link.source)}"
        target = f"{following.name}: {_write_label(following, link.target)}"
        rows.append([source, target, str(link.clients)])
    columns = ["from cluster", "to cluster", "clients"]
    return Table.first("Moves between clusters", columns, rows, limit=LISTED, noun="more band")
