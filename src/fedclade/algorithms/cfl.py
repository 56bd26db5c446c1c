"""Clustered Federated Learning: Sattler, Müller, Samek 2019, Algorithm 5.

:meth:`CFL.step` is one pass of the algorithm's loop, and :meth:`Thresholds.examine` its lines 14 to
18, which decide whether a cluster is split. Where the paper leaves a choice, this file makes it:

**Weighted mean.** The mean is weighted by |D_i| as in eqs. 2 and 32; Algorithm 5, line 13, leaves
the weights out (``weighted = false``). With equal sizes it is the same.

**End of a run.** Algorithms 2 and 3 end: a cluster is done when its mean update is below ε₁, and
all of its updates are below ε₂ (eq. 34) or the split is rejected. Here a run has a fixed number of
rounds, so that methods can be compared. With ``stop_when_stationary`` it ends in the first round in
which every cluster is done. With ``stop_done_clusters`` a cluster that is done trains no more
(Algorithm 3, line 10), and the run ends when all clusters are done.

**Models after a split.** A cluster's children start from θ + Δθ_c, the model that the cluster's
last round led to (Algorithm 2, line 7, then Algorithm 3, lines 7 and 8). The node itself keeps θ,
at which the updates before the split were made (eq. 47). The authors' published code moves each
child by the mean of its own members' updates (``children_start = "own_mean"``).

**Model at which clients are compared.** Clients are compared at θ, by "the clients' latest
transmitted updates" (section III; Algorithm 5, line 15). Lines 3 to 6 of Algorithm 3 take α and ε₂
at the stationary point θ*, which is θ + Δθ_c: ``compared_at = "stationary"`` queries all members
once more, at θ*. When they are compared by updates made there, the node keeps θ*, as eq. 47 has it.

**Units of ε₂.** Eqs. 33 and 34 and Algorithm 3, line 6, compare ε₂ with gradients, Algorithm 5,
line 14, with updates. So with ``similarity = "gradients"`` ε₂ is in the units of a gradient, unless
``eps2_of = "updates"``.

**Secure aggregation.** The server then does not know the norm of a single update, and eq. 33 takes
the root mean square of the members' norms in place of the largest. A cluster is so split later, if
at all.

**Partial participation.** With a client fraction below 1 the criterion is first evaluated on the
cohort. If it calls for a split, the absent members are queried for their updates at the same model,
and the updates of all members decide. No similarity is made up: members that do not reply even then
stay at the node as stragglers, and join a child when they reply (Algorithm 4).

**Criteria without thresholds.** ``criterion`` replaces lines 14 to 18. With ``"replicated"`` a
statistical test decides, whatever the norms are
(:mod:`fedclade.algorithms.rcfl.replicate_test`). The tree is grown and used in the same way.

**Fall-back.** "It is always possible to fall back to the Federated Learning solution" (section
II-A) assumes that federated learning has converged before a split. With thresholds it has not, so
with ``fallback`` it goes on training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedclade.algorithms.base import Algorithm, RoundLog, sample
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    log_of,
    move_clusters,
    place_stragglers,
)
from fedclade.algorithms.fallback import best_on_validation, train_beside
from fedclade.algorithms.rcfl.replicate_test import ReplicateTest
from fedclade.algorithms.split_criterion import (
    CFLState,
    ExaminedCluster,
    ProposedSplit,
    SplitCriterion,
)
from fedclade.core import (
    Clients,
    ClusterSplit,
    Event,
    Joined,
    Node,
    ParameterTree,
    Rejected,
    Round,
    Stationary,
    Updates,
    checked,
    mean,
    require,
)

THRESHOLD_OPTIONS = (
    "eps1",
    "eps2",
    "eps2_of",
    "gamma_max",
    "similarity",
    "compared_at",
    "split_rounds",
)
"""Options of the paper's criterion; another criterion does not use them."""

STRUCTURE_OPTIONS = ("children_start", "stop_when_stationary", "stop_done_clusters")
"""Further options that the replicate test does not use."""

