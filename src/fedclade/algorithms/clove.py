"""CLoVE, clustering of loss vector embeddings (Bhatia et al. 2026; arXiv:2506.22427).

Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty 2026. In every round each participant receives K
models, and reports the vector of their losses on its training data. The server clusters these loss
vectors by k-means, and matches clusters to models one to one, so that the sum of the clients'
losses with their clusters' models is as small as possible. The participants then train the models
of their clusters. In IFCA all clients may choose the same model; here each cluster has a model of
its own, whatever the initial models are. When assignments no longer change, clustering stops.

We had the authors' code (``utils/algorithm_utils.py``, BSD-3), the abstract, and a summary of the
paper, not its full text. This file follows the code. Choices and departures:

- *k-means* is the best of 50 runs; the code makes one run.
- *Unknown K.* With ``unknown_k``, as with the code's ``K_is_unknown``, ``clusters`` is an upper
  bound, and each round chooses the number of clusters by the silhouette of Ward's clusters. A larger
  number has to be better by more than 10 %. As in the code, the silhouette of at most ``clusters``
  participants is computed with five copies of each loss vector, by which clusters of a single
  participant have the best possible silhouette: K is then often the number of participants.
- *Stable assignments.* Clustering stops, for the rest of the run, before a round whose participants
  have each been assigned to the same model the last ``stable_rounds`` times. (The loop of the code
  overwrites its result, and in effect compares only the last assignment with the one
  ``stable_rounds`` − 1 times before.)
- *New participants after that* take the model of the cluster whose mean loss vector, as of the last
  clustering, is nearest to theirs. (The code has the same rule, but its clients count as seen before
  the check; and it computes their losses on test data, and takes a cluster's number for a model's.)
- *Clients that never took part* are in no cluster, and are evaluated with the model of the lowest
  loss on their training data. The code does not evaluate them.
- *Diverged models.* A loss that is not finite counts as the largest finite loss of the round.
- *Means of models* are weighted by |D_i|, as in the code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedclade.algorithms.base import OneCohort, RoundLog, State, require_different_models
from fedclade.algorithms.cluster_update import (
    log_of,
    membership_events,
    move_clusters,
    train_clusters,
)
from fedclade.algorithms.requires import EvaluatedModels, Requires
from fedclade.clustering import assign_to_lowest_loss, compute_training_losses, k_means
from fedclade.core import Clients, ParameterTree, RoundPlan, checked, require, rng

TOLERANCE = 1.1
"""Factor by which the silhouette of a larger number of clusters has to be better (code)."""

COPIES = 5
"""Number of copies of each loss vector in the silhouette of few participants (code)."""

LossVectors = NDArray[np.float64]
"""Losses of m participants with K models, ``[m, K]``."""


@dataclass(frozen=True, eq=False)
class CLoVEState(State):
    """State of CLoVE between rounds.

    Parameters
    ----------
    ids
        Ids of the n clients that took part in a clustering.
    repeats
        For each of them, the number of clusterings for which it has had its present model, ``[n]``.
    stopped
        Whether clustering has stopped, since assignments no longer changed.
    centroids
        Mean loss vector of the last cluster that was matched to each of the K models, ``[K, K]``;
        rows are infinite for models without a cluster in the last clustering. None before
        the first clustering.
    """

    ids: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    stopped: bool = False
    centroids: torch.Tensor | None = None


@checked()
@dataclass(frozen=True, kw_only=True)
class CLoVE(OneCohort[CLoVEState]):
    """CLoVE (Bhatia et al. 2026): clients are clustered by the vectors of their losses.

    Parameters
    ----------
    clusters
        Number K of models, which is the number of clusters; with ``unknown_k`` an upper bound of
        it.
    unknown_k
        Whether each round chooses the number of clusters, from 2 to ``clusters``, by the silhouette
        of the loss vectors.
    loss_transform
        ``square_root`` clusters square roots of losses, as the paper's theory does; ``identity``,
        as its experiments, the losses.
    stable_rounds
        Number of equal assignments of all participants after which clustering stops. 0: it never
        stops.
    """

    state_type = CLoVEState
    clusters: int = 2
    unknown_k: bool = False
    loss_transform: Literal["identity", "square_root"] = "identity"
    stable_rounds: int = 3

    def __post_init__(self) -> None:
        transforms = ("identity", "square_root")
        least = 2 if self.unknown_k else 1
        enough = self.clusters >= least
        rule = "at least 2 with algorithm.unknown_k" if self.unknown_k else "at least 1"
        require(
            ("algorithm.clusters", self.clusters, enough, rule),
            (
                "algorithm.loss_transform",
                self.loss_transform,
                self.loss_transform in transforms,
                "'identity' or 'square_root'",
            ),
            ("algorithm.stable_rounds", self.stable_rounds, self.stable_rounds >= 0, "at least 0"),
        )

    @property
    def requires(self) -> Requires:
        """Needs of CLoVE that a run checks, such as K different initial models.

        As with IFCA, ``disclosures`` is empty, since losses are not among the kinds of information
        that clients' policies name. Secure aggregation therefore refuses the method.
        """
        return Requires(
            updates=False,
            signatures=False,
            reports="training losses",
            initial_models=self.clusters,
            clusters_from="" if self.unknown_k else "clusters",
        )

    def init(self, params: torch.Tensor, clients: Clients) -> CLoVEState:
        """Return the state before round 1, with K different models and no client in a cluster.

        Parameters
        ----------
        params
            Initial models ``[K, S]``, one parameter vector in each row.
        clients
            All clients of the run.

        Raises
        ------
        ConfigError
            If two of the initial models are equal.
        """
        models = require_different_models(params, self.clusters, "clove")
        return CLoVEState(ParameterTree.star([()] * self.clusters, models, clients.ids))

    def step(
        self, state: CLoVEState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[CLoVEState, RoundLog]:
        """Run one round of CLoVE: cluster the participants by their losses, and train the models.

        After clustering has stopped, each participant only receives and trains its own model.
        """
        before = state.tree
        cohort = sorted(cohort)
        stopped = state.stopped or self._is_stable(state, cohort)
        state = replace(state, stopped=stopped)
        sent_before = False
        if not stopped:
            state, cohort = self._cluster(state, cohort, clients, this_round)
            # The participants have already received all models, to compute losses.
            sent_before = True
        elif any(before.leaf_of[client] == 0 for client in cohort):
            state = self._assign_new_clients(state, cohort, clients)
            cohort = [client for client in cohort if state.tree.leaf_of[client]]
        events = membership_events(before, state.tree) if state.tree is not before else []
        if not cohort:
            return state, log_of([], events)
        parts = train_clusters(state, cohort, clients, this_round, sent_before=sent_before)
        tree = move_clusters(state.tree, parts)
        return replace(state, tree=tree), log_of(parts, events)

    def models_for(self, state: CLoVEState, clients: Clients) -> EvaluatedModels:
        """Return the models with which clients are evaluated: those of their last clusters.

        A client that is evaluated and never took part is queried for the model with the lowest loss
        on its data.
        """
        tree = state.tree
        unseen = [client for client in clients.evaluated if tree.leaf_of.get(client) == 0]
        if unseen:
            tree, _ = assign_to_lowest_loss(tree, unseen, clients)
        return EvaluatedModels(nodes=tree.leaf_of)

    def _is_stable(self, state: CLoVEState, cohort: Sequence[int]) -> bool:
        """Return whether all participants have had the same models for ``stable_rounds`` times."""
        repeats = dict(zip(state.ids, state.repeats, strict=True))
        stable = [repeats.get(client, 0) >= self.stable_rounds for client in cohort]
        return self.stable_rounds > 0 and len(stable) > 0 and all(stable)

    def _cluster(
        self, state: CLoVEState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[CLoVEState, list[int]]:
        """Cluster the participants by their loss vectors, and match the clusters to models.

        Returns
        -------
        tuple
            The state with the new assignments, and the participants that reported their losses.
        """
        tree = state.tree
        ids, vectors = self._query_loss_vectors(tree, cohort, clients)
        if not ids:
            return state, []
        count = choose_cluster_count(vectors, self.clusters) if self.unknown_k else self.clusters
        draw = rng.generator(this_round.seed, "loss vectors", this_round.number)
        labels = k_means(vectors, count, draw)
        matched = match_clusters_to_models(vectors, labels)
        centroids = torch.full((self.clusters, self.clusters), torch.inf, dtype=torch.float64)
        for label, model in matched.items():
            centroids[model] = torch.from_numpy(vectors[labels == label].mean(axis=0))
        leaves = [leaf.id for leaf in tree.leaves]
        leaf_of = {
            client: leaves[matched[label]]
            for client, label in zip(ids, labels.tolist(), strict=True)
        }
        repeats = dict(zip(state.ids, state.repeats, strict=True))
        for client, leaf in leaf_of.items():
            same = tree.leaf_of[client] == leaf
            repeats[client] = repeats.get(client, 0) + 1 if same else 1
        state = replace(
            state,
            tree=tree.reassigned(leaf_of),
            ids=tuple(repeats),
            repeats=tuple(repeats.values()),
            centroids=centroids,
        )
        return state, ids

    def _assign_new_clients(
        self, state: CLoVEState, cohort: Sequence[int], clients: Clients
    ) -> CLoVEState:
        """Assign participants without a model to those of the nearest clusters' centroids."""
        assert state.centroids is not None  # clustering stops only after it has been done
        tree = state.tree
        new = [client for client in cohort if tree.leaf_of[client] == 0]
        ids, vectors = self._query_loss_vectors(tree, new, clients)
        if not ids:
            return state
        apart = np.linalg.norm(vectors[:, None] - state.centroids.numpy()[None], axis=2)
        nearest = apart.argmin(axis=1).tolist()
        leaves = [leaf.id for leaf in tree.leaves]
        leaf_of = {client: leaves[model] for client, model in zip(ids, nearest, strict=True)}
        return replace(state, tree=tree.reassigned(leaf_of))

    def _query_loss_vectors(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients
    ) -> tuple[list[int], LossVectors]:
        """Query clients for their losses with all K models.

        Returns
        -------
        tuple
            The m clients that replied, in ascending order, and their loss vectors ``[m, K]``, in
            nats, after ``loss_transform``.
        """
        models, rows = tree.models([leaf.id for leaf in tree.leaves])
        losses = compute_training_losses(models, rows, ids, clients)
        replied = sorted(losses)
        if not replied:
            return [], np.empty((0, self.clusters))
        vectors = np.stack([losses[client].double().cpu().numpy() for client in replied])
        finite = np.isfinite(vectors)
        largest = vectors[finite].max() if finite.any() else 0.0
        vectors = np.where(finite, vectors, largest)
        # A loss such as the negative log-likelihood of a density may be below 0.
        return replied, np.sqrt(vectors.clip(0)) if self._takes_roots else vectors

    @property
    def _takes_roots(self) -> bool:
        return self.loss_transform == "square_root"


