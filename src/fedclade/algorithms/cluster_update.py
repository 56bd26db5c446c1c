"""Building blocks for the rounds of clustered methods.

The functions train the clients of each cluster, measure the clients' updates, move the clusters'
models by the mean updates, and report the round. Two functions for hierarchical clustering of
clients are at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedclade import core
from fedclade.algorithms.base import RoundLog, State
from fedclade.clustering import Merges, SplitCriteria, choose_cut, cut, place_in_branches
from fedclade.core import (
    Clients,
    ClientWork,
    ParameterTree,
    RoundPlan,
    Updates,
    mean,
    row_norms,
    without_ids,
)

if TYPE_CHECKING:
    from fedclade.core import Clustered, Event

LARGEST_COMPARED = 1000
"""Largest number of members for which a cluster's similarities are computed in every round.

For more clients they would take more memory and time than the rest of the round.
"""


@dataclass(frozen=True, eq=False)
class ClusterUpdate:
    """Result of a round for one cluster: its members' updates, their mean and their norms.

    Parameters
    ----------
    node
        The cluster's node in the tree.
    updates
        The updates of the members that replied.
    criteria
        Norms of the updates and of their mean, and the members' similarities if they were computed.
    mean
        Mean of the updates, ``[S]`` (a parameter vector), in parameter units; None if no member
        replied.
    enough
        Whether at least ``min_clients`` members replied, so that the cluster's model may move, and
        the cluster may be split.
    waits
        Whether the updates come from stragglers: members of a split cluster that did not reply when
        it was split. They train the model of the split cluster, which does not move.
    weighted
        Whether the mean weights clients by their numbers of examples.
    """

    node: int
    updates: Updates
    criteria: SplitCriteria
    mean: torch.Tensor | None
    enough: bool
    waits: bool = False
    weighted: bool = True

    @classmethod
    def of(
        cls,
        node: int,
        updates: Updates,
        this_round: RoundPlan,
        *,
        waits: bool = False,
        weighted: bool = True,
    ) -> ClusterUpdate:
        """Create the result of a cluster from its updates, with their mean and norms.

        Parameters
        ----------
        node
            The cluster's node in the tree.
        updates
            The updates of the members that replied.
        this_round
            The round, which gives ``min_clients``.
        waits
            Whether the updates come from stragglers.
        weighted
            Whether the mean weights clients by their numbers of examples.
        """
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
        """Return the result with other updates, such as the updates of all members."""
        mean_update = mean(updates, weighted=self.weighted)
        criteria = SplitCriteria.of(updates, mean_update)
        return replace(self, updates=updates, mean=mean_update, criteria=criteria)

    def compared(self) -> ClusterUpdate:
        """Return the result with the similarities of the members' updates added.

        The result is unchanged if no member replied, if more than :data:`LARGEST_COMPARED` members
        replied, or if the members are stragglers.
        """
        if not self.updates.ids or self.waits or len(self.updates.ids) > LARGEST_COMPARED:
            return self
        return self.compared_by(self.updates)

    def compared_by(self, updates: Updates) -> ClusterUpdate:
        """Return the result with members' similarities computed from other updates or gradients."""
        return replace(self, criteria=self.criteria.compared(updates.signatures, updates.ids))

    @property
    def step(self) -> torch.Tensor | None:
        """Mean update ``[S]``, by which the cluster's model moves.

        None if the model does not move: too few members replied, or the members are stragglers.
        """
        return self.mean if self.enough and not self.waits else None

    @property
    def discrepancy(self) -> float | None:
        """Sum of the distances of the clients' models from the cluster's model after the round.

        The distances are summed over the members that replied (FedGroup eq. 4). None if no member
        replied, or if the run streams updates and does not store updates of single clients.
        """
        if not self.updates.ids or self.updates.deltas is None:
            return None
        if self.step is None:
            return float(self.updates.norms.sum())
        n_parameters = self.updates.n_parameters  # the buffers behind them do not count
        deltas = self.updates.deltas[:, :n_parameters]
        return float(row_norms(deltas, self.step[:n_parameters]).sum())


