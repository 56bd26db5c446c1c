"""Views of a run for pictures and pages: final scores, order of clients, comparison with a run."""

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
    """Row of each client that replied to the run's last evaluation, by client id."""
    known: Mapping[int, Row]
    """Last row of each client that replied to any evaluation of the run."""
    score: Score

    @classmethod
    def of(cls, run: Run) -> Outcome:
        """Return the final state of the clients of a run."""
        known = {
            row["client"]: row for row in sorted(run.client_rows, key=lambda row: row["round"])
        }
        last = max((row["round"] for row in known.values()), default=0)
        rows = {client: row for client, row in known.items() if row["round"] == last}
        return cls(rows, known, Score.of_run(run))

    @cached_property
    def truth(self) -> dict[int, int] | None:
        """True cluster of each client for which it is known; None if no true cluster is known."""
        truth = {client: row["true_cluster"] for client, row in self.known.items()}
        return {client: cluster for client, cluster in truth.items() if cluster is not None} or None

    def name(self, client: int) -> str:
        """Return a client's name, or its id as text if the client has only the default name."""
        if client in self.known:
            name = self.known[client]["name"]
        else:
            name = f"client-{client}"
        if name == f"client-{client}":
            return str(client)
        return name

    def mean_score(self, members: Iterable[int]) -> float | None:
        """Return the mean score of the given clients; None if none of these clients has a score.

        Clients without a score are left out.
        """
        rows = [self.rows[client] for client in members if client in self.rows]
        scores = self.score.by_client(rows).values()
        if not scores:
            return None
        return sum(scores) / len(scores)


@dataclass(frozen=True)
class ClientOrder:
    """Order of a run's clients in heat maps of similarities.

    Clients are sorted by leaf of the parameter tree, then by true cluster, then by id. Clients that
    are in no leaf yet are first, and clients that have left the run are last.
    """

    run: Run

    @cached_property
    def truth(self) -> dict[int, int] | None:
        """True cluster of each client for which it is known; None if no true cluster is known."""
        return Outcome.of(self.run).truth

    @cached_property
    def _place(self) -> dict[int, int]:
        """Position of each leaf in the order of the parameter tree, by node id."""
        return {leaf.id: i for i, leaf in enumerate(leaves_in_tree_order(self.run.tree))}

    def rows(self, clients: Sequence[int]) -> list[int]:
        """Return the order in which a matrix's rows are drawn, given the client id of each row."""
        truth = self.truth or {}

        def key(row: int) -> tuple[int, int, int, int]:
            """Return a row's sort key: position and id of the leaf, true cluster, client id."""
            client = clients[row]
            true_cluster = truth.get(client, -1)
            cluster = self.run.tree.leaf_of.get(client)
            if cluster is None:
                return len(self._place), 0, true_cluster, client
            return self._place.get(cluster, -1), cluster, true_cluster, client

        return sorted(range(len(clients)), key=key)

    def clusters(self, clients: Sequence[int]) -> list[tuple[int, int, str]]:
        """Return the blocks of clients in the same current cluster: start, size, name."""
        return blocks([str(self.run.tree.leaf_of.get(client, "left")) for client in clients])

    def true_clusters(self, clients: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the blocks of clients with the same known true cluster: start, size, number."""
        return truth_blocks(clients, self.truth or {})


def blocks(labels: Sequence[L]) -> list[tuple[int, int, L]]:
    """Return the blocks of equal consecutive labels: start, size and label of each block."""
    found: list[tuple[int, int, L]] = []
    start = 0
    for label, same in groupby(labels):
        size = len(list(same))
        found.append((start, size, label))
        start += size
    return found


def truth_blocks(clients: Sequence[int], truth: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return the blocks of consecutive clients that have the same known true cluster.

    Parameters
    ----------
    clients
        Ids of the clients in their order.
    truth
        True clusters by client id.

    Returns
    -------
    list of tuple
        Position of the first client, size, and true cluster of each block.
    """
    found = blocks([truth.get(client) for client in clients])
    return [(start, size, label) for start, size, label in found if label is not None]


def composition(members: Iterable[int], truth: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the known true clusters among some clients, with their sizes, the largest first.

    Parameters
    ----------
    members
        Ids of the clients.
    truth
        True clusters by client id.

    Returns
    -------
    list of tuple
        True cluster, and number of the given clients in it.
    """
    counts = Counter(truth[client] for client in members if client in truth)
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def purity(members: Iterable[int], truth: Mapping[int, int]) -> float | None:
    """Return the share of a cluster's members that are in the most common true cluster.

    Only members with a known true cluster count. None if no true cluster is known.

    Parameters
    ----------
    members
        Ids of the cluster's clients.
    truth
        True clusters by client id.
    """
    inside = composition(members, truth)
    if not inside:
        return None
    return inside[0][1] / sum(n for _, n in inside)


@dataclass(frozen=True, eq=False)
class RunView:
    """Run, finished or in progress, with the objects that its report needs.

    These are, for example, another run to compare with and the results of newcomers.
    """

    run: Run
    against: Run | None = None
    """Run of the same clients with which the report compares this run, if any."""
    against_label: str = ""
    newcomers: Mapping[str, Any] | None = None
    """Content of ``newcomers.json``, as written by ``fedclade assign``."""
    folder: Path | None = None
    """Folder of the run; None if the run is not stored."""

    @cached_property
    def colours(self) -> ClusterColours:
        """Colours of the run's clusters."""
        return ClusterColours(self.run)

    @cached_property
    def outcome(self) -> Outcome:
        """Final state of the run's clients: scores, names and true clusters."""
        return Outcome.of(self.run)

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished; a run in progress has neither a model layout nor gains."""
        return self.run.layout is not None or self.run.gains is not None

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""
        return self.run.summary["rounds"]

    @property
    def model_round(self) -> int:
        """Round from which the parameter tree and its models are stored."""
        return self.run.model_round

    @property
    def score(self) -> Score:
        """Main metric of the run."""
        return self.outcome.score

    @cached_property
    def scores(self) -> dict[int, float]:
        """Last score of each client that has a score, by client id."""
        return self.score.by_client(self.outcome.rows.values())

    @property
    def difference(self) -> tuple[str, str]:
        """Mean difference of the clients' scores to the other run, as text, and its trend.

        The text ends with the label of the other run. The trend is ``good``, ``bad`` or empty
        (:meth:`Score.compare`). Both texts are empty without another run, or if no client has a
        score in both.
        """
        if self.against is None:
            return "", ""
        others = self.score.by_client(Outcome.of(self.against).rows.values())
        difference, trend = self.score.compare(self.scores, others)
        return (f"{difference} against {self.against_label}" if difference else ""), trend

    @cached_property
    def before(self) -> tuple[str, dict[int, float]] | None:
        """Scores to compare this run with: label, and scores by client id; None if there are none.

        If the report compares this run with another run, the scores are from the other run.
        Otherwise, they are scores of the model of the parameter tree's root: from the last round in
        which this model was evaluated on a client that now has the model of another node. None
        without such a round.
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