def match_clusters_to_models(vectors: LossVectors, labels: NDArray[np.int64]) -> Mapping[int, int]:
    """Match clusters of clients to models so that the sum of the clients' losses is smallest.

    Each cluster is matched to one model, and each model to at most one cluster.

    Parameters
    ----------
    vectors
        Losses of m clients with K models, ``[m, K]``.
    labels
        Cluster of each client, ``[m]``; at most K different ones.

    Returns
    -------
    Mapping
        Number of the model, from 0 to K − 1, by cluster.
    """
    clusters = np.unique(labels).tolist()
    costs = np.stack([vectors[labels == cluster].sum(axis=0) for cluster in clusters])
    _, models = scipy.optimize.linear_sum_assignment(costs)
    return dict(zip(clusters, models.tolist(), strict=True))


def choose_cluster_count(vectors: LossVectors, at_most: int) -> int:
    """Choose the number of clusters of loss vectors by the silhouette of Ward's clusters.

    A larger number has to have a silhouette that is better by more than 10 %.

    Parameters
    ----------
    vectors
        Losses of m clients with K models, ``[m, K]``.
    at_most
        Largest number of clusters, at least 2.

    Returns
    -------
    int
        A number from 2 to ``at_most`` and to m; 1 if there is only one client, or if all vectors
        are equal.
    """
    from sklearn.cluster import AgglomerativeClustering  # slow to import: only where used
    from sklearn.metrics import silhouette_score

    distinct = len(np.unique(vectors, axis=0))
    largest = min(at_most, len(vectors))
    # A silhouette needs fewer clusters than points. The authors' code therefore copies the points.
    points = np.repeat(vectors, COPIES, axis=0) if largest >= len(vectors) else vectors
    best, best_score = 1, -1.0
    for count in range(2, min(largest, distinct) + 1):
        labels = AgglomerativeClustering(n_clusters=count, linkage="ward").fit_predict(points)
        score = float(silhouette_score(points, labels))
        if score > best_score * TOLERANCE:
            best, best_score = count, score
    return best
