"""Picture of a parameter tree: a bar for each cluster, from its first round to its split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from statistics import fmean

from fedclade.core import Node
from fedclade.report import queries, run_view
from fedclade.report.formats import NONE, count, percent, shortened
from fedclade.report.page.section import Section
from fedclade.report.queries import Series
from fedclade.report.run_view import RunView
from fedclade.report.tables import criterion_text

DRAWN = 40
"""Largest number of current clusters that are drawn; the smallest clusters are left out."""

ROW = 46
"""Height of a row of the picture, which contains one current cluster, in pixels."""

HEAD = 30
"""Height above the first row in pixels."""

LEFT = 6.0
RIGHT = 98.5
"""Start of the first round and end of the last round, in per cent of the width."""

THIN = 4.0
THICK = 18.0
"""Thickness in pixels of a bar without clients and of a bar with all clients.

In between, the thickness grows with the square root of the share of the clients.
"""

ROOM = 14.0
"""Shortest bar with a full label, in per cent of the width; leaves always have a full label."""

MEMBERS = 60
"""Largest number of a cluster's members that are named."""

TICKS = 6
"""Approximate number of rounds that are named on the axis."""


@dataclass(frozen=True)
class Share:
    """Number of a cluster's clients that belong to one true cluster."""

    label: int
    """Number of the true cluster."""
    inside: int
    """Number of the cluster's clients in the true cluster."""
    overall: int
    """Number of all clients in the true cluster."""
    width: float
    """Share of the cluster's clients that are in the true cluster, in per cent."""


@dataclass(frozen=True)
class Branch:
    """Cluster in the picture of a parameter tree: its bar, and the details shown on selection."""

    id: int
    parent: int | None
    level: int
    start: float
    """Left end of the bar, in per cent of the width."""
    end: float
    """Right end of the bar, in per cent of the width."""
    y: float
    """Vertical middle of the bar, in pixels."""
    thickness: float
    """Thickness of the bar, in pixels."""
    colour: str
    label: str
    """Text after the cluster's id; empty if there is not enough space."""
    side: str
    """Part of the bar at which the label is anchored: ``start``, ``end`` or ``middle``."""
    label_y: float
    """Baseline of the label, in pixels."""
    spoken: str
    """Text for screen readers."""
    facts: Sequence[tuple[str, str]]
    """Names and values of the cluster's properties."""
    members: str
    truth: Sequence[Share]
    """True clusters of the members; empty if no true cluster is known."""
    is_leaf: bool


@dataclass(frozen=True)
class TreePicture:
    """Layout of the picture of a parameter tree."""

    branches: Sequence[Branch]
    """Bars of the clusters, parents before children."""
    height: float
    """Height in pixels."""
    ticks: Sequence[tuple[str, float]]
    """Named rounds on the axis, with their positions in per cent of the width."""
    note: str
    """Remark on clusters that are not drawn."""


def tree_section(view: RunView) -> Section:
    """Return the page section with the parameter tree of a run."""
    picture = tree_picture(view)
    caption = (
        "All clusters of the run, each as a bar from its first round to its split; a thicker bar "
        "has more clients. Select one with a click, or with Tab and the arrow keys, to see its "
        "members and the criteria of its split. "
    )
    # The summary of a run in progress has no stability.
    clusters = view.run.summary.get("clusters", {})
    stable = queries.describe_stable_groups(clusters)
    if stable is not None:
        caption = f"{stable} {caption}"
    return Section("tree", "Parameter tree", caption + picture.note, trees={"": picture})


def tree_picture(view: RunView) -> TreePicture:
    """Compute the layout of the picture of a run's parameter tree."""
    layout = _Layout(view)
    n_leaves = len(view.colours.leaves)
    n_empty = sum(not leaf.members for leaf in view.run.tree.leaves)
    sentences: list[str] = []
    if n_leaves > DRAWN:
        sentences.append(f"The {DRAWN} largest of {n_leaves:,} clusters are drawn.")
    if n_empty:
        sentences.append(f"{count(n_empty, 'cluster')} without members not drawn.")
    return TreePicture(
        branches=[layout.place_branch(node) for node in layout.nodes],
        height=HEAD + ROW * max(len(layout.leaves), 1) + 8,
        ticks=layout.ticks,
        note=" ".join(sentences),
    )


