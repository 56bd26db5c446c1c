"""FL+HC, federated learning with one step of hierarchical clustering (Briggs et al. 2020).

Briggs, Fan, Andras 2020, "Federated learning with hierarchical clustering", Algorithm 1.

For n rounds all clients train one model (lines 3 to 6). Then a clustering step queries all clients
for their updates Δw (lines 7 to 9) and clusters them by hierarchical clustering (line 10). From
then on every cluster trains a model of its own, starting from the joint model (lines 11 to 16).

Where the paper leaves a choice, this file decides as follows:

**Clustering step.** The clustering step is a round of its own and moves no model: line 12 starts
every cluster from the w at which the updates were made. If the step finds one cluster, FL+HC is
FedAvg that paused for a round. With ``keep_updates`` the training of this round is not discarded:
each cluster starts from w plus the mean of its members' Δw, as line 24 would move it.

**Clients that do not reply to the clustering step**, although they are queried again, are in no
cluster, and train and use the joint model w. When such a client replies in a later round, with an
update made at w like the other clients' updates, it joins the cluster with the most similar update.
If too few clients reply, the next round repeats the clustering step.

**Number of sampled clients.** Line 19, m = max(α·K, 1), is in a procedure that is called for each
cluster with its clients K_c (line 14). K has two readings, which are the same with α = 1:

- ``cohort = "of_cluster"``, the literal reading: K is the number of the cluster's clients. In a
  cluster of three clients, a small α then lets only one client train in a round.
- ``cohort = "of_all"``, the default: K is the number of all clients, as in the caption and in line
  7. A round trains m clients of each cluster, or the whole cluster if it has fewer than m.

The first reading does not fit the paper's results. In Table I FL+HC ends as accurate as FL at every
α, and section III-A finds that α hardly matters, but our runs of the first reading end below FL
where clusters are small (docs/reproduce.md, flhc-table1). The experiment flhc-cohort compares both
readings with Table I.

**Compared vectors.** Clients are compared by their updates Δw (line 8, section II). Section I-C has
"the parameters of the local model", w + Δw (``compare = "parameters"``): that is the same for l1
and l2, but for cosine the common w hides the differences.

**Average linkage** is the mean distance over all pairs (UPGMA). Section I-C compares the averages
of the clusters, which is ``linkage = "centroid"``: it can merge at falling distances, against the
monotonicity that the same section relies on.

**Batches.** Line 27 splits a client's data into batches before the epochs begin, so that all epochs
pass through the same ones. Here every epoch has an order of its own, as with all methods, unless
the local training has ``reshuffle = false``.

**Threshold.** The paper tries several thresholds T and reports the best. Without one, T is where
the merge heights have their largest relative gap, if that is wider than chance makes it:
:func:`~fedclade.clustering.count_clusters_by_gap`.

**Many clients.** For many thousands of clients, single linkage is computed by a minimum spanning
tree, which gives the same clusters. The other linkages need the distance of every pair: with
``sample``, this number of clients is drawn and clustered, and each other client joins the cluster
with the nearest mean. That is not in the paper, so it has to be requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

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
    move_new_clusters,
    place_stragglers,
    train_clusters,
    train_root,
)
from fedclade.algorithms.requires import Requires, RunFacts
from fedclade.clustering import (
    CENTROID,
    LINKAGES,
    METRICS,
    MOST_PAIRED,
    Merges,
    agglomerate,
    assign_to_nearest_mean,
    compute_distances,
    merge_by_centroids,
    single_linkage,
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
    RoundPlan,
    checked,
    require,
    rng,
    unknown,
)

if TYPE_CHECKING:
    from torch import Tensor

MOST_EXACT = 20_000
"""Largest number of clients for which all pairwise distances are computed.

