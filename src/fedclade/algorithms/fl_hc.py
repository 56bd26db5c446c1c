"""FL+HC: Briggs, Fan, Andras 2020, "Federated learning with hierarchical clustering", Algorithm 1.

Where the paper leaves a choice, this file makes it:

- The round that asks all clients for Δw is a round of its own and moves no model: line 12 starts every cluster from the
  w at which the updates were made. With one cluster as the answer, FL+HC is FedAvg that paused for a round.
  With ``keep_updates`` the clustering step's training is not thrown away: each cluster starts from w plus the mean of
  its members' Δw, as line 24 would move it.
- Clients that do not answer in it, though they are asked again, wait in no cluster, with the joint model w. When one
  answers in a later round, from w as the others did, it joins the cluster with the update most like its own. With too
  few answers to cluster, the round is held again.
- Line 19, m = max(α·K, 1), is in a procedure that is called for each cluster with its clients K_c (line 14). Read by
  the letter, its K is the cluster (``cohort = "of_cluster"``): of a cluster of three a round then trains one client,
  whose data alone moves the model. That cannot be what the paper's figures are of: in Table I FL+HC ends as accurate as
  FL at every α, and section III-A finds that α hardly matters, while our runs of this reading end below FL where
  clusters are small (docs/reproduce.md, flhc-table1). By the other reading K is all clients, as in the caption and in
  line 7: a round trains m clients of each cluster, or the whole cluster if it has fewer (``cohort = "of_all"``, the
  default), and a small cluster trains alike at every α. The experiment flhc-cohort puts both readings beside Table I.
  With α = 1 they are the same.
- Clients are compared by their updates Δw (line 8, section II). Section I-C has "the parameters of the local model",
  w + Δw (``compare = "parameters"``): that is the same for l1 and l2, but for cosine the common w hides what differs.
- Average linkage is the mean distance over all pairs (UPGMA). Section I-C compares the averages of the clusters, which
  is ``linkage = "centroid"``: it can merge at falling distances, against the monotonicity that the same section counts
  on.
- Line 27 splits a client's data into batches before the epochs begin, so that all epochs pass through the same ones.
  Here every epoch has an order of its own, as with all methods, unless the local training has ``reshuffle = false``.
- The paper tries several thresholds T and reports the best. Without one, T is where the merge heights have their
  largest relative gap, if that is wider than chance makes it: :func:`~fedclade.clustering.n_clusters_by_gap`.
- Single linkage of many thousands of clients is found by a minimum spanning tree, which is the same. The other linkages
  need the distance of every pair: with ``sample`` that many clients are drawn and clustered, and each other joins the
  cluster with the nearest mean. That is not in the paper, so it has to be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedclade.algorithms.base import (
    Algorithm,
    RoundLog,
    State,
    groups_that_train,
    never_clusters,
    sample_count,
    share_of,
)
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    cut_rules,
    log_of,
    merged,
    move_clusters,
    place_stragglers,
    train_clusters,
    train_root,
)
from fedclade.clustering import (
    CENTROID,
    LINKAGES,
    METRICS,
    MOST_PAIRED,
    Merges,
    agglomerate,
    centroid_linkage,
    distances,
    single_linkage,
    to_nearest_mean,
)
from fedclade.core import (
    Clients,
    Clustered,
    ClusterSplit,
    ConfigError,
    Event,
    ParameterTree,
    Postponed,
    Round,
    Updates,
    checked,
    mean,
    require,
    rng,
    row_norms,
    unknown,
)

MOST_EXACT = 20_000
"""Clients whose distances can be held, all at once and unasked: with what is computed from them they take some 5 GB."""


@dataclass(frozen=True, eq=False)
class FLHCState(State):
    """Whether the clustering step has been taken."""

    clustered: bool = False


@checked()
@dataclass(frozen=True, kw_only=True)
class FLHC(Algorithm[FLHCState]):
    """Federated learning with one step of hierarchical clustering (Briggs et al. 2020, Algorithm 1).

    Parameters
    ----------
    rounds_before
        n of Algorithm 1: rounds of federated learning before the round in which all clients are clustered.
    metric
        Of the distance between two updates: ``l1``, ``l2`` or ``cosine``.
    linkage
        Of the distance between two clusters: ``single``, ``complete``, ``average`` (the mean over all pairs, UPGMA),
        ``centroid`` (the distance of the means, the wording of section I-C), or ``ward``, with ``l2`` only. The
        defaults, ``l1`` and ``complete``, are the paper's for clients of whom nothing is known.
    threshold
        T: clusters merge up to this distance, in parameter units, or in [0, 2] for ``cosine``. ``"auto"``, as when it
        is left out: at the largest gap between merges, or one cluster if there is none to speak of; surest with
        ``ward`` or ``cosine``, as gaps between ``l1`` distances are narrow.
    n_clusters
        Merge until so many are left, instead of up to a threshold.
    compare
        Clients by their ``updates``, or by the ``parameters`` of the models that they trained.
    cohort
        K of m = max(α·K, 1), the number of clients that a round trains in each cluster (line 19), where α is the run's
        ``client_fraction``. ``of_all``: K is the number of all clients that are available in the round, and a cluster
        of fewer than m clients trains whole. ``of_cluster``: K is the number of the cluster's own clients.
    sample
        Of more clients, so many are drawn and clustered, and each other joins the cluster with the nearest mean. Not
        with ``single``, which is exact for any number of them. The other linkages are exact, too, where it is left out,
        for up to 20,000 clients; for more it has to be given.
    keep_updates
        Whether each cluster starts from the model w plus the mean of its members' updates Δw, weighted by their numbers
        of examples; a cluster of which fewer than ``min_clients`` members replied starts from w. If false, as in
        Algorithm 1 line 12, all clusters start from w, and the clustering step moves no model.
    """

    state_type = FLHCState
    clusters_from = "n_clusters"

    rounds_before: int = 10
    metric: str = "l1"
    linkage: str = "complete"
    threshold: float | Literal["auto"] | None = None
    n_clusters: int | None = None
    compare: Literal["updates", "parameters"] = "updates"
    cohort: Literal["of_all", "of_cluster"] = "of_all"
    sample: int | None = None
    keep_updates: bool = False

    def __post_init__(self) -> None:
        linkages = (*LINKAGES, CENTROID)
        for kind, name, known in (("metric", self.metric, METRICS), ("linkage", self.linkage, linkages)):
            if name not in known:
                raise ConfigError(unknown(kind, name, known))
        compared, cohorts = ("updates", "parameters"), ("of_all", "of_cluster")
        fits = self.linkage != "ward" or self.metric == "l2"
        fewest = max(4, self.n_clusters or 0)
        enough, unused = self.sample is None or self.sample >= fewest, self.sample is None or self.linkage != "single"
        require(
            ("algorithm.rounds_before", self.rounds_before, self.rounds_before >= 0, "at least 0"),
            ("algorithm.metric", self.metric, fits, "'l2' with linkage 'ward'"),
            ("algorithm.compare", self.compare, self.compare in compared, "'updates' or 'parameters'"),
            ("algorithm.cohort", self.cohort, self.cohort in cohorts, "'of_all' or 'of_cluster'"),
            *cut_rules(self.threshold, self.n_clusters),
            ("algorithm.sample", self.sample, enough, f"at least {fewest}"),
            ("algorithm.sample", self.sample, unused, "left out: linkage 'single' is exact for any number of clients"),
        )

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return self.compare == "parameters" or self.keep_updates

    @property
    def compares_lengths(self) -> bool:
        """Whether the lengths of updates matter: by all metrics but the cosine."""
        return self.metric != "cosine"

    def too_short(self, rounds: int) -> str:
        """Return what a run of so few rounds misses: the clustering step."""
        return never_clusters(self, self.rounds_before + 1, rounds, "rounds_before")

    def check_clients(self, clients: int) -> None:
        """Check that there are enough clients for ``n_clusters``, and no more than can be clustered."""
        super().check_clients(clients)
        fits = clients <= MOST_EXACT or self.linkage == "single" or self.sample is not None
        few = f"given, such as 4096, for {clients:,} clients: {self.linkage} linkage holds the distances of all pairs"
        require(("algorithm.sample", self.sample, fits, f"{few}, and is exact for at most {MOST_EXACT:,}"))

    def init(self, params: Tensor, clients: Clients) -> FLHCState:
        """Put all clients in one cluster (line 2)."""
        return FLHCState(ParameterTree.root_only(clients.ids, params))

    def sample_cohort(self, state: FLHCState, fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
        """Sample m clients of every cluster, or all of a cluster that has fewer (lines 19 and 20)."""
        if self.cohort == "of_cluster":
            return super().sample_cohort(state, fraction, draw)
        m = share_of(len(state.tree.nodes[0].members), fraction)
        cohorts = (sample_count(members, min(m, len(members)), draw) for members in groups_that_train(state))
        return tuple(chain.from_iterable(cohorts))

    def step(
        self, state: FLHCState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FLHCState, RoundLog]:
        """Run a round of federated learning in every cluster, or the clustering step."""
        if this_round.number <= self.rounds_before or state.clustered:
            parts = train_clusters(state, cohort, clients, this_round)  # lines 4 and 14, that is 19 to 23
            tree, events = place_stragglers(move_clusters(state.tree, parts), parts)  # line 24
            return replace(state, tree=tree), log_of(parts, events)
        part = train_root(state, clients.ids, clients, replace(this_round, require_all=True)).compared()  # lines 7 to 9
        needed = min(len(clients.ids), max(2, self.n_clusters or 0))
        if not part.enough or len(part.updates.ids) < needed:
            return state, log_of([part], [Postponed(part.node, len(part.updates.ids), needed)], phase="cluster")
        tree, events = self._clustered(state.tree, part, this_round)
        discrepancy = None  # as no model moves
        if self.keep_updates:
            tree, discrepancy = _moved_by_updates(tree, part.updates, this_round.min_clients)
        log = replace(log_of([part], events, phase="cluster"), discrepancy=discrepancy)
        return FLHCState(tree, clustered=True), log

    def _clustered(
        self, tree: ParameterTree, part: ClusterUpdate, this_round: Round
    ) -> tuple[ParameterTree, list[Event]]:
        """Cluster the updates (line 10); every cluster goes on from the joint model (lines 11 and 12)."""
        root, updates = tree.nodes[part.node], part.updates
        vectors = updates.signatures
        if self.compare == "parameters":
            vectors = (root.params + updates.required_deltas)[:, : updates.n_parameters]
        clusters, threshold, event = self._found(updates.ids, vectors, this_round)
        events: list[Event] = [event]
        if len(clusters) > 1:
            assert threshold is not None  # as merges are undone
            cached = [updates.signatures_of(cluster) for cluster in clusters]
            height = {"threshold": threshold}
            tree = tree.split(
                root.id, clusters, params=root.params, cached=cached, round_number=this_round.number, criteria=height
            )
            children = tuple(child.id for child in tree.children(root.id))
            members = tuple(tuple(cluster) for cluster in clusters)
            events.append(ClusterSplit(root.id, **part.criteria.numbers, clusters=members, children=children))
        return tree, events

    def _found(
        self, ids: Sequence[int], vectors: Tensor, this_round: Round
    ) -> tuple[list[list[int]], float | None, Clustered]:
        """Return the clusters, the height of the cut, and the event; see :func:`merged`."""
        how = self.metric, self.linkage, self.threshold, self.n_clusters
        if self.linkage == "single" and len(ids) > MOST_PAIRED:
            return merged(ids, single_linkage(vectors, self.metric), *how)
        self.check_clients(len(ids))
        if self.sample is None or len(ids) <= self.sample:
            return merged(ids, self._merges(vectors), *how)
        draw = rng.generator(this_round.seed, "linkage sample", this_round.number)
        drawn = np.sort(draw.choice(len(ids), self.sample, replace=False))
        merges = self._merges(vectors[torch.from_numpy(drawn)])
        some, height, event = merged([ids[place] for place in drawn], merges, *how)
        cluster_of = {client: number for number, cluster in enumerate(some) for client in cluster}
        labels = np.array([cluster_of[ids[place]] for place in drawn])
        found = to_nearest_mean(vectors, drawn, labels, self.metric)
        clusters = [[ids[place] for place in np.flatnonzero(found == number).tolist()] for number in range(len(some))]
        clusters.sort(key=lambda cluster: (-len(cluster), cluster[0]))
        return clusters, height, replace(event, sizes=tuple(map(len, clusters)))

    def _merges(self, vectors: Tensor) -> Merges:
        """Merge clients by their vectors ``[m, R]`` until one cluster is left."""
        if self.linkage == CENTROID:
            return centroid_linkage(vectors, self.metric)
        return agglomerate(distances(vectors, self.metric), self.linkage)


def _moved_by_updates(tree: ParameterTree, updates: Updates, min_clients: int) -> tuple[ParameterTree, float]:
    """Move every cluster's model by the mean of its members' updates (Algorithm 1, line 24), made at the root's model.

    A cluster of which fewer than ``min_clients`` members replied keeps the root's model. Return the tree, and how far
    the clients' models are from those of their clusters then, in all.
    """
    discrepancy = 0.0
    replied = set(updates.ids)
    for leaf in tree.leaves:
        of_cluster = updates.select([client for client in leaf.members if client in replied])
        if len(of_cluster.ids) < min_clients:
            discrepancy += float(of_cluster.norms.sum())
            continue
        step = mean(of_cluster)
        tree = tree.moved(leaf.id, step)
        D = updates.n_parameters
        discrepancy += float(row_norms(of_cluster.required_deltas[:, :D], step[:D]).sum())
    return tree, discrepancy
