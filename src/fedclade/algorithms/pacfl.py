"""PACFL, clustering by principal angles between clients' data (Vahidian et al. 2023, Algorithm 1).

Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin, arXiv:2209.10526. Before training, every
client sends the first p left singular vectors of its data. The server compares clients by the
angles between these vectors, and clusters the clients once by hierarchical clustering with a
threshold, which also determines the number of clusters. Each cluster is then trained by FedAvg. The
vectors disclose what the data looks like: the first vector of a label is close to the mean of the
client's inputs with that label.

Paper and official code measure different distances, and neither can detect differences in how
labels are named. ``distance`` chooses:

- ``"paper"``, the default: one matrix of all data of a client, and the smallest principal angle Θ₁
  of the two subspaces, or (``angle = "same_place"``) the trace of arccos(UᵀV), the angles between
  vectors at the same position.
- ``"code"``: the official code (``main_pacfl.py``, ``hierarchical_clustering.py``) decomposes the
  data of each label separately, concatenates all vectors of a client, and takes the smallest angle
  between any vector of one client and any vector of the other, whatever their labels. The vectors
  of different labels are not orthogonal, so this is not a principal angle. For its mixture of data
  sets (MIX-4) the official code decomposes all data of a client instead.
- ``"per_label"``, a variant of fedclade, neither in the paper nor in the code: principal angles
  between the data of the same label, averaged over the labels that at least one of two clients has.
  A label that only one of them has counts as 90°. It is the only one of the three that finds
  clients whose labels are permuted.

Where paper and official code leave a choice, this file decides as follows:

- *Angles* lie in [0°, 90°], since the sign of a singular vector has no meaning and depends on the
  linear-algebra library. The official code keeps the sign. The trace is divided by the number of
  vectors, so that a threshold has the same meaning for every p. A vector that only one of two
  clients has at a position counts as 90°.
- *Linkage.* The distance of two clusters is the mean over all pairs of their clients (UPGMA). The
  "average" of the official code gives equal weight to two clusters that merge, whatever their
  sizes (WPGMA).
- *Clients that do not send their vectors* are in no cluster. When they send their vectors in a
  later round, they join the cluster of the smallest mean angle.
- *Threshold.* The paper and the code tune it by hand for each data set and distance: 4.9° in the
  script for two labels of CIFAR-10, 42° for MIX-4, and 3.5° as the code's default. None of these
  values suits another distance or data set, so this file has no default in degrees. Without a
  threshold,
  clusters are cut at the largest gap between merges, or not at all:
  :func:`~fedclade.clustering.count_clusters_by_gap`, which uses only the merges, whatever the
  distance.
- *Outliers.* Before clustering, clients that are far from all others become separate clusters: at
  most a share ``set_apart`` of all clients. The paper has no such step. Without it, one client that
  sends random vectors would create the largest gap, and all other clients would merge
  (:func:`~fedclade.clustering.find_far_groups`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedclade.algorithms.base import Algorithm, RoundLog, State
from fedclade.algorithms.cluster_update import (
    cut_rules,
    log_of,
    membership_events,
    merged,
    move_clusters,
    train_clusters,
)
from fedclade.algorithms.requires import Requires, RunFacts
from fedclade.algorithms.subspace_query import SubspaceQuery
from fedclade.clustering import agglomerate, compute_angles, compute_nearest_angles, find_far_groups
from fedclade.core import (
    Clients,
    Event,
    ParameterTree,
    Postponed,
    RoundPlan,
    SetApart,
    checked,
    has_replied,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor

SET_APART = 0.2
"""Default of the largest share of clients that are set apart, if the threshold is automatic.

