"""A round of federated learning in clusters: training, what came back from each cluster, moving the models, the log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedclade.algorithms.base import RoundLog, State
from fedclade.clustering import Merges, SplitCriteria, cut, placed, where_to_cut
from fedclade.core import (
    Clients,
    Clustered,
    Empty,
    Event,
    Joined,
    ParameterTree,
    Round,
    TooFew,
    Updates,
    mean,
    row_norms,
)

# The clustering step that FL+HC and PACFL share: all clients at once, merged from the nearest on,
# and cut.

Rule = tuple[str, object, bool, str]
"""A setting, its value, whether it holds, and what it should be; see :func:`fedclade.core.errors.require`."""


def cut_rules(threshold: float | str | None, n_clusters: int | None, largest: float = math.inf) -> tuple[Rule, ...]:
    """Return what the options ``threshold``, up to the largest distance there is, and ``n_clusters`` must be."""
    number = isinstance(threshold, int | float)
    holds = 0 < threshold <= largest if number else threshold in (None, "auto")
    unit = "" if math.isinf(largest) else f" and at most {largest:g} degrees"
    either = threshold is None or n_clusters is None
    return (
        ("algorithm.threshold", threshold, holds, f"greater than 0{unit}, or 'auto'"),
        ("algorithm.threshold", threshold, either, "left out where n_clusters is given"),
        ("algorithm.n_clusters", n_clusters, n_clusters is None or n_clusters >= 1, "at least 1"),
    )


def merged(
    clients: Sequence[int],
    merges: Merges,
    metric: str,
    linkage: str,
    threshold: float | str | None,
    n_clusters: int | None,
) -> tuple[list[list[int]], float | None, Clustered]:
    """Cut the dendrogram of some clients, ``[m-1, 4]``; see :func:`fedclade.clustering.where_to_cut`.

    Return the members of each cluster, the largest first; the height of the cut, None where nothing is cut; and the
    event.
    """
    count, height = where_to_cut(merges[:, 2], threshold, n_clusters)
    labels = cut(merges, count)
    clusters = [[clients[i] for i in np.flatnonzero(labels == label).tolist()] for label in range(count)]
    event = Clustered(
        0,
        metric=metric,
        linkage=linkage,
        threshold=height,
        sizes=tuple(len(cluster) for cluster in clusters),
        clients=tuple(clients),
        merges=tuple((int(a), int(b), at) for a, b, at, _ in merges.tolist()),
    )
    return clusters, height, event


LARGEST_COMPARED = 1000
"""Clients that are compared in every round; the similarities of more take more memory and time than all else."""


@dataclass(frozen=True, eq=False)
class ClusterUpdate:
    """One cluster's part of a round: the updates of its members that answered, and what they show."""

    node: int
    updates: Updates
    criteria: SplitCriteria
    mean: Tensor | None  # of the updates, [S]; None if nobody answered
    enough: bool  # so many answered that the cluster may move, and decide anything
    waits: bool = False  # no cluster, but stragglers of one that was split

    @classmethod
    def of(
        cls, node: int, updates: Updates, this_round: Round, *, waits: bool = False, weighted: bool = True
    ) -> ClusterUpdate:
        """Measure what came from a cluster; see :func:`fedclade.core.aggregate.mean` for ``weighted``."""
        moved = mean(updates, weighted=weighted) if updates.ids else None
        enough = len(updates.ids) >= this_round.min_clients
        return cls(node, updates, SplitCriteria.of(updates, moved), moved, enough, waits)

    def compared(self) -> ClusterUpdate:
        """Return the same with the similarities of its clients, unless there are too many for every round."""
        if not self.updates.ids or self.waits or len(self.updates.ids) > LARGEST_COMPARED:
            return self
        return replace(self, criteria=self.criteria.compared(self.updates.signatures, self.updates.ids))

    @property
    def step(self) -> Tensor | None:
        """What the cluster's model moves by, ``[S]``: the mean of its updates; None if it keeps its model."""
        return self.mean if self.enough and not self.waits else None

    @property
    def discrepancy(self) -> float | None:
        """How far the clients' models are from the cluster's after its step, in all (FedGroup eq. 4)."""
        if not self.updates.ids or self.updates.deltas is None:
            return None
        D = self.updates.n_parameters
        if self.step is None:
            return float(self.updates.norms.sum())
        return float(row_norms(self.updates.deltas[:, :D], self.step[:D]).sum())


