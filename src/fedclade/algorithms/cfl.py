"""Clustered Federated Learning: Sattler, Müller, Samek 2019, Algorithm 5.

:meth:`CFL.step` is one pass of the algorithm's loop, and :meth:`Thresholds.examine` its lines 14 to
18, which decide whether a cluster is split. A client's update is Δθ_i; a cluster c has the model θ
and the weighted mean update Δθ_c; α are the cosine similarities of updates, and ε₁, ε₂ and γ_max
the paper's thresholds. Where the paper leaves a choice, this file decides as follows:

**Weighted mean.** The mean is weighted by |D_i| as in eqs. 2 and 32; Algorithm 5, line 13, leaves
the weights out (``weighted = false``). With equal sizes it is the same.

**End of a run.** Algorithms 2 and 3 end by themselves: a cluster is done when its mean update is
below ε₁, and all of its updates are below ε₂ (eq. 34) or the split is rejected. Here a run has a
fixed number of rounds, so that methods can be compared. With ``stop_when_stationary`` it ends in
the first round in which every cluster is done. With ``stop_done_clusters`` a cluster that is done
trains no more (Algorithm 3, line 10), and the run ends when all clusters are done.

**Models after a split.** A cluster's children start from θ + Δθ_c, the model that the cluster's
last round led to (Algorithm 2, line 7, then Algorithm 3, lines 7 and 8). The split cluster's node
in the tree keeps θ, at which the updates before the split were made (eq. 47). The authors'
published code moves each child by the mean of its own members' updates (``children_start =
"own_mean"``).

**Model at which clients are compared.** Clients are compared at θ, by "the clients' latest
transmitted updates" (section III; Algorithm 5, line 15). Lines 3 to 6 of Algorithm 3 take α and ε₂
at the stationary point θ*, which is θ + Δθ_c: ``compared_at = "stationary"`` queries all members
once more, at θ*. If clients are compared by updates made at θ*, the node stores θ* (eq. 47).

**Units of ε₂.** Eqs. 33 and 34 and Algorithm 3, line 6, compare ε₂ with gradients, Algorithm 5,
line 14, with updates. So with ``similarity = "gradients"`` ε₂ is in the units of a gradient, unless
``eps2_of = "updates"``.

**Secure aggregation.** The server then does not know the norm of a single update, and eq. 33 takes
the root mean square of the members' norms in place of the largest norm. This value is smaller, so a
cluster is split later, or never.

**Partial participation.** With a client fraction below 1 the criterion is first evaluated on the
cohort. If it calls for a split, the absent members are queried for their updates at the same model,
and the updates of all members decide. Members that do not reply even then are not assigned by a
guess: they stay at the split node as stragglers, and join a child when they reply (Algorithm 4).

**Criteria without thresholds.** The option ``criterion`` replaces lines 14 to 18. With
``"replicated"`` a statistical test decides, whatever the norms are
(:mod:`fedclade.algorithms.rcfl.replicate_test`). The tree is grown and used in the same way.

**Fall-back.** "It is always possible to fall back to the Federated Learning solution" (section
II-A) assumes that the model of all clients has converged before a split. Thresholds can split the
clients earlier. With ``fallback`` clients therefore continue to train this model, the root's, after
the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fedclade import core
from fedclade.algorithms.base import Algorithm, RoundLog, sample
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    log_of,
    move_clusters,
    place_stragglers,
)
from fedclade.algorithms.fallback import best_on_validation, train_beside
from fedclade.algorithms.rcfl.replicate_test import ReplicateTest
from fedclade.algorithms.requires import EvaluatedModels, Requires, RunFacts
from fedclade.algorithms.split_criterion import (
    CFLState,
    ExaminedCluster,
    ProposedSplit,
    SplitCriterion,
)
from fedclade.core import (
    Clients,
    ClientWork,
    Node,
    Nothing,
    ParameterTree,
    Round,
    RoundPlan,
    Updates,
    checked,
    mean,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fedclade.core import Event

THRESHOLD_OPTIONS = (
    "eps1",
    "eps2",
    "eps2_of",
    "gamma_max",
    "similarity",
    "compared_at",
    "split_rounds",
)
"""Options of the paper's criterion by thresholds, which other criteria do not use."""

STRUCTURE_OPTIONS = ("children_start", "stop_when_stationary", "stop_done_clusters")
"""Options of CFL, in addition to the thresholds, that the replicate test does not use."""