SPLIT_NUMBERS = ("mean_norm", "max_norm", "alpha_cross_max", "gamma_bound", "p_value", "gain")
"""Numbers of a split that events have fields for; the tree keeps all numbers of a criterion."""

AUTO_SHARE = 10
"""With ``eps1 = "auto"``, ε₁ is the largest mean norm so far divided by this (journal version)."""


@dataclass(frozen=True, kw_only=True)
class Thresholds(SplitCriterion):
    """Split a cluster by the paper's three thresholds (Algorithm 5, lines 14 to 18).

    Parameters
    ----------
    eps1, eps2, eps2_of, gamma_max, similarity, compared_at, split_rounds
        As in :class:`CFL`, which checks them.
    """

    eps1: float | Literal["auto"] = "auto"
    eps2: float = 1.0
    eps2_of: Literal["compared", "updates"] = "compared"
    gamma_max: float = 0.0
    similarity: Literal["updates", "gradients"] = "updates"
    compared_at: Literal["round_start", "stationary"] = "round_start"
    split_rounds: tuple[int, ...] = ()

    @property
    def needs_updates(self) -> bool:
        """False: signatures, norms and means of the updates suffice."""
        return False

    @property
    def asks_for_gradients(self) -> bool:
        """Return whether clients send gradients to be compared."""
        return self.similarity == "gradients"

    def examine(
        self, cluster: ClusterUpdate, state: CFLState, clients: Clients, this_round: Round
    ) -> ExaminedCluster:
        """Decide whether a cluster is split (lines 14 to 18).

        Line 14 is first evaluated on the clients that replied. Only if it holds, or if it depends
        on updates or gradients that are not there yet, further clients and queries are needed.
        """
        node = state.tree.nodes[cluster.node]
        peak = float(state.peaks[cluster.node])
        if not self._may_split(node, cluster, peak, this_round):  # line 14, eq. 32
            return self._keep_whole(cluster.compared(), peak, this_round)
        if self._limits_updates and cluster.criteria.max_norm <= self.eps2:  # line 14, eq. 33
            return self._keep_whole(cluster.compared(), peak, this_round)

        all_members = replace(this_round, require_all=True)
        cluster = _add_absent_members(cluster, node, clients, all_members)
        # The mean of all members may differ from that of the cohort. If this rules a split out, the
        # further query below is not worth its cost.
        if self._queries_again and not self._may_split(node, cluster, peak, this_round):
            return self._keep_whole(cluster.compared(), peak, this_round)

        node, updates, compared = self._query_compared(cluster, node, clients, all_members)
        if compared.ids:
            cluster = cluster.compared_by(compared)  # α_ij, line 15
        if len(compared.ids) < 2:
            # One client has nothing to be compared with, and the cluster is not done either: eq. 34
            # does not hold.
            return ExaminedCluster(cluster)

        criteria = cluster.criteria
        if not self._limits_updates:
            criteria = replace(criteria, max_norm=float(compared.norms.max()))
        disagree = criteria.max_norm > self.eps2  # line 14, eq. 33
        if not disagree or not self._may_split(node, cluster, peak, this_round):
            return self._keep_whole(cluster, peak, this_round)
        bipartition = criteria.bipartition  # c₁ and c₂, line 16
        if bipartition is None:
            return self._keep_whole(cluster, peak, this_round)
        numbers = criteria.numbers  # with α_cross^max, line 17
        noise_explains = numbers["gamma_bound"] <= self.gamma_max  # line 18, eq. 39
        split = ProposedSplit(
            node=node,
            updates=updates,
            clusters=(bipartition.first, bipartition.second),
            criteria=numbers,
            rejected_because=f"gamma_bound <= {self.gamma_max}" if noise_explains else "",
        )
        return replace(self._keep_whole(cluster, peak, this_round), split=split)

    def _query_compared(
        self, cluster: ClusterUpdate, node: Node, clients: Clients, this_round: Round
    ) -> tuple[Node, Updates, Updates]:
        """Return the updates or gradients that are compared, after a further query if needed.

        Returns
        -------
        tuple of Node, Updates and Updates
            The node, with the model that it keeps at a split; the updates that are cached then; and
            the updates or gradients that are compared.
        """
        updates = cluster.updates
        rows = [0] * len(updates.ids)
        model = node.params
        if self.compared_at == "stationary" and cluster.step is not None:
            model = model + cluster.step  # θ*
        if self.similarity == "gradients":
            gradients = clients.gradients(updates.ids, model[None], rows, this_round)
            return node, updates, gradients
        if self.compared_at == "stationary":
            again = replace(this_round, purpose="stationary")
            updates = clients.train(updates.ids, model[None], rows, again).select(updates.ids)
            return replace(node, params=model), updates, updates
        return node, updates, updates

    @property
    def _queries_again(self) -> bool:
        """Return whether members are compared by something else than the round's updates."""
        return self.similarity == "gradients" or self.compared_at == "stationary"

    @property
    def _limits_updates(self) -> bool:
        """Return whether ε₂ is compared with the norms of the round's updates."""
        return not self._queries_again or self.eps2_of == "updates"

    def _may_split(
        self, node: Node, cluster: ClusterUpdate, peak: float, this_round: Round
    ) -> bool:
        """Return whether a cluster can be split, and eq. 32 or a date in ``split_rounds`` holds."""
        if len(node.members) < 2 or not cluster.enough:
            return False
        if self.split_rounds:
            return this_round.number in self.split_rounds
        return self._is_stationary(cluster, peak)

    def _is_stationary(self, cluster: ClusterUpdate, peak: float) -> bool:
        """Return whether a cluster is near a stationary point of its objective (line 14, eq. 32).

        The peak is that of the rounds before. A mean norm that is larger is no tenth of itself, so
        that including this round would change nothing.
        """
        eps1 = peak / AUTO_SHARE if self.eps1 == "auto" else self.eps1
        return cluster.criteria.mean_norm < eps1

    def _keep_whole(
        self, cluster: ClusterUpdate, peak: float, this_round: Round
    ) -> ExaminedCluster:
        """Return a cluster without a split; it is done if it is near a stationary point.

        With dates no cluster is done before the last of them.
        """
        last_date = max(self.split_rounds, default=0)
        may_be_done = cluster.enough and this_round.number >= last_date
        is_done = may_be_done and self._is_stationary(cluster, peak)
        return ExaminedCluster(cluster, is_done=is_done)