The distances of so many clients, and the arrays computed from them, take some 5 GB.
"""


@dataclass(frozen=True, eq=False)
class FLHCState(State):
    """State of FL+HC between rounds.

    Parameters
    ----------
    clustered
        Whether the round with the clustering step is over.
    """

    clustered: bool = False


@checked()
@dataclass(frozen=True, kw_only=True)
class FLHC(Algorithm[FLHCState]):
    """Federated learning with one step of hierarchical clustering (Briggs et al. 2020).

    Parameters
    ----------
    rounds_before
        n of Algorithm 1, at least 0: number of rounds of federated learning before the clustering
        step.
    metric
        Distance between two updates: ``l1``, ``l2`` or ``cosine``.
    linkage
        Distance between two clusters: ``single``, ``complete``, ``average`` (the mean over all
        pairs, UPGMA), ``centroid`` (the distance of the means, the wording of section I-C), or
        ``ward``, with ``l2`` only. The defaults, ``l1`` and ``complete``, are the paper's for
        clients about which nothing is known.
    threshold
        T: clusters merge up to this distance, in parameter units, or in [0, 2] for ``cosine``. With
        ``"auto"`` or None, merging stops at the largest gap between the distances of consecutive
        merges; if no gap is clear, there is one cluster. This is most reliable with ``ward`` or
        ``cosine``, as gaps between ``l1`` distances are narrow.
    n_clusters
        Merge until this number of clusters is left, instead of up to a threshold.
    compare
        Compare clients by their ``updates``, or by the ``parameters`` of the models that they
        trained.
    cohort
        K of m = max(α·K, 1), the number of clients that a round trains in each cluster (line 19),
        where α is the run's ``client_fraction``. ``of_all``: K is the number of all clients that
        are available in the round, and a cluster of fewer than m clients trains whole.
        ``of_cluster``: K is the number of the cluster's own clients.
    sample
        Number of clients that are drawn and clustered, if there are more clients; each other client
        joins the cluster with the nearest mean. Not available with ``single`` linkage, which is
        exact for any number of clients. None: all clients are clustered, which the other linkages
        allow for up to 20,000 clients.
    keep_updates
        Whether each cluster starts from the model w plus the mean of its members' updates Δw,
        weighted by their numbers of examples; a cluster of which fewer than ``min_clients`` members
        replied starts from w. If false, as in Algorithm 1, line 12, all clusters start from w, and
        the clustering step moves no model.

    Raises
    ------
    ConfigError
        If options are unknown or out of range; one line for each of them.
    """

    state_type = FLHCState

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
        if self.metric not in METRICS:
            raise ConfigError(unknown("metric", self.metric, METRICS))
        linkages = (*LINKAGES, CENTROID)
        if self.linkage not in linkages:
            raise ConfigError(unknown("linkage", self.linkage, linkages))
        metric_valid = self.linkage != "ward" or self.metric == "l2"
        compare_valid = self.compare in ("updates", "parameters")
        cohort_valid = self.cohort in ("of_all", "of_cluster")
        smallest_sample = max(4, self.n_clusters or 0)
        sample_valid = self.sample is None or self.sample >= smallest_sample
        sample_used = self.sample is None or self.linkage != "single"
        sample_rule = "left out, since linkage 'single' is exact for any number of clients"
        require(
            ("algorithm.rounds_before", self.rounds_before, self.rounds_before >= 0, "at least 0"),
            ("algorithm.metric", self.metric, metric_valid, "'l2' with linkage 'ward'"),
            ("algorithm.compare", self.compare, compare_valid, "'updates' or 'parameters'"),
            ("algorithm.cohort", self.cohort, cohort_valid, "'of_all' or 'of_cluster'"),
            *cut_rules(self.threshold, self.n_clusters),
            ("algorithm.sample", self.sample, sample_valid, f"at least {smallest_sample}"),
            ("algorithm.sample", self.sample, sample_used, sample_rule),
        )

    @property
    def requires(self) -> Requires:
        """Needs of FL+HC that a run checks: signatures of updates, or whole updates.

        The clustering step compares clients by signatures of their updates, which are short
        vectors. It needs whole updates to compare models (``compare = "parameters"``), or to move
        the clusters' models (``keep_updates``).
        """
        return Requires(
            updates=self.compare == "parameters" or self.keep_updates,
            lengths=self.metric != "cosine",
            clusters_from="n_clusters",
        )

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that the number of clients suits ``n_clusters`` and ``sample``.

        The result contains a warning if the run ends before the clustering step.

        Raises
        ------
        ConfigError
            If there are fewer clients than ``n_clusters``; or more clients than can be compared in
            pairs, and ``sample`` is not set.
        """
        warnings = super().check(run)
        if run.clients is not None:
            self._check_sample(run.clients)
        return (*warnings, *never_clusters(self, self.rounds_before + 1, run, "rounds_before"))

    def _check_sample(self, clients: int) -> None:
        """Check that ``sample`` is set if there are too many clients to compare all pairs."""
        valid = clients <= MOST_EXACT or self.linkage == "single" or self.sample is not None
        needed = (
            f"set, for example to 4096, for {clients:,} clients: {self.linkage} linkage stores the "
            "distances of all pairs"
        )
        rule = f"{needed}, and therefore takes at most {MOST_EXACT:,} clients"
        require(("algorithm.sample", self.sample, valid, rule))

    def init(self, params: Tensor, clients: Clients) -> FLHCState:
        """Return the state before round 1: all clients share one model (Algorithm 1, line 2)."""
        return FLHCState(ParameterTree.root_only(clients.ids, params))

    def sample_cohort(
        self, state: FLHCState, fraction: float, draw: np.random.Generator
    ) -> Sequence[int]:
        """Sample the clients of a round: m clients of every cluster, or all if it has fewer.

        Source: Algorithm 1, lines 19 and 20. The number m is a fraction of all clients, or of the
        clients of each cluster, see ``cohort``.
        """
        if self.cohort == "of_cluster":
            return super().sample_cohort(state, fraction, draw)
        m = share_of(len(state.tree.nodes[0].members), fraction)
        cohort: list[int] = []
        for members in groups_that_train(state):
            cohort += sample_count(members, min(m, len(members)), draw)
        return tuple(cohort)

    def step(
        self, state: FLHCState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[FLHCState, RoundLog]:
        """Run a round of federated learning in every cluster, or the clustering step.

        Parameters
        ----------
        state
            The state after the previous round.
        cohort
            Ids of the clients sampled for this round; the clustering step queries all clients.
        clients
            All clients of the run; queries go through this object.
        this_round
            Number, seed and local training of the round.
        """
        if this_round.number > self.rounds_before and not state.clustered:
            return self._run_clustering_step(state, clients, this_round)
        # lines 19 to 23, the procedure that lines 4 and 14 call
        trained = train_clusters(state, cohort, clients, this_round)
        tree = move_clusters(state.tree, trained)  # line 24
        tree, events = place_stragglers(tree, trained)
        return replace(state, tree=tree), log_of(trained, events)

    def _run_clustering_step(
        self, state: FLHCState, clients: Clients, this_round: RoundPlan
    ) -> tuple[FLHCState, RoundLog]:
        """Query all clients for updates and cluster the clients (Algorithm 1, lines 7 to 12).

        If too few clients reply, the clustering is postponed to the next round.

        Returns
        -------
        tuple
            The next state, and the log of the round.
        """
        trained = train_root(state, clients.ids, clients, this_round, require_all=True).compared()
        replies = len(trained.updates.ids)
        needed = min(len(clients.ids), max(2, self.n_clusters or 0))
        if not trained.enough or replies < needed:
            postponed = Postponed(trained.node, replies, needed)
            return state, log_of([trained], [postponed], phase="cluster")
        tree, events = self._create_clusters(state.tree, trained, this_round)
        discrepancy = None  # no model moves
        if self.keep_updates:
            tree, discrepancy = move_new_clusters(tree, trained.updates, this_round.min_clients)
        log = log_of([trained], events, phase="cluster")
        return FLHCState(tree, clustered=True), replace(log, discrepancy=discrepancy)

    def _create_clusters(
        self, tree: ParameterTree, trained: ClusterUpdate, this_round: Round
    ) -> tuple[ParameterTree, list[Event]]:
        """Cluster the clients by their updates (Algorithm 1, line 10).

        Returns
        -------
        tuple
            The tree, in which every cluster starts from the joint model (lines 11 and 12); and the
            events that report the clustering. The tree is unchanged if there is one cluster.
        """
        root = tree.nodes[trained.node]
        updates = trained.updates
        vectors = updates.signatures
        if self.compare == "parameters":
            vectors = (root.params + updates.required_deltas)[:, : updates.n_parameters]
        clusters, threshold, event = self._find_clusters(updates.ids, vectors, this_round)
        if len(clusters) == 1:
            return tree, [event]
        assert threshold is not None  # several clusters are left only by a cut
        tree = tree.split(
            root.id,
            clusters,
            params=root.params,
            cached=[updates.signatures_of(cluster) for cluster in clusters],
            round_number=this_round.number,
            criteria={"threshold": threshold},
        )
        split = ClusterSplit(
            root.id,
            **trained.criteria.numbers,
            clusters=tuple(tuple(cluster) for cluster in clusters),
            children=tuple(child.id for child in tree.children(root.id)),
        )
        return tree, [event, split]

    def _find_clusters(
        self, ids: Sequence[int], vectors: Tensor, this_round: Round
    ) -> tuple[list[list[int]], float | None, Clustered]:
        """Cluster clients hierarchically, all of them or a sample of ``sample`` clients.

        Parameters
        ----------
        ids
            Ids of m clients.
        vectors
            Vectors by which the clients are compared, ``[m, R]``: one row for each client.
        this_round
            The round, whose seed and number determine the sample.

        Returns
        -------
        tuple
            The members of each cluster, the largest cluster first; the height at which the
            dendrogram is cut, None if there is one cluster and no threshold; and the event that
            reports the clusters.
        """
        if self.linkage == "single" and len(ids) > MOST_PAIRED:
            return self._cut_dendrogram(ids, single_linkage(vectors, self.metric))
        self.check(RunFacts(clients=len(ids)))
        if self.sample is None or len(ids) <= self.sample:
            return self._cut_dendrogram(ids, self._build_dendrogram(vectors))

        generator = rng.generator(this_round.seed, "linkage sample", this_round.number)
        drawn = np.sort(generator.choice(len(ids), self.sample, replace=False))
        merges = self._build_dendrogram(vectors[torch.from_numpy(drawn)])
        drawn_ids = [ids[place] for place in drawn]
        clusters_of_drawn, height, event = self._cut_dendrogram(drawn_ids, merges)
        label_of: dict[int, int] = {}
        for label, cluster in enumerate(clusters_of_drawn):
            label_of |= dict.fromkeys(cluster, label)
        labels_of_drawn = np.array([label_of[client] for client in drawn_ids])
        labels = assign_to_nearest_mean(vectors, drawn, labels_of_drawn, self.metric)
        clusters: list[list[int]] = []
        for label in range(len(clusters_of_drawn)):
            places = np.flatnonzero(labels == label).tolist()
            clusters.append([ids[place] for place in places])
        clusters.sort(key=lambda cluster: (-len(cluster), cluster[0]))
        return clusters, height, replace(event, sizes=tuple(map(len, clusters)))

    def _build_dendrogram(self, vectors: Tensor) -> Merges:
        """Cluster m clients hierarchically by their vectors ``[m, R]``.

        Returns
        -------
        numpy.ndarray
            The dendrogram as a linkage matrix ``[m-1, 4]`` in SciPy's format.
        """
        if self.linkage == CENTROID:
            return merge_by_centroids(vectors, self.metric)
        return agglomerate(compute_distances(vectors, self.metric), self.linkage)

    def _cut_dendrogram(
        self, ids: Sequence[int], merges: Merges
    ) -> tuple[list[list[int]], float | None, Clustered]:
        """Cut a dendrogram of clients at ``threshold``, or into ``n_clusters`` clusters.

        Returns
        -------
        tuple
            The members of each cluster, the largest cluster first; the height of the cut, None if
            there is one cluster and no threshold; and the event that reports the clusters.
        """
        return merged(
            ids,
            merges,
            self.metric,
            linkage=self.linkage,
            threshold=self.threshold,
            n_clusters=self.n_clusters,
        )
