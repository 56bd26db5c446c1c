"""The parameter tree as a picture: a bar for each cluster, from the round it came into being to that of its split."""

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
"""So many current clusters are drawn, the largest; of the rest only the number is shown."""

ROW = 46
"""Pixels from one cluster to the next."""

HEAD = 30
"""Pixels above the first."""

LEFT, RIGHT = 6.0, 98.5
"""Where the first round begins and the last ends, in per cent of the width; the root begins at the edge."""

THIN, THICK = 4.0, 18.0
"""Pixels of a bar for no clients, and for all of them; in between its area grows with their number."""

ROOM = 14.0
"""Where a bar is shorter, in per cent of the width, only the id of a cluster stands at it, unless it is a leaf."""

MEMBERS = 60
"""So many members are shown by name."""

TICKS = 6
"""About so many rounds are named on the axis."""


@dataclass(frozen=True)
class Share:
    """A true cluster within a found one."""

    label: int
    inside: int
    """How many of the cluster's clients are in it."""
    overall: int
    """How many of all clients are."""
    width: float
    """Its share of the cluster, in per cent."""


@dataclass(frozen=True)
class Branch:
    """A cluster in the picture, and what is shown of it when it is chosen."""

    id: int
    parent: int | None
    level: int
    start: float
    """Of its bar, in per cent of the width, as is its end."""
    end: float
    y: float
    """Of its bar, in pixels, as is its thickness."""
    thickness: float
    colour: str
    label: str
    """The rest of its name, after the id, if there is room for it."""
    side: str
    """Whether its name begins at the bar's ``start``, ends at its ``end``, or stands in the ``middle``."""
    spoken: str
    """What a screen reader says."""
    facts: Sequence[tuple[str, str]]
    """Names and values."""
    members: str
    truth: Sequence[Share]
    """The true clusters of its members; empty where they are not known."""
    is_leaf: bool


@dataclass(frozen=True)
class TreePicture:
    """A parameter tree, laid out."""

    branches: Sequence[Branch]
    """Parents before children."""
    height: float
    """In pixels."""
    ticks: Sequence[tuple[str, float]]
    """Rounds on the axis, with their place in per cent of the width."""
    note: str
    """What is not drawn."""


def tree_section(view: RunView) -> Section:
    """Return the parameter tree of a run."""
    picture = tree_picture(view)
    caption = (
        "Every cluster there has been, as a bar from its first round to its split, the thicker the more clients it "
        "has. Choose one with a click, or with Tab and the arrow keys, to see who is in it and why it was split. "
    )
    return Section("tree", "Parameter tree", caption + picture.note, trees={"": picture})


def tree_picture(view: RunView) -> TreePicture:
    """Lay the tree of a run out."""
    layout = _Layout(view)
    leaves, empty = len(view.colours.leaves), sum(not leaf.members for leaf in view.run.tree.leaves)
    note = f"Drawn are the {DRAWN} largest of {leaves:,} clusters. " if leaves > DRAWN else ""
    note += f"{count(empty, 'cluster')} without members not drawn." if empty else ""
    height = HEAD + ROW * max(len(layout.leaves), 1) + 8
    return TreePicture([layout.branch(node) for node in layout.nodes], height, layout.ticks, note.strip())