@checked()
@dataclass(frozen=True, kw_only=True)
class CFL(Algorithm[CFLState]):
    """Clustered Federated Learning: split a cluster when its members disagree.

    Sattler et al. 2019, Algorithm 5, which joins Algorithms 1 to 3.

    Parameters
    ----------
    eps1
        ε₁ of eq. 32: a cluster is near a stationary point when the norm of its weighted mean update
        is below this, in parameter units. ``"auto"``: a tenth of the largest such norm seen in the
        cluster and its ancestors (the rule of thumb of the journal version).
    eps2
        ε₂ of eqs. 33 and 34: members disagree when the largest norm of an update is above this, in
        parameter units; with gradients in the units of a gradient.
    eps2_of
        What ε₂ is compared with: what is ``compared`` by ``similarity`` and ``compared_at`` (eq.
        34; Algorithm 3, line 6), or always the round's ``updates``. By default these are the same
        (Algorithm 5, line 14).
    gamma_max
        γ_max of eq. 39, in [0, 1): the noise that updates may have. A bi-partition that such noise
        could explain is rejected.
    similarity
        α from weight ``updates`` (eq. 51) or from full ``gradients`` at the same model (eq. 50).
    compared_at
        The model at which members of a cluster that may be split are compared: at the
        ``round_start``, before the step that led to the stationary point (Algorithm 5, line 15), or
        at the ``stationary`` point θ* itself (Algorithm 3, lines 3 to 6). The latter queries every
        member for one more update, or gradient; parameters that stay with clients
        (``model.personal``) are then as the round's training left them.
    children_start
        The model that the children of a split start from: the cluster's after its step by the mean
        of all members, the ``cluster_mean`` (Algorithm 3, lines 7 and 8), or each child's after a
        step by the mean of its own members, the ``own_mean``, as in the authors' published code. A
        child of which fewer than ``min_clients`` members replied starts from the cluster's.
    split_rounds
        Split in these rounds only, counted from 1, whether or not eq. 32 holds (figure 8); eqs. 33
        and 39 still decide which clusters. Empty: whenever eq. 32 holds.
    min_cluster_size
        Splits that leave a smaller cluster are rejected.
    weighted
        Whether clients count by their numbers of examples (eqs. 2 and 32), or all alike (Algorithm
        5, line 13).
    stop_when_stationary
        End the run when every cluster is near a stationary point (eq. 32, the end of Algorithm 2)
        and is not to be split (eq. 34, or eq. 39: the end of Algorithm 3); with ``split_rounds``
        not before the last of them.
    stop_done_clusters
        Whether each cluster trains no more once it is near a stationary point and is not to be
        split (Algorithm 3, line 10). The run ends when all clusters are done. Both equations are
        evaluated on the clients that replied in the round: with a client fraction below 1 another
        member may be above ε₂ when its cluster is done. A cluster that a client joins trains again.
        Not with ``fallback``, whose root continues to train.
    fallback
        After the first split continue to train the root's model in addition to the clusters', as
        plain federated learning does, and serve each client with the model on its path that is best
        on validation data (:mod:`fedclade.algorithms.fallback`), so that clients fare at least
        about as well as with FedAvg (end of section II-A). From the first split on it takes twice
        the training and the bytes, and of private clients twice the releases.
    criterion
        What decides when to split, and into what: the paper's ``thresholds``; ``replicated``, the
        test of :class:`ReplicatedCFL`, which needs none of eps1, eps2 and gamma_max; or in Python a
        :class:`~fedclade.algorithms.SplitCriterion`.
    level
        With ``replicated``, the chance of ever splitting a cluster whose members all have one
        distribution.

    Raises
    ------
    ConfigError
        If an option is out of range, or the criterion does not use it; one line for each.
    """

    state_type = CFLState

    eps1: float | Literal["auto"] = "auto"
    eps2: float = 1.0
    eps2_of: Literal["compared", "updates"] = "compared"
    gamma_max: float = 0.0
    similarity: Literal["updates", "gradients"] = "updates"
    compared_at: Literal["round_start", "stationary"] = "round_start"
    children_start: Literal["cluster_mean", "own_mean"] = "cluster_mean"
    split_rounds: tuple[int, ...] = ()
    min_cluster_size: int = 1
    weighted: bool = True
    stop_when_stationary: bool = False
    stop_done_clusters: bool = False
    fallback: bool = False
    criterion: Literal["thresholds", "replicated"] | SplitCriterion = "thresholds"
    level: float = 0.01

    def __post_init__(self) -> None:
        eps1_valid = self.eps1 == "auto" if isinstance(self.eps1, str) else self.eps1 > 0
        eps2_of_valid = self.eps2_of in ("compared", "updates")
        compared_at_valid = self.compared_at in ("round_start", "stationary")
        children_start_valid = self.children_start in ("cluster_mean", "own_mean")
        stop_valid = not (self.fallback and self.stop_done_clusters)
        stop_rule = "false with fallback = true, whose root all clients train on"
        similarity_valid = self.similarity in ("updates", "gradients")
        rounds_valid = all(number >= 1 for number in self.split_rounds)
        criterion_valid = isinstance(self.criterion, SplitCriterion) or self.criterion in (
            "thresholds",
            "replicated",
        )
        criterion_rule = "'thresholds' or 'replicated', or in Python a SplitCriterion"
        require(
            ("algorithm.eps1", self.eps1, eps1_valid, "greater than 0, or 'auto'"),
            ("algorithm.eps2", self.eps2, self.eps2 > 0, "greater than 0"),
            ("algorithm.eps2_of", self.eps2_of, eps2_of_valid, "'compared' or 'updates'"),
            (
                "algorithm.compared_at",
                self.compared_at,
                compared_at_valid,
                "'round_start' or 'stationary'",
            ),
            (
                "algorithm.children_start",
                self.children_start,
                children_start_valid,
                "'cluster_mean' or 'own_mean'",
            ),
            ("algorithm.stop_done_clusters", self.stop_done_clusters, stop_valid, stop_rule),
            ("algorithm.gamma_max", self.gamma_max, 0 <= self.gamma_max < 1, "in [0, 1)"),
            ("algorithm.similarity", self.similarity, similarity_valid, "'updates' or 'gradients'"),
            ("algorithm.split_rounds", self.split_rounds, rounds_valid, "rounds from 1 on"),
            (
                "algorithm.min_cluster_size",
                self.min_cluster_size,
                self.min_cluster_size >= 1,
                "at least 1",
            ),
            ("algorithm.criterion", self.criterion, criterion_valid, criterion_rule),
            ("algorithm.level", self.level, 0 < self.level < 1, "greater than 0 and less than 1"),
        )
        self._refuse_unused_options()

    def _refuse_unused_options(self) -> None:
        """Refuse options that the criterion does not use, rather than ignore them."""
        if self.criterion == "replicated":
            unused = (*THRESHOLD_OPTIONS, *STRUCTURE_OPTIONS)
            rule = "left out: criterion = 'replicated' splits by a test, not by thresholds"
        elif isinstance(self.criterion, SplitCriterion):
            unused = (*THRESHOLD_OPTIONS, "level")
            criterion = type(self.criterion).__name__
            rule = f"left out: the criterion {criterion} has its own options, and decides alone"
        else:
            return
        rules: list[tuple[str, object, bool, str]] = []
        for name in unused:
            value = getattr(self, name)
            rules.append((f"algorithm.{name}", value, value == getattr(CFL, name), rule))
        require(*rules)

    @property
    def split_criterion(self) -> SplitCriterion:
        """Criterion that decides which clusters are split."""
        if isinstance(self.criterion, SplitCriterion):
            return self.criterion
        if self.criterion == "replicated":
            return ReplicateTest(level=self.level)
        return Thresholds(
            eps1=self.eps1,
            eps2=self.eps2,
            eps2_of=self.eps2_of,
            gamma_max=self.gamma_max,
            similarity=self.similarity,
            compared_at=self.compared_at,
            split_rounds=self.split_rounds,
        )

    @property
    def asks_for_gradients(self) -> bool:
        """Return whether clients send gradients to be compared."""
        return self.split_criterion.asks_for_gradients

    @property
    def needs_updates(self) -> bool:
        """Return whether a step uses single clients' updates, as sums over clients are weighted."""
        if not self.weighted or self.children_start == "own_mean":
            return True
        return self.split_criterion.needs_updates

    def too_few(self, clients: int) -> str:
        """Return a warning if there are too few clients for two of ``min_cluster_size``."""
        needed = 2 * self.min_cluster_size
        if needed <= max(clients, 2):
            return ""
        return (
            "CFL splits no cluster of this run: two parts of at least min_cluster_size = "
            f"{self.min_cluster_size} members need {needed} clients, and there are {clients}; it "
            "is federated averaging unless that many join, so set a smaller "
            "algorithm.min_cluster_size"
        )

    def sample_cohort(
        self, state: CFLState, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Sample the clients of a round from every cluster that still trains, and stragglers."""
        if not state.done:
            return super().sample_cohort(state, fraction, draw)
        groups = [
            leaf.members for leaf in state.tree.leaves if leaf.members and leaf.id not in state.done
        ]
        groups += [members for _, members in sorted(state.tree.stragglers.items())]
        cohort: list[int] = []
        for members in groups:
            cohort += sample(members, fraction, draw)
        return tuple(cohort)

    def init(self, params: Tensor, clients: Clients) -> CFLState:
        """Put all clients in one cluster, with the initial model (line 3)."""
        tree = ParameterTree.root_only(clients.ids, params)
        state = CFLState(tree, peaks=torch.zeros(1, dtype=torch.float64))
        return self.split_criterion.init(state, clients)

    def step(
        self, state: CFLState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[CFLState, RoundLog]:
        """Run one pass of Algorithm 5's loop (lines 5 to 23).

        Parameters are those of :meth:`Algorithm.step <fedclade.Algorithm.step>`.
        """
        if not cohort:  # all clients that are available are in clusters that are done
            return state, RoundLog({}, {})

        # Lines 5 to 18: train all clusters, and find those that are to be split. Line 7, by which
        # clients add Δθ_c to their models, is done by the server at the end of the round before:
        # clients get the sum.
        examined = self._train_and_examine(state, cohort, clients, this_round)
        updates = [cluster.update for cluster in examined]
        moved = move_clusters(state.tree, updates)  # line 13, and line 7 of the next round
        tree, placements = place_stragglers(moved, updates)  # Algorithm 4

        events = list(placements)
        for cluster in examined:
            events += cluster.events
            if cluster.split is not None:
                tree, event = self._split(tree, cluster.split, this_round)  # lines 18 and 19
                events.append(event)

        if self.fallback:
            tree = self._continue_root(
                state.tree, tree, moved, cohort=cohort, clients=clients, this_round=this_round
            )
        done = _find_done_clusters(state, examined, events)
        stationary = self._all_done(state.tree, tree, done)
        if stationary:
            events.append(Stationary(0, len(state.tree.leaves)))

        has_split = any(isinstance(event, ClusterSplit) for event in events)
        next_state = replace(
            state,
            tree=tree,
            peaks=_inherit_peaks(_raise_peaks(state.peaks, updates), tree),
            stationary=stationary,
            done=tuple(sorted(done)) if self.stop_done_clusters and done else None,
        )
        return next_state, log_of(updates, events, "split" if has_split else "train")

    def _train_and_examine(
        self, state: CFLState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> list[ExaminedCluster]:
        """Train all clusters (lines 5 to 13), then examine each of them (lines 14 to 18)."""
        criterion = self.split_criterion
        trained = criterion.train(state, cohort, clients, this_round, weighted=self.weighted)
        examined: list[ExaminedCluster] = []
        for cluster in trained:
            if cluster.waits:  # stragglers of a cluster that is already split
                examined.append(ExaminedCluster(cluster))
            else:
                examined.append(criterion.examine(cluster, state, clients, this_round))
        return examined

    def join(
        self, state: CFLState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[CFLState, list[Event]]:
        """Let newcomers join clusters (Algorithm 4); clusters that were done then train again."""
        state, events = super().join(state, ids, clients, this_round)
        if not state.done:
            return state, events
        leaf_of = state.tree.leaf_of
        joined = {leaf_of[client] for client in ids if client in leaf_of}
        done = tuple(node for node in state.done if node not in joined)
        stationary = state.stationary and not joined
        return replace(state, done=done or None, stationary=stationary), events

    def finished(self, state: CFLState) -> bool:
        """Return whether every cluster is done, and the run is to end with them."""
        return state.stationary

    def serve(self, state: CFLState, clients: Clients) -> Mapping[int, int]:
        """Return for each client the node whose model it is evaluated with."""
        if self.fallback:
            return best_on_validation(state.tree, clients)
        return super().serve(state, clients)

    def _split(
        self, tree: ParameterTree, split: ProposedSplit, this_round: Round
    ) -> tuple[ParameterTree, Event]:
        """Split a cluster in two (line 19), unless the split is rejected (line 18)."""
        clusters = self._check_groups(split)
        numbers = {name: split.criteria[name] for name in SPLIT_NUMBERS if name in split.criteria}
        rejected_because = split.rejected_because
        if not rejected_because and min(map(len, clusters)) < self.min_cluster_size:
            rejected_because = f"fewer than {self.min_cluster_size} members"
        if rejected_because:
            event = Rejected(split.node.id, **numbers, clusters=clusters, because=rejected_because)
            return tree, event

        tree = tree.split(
            split.node.id,
            clusters,
            params=split.node.params,
            cached=[split.updates.signatures_of(cluster) for cluster in clusters],  # eq. 47
            round_number=this_round.number,
            criteria=split.criteria,
        )
        if self.children_start == "own_mean":
            tree = self._move_children(tree, split, this_round)
        children = tuple(child.id for child in tree.children(split.node.id))
        return tree, ClusterSplit(split.node.id, **numbers, clusters=clusters, children=children)

    def _check_groups(self, split: ProposedSplit) -> tuple[tuple[int, ...], ...]:
        """Return the two groups of a split, each in ascending order, as the tree caches updates.

        Raises
        ------
        ConfigError
            If the criterion proposes something else than two groups of clients that replied.
        """
        groups = tuple(tuple(sorted(map(int, group))) for group in split.clusters)
        members = [client for group in groups for client in group]
        distinct = set(members)
        two_groups = len(groups) == 2 and all(groups)
        valid = two_groups and len(members) == len(distinct) and distinct <= set(split.updates.ids)
        name = type(self.split_criterion).__name__
        setting = f"the split of cluster {split.node.id} by {name}"
        require(
            (setting, groups, valid, "two groups of its clients that replied, each in one of them")
        )
        return groups

    def _move_children(
        self, tree: ParameterTree, split: ProposedSplit, this_round: Round
    ) -> ParameterTree:
        """Move each child by the mean of its own members' updates, as the published code does."""
        for child in tree.children(split.node.id):
            updates = split.updates.select(child.members)
            if len(updates.ids) >= this_round.min_clients:
                step = mean(updates, weighted=self.weighted)
                tree = tree.with_model(child.id, split.node.params + step)
        return tree

    def _continue_root(
        self,
        before: ParameterTree,
        after: ParameterTree,
        moved: ParameterTree,
        cohort: Sequence[int],
        clients: Clients,
        this_round: Round,
    ) -> ParameterTree:
        """Continue to train the root's model once the root is split.

        ``before`` and ``after`` are the trees before and after the round, and ``moved`` is the tree
        after training and before splits.
        """
        if len(before.nodes) > 1:
            model = train_beside(before, cohort, clients, this_round, weighted=self.weighted)
            return after.continued(model)
        if len(after.nodes) > 1:  # in the round of its split the root has already been trained
            return after.continued(moved.nodes[0].params)
        return after

    def _all_done(self, before: ParameterTree, after: ParameterTree, done: set[int]) -> bool:
        """Return whether every cluster is done and no straggler waits, where a run may end so."""
        if not (self.stop_when_stationary or self.stop_done_clusters) or before.stragglers:
            return False
        return all(leaf.id in done for leaf in after.leaves if leaf.members)


def _add_absent_members(
    cluster: ClusterUpdate, node: Node, clients: Clients, this_round: Round
) -> ClusterUpdate:
    """Query the members outside of the cohort at the same model, and measure all updates."""
    updates = cluster.updates
    replied = set(updates.ids)
    absent = [member for member in node.members if member not in replied]
    if absent:
        further = clients.train(absent, node.params[None], [0] * len(absent), this_round)
        updates = updates.concat(further).select(node.members)
    return cluster.with_updates(updates)


def _find_done_clusters(
    state: CFLState, examined: Sequence[ExaminedCluster], events: Sequence[Event]
) -> set[int]:
    """Return the clusters that are done after a round, and that did not change in it.

    A cluster changes if it is split, or if a client joins it.
    """
    done = set(state.done or ())
    done.update(cluster.update.node for cluster in examined if cluster.is_done)
    changed = {event.node for event in events if isinstance(event, ClusterSplit | Joined)}
    return done - changed


def _raise_peaks(peaks: Tensor, updates: Sequence[ClusterUpdate]) -> Tensor:
    """Return the largest mean norm in each node's lineage, ``[nodes]``, this round included."""
    peaks = peaks.clone()
    for cluster in updates:
        peaks[cluster.node] = max(float(peaks[cluster.node]), cluster.criteria.mean_norm)
    return peaks


def _inherit_peaks(peaks: Tensor, tree: ParameterTree) -> Tensor:
    """Give every new node the largest norm of its parent: a lineage begins at the root."""
    inherited = [peaks[node.parent or 0] for node in tree.nodes[len(peaks) :]]
    return torch.cat([peaks, torch.tensor(inherited, dtype=peaks.dtype)])
