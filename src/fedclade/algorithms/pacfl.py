"""PACFL: Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin 2023 (arXiv:2209.10526), Algorithm 1.

Before training, every client sends the first p left singular vectors of its data. The server compares clients by the
angles between these, clusters them once by hierarchical clustering with a threshold, which also settles how many
clusters there are, and trains each cluster by FedAvg. The vectors show what the data looks like: the first one of a
label is close to the mean of the client's inputs with it.

Where paper and official code differ or leave a choice, this file makes it:

- ``per_label``: the paper decomposes the matrix of all data of a client. The official code does so where clients hold
  different data sets (MIX-4); where they differ in labels, it decomposes the data of each label by itself.
- ``angle``: the smallest principal angle, or the angles between vectors of the same place (the trace of arccos(UᵀV));
  the paper names both. Per label they are averaged over the labels that at least one of two clients holds; a label that
  one of them lacks counts as 90°, and so does a vector of the same place. The official code takes the smallest angle
  between any two vectors instead, whatever their labels, which cannot see what labels are called: on MNIST with label
  swaps it gave ARI 0, the average 1.
- Angles lie in [0°, 90°], since the sign of a singular vector means nothing (the official code keeps it), and the trace
  is divided by the number of vectors, so that a threshold means the same whatever p is.
- Linkage is by the mean over pairs; the "average" of the official code weighs the two clusters that merge alike.
- Clients that do not send their vectors wait in no cluster; when they do, they join that of the smallest mean angle.
- The threshold is tuned by hand there. Here, without one, clusters are cut at the largest gap between merges, or not at
  all: :func:`~fedclade.clustering.n_clusters_by_gap`. Before, up to a share ``set_apart`` of the clients that are far
  from all others become clusters of their own, of which the paper knows nothing: one client that sends random vectors
  would make the largest gap, and so join all others (:func:`~fedclade.clustering.far_groups`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy
import torch
from torch import Tensor

from fedclade.algorithms.base import Algorithm, RoundLog
from fedclade.algorithms.cluster_update import log_of, membership_events, move_clusters, train_clusters
from fedclade.algorithms.hierarchical import cut_rules, merged
from fedclade.algorithms.state import State
from fedclade.clustering import agglomerate, angles, far_groups
from fedclade.core import (
    Clients,
    DataSpec,
    Event,
    ParameterTree,
    Postponed,
    Round,
    SetApart,
    SubspaceQuery,
    checked,
    require,
)

SET_APART = 0.2
"""Share of the clients that may be set apart where the threshold is automatic; as ``aggregate.byzantine``."""


@checked()
@dataclass(frozen=True, kw_only=True)
class PACFL(Algorithm[State]):
    """Clusters by principal angles between the clients' data, found once before training (Vahidian et al. 2023).

    Parameters
    ----------
    vectors
        p, how many singular vectors each client sends (for each label); 3 in the official script, 5 by default there.
    per_label
        Whether the data of each label is decomposed by itself.
    angle
        Between two clients: the ``smallest`` principal angle, or the mean of all angles between vectors of the
        ``same_place``.
    threshold
        β: clusters merge up to this angle, in degrees. ``"auto"``, as when it is left out: at the largest gap between
        merges, or one cluster if there is none to speak of.
    n_clusters
        Merge until so many are left, instead of up to a threshold.
    set_apart
        Up to this share of the clients, rounded down, that are far from all others are set apart before the others are
        clustered: each group of them is a cluster of its own, and an event names it. By default 0.2 where the threshold
        is automatic, and 0 where ``threshold`` or ``n_clusters`` is given, as in the paper.
    """

    asks_for = "subspaces of their data"
    discloses = ("subspaces",)
    clusters_from = "n_clusters"

    vectors: int = 3
    per_label: bool = True
    angle: Literal["smallest", "same_place"] = "smallest"
    threshold: float | Literal["auto"] | None = None
    n_clusters: int | None = None
    set_apart: float | None = None

    def __post_init__(self) -> None:
        known = ("smallest", "same_place")
        require(
            ("algorithm.vectors", self.vectors, self.vectors >= 1, "at least 1"),
            ("algorithm.angle", self.angle, self.angle in known, "'smallest' or 'same_place'"),
            *cut_rules(self.threshold, self.n_clusters, largest=90),
            (
                "algorithm.set_apart",
                self.set_apart,
                self.set_apart is None or 0 <= self.set_apart < 0.5,
                "at least 0 and below 0.5, or left out",
            ),
        )

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates."""
        return False

    def check_data(self, spec: DataSpec) -> None:
        """Check that examples have labels, if each one's inputs are compared by themselves."""
        SubspaceQuery((), self.vectors, self.per_label).matrices(spec)

    def init(self, params: Tensor, clients: Clients) -> State:
        """Put all clients in one cluster; they are asked for their vectors in the first round."""
        return State(ParameterTree.root_only(clients.ids, params))

    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Cluster all clients, if that is still to be done; then run one round of FedAvg in every cluster."""
        tree, events = state.tree, list[Event]()
        if len(tree.nodes) == 1:
            tree, events = self._clustered(tree, clients)
        elif back := [client for client in cohort if client in tree.stragglers.get(0, ())]:
            tree, events = self._placed(tree, back, clients)
        leaves = {leaf.id for leaf in tree.leaves}
        cohort = [client for client in cohort if tree.leaf_of[client] in leaves]
        parts = train_clusters(State(tree), cohort, clients, this_round) if cohort else []
        return State(move_clusters(tree, parts)), log_of(parts, events)

    def _clustered(self, tree: ParameterTree, clients: Clients) -> tuple[ParameterTree, list[Event]]:
        """Cluster all clients that send their vectors; with too few of them go on with one model."""
        everybody, needed = sorted(clients.ids), self.n_clusters or 1
        ids, vectors = self._vectors_of(everybody, clients)
        if len(ids) < needed:
            return tree, [Postponed(0, len(ids), needed)]
        apart = angles(vectors, self.angle)
        far = far_groups(apart, self._most_apart(len(ids)))
        alone = {place for group in far for place in group.places}
        rest = [place for place in range(len(ids)) if place not in alone]
        merges = agglomerate(scipy.spatial.distance.squareform(apart[np.ix_(rest, rest)], checks=False), "average")
        near = [ids[place] for place in rest]
        clusters, _, event = merged(near, merges, "angle", "average", self.threshold, self.n_clusters)
        told: list[Event] = []
        for group in far:
            members = [ids[place] for place in group.places]
            clusters.append(members)
            told.append(SetApart(len(clusters), tuple(members), group.distance, group.usual))
        absent = sorted(set(everybody) - set(ids))
        return ParameterTree.star(clusters, tree.nodes[0].params, unassigned=absent), [event, *told]

    def _most_apart(self, clients: int) -> int:
        """Return how many of some clients may be set apart, so that enough are left to be clustered."""
        is_automatic = self.threshold in (None, "auto") and self.n_clusters is None
        share = self.set_apart
        if share is None:
            share = SET_APART if is_automatic else 0.0
        return min(math.floor(round(share * clients, 9)), clients - (self.n_clusters or 1))

    def _placed(
        self, tree: ParameterTree, waiting: Sequence[int], clients: Clients
    ) -> tuple[ParameterTree, list[Event]]:
        """Let each straggler that now sends its vectors join the cluster of the smallest mean angle.

        Members send theirs again: the server keeps none, since they show what the data looks like.
        """
        members = sorted(client for leaf in tree.leaves for client in leaf.members)
        late, new = self._vectors_of(waiting, clients)
        known, old = self._vectors_of(members, clients) if late else ([], new)
        if not known:
            return tree, []
        apart = torch.from_numpy(angles(torch.cat([old, new]), self.angle))[len(known) :, : len(known)]
        leaf_of = torch.tensor([tree.leaf_of[client] for client in known])
        leaves = leaf_of.unique().tolist()
        nearest = torch.stack([apart[:, leaf_of == leaf].mean(dim=1) for leaf in leaves]).argmin(dim=0).tolist()
        placed = tree.reassigned({client: leaves[k] for client, k in zip(late, nearest, strict=True)})
        return placed, membership_events(tree, placed)

    def _vectors_of(self, ids: Sequence[int], clients: Clients) -> tuple[list[int], Tensor]:
        """Return the clients that send their vectors, and these, ``[m, L, d, p]``."""
        vectors = clients.subspaces(ids, self.vectors, self.per_label)
        came = vectors.flatten(1).any(dim=1).tolist()
        return [client for client, answers in zip(ids, came, strict=True) if answers], vectors[came]
