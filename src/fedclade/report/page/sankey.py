"""Which clients moved when, as a Sankey diagram: the clients of each cluster, and where they went, over the rounds."""

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
"""So many states are drawn: the first, the last, and changes spread between them."""

WIDEST = 12
"""So many clusters stand in a column; the smaller ones are put together."""

LISTED = 60
"""So many bands are listed."""

REST = -1
"""Stands for the smaller clusters, put together."""

GAP = 0.04
"""Between two clusters of a column, as a share of its height; all gaps together take at most a third of it."""


@dataclass(frozen=True)
class Stage:
    """The cluster of each client at some time, such as ``round 12``, or its true one."""

    name: str
    place: Mapping[int, int]
    truth: bool = False


def sankey_section(view: RunView) -> Section | None:
    """Return how clients moved between clusters; None for a run that never had two clusters."""
    stages, left_out = _stages(view)
    if len(stages) < 2 or max(len(set(stage.place.values())) for stage in stages if not stage.truth) < 2:
        return None
    drawn = [_gathered(stage) for stage in stages]
    caption = (
        "The clients of each cluster, from left to right over the rounds in which somebody moved; the height of a band "
        "is the number of clients in it. "
    )
    caption += "At the right, their true clusters. " if stages[-1].truth else ""
    caption += f"{count(left_out, 'further round')} with moves not drawn. " if left_out else ""
    gathered = any(REST in stage.place.values() for stage in drawn)
    caption += f"Beyond the {WIDEST - 1} largest of a column, clusters are put together." if gathered else ""
    figure = _figure(view, drawn)
    return Section("flow", "Who moved when", caption.strip(), {"": figure}, tables=[_table(drawn)])


def _stages(view: RunView) -> tuple[list[Stage], int]:
    """Return the states to draw, and how many changes were left out between them."""
    places: dict[int, dict[int, int]] = defaultdict(dict)
    for row in view.run.client_rows:
        places[row["round"]][row["client"]] = row["cluster"]
    changes: list[int] = []
    before: Mapping[int, int] = {}
    for number in sorted(places):
        if any(before.get(client) != cluster for client, cluster in places[number].items()):
            changes.append(number)
        before = places[number]
    kept = _spread(changes, STAGES)
    stages = [Stage(f"round {number}", places[number]) for number in kept]
    if (truth := view.outcome.truth) is not None:
        known = {client: truth[client] for client in view.outcome.rows if client in truth}
        stages.append(Stage("truth", known, truth=True))
    return stages, len(changes) - len(kept)


def _spread(numbers: Sequence[int], limit: int) -> list[int]:
    """Return at most so many of some numbers, the first and the last among them."""
    if len(numbers) <= limit:
        return list(numbers)
    return [numbers[round(i * (len(numbers) - 1) / (limit - 1))] for i in range(limit)]


def _gathered(stage: Stage) -> Stage:
    """Return a stage of at most ``WIDEST`` clusters."""
    sizes = Counter(stage.place.values())
    if len(sizes) <= WIDEST:
        return stage
    kept = {cluster for cluster, _ in sizes.most_common(WIDEST - 1)}
    place = {client: cluster if cluster in kept else REST for client, cluster in stage.place.items()}
    return Stage(stage.name, place, stage.truth)


def _links(stages: Sequence[Stage]) -> list[tuple[int, int, int, int]]:
    """Return for each stage but the last: the stage, a cluster, one of the next, and how many clients went there."""
    links: list[tuple[int, int, int, int]] = []
    for i, (stage, after) in enumerate(pairwise(stages)):
        both = [client for client in stage.place if client in after.place]
        moved = Counter((stage.place[client], after.place[client]) for client in both)
        links += [(i, a, b, n) for (a, b), n in sorted(moved.items())]
    return links


def _figure(view: RunView, stages: Sequence[Stage]) -> Figure:
    columns = [_ordered(view, stage) for stage in stages]
    nodes = [(i, cluster) for i, column in enumerate(columns) for cluster in column]
    index = {node: n for n, node in enumerate(nodes)}
    links = _links(stages)
    places = [_placed(stage, column) for stage, column in zip(stages, columns, strict=True)]
    last = len(stages) - 1
    sankey = {
        "type": "sankey",
        "arrangement": "fixed",
        "node": {
            "label": [_label(stages[i], cluster) for i, cluster in nodes],
            "color": [_colour(view, stages[i], cluster) for i, cluster in nodes],
            "x": [0.001 + 0.998 * i / last for i, _ in nodes],
            "y": [places[i][cluster] for i, cluster in nodes],
            "thickness": 14,
            "pad": 8,
            "line": {"width": 0},
            "hovertemplate": "%{label}<br>%{value:d} clients<extra></extra>",
        },
        "link": {
            "source": [index[i, a] for i, a, _, _ in links],
            "target": [index[i + 1, b] for i, _, b, _ in links],
            "value": [n for *_, n in links],
            "color": [f"{_colour(view, stages[i], a)}/0.28" for i, a, _, _ in links],
            "hovertemplate": "%{value:d} clients<br>from %{source.label}<br>to %{target.label}<extra></extra>",
        },
    }
    anchors = ["left", *["center"] * (last - 1), "right"]
    heads = [
        note(stage.name, i / last, 1.0, yanchor="bottom", yshift=6, xanchor=anchor)
        for i, (stage, anchor) in enumerate(zip(stages, anchors, strict=True))
    ]
    return figure([sankey], 400, annotations=heads, margin={"l": 8, "r": 8, "t": 32, "b": 12})


def _ordered(view: RunView, stage: Stage) -> list[int]:
    """Return the clusters of a stage from top to bottom: as in the tree, so that few bands cross."""
    leaves = view.colours.leaves
    rank = {leaf: place for place, leaf in enumerate(leaves)}
    leaf_of = view.run.tree.leaf_of

    def mean_place(cluster: int) -> tuple[float, int]:
        members = [client for client, own in stage.place.items() if own == cluster]
        ranks = [rank.get(leaf_of.get(client, 0), 0) for client in members]
        return sum(ranks) / len(ranks), cluster

    return sorted(set(stage.place.values()), key=mean_place)


def _placed(stage: Stage, column: Sequence[int]) -> dict[int, float]:
    """Return where the middle of each cluster lies in its column, from 0 at the top to 1."""
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


def _label(stage: Stage, cluster: int) -> str:
    if cluster == REST:
        return "others"
    return f"true {cluster}" if stage.truth else str(cluster)


def _colour(view: RunView, stage: Stage, cluster: int) -> str:
    return truth_colour(cluster) if stage.truth else "@muted" if cluster == REST else view.colours.of(cluster)


def _table(stages: Sequence[Stage]) -> Table:
    rows = [
        [f"{stages[i].name}: {_label(stages[i], a)}", f"{stages[i + 1].name}: {_label(stages[i + 1], b)}", str(n)]
        for i, a, b, n in _links(stages)
    ]
    return Table.first("From where to where", ["from", "to", "clients"], rows, LISTED, "more band")
