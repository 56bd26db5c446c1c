"""One round of clustered federated learning.

Train each cluster's clients, measure their updates, move the cluster's model, and log the round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedclade.algorithms.base import RoundLog, State
from fedclade.clustering import Merges, SplitCriteria, choose_cut, cut, place_in_branches
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

LARGEST_COMPARED = 1000
"""Largest number of clients in a cluster that are compared in every round.

The similarities of more clients would take more memory and time than all else in a round.
"""


@dataclass(frozen=True, eq=False)
class ClusterUpdate:
    """One cluster's part of a round: the members' updates, and what is measured on them.

    Parameters
    ----------
    node
        The cluster's node in the tree.
    updates
        The updates of the members that replied.
    criteria
        Norms of the updates and of their mean, and the members' similarities where they were
        computed.
    mean
        Mean of the updates, ``[S]``, in parameter units; None if no member replied.
    enough
        Whether at least ``min_clients`` members replied, so that the cluster may move, and be
        split.
    waits
        True for the stragglers of a cluster that was split: they train at its node, which does not
        move.
    weighted
        Whether the mean weights clients by their numbers of examples.
    """

    node: int
    updates: Updates
    criteria: SplitCriteria
    mean: Tensor | None
    enough: bool
    waits: bool = False
    weighted: bool = True

    @classmethod
    def of(
        cls,
        node: int,
        updates: Updates,
        this_round: Round,
        *,
        waits: bool = False,
        weighted: bool = True,
    ) -> ClusterUpdate:
        """Measure the updates of a cluster, and their mean, ``weighted`` by examples or not."""
        mean_update = mean(updates, weighted=weighted) if updates.ids else None
        return cls(
            node=node,
            updates=updates,
            criteria=SplitCriteria.of(updates, mean_update),
            mean=mean_update,
            enough=len(updates.ids) >= this_round.min_clients,
            waits=waits,
            weighted=weighted,
        )

    def with_updates(self, updates: Updates) -> ClusterUpdate:
        """Return the cluster measured on other updates, such as those of all its members."""
        mean_update = mean(updates, weighted=self.weighted)
        criteria = SplitCriteria.of(updates, mean_update)
        return replace(self, updates=updates, mean=mean_update, criteria=criteria)

    def compared(self) -> ClusterUpdate:
        """Return the cluster with the similarities of its members.

        It stays without them if there are more than :data:`LARGEST_COMPARED`, and for stragglers.
        """
        if not self.updates.ids or self.waits or len(self.updates.ids) > LARGEST_COMPARED:
            return self
        return self.compared_by(self.updates)

    def compared_by(self, updates: Updates) -> ClusterUpdate:
        """Return the cluster with similarities of other updates or gradients, however many."""
        return replace(self, criteria=self.criteria.compared(updates.signatures, updates.ids))

    @property
    def step(self) -> Tensor | None:
        """Vector ``[S]`` by which the cluster's model moves: the mean update; None for no move."""
        return self.mean if self.enough and not self.waits else None

    @property
    def discrepancy(self) -> float | None:
        """Sum of the distances of the clients' models from the cluster's model after its step.

        It is the cluster's part of FedGroup's eq. 4. None if no member replied, or if
        single updates are not kept.
        """
        if not self.updates.ids or self.updates.deltas is None:
            return None
        if self.step is None:
            return float(self.updates.norms.sum())
        n_parameters = self.updates.n_parameters  # buffers follow, and do not count
        deltas = self.updates.deltas[:, :n_parameters]
        return float(row_norms(deltas, self.step[:n_parameters]).sum())


def train_clusters(
    state: State,
    cohort: Sequence[int],
    clients: Clients,
    this_round: Round,
    *,
    weighted: bool = True,
) -> list[ClusterUpdate]:
    """Train the cohort, each client from the model of its cluster; return these clusters."""
    nodes = [state.tree.leaf_of[client] for client in cohort]
    models, rows = state.tree.models(nodes)
    updates = clients.train(cohort, models, rows, this_round)
    return by_cluster(state.tree, updates, this_round, weighted=weighted)


def train_root(
    state: State, cohort: Sequence[int], clients: Clients, this_round: Round
) -> ClusterUpdate:
    """Train the cohort, each client from the root's model."""
    model = state.tree.nodes[0].params
    updates = clients.train(cohort, model[None], [0] * len(cohort), this_round)
    return ClusterUpdate.of(0, updates.select(sorted(cohort)), this_round)


def by_cluster(
    tree: ParameterTree, updates: Updates, this_round: Round, *, weighted: bool = True
) -> list[ClusterUpdate]:
    """Separate updates by the clusters of their clients, and return these in the order of nodes.

    Each client must have started from the model of its cluster. Clusters of which no member replied
    are included.
    """
    members: dict[int, list[int]] = {}
    for client in sorted({*updates.ids, *updates.left_out}):
        members.setdefault(tree.leaf_of[client], []).append(client)
    clusters: list[ClusterUpdate] = []
    for node, ids in sorted(members.items()):
        # Clients at a node that was split are its stragglers. The root of a star has "split in
        # round 0" instead: it was never a cluster that trained.
        waits = bool(tree.nodes[node].split_in)
        clusters.append(
            ClusterUpdate.of(node, updates.select(ids), this_round, waits=waits, weighted=weighted)
        )
    return clusters


