"""What tables and figures look up in a run: scores, names, true clusters, the order of the leaves, courses."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import TypeVar

import numpy as np

from fedclade.core import (
    Checked,
    Clustered,
    ClusterSplit,
    Disconnected,
    Joined,
    Left,
    LeftOut,
    Node,
    ParameterTree,
    Reconnected,
    Refused,
    Regrouped,
    Rejected,
    Retried,
)
from fedclade.runs import Row, Run, SimilarityMatrix, event_of
from fedclade.tasks import perplexity

L = TypeVar("L")

SHOWN = (
    *(ClusterSplit, Rejected, Clustered, Checked, Regrouped, Joined, Left, Disconnected, Reconnected),
    *(LeftOut, Refused, Retried),
)
"""Events that tables and figures show."""


@dataclass(frozen=True)
class Series:
    """How a number of one cluster went over the rounds.

    Parameters
    ----------
    rounds
        Ascending.
    values
        One for each round.
    """

    rounds: tuple[int, ...]
    values: tuple[float, ...]


def heading(run: Run) -> str:
    """Return what a run is, in one line: ``cfl on digits, 20 clients, shift label_swap, 4 clusters, seed 0``."""
    return f"{run.summary['algorithm']} on {run.summary['data']}, seed {run.summary['seed']}"


def events_of(run: Run, *kinds: str) -> list[Row]:
    """Return the events of some kinds, in order: those with all that a table or a figure tells of them.

    A method of one's own may have events of the same names, and tell less of them.
    """
    types = {each.kind: each for each in SHOWN if each.kind in kinds}
    return [row for row in run.events if row["kind"] in types and event_of(row, types[row["kind"]]) is not None]


def is_language(run: Run) -> bool:
    """Tell whether the model predicts words, so that perplexity says more than accuracy."""
    return "perplexity" in run.summary


def score(row: Row, language: bool) -> float:
    """Return a client's accuracy in [0, 1] from its row of ``clients.parquet``, or perplexity for language data."""
    return perplexity(row["loss"]) if language else row["accuracy"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended for its clients.

    Parameters
    ----------
    rows
        Each client's row of the last evaluation, by client id: of those that answered it.
    known
        The last row of each client that ever answered one.
    everybody
        All clients of the run, also those that never answered one.
    language
        Whether scores are perplexities.
    """

    rows: Mapping[int, Row]
    known: Mapping[int, Row]
    everybody: frozenset[int]
    language: bool

    @classmethod
    def of(cls, run: Run) -> Outcome:
        """Look it up in a run."""
        known = {row["client"]: row for row in sorted(run.clients, key=lambda row: row["round"])}
        last = max((row["round"] for row in known.values()), default=0)
        members = {client for node in run.tree.nodes for client in node.members}
        compared = {client for matrix in run.similarities for client in matrix.clients}
        rows = {client: row for client, row in known.items() if row["round"] == last}
        return cls(rows, known, frozenset(members | compared | set(known)), is_language(run))

    @cached_property
    def truth(self) -> dict[int, int] | None:
        """The true cluster of each client by id, of those of whom it is known; None if it is known of nobody."""
        truth = {client: row["true_cluster"] for client, row in self.known.items()}
        return {client: cluster for client, cluster in truth.items() if cluster is not None} or None

    def name(self, client: int) -> str:
        """Return what to call a client: its name, or only its id if the name says nothing more, or is not known."""
        name = self.known[client]["name"] if client in self.known else f"client-{client}"
        return str(client) if name == f"client-{client}" else name

    def mean_score(self, members: Iterable[int]) -> float | None:
        """Return the mean accuracy of some clients, or their mean perplexity for language data.

        Those without a row are left out; None if nobody has one.
        """
        scores = [score(self.rows[client], self.language) for client in members if client in self.rows]
        return sum(scores) / len(scores) if scores else None


@dataclass(frozen=True)
class ClientOrder:
    """The order of clients in pictures of similarities: by leaf, then by true cluster, then by id.

    Clients that no leaf holds stand first, those that have left the run last.
    """

    run: Run

    @cached_property
    def truth(self) -> dict[int, int] | None:
        """The true cluster of each client; None if it is not known."""
        return Outcome.of(self.run).truth

    @cached_property
    def _place(self) -> dict[int, int]:
        return {leaf.id: i for i, leaf in enumerate(leaves_in_tree_order(self.run.tree))}

    def rows(self, clients: Sequence[int]) -> list[int]:
        """Return the rows of a matrix of some clients in this order."""

        def key(row: int) -> tuple[int, int, int, int]:
            client, truth = clients[row], self.truth or {}
            if (cluster := self.run.tree.leaf_of.get(client)) is None:
                return len(self._place), 0, truth.get(client, -1), client
            return self._place.get(cluster, -1), cluster, truth.get(client, -1), client

        return sorted(range(len(clients)), key=key)

    def clusters(self, clients: Sequence[int]) -> list[tuple[int, int, str]]:
        """Return where each cluster begins among clients in this order, how many there are, and what to call it."""
        names = (str(self.run.tree.leaf_of.get(client, "left")) for client in clients)
        return blocks(list(names))

    def true_clusters(self, clients: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the same of true clusters; nothing of clients whose true cluster is not known."""
        return truth_blocks(clients, self.truth or {})


def largest_similarity(matrices: Sequence[SimilarityMatrix]) -> float:
    """Return the largest similarity of two different clients, up to the next tenth: the end of a colour scale."""
    pairs = [np.abs(m.alpha[~np.eye(len(m.clients), dtype=bool)]) for m in matrices]
    largest = max((float(each[np.isfinite(each)].max(initial=0.0)) for each in pairs), default=0.0)
    return min(1.0, math.ceil(10 * largest) / 10) or 0.1


def last_criteria(run: Run) -> dict[int, Row]:
    """Return the last row of ``clusters.parquet`` of every node that had one, by node."""
    return {row["node"]: row for row in run.clusters}


def composition(members: Iterable[int], truth: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the true clusters among some clients and how many clients each has, the largest first.

    Clients whose true cluster is not known are left out.
    """
    counts = Counter(truth[client] for client in members if client in truth)
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def purity(members: Iterable[int], truth: Mapping[int, int]) -> float | None:
    """Return the share of clients in the most common true cluster among them; None if no true cluster is known."""
    inside = composition(members, truth)
    return inside[0][1] / sum(n for _, n in inside) if inside else None


def leaves_in_tree_order(tree: ParameterTree) -> tuple[Node, ...]:
    """Return the leaves depth first, so that clusters that parted late stand side by side."""
    leaves: list[Node] = []
    pending = [tree.nodes[0]]
    while pending:
        node = pending.pop()
        children = tree.children(node.id)
        pending += reversed(children)
        if not children:
            leaves.append(node)
    return tuple(leaves)


def splits_by_round(tree: ParameterTree) -> dict[int, list[int]]:
    """Return the nodes that were split, by round. A tree that starts out with many clusters was not split into them."""
    splits: dict[int, list[int]] = defaultdict(list)
    for node in tree.nodes:
        if node.split_in:
            splits[node.split_in].append(node.id)
    return dict(sorted(splits.items()))


def clustering_step(run: Run) -> Row | None:
    """Return the event of the last step of hierarchical clustering; None if there was none."""
    steps = events_of(run, "clustered")
    return steps[-1] if steps else None


def children_of_split(run: Run, event: Row) -> dict[int, int]:
    """Return the node that each client of a node went to in an event; the node itself without a split.

    Children that came into being before any round trained are those of a clustering at the start of the first. Clients
    that have left the run since are not in it.
    """
    node = run.tree.nodes[event["node"]]
    born = [child for child in run.tree.children(node.id) if child.born in (event["round"], 0)]
    return {client: part.id for part in (node, *born) for client in part.members}


def blocks(labels: Sequence[L]) -> list[tuple[int, int, L]]:
    """Return the runs of equal labels: start, size, label."""
    found: list[tuple[int, int, L]] = []
    start = 0
    for label, same in groupby(labels):
        size = len(list(same))
        found.append((start, size, label))
        start += size
    return found


def truth_blocks(clients: Sequence[int], truth: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return the runs of clients of one true cluster: start, size, true cluster; nothing where it is not known."""
    found = blocks([truth.get(client) for client in clients])
    return [(start, size, label) for start, size, label in found if label is not None]


def score_courses(run: Run) -> dict[int, Series]:
    """Return the mean score of the clients in each cluster over the rounds, by node.

    The evaluation after a split counts for the cluster that was split: its parts still have its model.
    """
    language = is_language(run)
    scores: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in run.clients:
        node = run.tree.nodes[row["cluster"]]
        while node.born >= row["round"] and node.parent is not None:
            node = run.tree.nodes[node.parent]
        scores[node.id][row["round"]].append(score(row, language))
    return {
        node: Series(tuple(by_round), tuple(sum(values) / len(values) for values in by_round.values()))
        for node, by_round in sorted(scores.items())
    }


def joined_courses(tree: ParameterTree, courses: Mapping[int, Series]) -> dict[int, Series]:
    """Return courses that each go on from the last point of the nearest node above that has one."""
    joined: dict[int, Series] = {}
    for node, course in courses.items():
        above = (ancestor.id for ancestor in reversed(tree.above(node)[:-1]))
        before = next((courses[ancestor] for ancestor in above if ancestor in courses), None)
        if before is not None and before.rounds[-1] < course.rounds[0]:  # not so for clients that no leaf holds yet
            course = Series((before.rounds[-1], *course.rounds), (before.values[-1], *course.values))
        joined[node] = course
    return joined


def criterion_courses(run: Run, column: str) -> dict[int, Series]:
    """Return one column of ``clusters.parquet`` over the rounds, by node, wherever there is a number."""
    numbers: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for row in run.clusters:
        if (value := row.get(column)) is not None:
            numbers[row["node"]].append((row["round"], value))
    return {
        node: Series(tuple(number for number, _ in pairs), tuple(value for _, value in pairs))
        for node, pairs in numbers.items()
    }


def thresholds_of_norms(run: Run) -> tuple[float | None, float | dict[int, Series] | None]:
    """Return CFL's ε₂ (eq. 33) and ε₁ (eq. 32), each None for another algorithm, ε₁ also where splits have dates.

    With ``eps1 = "auto"`` that is a tenth of the largest mean norm in a cluster's lineage so far, by node.
    """
    settings = run.config.get("algorithm", {})
    eps2, eps1 = (settings.get(name) for name in ("eps2", "eps1"))
    eps1 = None if settings.get("split_rounds") else eps1
    if eps1 != "auto":
        return eps2, eps1
    found: dict[int, Series] = {}
    means, peaks = criterion_courses(run, "mean_norm"), dict[int | None, float]({None: 0.0})
    for node in run.tree.nodes:  # parents come before their children
        course = means.get(node.id, Series((), ()))
        highest = tuple(accumulate(course.values, max, initial=peaks[node.parent]))
        peaks[node.id] = highest[-1]
        if course.rounds:
            found[node.id] = Series(course.rounds, tuple(peak / 10 for peak in highest[1:]))
    return eps2, found


def mean_course(courses: Iterable[Series]) -> Series:
    """Return the mean over the clusters that there were in each round."""
    values: dict[int, list[float]] = defaultdict(list)
    for course in courses:
        for number, value in zip(course.rounds, course.values, strict=True):
            values[number].append(value)
    rounds = tuple(sorted(values))
    return Series(rounds, tuple(sum(values[number]) / len(values[number]) for number in rounds))