def train_clusters(
    state: State, cohort: Sequence[int], clients: Clients, this_round: Round, *, weighted: bool = True
) -> list[ClusterUpdate]:
    """Let the cohort train, each client from its cluster's model; return those clusters."""
    leaf_of = state.tree.leaf_of
    models, assignment = state.tree.models([leaf_of[client] for client in cohort])
    return by_cluster(state.tree, clients.train(cohort, models, assignment, this_round), this_round, weighted=weighted)


def train_root(state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> ClusterUpdate:
    """Let the cohort train, each client from the root's model."""
    updates = clients.train(cohort, state.tree.nodes[0].params[None], [0] * len(cohort), this_round)
    return ClusterUpdate.of(0, updates.select(sorted(cohort)), this_round)


def by_cluster(
    tree: ParameterTree, updates: Updates, this_round: Round, *, weighted: bool = True
) -> list[ClusterUpdate]:
    """Part the updates of clients that each started from its cluster's model; return those clusters."""
    members: dict[int, list[int]] = {}
    for client in sorted({*updates.ids, *updates.left_out}):
        members.setdefault(tree.leaf_of[client], []).append(client)
    parts: list[ClusterUpdate] = []
    for node, ids in sorted(members.items()):
        waits = bool(tree.nodes[node].split_in)  # the root of a star, split in round 0, is no cluster that was parted
        parts.append(ClusterUpdate.of(node, updates.select(ids), this_round, waits=waits, weighted=weighted))
    return parts


def move_clusters(tree: ParameterTree, parts: Sequence[ClusterUpdate]) -> ParameterTree:
    """Move every cluster's model by the mean of its updates (CFL eq. 2; Algorithm 2, line 7).

    A cluster with too few answers keeps its model, and so does a node at which clients wait.
    """
    for part in parts:
        if part.step is not None:
            tree = tree.moved(part.node, part.step)
    return tree


def log_of(parts: Sequence[ClusterUpdate], events: Sequence[Event] = (), phase: str = "train") -> RoundLog:
    """Gather what a round reports, with the clusters that had too few answers."""
    clusters = [part for part in parts if not part.waits]
    too_few = [TooFew(part.node, len(part.updates.ids)) for part in clusters if not part.enough]
    apart = [part.discrepancy for part in parts if part.updates.ids]
    return RoundLog(
        criteria={part.node: part.criteria for part in clusters if part.updates.ids},
        losses={c: loss for p in parts for c, loss in zip(p.updates.ids, p.updates.losses.tolist(), strict=True)},
        discrepancy=sum(each for each in apart if each is not None) if apart and None not in apart else None,
        events=(*too_few, *events),
        phase=phase,
    )


def membership_events(before: ParameterTree, after: ParameterTree) -> list[Event]:
    """Return which clients joined which cluster, and which clusters are empty now; there may be new leaves."""
    was = {leaf.id: set(leaf.members) for leaf in before.leaves}
    events: list[Event] = []
    for leaf in after.leaves:
        old = was.get(leaf.id, set[int]())
        if joined := tuple(sorted(set(leaf.members) - old)):
            events.append(Joined(leaf.id, joined))
        if not leaf.members and (old or not any(was.values())):
            events.append(Empty(leaf.id))
    return events


def place_stragglers(tree: ParameterTree, parts: Sequence[ClusterUpdate]) -> tuple[ParameterTree, list[Event]]:
    """Put stragglers that have answered at a node that was split into the child that is most like them.

    As in CFL's Algorithm 4: their updates were made at the model of the split, and are compared with those cached then.
    If the child was split as well, they are its stragglers.
    """
    events: list[Event] = []
    for part in parts:
        if part.waits:
            tree, joined = placed(tree, part.node, part.updates)
            events += [Joined(node, tuple(clients)) for node, clients in joined.items()]
    return tree, events