def train_clusters(
    state: State,
    cohort: Sequence[int],
    clients: Clients,
    this_round: RoundPlan,
    work: ClientWork | None = None,
    *,
    weighted: bool = True,
    sent_before: bool = False,
    require_all: bool = False,
) -> list[ClusterUpdate]:
    """Train the clients of a cohort, each from its cluster's model, and group their updates.

    Parameters
    ----------
    state
        The state, whose tree contains the clusters' models.
    cohort
        Ids of the clients that train.
    clients
        All clients of the run.
    this_round
        Number, seed and local training of the round.
    work
        Work of each client. None: each client trains as the round specifies, and replies with its
        update.
    weighted
        Whether the mean of a cluster weights clients by their numbers of examples.
    sent_before
        Whether clients have received the models earlier in this round, so that they do not count as
        traffic again.
    require_all
        Whether clients that do not reply are queried again.

    Returns
    -------
    list of ClusterUpdate
        The result of each cluster with clients in the cohort, in the order of nodes.
    """
    nodes = [state.tree.leaf_of[client] for client in cohort]
    models, rows = state.tree.models(nodes)
    updates = clients.train(
        cohort,
        models,
        rows,
        this_round,
        work=work,
        sent_before=sent_before,
        require_all=require_all,
    )
    return by_cluster(state.tree, updates, this_round, weighted=weighted)


def train_root(
    state: State,
    cohort: Sequence[int],
    clients: Clients,
    this_round: RoundPlan,
    work: ClientWork | None = None,
    *,
    sent_before: bool = False,
    require_all: bool = False,
) -> ClusterUpdate:
    """Train the clients of a cohort, all from the root's model, as one cluster.

    For the parameters see :func:`train_clusters`.
    """
    model = state.tree.nodes[0].params
    updates = clients.train(
        cohort,
        model[None],
        [0] * len(cohort),
        this_round,
        work=work,
        sent_before=sent_before,
        require_all=require_all,
    )
    return ClusterUpdate.of(0, updates.select(sorted(cohort)), this_round)


def by_cluster(
    tree: ParameterTree, updates: Updates, this_round: RoundPlan, *, weighted: bool = True
) -> list[ClusterUpdate]:
    """Group updates by the clusters of their clients, with one result for each cluster.

    Each client must have trained from its cluster's model. A cluster is included even if none of
    its queried members replied. The results are in the order of the clusters' nodes.
    """
    members: dict[int, list[int]] = {}
    for client in sorted({*updates.ids, *updates.left_out}):
        members.setdefault(tree.leaf_of[client], []).append(client)
    clusters: list[ClusterUpdate] = []
    for node, ids in sorted(members.items()):
        # Clients at a node that was split are its stragglers. The root of a star has split_in = 0,
        # since it was never a cluster that trained; its members are no stragglers.
        waits = bool(tree.nodes[node].split_in)
        clusters.append(
            ClusterUpdate.of(node, updates.select(ids), this_round, waits=waits, weighted=weighted)
        )
    return clusters


def move_clusters(tree: ParameterTree, parts: Sequence[ClusterUpdate]) -> ParameterTree:
    """Move every cluster's model by its mean update (CFL eq. 2; Algorithm 2, line 7).

    A model does not change if fewer than ``min_clients`` members of its cluster replied. The model
    of a split cluster, which only stragglers train, does not change either.

    Parameters
    ----------
    tree
        The tree of clusters before the round.
    parts
        The round's result for each cluster.
    """
    for cluster in parts:
        if cluster.step is not None:
            tree = tree.moved(cluster.node, cluster.step)
    return tree


def move_new_clusters(
    tree: ParameterTree, updates: Updates, min_clients: int
) -> tuple[ParameterTree, float]:
    """Move every new cluster's model by its members' mean update (FL+HC Algorithm 1, line 24).

    The updates were made at the root's model, from which all clusters start. The model of a cluster
    of which fewer than ``min_clients`` members replied does not move.

    Parameters
    ----------
    tree
        The tree, whose leaves are the new clusters.
    updates
        The updates of the members that replied.
    min_clients
        Smallest number of replies for which a cluster's model moves.

    Returns
    -------
    tuple
        The tree, and the sum of the distances of the clients' models from their clusters' models.
    """
    discrepancy = 0.0
    replied = set(updates.ids)
    n_parameters = updates.n_parameters
    for leaf in tree.leaves:
        own_updates = updates.select([client for client in leaf.members if client in replied])
        if len(own_updates.ids) < min_clients:
            discrepancy += float(own_updates.norms.sum())
            continue
        step = mean(own_updates)
        tree = tree.moved(leaf.id, step)
        deltas = own_updates.required_deltas[:, :n_parameters]
        discrepancy += float(row_norms(deltas, step[:n_parameters]).sum())
    return tree, discrepancy