SPLIT_NUMBERS = ("mean_norm", "max_norm", "alpha_cross_max", "gamma_bound", "p_value", "gain")
"""Numbers of a split for which events have fields; the tree stores all numbers of a criterion."""

AUTO_SHARE = 10
"""Divisor of the largest mean norm so far, for ε₁ if ``eps1 = "auto"`` (journal version)."""


@dataclass(frozen=True, kw_only=True)
class Thresholds(SplitCriterion):
    """Criterion that splits a cluster by CFL's three thresholds (Algorithm 5, lines 14 to 18).

    The thresholds are ε₁ on the norm of the mean update, ε₂ on the largest norm of an update, and
    γ_max on the noise of updates.

    Parameters
    ----------
    eps1, eps2, eps2_of, gamma_max, similarity, compared_at, split_rounds
        As in :class:`CFL`, which checks their values.
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
        """Whether the criterion needs whole updates of single clients: False.

        The thresholds need only norms, means and signatures (short vectors for comparison) of
        updates.
        """
        return False

    @property
    def asks_for_gradients(self) -> bool:
        """Whether clients are queried for gradients, by which they are then compared."""
        return self.similarity == "gradients"

    def examine(
        self, cluster: ClusterUpdate, state: CFLState, clients: Clients, this_round: RoundPlan
    ) -> ExaminedCluster:
        """Decide whether a cluster is split by CFL's thresholds (Algorithm 5, lines 14 to 18).

        The condition in line 14, with the thresholds ε₁ and ε₂, is first evaluated on the clients
        that replied. Further clients are queried only if this condition holds, or if it depends on
        updates or gradients that the server does not have yet.
        """
        node = state.tree.nodes[cluster.node]
        peak = float(state.peaks[cluster.node])
        if not self._may_split(node, cluster, peak, this_round):  # line 14, eq. 32
            return self._keep_whole(cluster.compared(), peak, this_round)
        if self._limits_updates and cluster.criteria.max_norm <= self.eps2:  # line 14, eq. 33
            return self._keep_whole(cluster.compared(), peak, this_round)

        cluster = _add_absent_members(cluster, node, clients, this_round)
        # The mean of all members may differ from that of the cohort. If this rules a split out, the
        # further query below is not worth its cost.
        if self._queries_again and not self._may_split(node, cluster, peak, this_round):
            return self._keep_whole(cluster.compared(), peak, this_round)

        node, updates, compared = self._query_compared(cluster, node, clients, this_round)
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
        """Return the updates or gradients by which members are compared, queried if necessary.

        Returns
        -------
        tuple of Node, Updates and Updates
            The cluster's node, with the model that the node keeps if the cluster is split; the
            updates that the tree stores in that case; and the updates or gradients by which members
            are compared.
        """
        updates = cluster.updates
        rows = [0] * len(updates.ids)
        model = node.params
        if self.compared_at == "stationary" and cluster.step is not None:
            model = model + cluster.step  # θ*
        if self.similarity == "gradients":
            gradients = clients.gradients(
                updates.ids, model[None], rows, this_round, require_all=True
            )
            return node, updates, gradients
        if self.compared_at == "stationary":
            again = replace(this_round, purpose="stationary")
            work = ClientWork(store=Nothing())
            updates = clients.train(
                updates.ids, model[None], rows, again, work, require_all=True
            ).select(updates.ids)
            return replace(node, params=model), updates, updates
        return node, updates, updates

    @property
    def _queries_again(self) -> bool:
        """Whether members are compared by vectors that a second query requests after the training.

        These vectors are gradients, or updates made at the stationary point.
        """
        return self.similarity == "gradients" or self.compared_at == "stationary"

    @property
    def _limits_updates(self) -> bool:
        """Whether the threshold ε₂ applies to the norms of the updates of the round's training."""
        return not self._queries_again or self.eps2_of == "updates"

    def _may_split(
        self, node: Node, cluster: ClusterUpdate, peak: float, this_round: RoundPlan
    ) -> bool:
        """Return whether a cluster may be split, before its members are compared.

        It needs two members and enough replies. In addition the round must be one of
        ``split_rounds`` or, if ``split_rounds`` is empty, the cluster must be near a stationary
        point (eq. 32).
        """
        if len(node.members) < 2 or not cluster.enough:
            return False
        if self.split_rounds:
            return this_round.number in self.split_rounds
        return self._is_stationary(cluster, peak)

    def _is_stationary(self, cluster: ClusterUpdate, peak: float) -> bool:
        """Return whether a cluster is near a stationary point of its objective (line 14, eq. 32).

        That is so if the norm of the mean update is below ε₁. With ``eps1 = "auto"``, ε₁ is a tenth
        of ``peak``, the largest norm of a mean update in the rounds before.
        """
        # The peak need not include this round: a new largest norm is not below a tenth of itself.
        eps1 = peak / AUTO_SHARE if self.eps1 == "auto" else self.eps1
        return cluster.criteria.mean_norm < eps1

    def _keep_whole(
        self, cluster: ClusterUpdate, peak: float, this_round: RoundPlan
    ) -> ExaminedCluster:
        """Return the result of the examination for a cluster that is not split.

        The cluster is marked as done if it is near a stationary point; with ``split_rounds``, not
        before the last of these rounds.
        """
        last_date = max(self.split_rounds, default=0)
        may_be_done = cluster.enough and this_round.number >= last_date
        is_done = may_be_done and self._is_stationary(cluster, peak)
        return ExaminedCluster(cluster, is_done=is_done)


