"""A run as pictures and pages show it, and what stands beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from fedclade.report.colours import ClusterColours
from fedclade.report.queries import leaves_in_tree_order
from fedclade.report.score import Score
from fedclade.runs import Row, Run

# How a run ended for its clients: their scores, names and true clusters, and their order in
# pictures.

L = TypeVar("L")


@dataclass(frozen=True)
class Outcome:
    """How a run ended for its clients."""

    rows: Mapping[int, Row]
    """By client: its row of the last evaluation, of those that answered it."""
    known: Mapping[int, Row]
    """By client: its last row, of those that ever answered an evaluation."""
    everybody: frozenset[int]
    """All clients of the run, also those that never answered one."""
    score: Score

    @classmethod
    def of(cls, run: Run) -> Outcome:
        """Look it up in a run."""
        known = {row["client"]: row for row in sorted(run.client_rows, key=lambda row: row["round"])}
        last = max((row["round"] for row in known.values()), default=0)
        members = {client for node in run.tree.nodes for client in node.members}
        compared = {client for matrix in run.similarities for client in matrix.clients}
        rows = {client: row for client, row in known.items() if row["round"] == last}
        return cls(rows, known, frozenset(members | compared | set(known)), Score.of_run(run))

    @cached_property
    def truth(self) -> dict[int, int] | None:
        """The true cluster of each client for which it is known; None if there is none."""
        truth = {client: row["true_cluster"] for client, row in self.known.items()}
        return {client: cluster for client, cluster in truth.items() if cluster is not None} or None

    def name(self, client: int) -> str:
        """Return a client's name, or only its id if the name says nothing more, or is not known."""
        name = self.known[client]["name"] if client in self.known else f"client-{client}"
        return str(client) if name == f"client-{client}" else name

    def mean_score(self, members: Iterable[int]) -> float | None:
        """Return the mean score of the clients among some that have one; None if there is none."""
        rows = [self.rows[client] for client in members if client in self.rows]
        scores = self.score.by_client(rows).values()
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
        """Return the clusters of clients in this order: start, size, name."""
        return blocks([str(self.run.tree.leaf_of.get(client, "left")) for client in clients])

    def true_clusters(self, clients: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the same of true clusters; nothing of clients whose true cluster is not known."""
        return truth_blocks(clients, self.truth or {})


def blocks(labels: Sequence[L]) -> list[tuple[int, int, L]]:
    """Return the stretches of equal labels: start, size, label."""
    found: list[tuple[int, int, L]] = []
    start = 0
    for label, same in groupby(labels):
        size = len(list(same))
        found.append((start, size, label))
        start += size
    return found


def truth_blocks(clients: Sequence[int], truth: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return the stretches of clients of one true cluster: start, size, true cluster; nothing where it is not known."""
    found = blocks([truth.get(client) for client in clients])
    return [(start, size, label) for start, size, label in found if label is not None]


def composition(members: Iterable[int], truth: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the known true clusters among some clients and how many clients each has, the largest first."""
    counts = Counter(truth[client] for client in members if client in truth)
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def purity(members: Iterable[int], truth: Mapping[int, int]) -> float | None:
    """Return the share of clients in the most common true cluster among them; None if no true cluster is known."""
    inside = composition(members, truth)
    return inside[0][1] / sum(n for _, n in inside) if inside else None


@dataclass(frozen=True, eq=False)
class RunView:
    """A run to be shown, finished or as far as it has come."""

    run: Run
    against: Run | None = None
    """A run of the same clients that it is measured by."""
    against_label: str = ""
    newcomers: Mapping[str, Any] | None = None
    """What ``fedclade assign`` wrote of it, as in ``newcomers.json``."""
    folder: Path | None = None
    """Where the run is kept."""

    @cached_property
    def colours(self) -> ClusterColours:
        """The colours of the run's clusters."""
        return ClusterColours(self.run)

    @cached_property
    def outcome(self) -> Outcome:
        """How the run ended for its clients."""
        return Outcome.of(self.run)

    @property
    def rounds(self) -> int:
        """How many rounds there were."""
        return self.run.summary["rounds"]

    @property
    def model_round(self) -> int:
        """The round that the tree and its models are of."""
        return self.run.model_round

    @property
    def score(self) -> Score:
        """What clients are scored by."""
        return self.outcome.score

    @cached_property
    def scores(self) -> dict[int, float]:
        """The last score of each client that has one."""
        return self.score.by_client(self.outcome.rows.values())

    @cached_property
    def before(self) -> tuple[str, dict[int, float]] | None:
        """The name of what clients are compared with, and their scores there: the other run, or else the root's model.

        The root's model is that of the last evaluation in which the root served a client that another node serves now.
        """
        if self.against is not None:
            rows = Outcome.of(self.against).rows
            return self.against_label, self.score.by_client(rows.values())
        last = {client: row["served_by"] for client, row in self.outcome.rows.items() if "served_by" in row}
        rounds = [
            row["round"]
            for row in self.run.client_rows
            if row.get("served_by") == 0 and last.get(row["client"], 0) != 0
        ]
        if not rounds:
            return None
        at = max(rounds)
        rows = [row for row in self.run.client_rows if row["round"] == at and row["served_by"] == 0]
        return f"the root’s model of round {at}", self.score.by_client(rows)