@dataclass(frozen=True)
class _Layout:
    """Positions of clusters in the picture of a parameter tree.

    Each leaf has a row; every other cluster is at the mean height of its children.
    """

    view: RunView

    @cached_property
    def leaves(self) -> list[int]:
        """Ids of the leaves that are drawn (the largest ones), in the order of the tree."""
        nodes = self.view.run.tree.nodes
        leaves = self.view.colours.leaves
        largest = sorted(leaves, key=lambda leaf: -len(nodes[leaf].members))[:DRAWN]
        return [leaf for leaf in leaves if leaf in largest]

    @cached_property
    def nodes(self) -> list[Node]:
        """Clusters that are drawn, parents before children."""
        tree = self.view.run.tree
        drawn = {0}
        for leaf in self.leaves:
            drawn.update(node.id for node in tree.above(leaf))
        return [node for node in tree.nodes if node.id in drawn]

    @cached_property
    def y(self) -> dict[int, float]:
        """Vertical position of each drawn cluster in pixels, by node id."""
        places = {leaf: HEAD + ROW * (i + 0.5) for i, leaf in enumerate(self.leaves)}
        children_places: dict[int, list[float]] = {}
        for node in reversed(self.nodes):
            if node.id not in places:
                places[node.id] = fmean(children_places.get(node.id, [HEAD + ROW / 2]))
            if node.parent is not None:
                children_places.setdefault(node.parent, []).append(places[node.id])
        return places

    @cached_property
    def scores(self) -> dict[int, Series]:
        """Mean score of each cluster over the rounds, by node id."""
        return queries.score_series(self.view.run)

    @cached_property
    def children_born(self) -> dict[int | None, list[int]]:
        """Rounds in which a cluster's children were created, by the id of the cluster.

        Clusters without children are left out. The key None has the round of the root.
        """
        born: dict[int | None, list[int]] = {}
        for node in self.view.run.tree.nodes:
            born.setdefault(node.parent, []).append(node.born)
        return born

    def scale_x(self, round_number: float) -> float:
        """Return the horizontal position of the end of a round, in per cent of the width."""
        return LEFT + (RIGHT - LEFT) * round_number / max(1, self.view.model_round)

    @property
    def ticks(self) -> list[tuple[str, float]]:
        """Rounds that are named on the axis, with their positions in per cent of the width."""
        rounds = self.view.model_round
        step = _round_up_step(rounds / TICKS)
        return [(str(i), self.scale_x(i)) for i in range(step, rounds + 1, step)]

    def place_branch(self, node: Node) -> Branch:
        """Return the bar of a cluster in the picture, with the details shown on selection."""
        tree = self.view.run.tree
        is_leaf = node.id not in self.children_born
        is_root = node.parent is None
        # Clusters that replace all earlier ones train in the round of that decision, so a cluster
        # ends when its first child is created.
        if is_leaf:
            last = self.view.model_round
        else:
            last = min(self.children_born[node.id])
        if is_root:
            start = 0.6
        else:
            start = self.scale_x(node.born)
        end = max(start + 0.6, self.scale_x(last))
        share = len(node.members) / max(1, len(tree.nodes[0].members))
        is_roomy = is_leaf or end - start >= ROOM
        side = "middle"
        if is_roomy:
            side = "start" if start < 70 else "end"
        facts = self._list_facts(node, is_leaf=is_leaf)
        spoken_facts = ", ".join(f"{name} {value}" for name, value in facts if value != NONE)
        names = [self.view.outcome.name(client) for client in node.members]
        label = ""
        if is_roomy:
            label = f" · {count(len(node.members), 'client')}"
        kind = "root" if is_root else "cluster"
        y = self.y[node.id]
        thickness = round(THIN + (THICK - THIN) * sqrt(min(1.0, share)), 1)
        # A label that ends with a short bar reaches to the left of it. If the bar lies below its
        # parent's, the label above it would cover the parent's bar.
        is_under_parent = node.parent is not None and y > self.y[node.parent]
        if is_leaf and not (side == "end" and is_under_parent):
            label_y = y - thickness / 2 - 5
        else:
            label_y = y + thickness / 2 + 14
        return Branch(
            id=node.id,
            parent=node.parent,
            level=len(tree.above(node.id)),
            start=round(start, 2),
            end=round(end, 2),
            y=y,
            thickness=thickness,
            colour=self.view.colours.of(node.id),
            label=label,
            side=side,
            label_y=round(label_y, 1),
            spoken=f"{kind} {node.id}: {spoken_facts}",
            facts=facts,
            members=shortened(names, MEMBERS),
            truth=self._list_true_clusters(node),
            is_leaf=is_leaf,
        )

    def _list_facts(self, node: Node, *, is_leaf: bool) -> list[tuple[str, str]]:
        """Return a cluster's properties: size, rounds, score, purity, and criteria of its split."""
        last = self.view.model_round
        if not is_leaf and node.split_in is not None:
            last = node.split_in
        lifetime = NONE
        if last > node.born:
            lifetime = f"{node.born + 1} to {last}"
        facts = [("clients", f"{len(node.members):,}"), ("rounds", lifetime)]
        if node.id in self.scores:
            score = self.view.score
            when = "" if is_leaf else " before its split"
            facts.append((f"{score.label}{when}", score.text(self.scores[node.id].values[-1])))
        purity = run_view.purity(node.members, self.view.outcome.truth or {})
        if purity is not None:
            facts.append(("purity", percent(purity, 0)))
        for criterion in node.criteria.items():
            name, value = criterion_text(criterion)
            facts.append((f"{name} at its split", value))
        return facts

    def _list_true_clusters(self, node: Node) -> list[Share]:
        """Return the true clusters of a cluster's members, the largest first; empty if unknown."""
        truth = self.view.outcome.truth
        if truth is None:
            return []
        overall = dict(run_view.composition(truth, truth))
        inside = run_view.composition(node.members, truth)
        n_known = sum(n for _, n in inside)
        return [
            Share(label, n, overall[label], width=round(100 * n / n_known, 1))
            for label, n in inside
        ]


def _round_up_step(step: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least ``step``, for axis ticks.

    >>> _round_up_step(0.3), _round_up_step(6.7), _round_up_step(41)
    (1, 10, 50)
    """
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= step:
                return factor * power
        power *= 10