The value is the same as the default of ``aggregate.byzantine``.
"""


@checked()
@dataclass(frozen=True, kw_only=True)
class PACFL(Algorithm[State]):
    """PACFL (Vahidian et al. 2023): clusters by principal angles between clients' data.

    Clusters are found once, before training.

    Parameters
    ----------
    vectors
        p, the number of singular vectors of each matrix; 3 in the official script, where the
        default is 5.
    distance
        ``"paper"``: the principal angle between the data of two clients. ``"code"``, as in the
        authors' code: the smallest angle between any two vectors of the labels' data.
        ``"per_label"``, a variant of fedclade: the principal angle between the data of the same
        label, averaged over labels.
    angle
        Angle between the data of two clients: ``smallest``, the smallest principal angle Θ₁; or
        ``same_place``, the mean of the angles between vectors at the same position, the paper's
        trace. With ``distance = "code"`` the angle is always the smallest.
    threshold
        β: clusters merge up to this angle, in degrees. A good value depends on the data and on
        ``distance``. With ``"auto"`` or None, merging stops at the largest gap between the angles
        of consecutive merges; if no gap is wide enough, there is one cluster.
    n_clusters
        Number of clusters at which merging stops, instead of a threshold.
    set_apart
        Largest share of the clients, rounded down, that may be set apart as outliers: clients that
        are far from all other clients. Outliers become separate clusters, which an event names,
        before the other clients are clustered. The default is 0.2 if the threshold is automatic,
        and 0 if ``threshold`` or ``n_clusters`` is given, as in the paper.
    """

    requires = Requires(
        updates=False,
        signatures=False,
        reports="subspaces of their data",
        disclosures=("subspaces",),
        data_queries=("subspaces",),
        clusters_from="n_clusters",
    )

    vectors: int = 3
    distance: Literal["paper", "code", "per_label"] = "paper"
    angle: Literal["smallest", "same_place"] = "smallest"
    threshold: float | Literal["auto"] | None = None
    n_clusters: int | None = None
    set_apart: float | None = None

    def __post_init__(self) -> None:
        is_known_distance = self.distance in ("paper", "code", "per_label")
        is_known_angle = self.angle in ("smallest", "same_place")
        suits_distance = self.distance != "code" or self.angle == "smallest"
        require(
            ("algorithm.vectors", self.vectors, self.vectors >= 1, "at least 1"),
            (
                "algorithm.distance",
                self.distance,
                is_known_distance,
                "'paper', 'code' or 'per_label'",
            ),
            ("algorithm.angle", self.angle, is_known_angle, "'smallest' or 'same_place'"),
            ("algorithm.angle", self.angle, suits_distance, "'smallest' if distance is 'code'"),
            *cut_rules(self.threshold, self.n_clusters, largest=90),
            (
                "algorithm.set_apart",
                self.set_apart,
                self.set_apart is None or 0 <= self.set_apart < 0.5,
                "at least 0 and below 0.5, or left out",
            ),
        )

    @property
    def per_label(self) -> bool:
        """Whether clients decompose the data of each label separately."""
        return self.distance != "paper"

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check the number of clients, and that clients can decompose inputs of this kind."""
        warnings = super().check(run)
        if run.data is not None:
            SubspaceQuery((), self.vectors, self.per_label).shape(run.data)
        return warnings

    def init(self, params: Tensor, clients: Clients) -> State:
        """Return the state before round 1, in which all clients are in one cluster."""
        return State(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Run one round of PACFL: one round of FedAvg in every cluster.

        In the first round, clients are clustered by the singular vectors of their data before they
        train (Vahidian et al. 2023, Algorithm 1).
        """
        tree = state.tree
        events = list[Event]()
        if len(tree.nodes) == 1:
            tree, events = self._cluster_clients(tree, clients)
        elif back := [client for client in cohort if client in tree.stragglers.get(0, ())]:
            tree, events = self._place_waiting_clients(tree, back, clients)
        leaves = {leaf.id for leaf in tree.leaves}
        cohort = [client for client in cohort if tree.leaf_of[client] in leaves]
        parts = train_clusters(State(tree), cohort, clients, this_round) if cohort else []
        return State(move_clusters(tree, parts)), log_of(parts, events)

    def _cluster_clients(
        self, tree: ParameterTree, clients: Clients
    ) -> tuple[ParameterTree, list[Event]]:
        """Query all clients for singular vectors, and cluster the clients that replied.

        Returns
        -------
        tuple
            The tree with a leaf for each cluster, and the events that report the clusters. If too
            few clients replied, the clustering is postponed: the tree is unchanged.
        """
        everybody = sorted(clients.ids)
        needed = self.n_clusters or 1
        ids, vectors = self._vectors_of(everybody, clients)
        if len(ids) < needed:
            return tree, [Postponed(0, len(ids), needed)]
        apart = self._compute_distances(vectors)
        far = find_far_groups(apart, self._most_apart(len(ids)))
        alone = {place for group in far for place in group.places}
        rest = [place for place in range(len(ids)) if place not in alone]
        merges = agglomerate(
            scipy.spatial.distance.squareform(apart[np.ix_(rest, rest)], checks=False), "average"
        )
        near = [ids[place] for place in rest]
        clusters, _, event = merged(
            near, merges, "angle", "average", self.threshold, self.n_clusters
        )
        told: list[Event] = []
        for group in far:
            members = [ids[place] for place in group.places]
            clusters.append(members)
            told.append(SetApart(len(clusters), tuple(members), group.distance, group.usual))
        absent = sorted(set(everybody) - set(ids))
        return ParameterTree.star(clusters, tree.nodes[0].params, unassigned=absent), [event, *told]

    def _most_apart(self, clients: int) -> int:
        """Return the largest number of outliers that may be set apart, given the number of clients.

        At least ``n_clusters`` clients are left to be clustered, or one client if ``n_clusters`` is
        not set.
        """
        is_automatic = self.threshold in (None, "auto") and self.n_clusters is None
        share = self.set_apart
        if share is None:
            share = SET_APART if is_automatic else 0.0
        return min(math.floor(round(share * clients, 9)), clients - (self.n_clusters or 1))

    def _place_waiting_clients(
        self, tree: ParameterTree, waiting: Sequence[int], clients: Clients
    ) -> tuple[ParameterTree, list[Event]]:
        """Query clients without a cluster for their vectors, and assign the clients that reply.

        Each one joins the cluster whose members' vectors have the smallest mean angle to its own.
        Members of clusters are queried again, too: the server does not store vectors, since these
        reveal what the data looks like.

        Returns
        -------
        tuple
            The tree after the assignments, and the events that report where clients joined.
        """
        members = sorted(client for leaf in tree.leaves for client in leaf.members)
        late, new = self._vectors_of(waiting, clients)
        known, old = self._vectors_of(members, clients) if late else ([], new)
        if not known:
            return tree, []
        apart = torch.from_numpy(self._compute_distances(torch.cat([old, new])))[
            len(known) :, : len(known)
        ]
        leaf_of = torch.tensor([tree.leaf_of[client] for client in known])
        leaves = leaf_of.unique().tolist()
        nearest = (
            torch.stack([apart[:, leaf_of == leaf].mean(dim=1) for leaf in leaves])
            .argmin(dim=0)
            .tolist()
        )
        placed = tree.reassigned(
            {client: leaves[k] for client, k in zip(late, nearest, strict=True)}
        )
        return placed, membership_events(tree, placed)

    def _compute_distances(self, vectors: Tensor) -> NDArray[np.float64]:
        """Compute the distances between the data of n clients, in degrees, ``[n, n]``.

        Parameters
        ----------
        vectors
            The clients' singular vectors, ``[n, L, d, p]``.
        """
        return (
            compute_nearest_angles(vectors)
            if self.distance == "code"
            else compute_angles(vectors, self.angle)
        )

    def _vectors_of(self, ids: Sequence[int], clients: Clients) -> tuple[list[int], Tensor]:
        """Query clients for the singular vectors of their data.

        Returns
        -------
        tuple
            The m clients that replied, and their vectors ``[m, L, d, p]``.
        """
        vectors = clients.ask(SubspaceQuery(ids, self.vectors, self.per_label))
        came = has_replied(vectors)
        replied = [client for client, has_come in zip(ids, came.tolist(), strict=True) if has_come]
        return replied, vectors[came]