@dataclass(frozen=True)
class _Layout:
    """Where each cluster lies: leaves in rows, every other cluster in the middle of its parts."""

    view: RunView

    @cached_property
    def leaves(self) -> list[int]:
        """The largest leaves, in the order of the tree."""
        nodes, leaves = self.view.run.tree.nodes, self.view.colours.leaves
        largest = sorted(leaves, key=lambda leaf: -len(nodes[leaf].members))[:DRAWN]
        return [leaf for leaf in leaves if leaf in largest]

    @cached_property
    def nodes(self) -> list[Node]:
        """The drawn clusters, parents before children."""
        tree = self.view.run.tree
        drawn = {node.id for leaf in self.leaves for node in tree.above(leaf)} | {0}
        return [node for node in tree.nodes if node.id in drawn]

    @cached_property
    def y(self) -> dict[int, float]:
        places = {leaf: HEAD + ROW * (i + 0.5) for i, leaf in enumerate(self.leaves)}
        below: dict[int, list[float]] = {}
        for node in reversed(self.nodes):
            places.setdefault(node.id, fmean(below.get(node.id, [HEAD + ROW / 2])))
            if node.parent is not None:
                below.setdefault(node.parent, []).append(places[node.id])
        return places

    @cached_property
    def scores(self) -> dict[int, Series]:
        return queries.score_series(self.view.run)

    @cached_property
    def born(self) -> dict[int | None, list[int]]:
        """When the parts of each cluster came into being that was split."""
        born: dict[int | None, list[int]] = {}
        for node in self.view.run.tree.nodes:
            born.setdefault(node.parent, []).append(node.born)
        return born

    def x(self, number: float) -> float:
        """Return where a round ends, in per cent of the width."""
        return LEFT + (RIGHT - LEFT) * number / self.view.model_round

    @property
    def ticks(self) -> list[tuple[str, float]]:
        rounds = self.view.model_round
        step = _nice(rounds / TICKS)
        return [(str(number), self.x(number)) for number in range(step, rounds + 1, step)]

    def branch(self, node: Node) -> Branch:
        """Return one cluster's bar, and what is shown of it."""
        is_leaf = node.id not in self.born
        # Clusters that are made anew train in the round in which that is decided, the one that ends their root.
        last = self.view.model_round if is_leaf else min(self.born[node.id])
        start = 0.6 if node.parent is None else self.x(node.born)
        share = len(node.members) / max(1, len(self.view.run.tree.nodes[0].members))
        end = max(start + 0.6, self.x(last))
        roomy = is_leaf or end - start >= ROOM
        shown = self._facts(node, is_leaf=is_leaf)
        return Branch(
            id=node.id,
            parent=node.parent,
            level=len(self.view.run.tree.above(node.id)),
            start=round(start, 2),
            end=round(end, 2),
            y=self.y[node.id],
            thickness=round(THIN + (THICK - THIN) * sqrt(min(1.0, share)), 1),
            colour=self.view.colours.of(node.id),
            label=f" · {count(len(node.members), 'client')}" if roomy else "",
            side="middle" if not roomy else "start" if start < 70 else "end",
            spoken=f"{'root' if node.parent is None else 'cluster'} {node.id}: "
            + ", ".join(f"{name} {value}" for name, value in shown if value != NONE),
            facts=shown,
            members=shortened([self.view.outcome.name(client) for client in node.members], MEMBERS),
            truth=self._truth(node),
            is_leaf=is_leaf,
        )

    def _facts(self, node: Node, *, is_leaf: bool) -> list[tuple[str, str]]:
        """Return what a cluster is: size, rounds, score, purity, and the numbers that its split was decided by."""
        last = self.view.model_round if is_leaf or node.split_in is None else node.split_in
        lifetime = f"{node.born + 1} to {last}" if last > node.born else NONE
        shown = [("clients", f"{len(node.members):,}"), ("rounds", lifetime)]
        if node.id in self.scores:
            when = "" if is_leaf else " before its split"
            shown.append((f"{self.view.score.label}{when}", self.view.score.text(self.scores[node.id].values[-1])))
        truth = self.view.outcome.truth
        if truth is not None and (purity := run_view.purity(node.members, truth)) is not None:
            shown.append(("purity", percent(purity, 0)))
        shown += [(f"{name} at its split", value) for name, value in map(criterion_text, node.criteria.items())]
        return shown

    def _truth(self, node: Node) -> list[Share]:
        truth = self.view.outcome.truth
        if truth is None:
            return []
        overall, inside = dict(run_view.composition(truth, truth)), run_view.composition(node.members, truth)
        known = sum(n for _, n in inside)
        return [Share(label, n, overall[label], round(100 * n / known, 1)) for label, n in inside]


def _nice(step: float) -> int:
    """Return the first of 1, 2, 5, 10, 20, 50, ... that is at least so large.

    >>> _nice(0.3), _nice(6.7), _nice(41)
    (1, 10, 50)
    """
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= step:
                return factor * power
        power *= 10