def move_clusters(tree: ParameterTree, parts: Sequence[ClusterUpdate]) -> ParameterTree:
    """Move every cluster's model by the mean of its updates (CFL eq. 2; Algorithm 2, line 7).

    A cluster with fewer replies than ``min_clients`` keeps its model, and so does a node with
    stragglers.
    """
    for cluster in parts:
        if cluster.step is not None:
            tree = tree.moved(cluster.node, cluster.step)
    return tree


def log_of(
    parts: Sequence[ClusterUpdate], events: Sequence[Event] = (), phase: str = "train"
) -> RoundLog:
    """Return the log of a round, with an event for each cluster that had too few replies."""
    clusters = [cluster for cluster in parts if not cluster.waits]
    too_few = [
        TooFew(cluster.node, len(cluster.updates.ids)) for cluster in clusters if not cluster.enough
    ]
    losses: dict[int, float] = {}
    for cluster in parts:
        losses |= dict(zip(cluster.updates.ids, cluster.updates.losses.tolist(), strict=True))
    return RoundLog(
        criteria={cluster.node: cluster.criteria for cluster in clusters if cluster.updates.ids},
        losses=losses,
        discrepancy=_sum_discrepancies(parts),
        events=(*too_few, *events),
        phase=phase,
    )


def _sum_discrepancies(clusters: Sequence[ClusterUpdate]) -> float | None:
    """Return the sum of the clusters' discrepancies.

    It is None if a discrepancy is unknown, or if no client replied.
    """
    discrepancies: list[float] = []
    for cluster in clusters:
        if not cluster.updates.ids:
            continue
        discrepancy = cluster.discrepancy
        if discrepancy is None:
            return None
        discrepancies.append(discrepancy)
    return sum(discrepancies) if discrepancies else None


def membership_events(before: ParameterTree, after: ParameterTree) -> list[Event]:
    """List the clients that joined each leaf, old or new, and the leaves that are empty now."""
    members_before = {leaf.id: set(leaf.members) for leaf in before.leaves}
    had_members = any(members_before.values())
    events: list[Event] = []
    for leaf in after.leaves:
        old = members_before.get(leaf.id, set[int]())
        joined = tuple(sorted(set(leaf.members) - old))
        if joined:
            events.append(Joined(leaf.id, joined))
        # At a first assignment, where no leaf had members before, leaves that get none are
        # reported, too.
        if not leaf.members and (old or not had_members):
            events.append(Empty(leaf.id))
    return events


def place_stragglers(
    tree: ParameterTree, parts: Sequence[ClusterUpdate]
) -> tuple[ParameterTree, list[Event]]:
    """Move stragglers that replied from the node of a split to a child (CFL Algorithm 4).

    It is the child whose cached updates are most similar to theirs. They trained at the model of
    the split, so their updates are compared with those cached then. If the child was split as well,
    they are its stragglers next.
    """
    events: list[Event] = []
    for cluster in parts:
        if cluster.waits:
            tree, joined = place_in_branches(tree, cluster.node, cluster.updates)
            events += [Joined(node, tuple(clients)) for node, clients in joined.items()]
    return tree, events


# Hierarchical clustering of all clients at once, which FL+HC, PACFL and FLUX share.

Rule = tuple[str, object, bool, str]
"""Setting, its value, whether it is valid, and what it should be, as ``require`` takes them."""


def cut_rules(
    threshold: float | str | None, n_clusters: int | None, largest: float = math.inf
) -> tuple[Rule, ...]:
    """Return the rules for the options ``threshold`` and ``n_clusters``.

    Parameters
    ----------
    threshold, n_clusters
        The options, of which at most one may be set.
    largest
        Largest distance that is possible, in degrees; infinite for distances without a unit.
    """
    threshold_valid = threshold in (None, "auto")
    if isinstance(threshold, int | float):
        threshold_valid = 0 < threshold <= largest
    upper_bound = "" if math.isinf(largest) else f" and at most {largest:g} degrees"
    only_one = threshold is None or n_clusters is None
    return (
        (
            "algorithm.threshold",
            threshold,
            threshold_valid,
            f"greater than 0{upper_bound}, or 'auto'",
        ),
        ("algorithm.threshold", threshold, only_one, "left out where n_clusters is given"),
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
    """Cut the dendrogram ``[m-1, 4]`` of m clients.

    Parameters
    ----------
    clients
        Their ids.
    merges
        The dendrogram, as SciPy writes it.
    metric, linkage
        How it was made, for the event.
    threshold, n_clusters
        Where to cut it; see :func:`fedclade.clustering.choose_cut`.

    Returns
    -------
    tuple
        The members of each cluster, the largest first; the height of the cut, None if nothing is
        cut; and the event.
    """
    count, height = choose_cut(merges[:, 2], threshold, n_clusters)
    labels = cut(merges, count)
    clusters: list[list[int]] = []
    for label in range(count):
        places = np.flatnonzero(labels == label).tolist()
        clusters.append([clients[place] for place in places])
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
