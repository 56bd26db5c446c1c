"""Views of a run for pictures and pages: final scores, order of clients, comparison run."""

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

L = TypeVar("L")


@dataclass(frozen=True)
class Outcome:
    """Final state of a run's clients: their scores, names and true clusters."""

    rows: Mapping[int, Row]
    """Row of the last evaluation of each client that replied to it."""
    known: Mapping[int, Row]
    """Last row of each client that replied to any evaluation."""
    everybody: frozenset[int]
    """All clients of the run, including clients that never replied to an evaluation."""
    score: Score

    @classmethod
    def of(cls, run: Run) -> Outcome:
        """Read the outcome of a run."""
        known = {
            row["client"]: row for row in sorted(run.client_rows, key=lambda row: row["round"])
        }
        last = max((row["round"] for row in known.values()), default=0)
        members = {client for node in run.tree.nodes for client in node.members}
        compared = {client for matrix in run.similarities for client in matrix.clients}
        rows = {client: row for client, row in known.items() if row["round"] == last}
        return cls(rows, known, frozenset(members | compared | set(known)), Score.of_run(run))

    @cached_property
    def truth(self) -> dict[int, int] | None:
        """True cluster of each client, if known; None if none is known."""
        truth = {client: row["true_cluster"] for client, row in self.known.items()}
        return {client: cluster for client, cluster in truth.items() if cluster is not None} or None

    def name(self, client: int) -> str:
        """Return a client's name, or its id if it has no name of its own."""
        name = self.known[client]["name"] if client in self.known else f"client-{client}"
        return str(client) if name == f"client-{client}" else name

    def mean_score(self, members: Iterable[int]) -> float | None:
        """Return the mean score of the members with a score; None if no member has one."""
        rows = [self.rows[client] for client in members if client in self.rows]
        scores = self.score.by_client(rows).values()
        return sum(scores) / len(scores) if scores else None


@dataclass(frozen=True)
class ClientOrder:
    """Order of clients in pictures of similarities: by leaf, then by true cluster, then by id.

    Clients that are in no leaf are first, and clients that have left the run last.
    """

    run: Run

    @cached_property
    def truth(self) -> dict[int, int] | None:
        """True cluster of each client; None if none is known."""
        return Outcome.of(self.run).truth

    @cached_property
    def _place(self) -> dict[int, int]:
        return {leaf.id: i for i, leaf in enumerate(leaves_in_tree_order(self.run.tree))}

    def rows(self, clients: Sequence[int]) -> list[int]:
        """Return the order of the rows of a matrix of some clients."""
        truth = self.truth or {}

        def key(row: int) -> tuple[int, int, int, int]:
            client = clients[row]
            true_cluster = truth.get(client, -1)
            cluster = self.run.tree.leaf_of.get(client)
            if cluster is None:
                return len(self._place), 0, true_cluster, client
            return self._place.get(cluster, -1), cluster, true_cluster, client

        return sorted(range(len(clients)), key=key)

    def clusters(self, clients: Sequence[int]) -> list[tuple[int, int, str]]:
        """Return the clusters of ordered clients: start, size, name."""
        return blocks([str(self.run.tree.leaf_of.get(client, "left")) for client in clients])

    def true_clusters(self, clients: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the known true clusters of ordered clients: start, size, number."""
        return truth_blocks(clients, self.truth or {})


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
    """Return the runs of clients with the same known true cluster: start, size, true cluster."""
    found = blocks([truth.get(client) for client in clients])
    return [(start, size, label) for start, size, label in found if label is not None]


def composition(members: Iterable[int], truth: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the known true clusters of some clients with their sizes, the largest first."""
    counts = Counter(truth[client] for client in members if client in truth)
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def purity(members: Iterable[int], truth: Mapping[int, int]) -> float | None:
    """Return the share of the most common true cluster; None if no true cluster is known."""
    inside = composition(members, truth)
    return inside[0][1] / sum(n for _, n in inside) if inside else None


@dataclass(frozen=True, eq=False)
class RunView:
    """A finished run, or one in progress, with the context of its report."""

    run: Run
    against: Run | None = None
    """Run of the same clients for comparison."""
    against_label: str = ""
    newcomers: Mapping[str, Any] | None = None
    """Content of ``newcomers.json``, as written by ``fedclade assign``."""
    folder: Path | None = None
    """Folder of the run."""

    @cached_property
    def colours(self) -> ClusterColours:
        """Colours of the run's clusters."""
        return ClusterColours(self.run)

    @cached_property
    def outcome(self) -> Outcome:
        """Final state of the run's clients."""
        return Outcome.of(self.run)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.run.summary["rounds"]

    @property
    def model_round(self) -> int:
        """Round of the stored tree and its models."""
        return self.run.model_round

    @property
    def score(self) -> Score:
        """Main metric."""
        return self.outcome.score

    @cached_property
    def scores(self) -> dict[int, float]:
        """Last score of each client that has one."""
        return self.score.by_client(self.outcome.rows.values())

    @cached_property
    def before(self) -> tuple[str, dict[int, float]] | None:
        """Label and scores for comparison: of the other run, or else of the root's model.

        The scores of the root's model are from the last evaluation in which the root's model was
        evaluated on a client that now has the model of another node. None without such an
        evaluation.
        """
        if self.against is not None:
            rows = Outcome.of(self.against).rows
            return self.against_label, self.score.by_client(rows.values())
        last_node: dict[int, int] = {}
        for client, row in self.outcome.rows.items():
            if "served_by" in row:
                last_node[client] = row["served_by"]
        by_root = [row for row in self.run.client_rows if row.get("served_by") == 0]
        rounds = [row["round"] for row in by_root if last_node.get(row["client"], 0) != 0]
        if not rounds:
            return None
        last_round = max(rounds)
        rows = [row for row in by_root if row["round"] == last_round]
        return f"the root’s model of round {last_round}", self.score.by_client(rows)