def log_of(
    parts: Sequence[ClusterUpdate], events: Sequence[Event] = (), phase: str = "train"
) -> RoundLog:
    """Build the log of a round from its results for the clusters.

    Parameters
    ----------
    parts
        The round's result for each cluster.
    events
        Events of the round. An event for each cluster with too few replies is put before them.
    phase
        Purpose of the round, such as ``train`` or ``split``.
    """
    clusters = [cluster for cluster in parts if not cluster.waits]
    too_few = [
        core.TooFew(cluster.node, len(cluster.updates.ids))
        for cluster in clusters
        if not cluster.enough
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
    """Sum the discrepancies of all clusters: the distances of clients' models from their clusters'.

    The sum is None if the discrepancy of a cluster with replies is unknown, or if no client
    replied.
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
    """Report the changes between two trees: the clients that joined each leaf, and empty leaves."""
    members_before = {leaf.id: leaf.members for leaf in before.leaves}
    had_members = any(members_before.values())
    events: list[Event] = []
    for leaf in after.leaves:
        old = members_before.get(leaf.id, ())
        # Usually nobody joined, and a comparison is fast even with millions of members.
        if leaf.members != old:
            joined = tuple(sorted(without_ids(leaf.members, old)))
            if joined:
                events.append(core.Joined(leaf.id, joined))
        # At a first assignment, where no leaf had members before, leaves that get none are
        # reported, too.
        if not leaf.members and (old or not had_members):
            events.append(core.Empty(leaf.id))
    return events


def place_stragglers(
    tree: ParameterTree, parts: Sequence[ClusterUpdate]
) -> tuple[ParameterTree, list[Event]]:
    """Move stragglers that have replied to a child of the split cluster at which they waited.

    Stragglers are the members that did not reply when their cluster was split. A straggler moves to
    the child whose stored updates are most similar to its own update (CFL Algorithm 4). The stored
    updates and its own can be compared, since all of them start from the split cluster's model. If
    this child has been split in the meantime, the client waits there as a straggler again.

    Returns
    -------
    tuple
        The tree after the moves, and an event for each node that clients joined.
    """
    events: list[Event] = []
    for cluster in parts:
        if cluster.waits:
            tree, joined = place_in_branches(tree, cluster.node, cluster.updates)
            events += [core.Joined(node, tuple(clients)) for node, clients in joined.items()]
    return tree, events


# Hierarchical clustering of all clients at once, which FL+HC, PACFL and FLUX share.

Rule = tuple[str, object, bool, str]
"""Rule for a setting, as ``require`` takes it: name, value, whether valid, and text of the rule."""


def cut_rules(
    threshold: float | str | None, n_clusters: int | None, largest: float = math.inf
) -> tuple[Rule, ...]:
    """Return the rules by which ``require`` checks the options ``threshold`` and ``n_clusters``.

    These options of an algorithm determine where hierarchical clustering stops.

    Parameters
    ----------
    threshold, n_clusters
        Values of the options: the distance up to which clusters merge, or ``"auto"``; and the
        number of clusters at which merging stops. At most one of the options may be set.
    largest
        Largest valid threshold, in degrees; infinite if distances are not in degrees.
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
        ("algorithm.threshold", threshold, only_one, "left out if n_clusters is set"),
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
    """Cut the dendrogram of m clients into clusters.

    Parameters
    ----------
    clients
        Ids of the m clients.
    merges
        The dendrogram as a linkage matrix ``[m-1, 4]`` in SciPy's format.
    metric, linkage
        Names of the distance between clients and of the linkage that the dendrogram is based on.
        The event reports them.
    threshold
        Distance up to which clusters merge. None or ``"auto"``: ``n_clusters`` decides.
    n_clusters
        Number of clusters into which the dendrogram is cut if ``threshold`` is not a number. None:
        the gaps between the heights of the merges decide; see
        :func:`fedclade.clustering.choose_cut`.

    Returns
    -------
    tuple
        The members of each cluster, the largest cluster first; the height of the cut, None if all
        clients are in one cluster and no threshold is set; and the event that reports the clusters.
    """
    count, height = choose_cut(merges[:, 2], threshold, n_clusters)
    labels = cut(merges, count)
    clusters: list[list[int]] = []
    for label in range(count):
        places = np.flatnonzero(labels == label).tolist()
        clusters.append([clients[place] for place in places])
    event = core.Clustered(
        0,
        metric=metric,
        linkage=linkage,
        threshold=height,
        sizes=tuple(len(cluster) for cluster in clusters),
        clients=tuple(clients),
        merges=tuple((int(a), int(b), at) for a, b, at, _ in merges.tolist()),
    )
    return clusters, height, event