@checked()
@dataclass(frozen=True, kw_only=True)
class CFL(Algorithm[CFLState]):
    """Clustered federated learning (CFL): split a cluster when its members' updates disagree.

    Source: Sattler et al. 2019, Algorithm 5, which combines Algorithms 1 to 3.

    Parameters
    ----------
    eps1
        ε₁ of eq. 32: a cluster is near a stationary point when the norm of its weighted mean update
        is below this value, in parameter units. ``"auto"``: a tenth of the largest such norm so far
        in the cluster and its ancestors (the rule of thumb of the journal version).
    eps2
        ε₂ of eqs. 33 and 34: members disagree when the largest norm of an update is above this
        value, in parameter units; if members are compared by gradients, in the units of a gradient.
    eps2_of
        Vectors to whose norms ε₂ applies: ``compared``, the vectors by which ``similarity`` and
        ``compared_at`` compare members (eq. 34; Algorithm 3, line 6); or ``updates``, always the
        updates of the round. With default options both are the same (Algorithm 5, line 14).
    gamma_max
        γ_max of eq. 39, in [0, 1): the assumed noise of updates. A bi-partition that noise of this
        size could explain is rejected.
    similarity
        Vectors whose cosines α are the similarities of members: model ``updates`` (eq. 51), or full
        ``gradients`` at the same model (eq. 50).
    compared_at
        The model at which members of a cluster that may be split are compared: at the
        ``round_start``, before the step that led to the stationary point (Algorithm 5, line 15), or
        at the ``stationary`` point θ* itself (Algorithm 3, lines 3 to 6). The latter queries every
        member for one more update, or gradient; parameters that stay with clients
        (``model.personal``) are then as the round's training left them.
    children_start
        Model from which the children of a split start: with ``cluster_mean``, the cluster's model
        plus the mean update of all members (Algorithm 3, lines 7 and 8); with ``own_mean``, the
        cluster's model plus the mean update of the child's own members, as in the authors'
        published code. With ``own_mean``, a child of which fewer than ``min_clients`` members
        replied starts as with ``cluster_mean``.
    split_rounds
        Rounds, counted from 1, in which clusters may be split, whether or not eq. 32 holds (figure
        8); eqs. 33 and 39 still decide which clusters are split. Empty: whenever eq. 32 holds.
    min_cluster_size
        Smallest number of members of a cluster; a split that would create a smaller cluster is
        rejected.
    weighted
        Whether means weight clients by their numbers of examples (eqs. 2 and 32), or equally
        (Algorithm 5, line 13).
    stop_when_stationary
        Whether the run ends when every cluster is near a stationary point (eq. 32, the end of
        Algorithm 2) and is not to be split (eq. 34, or eq. 39: the end of Algorithm 3). With
        ``split_rounds`` the run does not end before the last of these rounds.
    stop_done_clusters
        Whether a cluster no longer trains once it is near a stationary point and is not to be split
        (Algorithm 3, line 10). The run ends when all clusters are done. Both conditions are
        evaluated on the clients that replied in the round: with a client fraction below 1 another
        member's update may be above ε₂ when its cluster is done. If a client joins a cluster that
        is done, the cluster trains again. Not available with ``fallback``, which continues to train
        the root's model.
    fallback
        Whether clients continue to train the root's model after the first split, in addition to the
        clusters' models, as in plain federated learning. Each client is then evaluated with the
        model on its path in the tree that is best on validation data
        (:mod:`fedclade.algorithms.fallback`), so that its accuracy is at least about as high as
        with FedAvg (end of section II-A). From the first split on, training and traffic double; for
        private clients the number of releases doubles, too.
    criterion
        Criterion that decides which clusters are split into which groups: the paper's
        ``thresholds``; ``replicated``, the test of :class:`ReplicatedCFL`, which needs none of
        eps1, eps2 and gamma_max; or in Python a :class:`~fedclade.algorithms.SplitCriterion`.
    level
        With ``replicated``, upper bound on the probability that a cluster whose members all have
        the same distribution is ever split.

    Raises
    ------
    ConfigError
        If options are out of range, or are not used by the criterion; one line for each of them.
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
        stop_rule = "false with fallback = true, where all clients keep training the root's model"
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
            (
                "algorithm.split_rounds",
                self.split_rounds,
                rounds_valid,
                "round numbers of at least 1",
            ),
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
        """Raise a ConfigError for options that are set although the criterion does not use them."""
        if self.criterion == "replicated":
            unused = (*THRESHOLD_OPTIONS, *STRUCTURE_OPTIONS)
            rule = "left out, since criterion = 'replicated' does not use it"
        elif isinstance(self.criterion, SplitCriterion):
            unused = (*THRESHOLD_OPTIONS, "level")
            criterion = type(self.criterion).__name__
            rule = f"left out, since the criterion {criterion} does not use it"
        else:
            return
        rules: list[tuple[str, object, bool, str]] = []
        for name in unused:
            value = getattr(self, name)
            rules.append((f"algorithm.{name}", value, value == getattr(CFL, name), rule))
        require(*rules)

    @property
    def split_criterion(self) -> SplitCriterion:
        """Criterion that decides which clusters are split, built from the options."""
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
    def requires(self) -> Requires:
        """Needs of CFL that a run checks: whether the server needs whole updates, or gradients.

        Whole updates are needed if the criterion uses them, if means are not weighted by numbers of
        examples, or if children start from the means of their own members.
        """
        criterion = self.split_criterion
        needs_updates = not self.weighted or self.children_start == "own_mean"
        return Requires(
            updates=needs_updates or criterion.needs_updates, gradients=criterion.asks_for_gradients
        )

    def check(self, run: RunFacts) -> Sequence[str]:
        """Return a warning if clients are too few for two clusters of ``min_cluster_size``."""
        warnings = super().check(run)
        needed = 2 * self.min_cluster_size
        if run.clients is None or needed <= max(run.clients, 2):
            return warnings
        return (
            *warnings,
            "CFL cannot split any cluster of this run: two clusters of at least min_cluster_size = "
            f"{self.min_cluster_size} members need {needed} clients, but there are {run.clients}, "
            "so that the run is federated averaging unless enough clients join; set a smaller "
            "algorithm.min_cluster_size",
        )

    def sample_cohort(
        self, state: CFLState, fraction: float, draw: np.random.Generator
    ) -> Sequence[int]:
        """Sample a fraction of each cluster that is not done, and of each group of stragglers.

        A cluster that is done no longer trains. Stragglers are the members of a split cluster that
        did not reply when the cluster was split.
        """
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
        """Return the state before round 1: all clients share one model (Algorithm 5, line 3)."""
        tree = ParameterTree.root_only(clients.ids, params)
        state = CFLState(tree, peaks=torch.zeros(1, dtype=torch.float64))
        return self.split_criterion.init(state, clients)

    def step(
        self, state: CFLState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[CFLState, RoundLog]:
        """Run one round of CFL: one pass of the loop of Algorithm 5 (lines 5 to 23).

        All clusters train, then the split criterion examines each cluster, and clusters are split.
        For the parameters see :meth:`Algorithm.step <fedclade.Algorithm.step>`.
        """
        if not cohort:  # all available clients are in clusters that are done
            return state, RoundLog({}, {})

        # Lines 5 to 18: train all clusters, and find the clusters that are to be split. In line 7
        # clients add Δθ_c to their models. Here the server does so at the end of the round before,
        # and sends the sum.
        examined = self._train_and_examine(state, cohort, clients, this_round)
        updates = [cluster.update for cluster in examined]
        moved = move_clusters(state.tree, updates)  # line 13, and line 7 of the next round
        tree, placements = place_stragglers(moved, updates)  # Algorithm 4

        events = list(placements)
        for cluster in examined:
            events += cluster.events
            if cluster.split is not None:
                tree, event = self._apply_split(tree, cluster.split, this_round)  # lines 18 and 19
                events.append(event)

        if self.fallback:
            tree = self._continue_root(
                state.tree, tree, moved, cohort=cohort, clients=clients, this_round=this_round
            )
        done = _find_done_clusters(state, examined, events)
        stationary = self._all_done(state.tree, tree, done)
        if stationary:
            events.append(core.Stationary(0, len(state.tree.leaves)))

        has_split = any(isinstance(event, core.ClusterSplit) for event in events)
        next_state = replace(
            state,
            tree=tree,
            peaks=_inherit_peaks(_raise_peaks(state.peaks, updates), tree),
            stationary=stationary,
            done=tuple(sorted(done)) if self.stop_done_clusters and done else None,
        )
        next_state = _remember_tests(next_state, examined)
        return next_state, log_of(updates, events, "split" if has_split else "train")

    def _train_and_examine(
        self, state: CFLState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> list[ExaminedCluster]:
        """Train all clusters, then examine each one (Algorithm 5, lines 5 to 13 and 14 to 18)."""
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
        """Assign clients that join during a run to clusters, before a round (CFL Algorithm 4).

        A cluster that was done, and therefore no longer trained, trains again if a newcomer joins
        it.
        """
        state, events = super().join(state, ids, clients, this_round)
        if not state.done:
            return state, events
        leaf_of = state.tree.leaf_of
        joined = {leaf_of[client] for client in ids if client in leaf_of}
        done = tuple(node for node in state.done if node not in joined)
        stationary = state.stationary and not joined
        return replace(state, done=done or None, stationary=stationary), events

    def finished(self, state: CFLState) -> bool:
        """Return whether the run ends because all clusters are done.

        The result is False if neither ``stop_when_stationary`` nor ``stop_done_clusters`` is set.
        """
        return state.stationary

    def models_for(self, state: CFLState, clients: Clients) -> EvaluatedModels:
        """Return the models with which clients are evaluated: the models of their clusters.

        With ``fallback``, the model of each client is the one on its path in the tree that is best
        on validation data.
        """
        if self.fallback:
            return EvaluatedModels(nodes=best_on_validation(state.tree, clients))
        return super().models_for(state, clients)

    def _apply_split(
        self, tree: ParameterTree, split: ProposedSplit, this_round: RoundPlan
    ) -> tuple[ParameterTree, Event]:
        """Split a cluster in two (Algorithm 5, line 19), unless the split is rejected (line 18).

        Returns
        -------
        tuple
            The tree after the split, or the tree unchanged; and the event that reports the split or
            its rejection.
        """
        clusters = self._check_groups(split)
        numbers = {name: split.criteria[name] for name in SPLIT_NUMBERS if name in split.criteria}
        rejected_because = split.rejected_because
        if not rejected_because and min(map(len, clusters)) < self.min_cluster_size:
            rejected_because = f"fewer than {self.min_cluster_size} members"
        if rejected_because:
            event = core.Rejected(
                split.node.id, **numbers, clusters=clusters, because=rejected_because
            )
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
        return tree, core.ClusterSplit(
            split.node.id, **numbers, clusters=clusters, children=children
        )

    def _check_groups(self, split: ProposedSplit) -> tuple[tuple[int, ...], ...]:
        """Return the two groups of a proposed split, each with its clients in ascending order.

        Raises
        ------
        ConfigError
            If the criterion does not propose two disjoint, non-empty groups of clients that
            replied.
        """
        groups = tuple(tuple(sorted(map(int, group))) for group in split.clusters)
        members = [client for group in groups for client in group]
        distinct = set(members)
        two_groups = len(groups) == 2 and all(groups)
        valid = two_groups and len(members) == len(distinct) and distinct <= set(split.updates.ids)
        name = type(self.split_criterion).__name__
        setting = f"the split of cluster {split.node.id} by {name}"
        require(
            (
                setting,
                groups,
                valid,
                "two groups of clients of this cluster that replied, with no client in both",
            )
        )
        return groups

    def _move_children(
        self, tree: ParameterTree, split: ProposedSplit, this_round: RoundPlan
    ) -> ParameterTree:
        """Let each child of a split start from the old model plus the mean of its members' updates.

        The authors' published code does so. A child with fewer replies than ``min_clients`` is left
        as it is.
        """
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
        this_round: RoundPlan,
    ) -> ParameterTree:
        """Continue to train the root's model after the root is split, for the option ``fallback``.

        Parameters
        ----------
        before
            The tree before the round.
        after
            The tree after the round.
        moved
            The tree after the round's training, before splits.
        cohort
            Ids of the clients sampled for this round.
        clients
            All clients of the run.
        this_round
            Number, seed and local training of the round.

        Returns
        -------
        ParameterTree
            The tree ``after``, with the root's newly trained model if the root is split.
        """
        if len(before.nodes) > 1:
            model = train_beside(before, cohort, clients, this_round, weighted=self.weighted)
            return after.continued(model)
        if len(after.nodes) > 1:  # in the round of its split the root has already been trained
            return after.continued(moved.nodes[0].params)
        return after

    def _all_done(self, before: ParameterTree, after: ParameterTree, done: set[int]) -> bool:
        """Return whether the run may end after this round because all clusters are done.

        The result is False if neither ``stop_when_stationary`` nor ``stop_done_clusters`` is set,
        or if there are stragglers: members that did not reply when their cluster was split, and
        have no new cluster yet.
        """
        if not (self.stop_when_stationary or self.stop_done_clusters) or before.stragglers:
            return False
        return all(leaf.id in done for leaf in after.leaves if leaf.members)


def _add_absent_members(
    cluster: ClusterUpdate, node: Node, clients: Clients, this_round: Round
) -> ClusterUpdate:
    """Query the members of a cluster that were not sampled, and measure the updates of all members.

    All updates are made at the same model, the cluster's model before the round.
    """
    updates = cluster.updates
    replied = set(updates.ids)
    absent = [member for member in node.members if member not in replied]
    if absent:
        further = clients.train(
            absent, node.params[None], [0] * len(absent), this_round, require_all=True
        )
        updates = updates.concat(further).select(node.members)
    return cluster.with_updates(updates)


def _find_done_clusters(
    state: CFLState, examined: Sequence[ExaminedCluster], events: Sequence[Event]
) -> set[int]:
    """Return the nodes of the clusters that are done after a round.

    A cluster is done if the criterion found that it is near a stationary point and is not to be
    split. A cluster that was split in this round, or that a client has joined, is not done.
    """
    done = set(state.done or ())
    done.update(cluster.update.node for cluster in examined if cluster.is_done)
    changed = {event.node for event in events if isinstance(event, core.ClusterSplit | core.Joined)}
    return done - changed


def _remember_tests(state: CFLState, examined: Sequence[ExaminedCluster]) -> CFLState:
    """Record in the state how often each node has been tested, and the evidence of these tests.

    The tests are replicate tests. Their evidence is the running sum of their e-values. Nodes that
    were created in this round have no tests yet.

    Parameters
    ----------
    state
        The state after the round, which has the numbers and the evidence of the round before.
    examined
        The clusters examined in this round, with the tests so far of each cluster that was tested.
    """
    count = len(state.tree.nodes)
    tested = {cluster.update.node: cluster.tested for cluster in examined if cluster.tested}
    if state.tests is None and not tested:
        return state
    tests = torch.zeros(count, dtype=torch.int64)
    evidence = torch.zeros(count, dtype=torch.float64)
    if state.tests is not None and state.evidence is not None:
        tests[: len(state.tests)] = state.tests
        evidence[: len(state.evidence)] = state.evidence
    for node, so_far in tested.items():
        tests[node] = so_far.tests
        evidence[node] = so_far.evidence
    return replace(state, tests=tests, evidence=evidence)


def _raise_peaks(peaks: Tensor, updates: Sequence[ClusterUpdate]) -> Tensor:
    """Update each node's peak, the largest norm of its mean updates so far, after a round.

    The peaks have shape ``[nodes]``. A peak is raised if the round's mean update has a larger norm.
    """
    peaks = peaks.clone()
    for cluster in updates:
        peaks[cluster.node] = max(float(peaks[cluster.node]), cluster.criteria.mean_norm)
    return peaks


def _inherit_peaks(peaks: Tensor, tree: ParameterTree) -> Tensor:
    """Extend the peaks ``[nodes]`` to new nodes of the tree, which inherit their parents' peaks.

    The peak of a node is the largest norm of its mean updates so far.
    """
    inherited = [peaks[node.parent or 0] for node in tree.nodes[len(peaks) :]]
    return torch.cat([peaks, torch.tensor(inherited, dtype=peaks.dtype)])
