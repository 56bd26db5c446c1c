"""OCFL, one-shot clustered federated learning (Zuziak et al. 2024; arXiv:2503.04231, 2509.01587).

Zuziak, Pellungrini, Rinzivillo 2024. All clients train one model, until a measure of the
differences between their updates, the *temperature*, rises for the first time. Then the clients are
clustered once, by the rows of the matrix Γ of the cosine distances of their updates, with an
algorithm that chooses the number of clusters itself. From then on each cluster trains a model of its
own by federated averaging. The temperature of n clients is T(Γ) = ‖Γ‖_p / (n(n−1) 2^p)^(1/p), with
p = 2 in the authors' code, so that it is between 0 and 1.

This file follows the authors' code (``FedCL``, MIT). Choices and departures:

- *Clustering.* ``mean_shift`` is scikit-learn's MeanShift with its defaults, on the rows of Γ as
  points; ``hdbscan`` is its HDBSCAN on Γ as distances, with clusters of at least
  ``min_cluster_size`` clients. As in the code, all clients that HDBSCAN leaves out as noise form a
  cluster together. The bandwidth of MeanShift is the mean distance of a client from the farthest of
  its ⌊0.3 n⌋ nearest clients, itself included. For n ≤ 6 it is 0, and every client becomes a
  cluster.
- *The round of the clustering* is not repeated: each new cluster starts from the joint model plus
  the mean of its members' updates, as in the code.
- *Means* are weighted by |D_i| as in FedAvg; the code's are not. With equal sizes both are the same.
- *Client fraction below 1.* The code is for rounds with all clients. Here the temperature is that of
  the clients that replied, so it also changes with the sample. A client that did not take part in
  the round of the clustering waits with the joint model until it first replies; then it joins the
  cluster with the most similar update. As in FL+HC, each cluster samples separately.
- *Buffers*, such as BatchNorm's, are averaged but not compared. The code compares them, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import scipy
from numpy.typing import NDArray

from fedclade.algorithms.base import Algorithm, RoundLog, State
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    log_of,
    move_clusters,
    move_new_clusters,
    place_stragglers,
    train_clusters,
    train_root,
)
from fedclade.algorithms.requires import RunFacts
from fedclade.clustering import compute_distances
from fedclade.core import (
    Clients,
    ClusterSplit,
    ParameterTree,
    Postponed,
    RoundPlan,
    checked,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor

CosineDistances = NDArray[np.float64]
"""Cosine distances of all pairs of n clients, Γ, ``[n, n]``, in [0, 2]."""


@dataclass(frozen=True, eq=False)
class OCFLState(State):
    """State of OCFL between rounds.

    Parameters
    ----------
    temperature
        Temperature in the last round in which it was measured; infinite before the first one.
    clustered
        Whether the clients have been clustered.
    """

    temperature: float = math.inf
    clustered: bool = False


@checked()
@dataclass(frozen=True, kw_only=True)
class OCFL(Algorithm[OCFLState]):
    """OCFL (Zuziak et al. 2024): clients are clustered once, when their updates begin to diverge.

    Parameters
    ----------
    method
        Algorithm that clusters the clients: ``mean_shift`` or ``hdbscan``.
    min_cluster_size
        Smallest number of clients of a cluster that HDBSCAN finds, at least 2; unused by
        ``mean_shift``.
    """

    state_type = OCFLState

    method: Literal["mean_shift", "hdbscan"] = "mean_shift"
    min_cluster_size: int = 3

    def __post_init__(self) -> None:
        require(
            (
                "algorithm.method",
                self.method,
                self.method in ("mean_shift", "hdbscan"),
                "'mean_shift' or 'hdbscan'",
            ),
            (
                "algorithm.min_cluster_size",
                self.min_cluster_size,
                self.min_cluster_size >= 2,
                "at least 2",
            ),
        )

    @property
    def fewest(self) -> int:
        """Smallest number of clients that can be clustered."""
        return self.min_cluster_size if self.method == "hdbscan" else 2

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that there are enough clients for HDBSCAN.

        Raises
        ------
        ConfigError
            If there are fewer clients than ``min_cluster_size``, and HDBSCAN clusters them.
        """
        warnings = super().check(run)
        if run.clients is not None and self.method == "hdbscan":
            holds = self.min_cluster_size <= run.clients
            rule = f"at most the number of clients, {run.clients}"
            require(("algorithm.min_cluster_size", self.min_cluster_size, holds, rule))
        return warnings

    def init(self, params: Tensor, clients: Clients) -> OCFLState:
        """Return the state before round 1: all clients share one model."""
        return OCFLState(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: OCFLState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[OCFLState, RoundLog]:
        """Run one round of federated averaging in every cluster, and cluster if it is time.

        The metrics of rounds before the clustering, and of its round, have the ``temperature``.
        """
        if state.clustered:
            trained = train_clusters(state, cohort, clients, this_round)
            tree = move_clusters(state.tree, trained)
            tree, events = place_stragglers(tree, trained)
            return replace(state, tree=tree), log_of(trained, events)

        joint = train_root(state, cohort, clients, this_round)
        if len(joint.updates.ids) < 2:
            return replace(state, tree=move_clusters(state.tree, [joint])), log_of([joint])
        gamma = scipy.spatial.distance.squareform(
            compute_distances(joint.updates.signatures, "cosine"), checks=False
        )
        temperature = compute_temperature(gamma)
        tree = move_clusters(state.tree, [joint])
        log = log_of([joint])
        if temperature > state.temperature:
            tree, log = self._cluster(state.tree, joint, gamma, this_round)
        state = OCFLState(tree, temperature=temperature, clustered=log.phase == "cluster")
        return state, replace(log, numbers={"temperature": temperature})

    def _cluster(
        self,
        tree: ParameterTree,
        joint: ClusterUpdate,
        gamma: CosineDistances,
        this_round: RoundPlan,
    ) -> tuple[ParameterTree, RoundLog]:
        """Cluster the clients by the cosine distances of their updates, and move the new models.

        Parameters
        ----------
        tree
            The tree before the round.
        joint
            The updates of the n clients that replied, all made at the joint model.
        gamma
            Their cosine distances, ``[n, n]``.
        this_round
            The round.

        Returns
        -------
        tuple
            The tree, and the round's log. If too few clients replied, or all are in one cluster,
            the joint model moves as in the rounds before.
        """
        ids = joint.updates.ids
        if not joint.enough or len(ids) < self.fewest:
            postponed = Postponed(joint.node, len(ids), max(self.fewest, this_round.min_clients))
            return move_clusters(tree, [joint]), log_of([joint], [postponed])
        labels = find_clusters_by_density(gamma, self.method, self.min_cluster_size)
        clusters = group_by_label(ids, labels)
        if len(clusters) == 1:
            return move_clusters(tree, [joint]), log_of([joint], phase="cluster")
        tree = tree.split(
            joint.node,
            clusters,
            params=tree.nodes[joint.node].params,
            cached=[joint.updates.signatures_of(cluster) for cluster in clusters],
            round_number=this_round.number,
            criteria={"temperature": compute_temperature(gamma)},
        )
        split = ClusterSplit(
            joint.node,
            **joint.criteria.numbers,
            clusters=tuple(tuple(cluster) for cluster in clusters),
            children=tuple(child.id for child in tree.children(joint.node)),
        )
        tree, discrepancy = move_new_clusters(tree, joint.updates, this_round.min_clients)
        log = log_of([joint], [split], phase="cluster")
        return tree, replace(log, discrepancy=discrepancy)


def compute_temperature(gamma: CosineDistances) -> float:
    """Compute the temperature of n ≥ 2 clients: ‖Γ‖ / √(4 n(n−1)), with the Frobenius norm.

    It is 0 if all updates have the same direction, and at most 1.
    """
    n = len(gamma)
    return float(np.linalg.norm(gamma) / math.sqrt(n * (n - 1) * 4))


def find_clusters_by_density(
    gamma: CosineDistances, method: Literal["mean_shift", "hdbscan"], min_cluster_size: int
) -> NDArray[np.int64]:
    """Cluster n clients by the cosine distances of their updates.

    Parameters
    ----------
    gamma
        Cosine distances, ``[n, n]``.
    method
        ``mean_shift``, on the rows of the matrix as points; or ``hdbscan``, on the distances.
    min_cluster_size
        Smallest cluster that HDBSCAN finds, at most n.

    Returns
    -------
    numpy.ndarray
        Label of each client, ``[n]``; −1 for all clients that HDBSCAN leaves out as noise.
    """
    from sklearn.cluster import HDBSCAN, MeanShift  # slow to import: only where used

    if method == "mean_shift":
        labels = MeanShift().fit_predict(gamma)
    else:
        labels = HDBSCAN(
            min_cluster_size=min_cluster_size,
            metric="precomputed",
            copy=True,  # pyright: ignore[reportArgumentType]
        ).fit_predict(gamma)
    return labels.astype(np.int64)


def group_by_label(ids: Sequence[int], labels: NDArray[np.int64]) -> list[list[int]]:
    """Return the clients of each label, the largest cluster first."""
    clusters: dict[int, list[int]] = {}
    for client, label in zip(ids, labels.tolist(), strict=True):
        clusters.setdefault(label, []).append(client)
    return sorted(clusters.values(), key=lambda cluster: (-len(cluster), cluster[0]))
