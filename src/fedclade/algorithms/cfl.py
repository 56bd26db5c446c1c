"""Clustered Federated Learning: Sattler, Müller, Samek 2019, Algorithm 5 (which joins Algorithms 1 to 3).

Where the paper leaves a choice, this file makes it:

- The mean is weighted by |D_i| as in eqs. 2 and 32; Algorithm 5 line 13 leaves the weights out (``weighted = false``).
  With equal sizes it is the same.
- Algorithms 2 and 3 end: a cluster is done when its mean update is below ε₁, and all of its updates are below ε₂
  (eq. 34) or the split is rejected. A run trains for as many rounds as it is told, so that methods can be compared;
  with ``stop_when_stationary`` it ends in the first round in which every cluster is done. With ``stop_done_clusters``
  a cluster that is done trains no more (Algorithm 3 line 10), and the run ends when all are done.
- A cluster's children go on from θ + Δθ_c, the model that its last round led to (Algorithm 2 line 7, then Algorithm 3
  lines 7 and 8). The node itself keeps θ, at which the updates before the split were made (eq. 47). The authors'
  published code moves each child by the mean of its own members' updates (``children_start = "own_mean"``).
- Clients are compared at θ, by "the clients' latest transmitted updates" (section III; Algorithm 5 line 15). Lines 3 to
  6 of Algorithm 3 take α and ε₂ at the stationary point θ*, which is θ + Δθ_c: ``compared_at = "stationary"`` asks all
  members once more, at θ*. Compared by updates, the node keeps θ*, as eq. 47 has it.
- Eqs. 33 and 34 and Algorithm 3 line 6 hold ε₂ against gradients, Algorithm 5 line 14 against updates. So with
  ``similarity = "gradients"`` ε₂ is in the units of a gradient; ``eps2_of = "updates"`` takes updates all the same.
- Under secure aggregation nobody knows the norm of a single update, and eq. 33 takes the root mean square of the
  members' norms in place of the largest. A cluster is so split later, if at all.
- With a client fraction below 1 the criteria are first looked at on the cohort. If they call for a split, the absent
  members are asked for their updates at the same model, and the updates of all members decide. No similarity is made
  up: members that do not answer even then wait at the node, and join a child when they do (Algorithm 4).
- Thresholds can be left to a test: with ``criterion = "replicated"`` a cluster is split when updates from parts of its
  members' data say that there is more than one distribution (:mod:`fedclade.algorithms.replicated_splits`), whatever
  its norms are. The tree is grown and used as ever.
- "It is always possible to fall back to the Federated Learning solution" (section II-A) takes that to have converged
  when it is split. With thresholds it has not, so with ``fallback`` it goes on training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedclade.algorithms.base import Algorithm, RoundLog, State, sample
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of, move_clusters, place_stragglers, train_clusters
from fedclade.algorithms.fallback import best_on_validation, train_beside
from fedclade.algorithms.replicated_checks import Parting
from fedclade.algorithms.replicated_splits import SplitTest, train_and_test
from fedclade.clustering import SplitCriteria
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

BY_THRESHOLDS = (
    "eps1",
    "eps2",
    "eps2_of",
    "gamma_max",
    "similarity",
    "compared_at",
    "children_start",
    "split_rounds",
    "stop_when_stationary",
    "stop_done_clusters",
)
"""Settings of what a test decides without them."""


@dataclass(frozen=True, eq=False)
class CFLState(State):
    """The largest norm of a mean update in each node's lineage, ``[nodes]``, and whether every cluster is done.

    Where a test decides, also how clients part their data for it: into so many parts of so many examples.
    """

    peaks: Tensor
    stationary: bool = False
    parts: int = 0
    part_size: int = 0
    done: tuple[int, ...] | None = None
    """With ``stop_done_clusters``, the nodes of the clusters that train no more."""


@dataclass(frozen=True, eq=False)
class Examined:
    """One cluster's part of a round, and what decides whether it is split."""

    part: ClusterUpdate
    node: Node
    """The cluster, with the model at which ``updates`` were made; a split leaves the node that model."""
    updates: Updates
    """The members' updates that a split caches (eq. 47)."""
    criteria: SplitCriteria
    """The criteria that decide; those of ``part`` are about the round's own updates, for the log."""
    decides: bool = True
    """Whether enough members replied to be compared."""


@checked()
@dataclass(frozen=True, kw_only=True)
class CFL(Algorithm[CFLState]):
    """Clustered Federated Learning (Sattler et al. 2019, Algorithm 5): split a cluster when its members disagree.

    Parameters
    ----------
    eps1
        ε₁ of eq. 32: a cluster is near a stationary point when the norm of its weighted mean update is below this, in
        parameter units. ``"auto"``: a tenth of the largest such norm seen in the cluster and its ancestors (the rule of
        thumb of the journal version).
    eps2
        ε₂ of eqs. 33 and 34: its members disagree when the largest norm of an update is above this, in parameter units;
        with gradients in the units of these.
    eps2_of
        What ε₂ is held against: what is ``compared`` by ``similarity`` and ``compared_at`` (eq. 34; Algorithm 3,
        line 6), or always the round's ``updates``. By default these are the same (Algorithm 5, line 14).
    gamma_max
        γ_max of eq. 39, in [0, 1): how noisy updates may be; a bi-partition that such noise could explain is rejected.
    similarity
        α from weight ``updates`` (eq. 51) or from full ``gradients`` at the same model (eq. 50).
    compared_at
        The model at which members of a cluster that may be split are compared: at the ``round_start``, before the step
        that led to the stationary point (Algorithm 5, line 15), or at the ``stationary`` point θ* itself (Algorithm 3,
        lines 3 to 6). The latter asks for one more update, or gradient, of every member; parameters that stay with
        clients (``model.personal``) are then as the round's training left them.
    children_start
        The model that the children of a split start from: the cluster's after its step by the mean of all members, the
        ``cluster_mean`` (Algorithm 3, lines 7 and 8), or each child's after a step by the mean of its own members, the
        ``own_mean``, as in the authors' published code; a child of which fewer than ``min_clients`` members replied
        starts from the cluster's.
    split_rounds
        Split in these rounds only, counted from 1, whether or not eq. 32 holds (figure 8); eqs. 33 and 39 still decide
        which clusters. Empty: whenever eq. 32 holds.
    min_cluster_size
        Splits that leave a smaller cluster are rejected.
    weighted
        Whether clients count by their numbers of examples (eqs. 2 and 32), or all alike (Algorithm 5, line 13).
    stop_when_stationary
        End the run when every cluster is near a stationary point (eq. 32, the end of Algorithm 2) and is not to be
        split (eq. 34, or eq. 39: the end of Algorithm 3); with ``split_rounds`` not before the last of them.
    stop_done_clusters
        Whether each cluster trains no more once it is near a stationary point and is not to be split (Algorithm 3,
        line 10). The run ends when all clusters are done. Both equations are held against the clients that replied in
        the round: with a client fraction below 1 another member may be above ε₂ when its cluster is done. A cluster
        that a client joins trains again. Not with ``fallback``, whose root trains on.
    fallback
        After the first split train the root's model on beside the clusters', as plain federated learning does, and
        serve each client with that model on its path that validation data speaks for
        (:mod:`fedclade.algorithms.fallback`), so that clients fare at least about as well as with FedAvg (end of
        section II-A). From the first split on it takes twice the training and the bytes, and of private clients twice
        the releases.
    criterion
        What decides when to split, and into what: the paper's ``thresholds``, or ``replicated``: a test, as in
        :class:`ReplicatedCFL`, which needs none of eps1, eps2 and gamma_max.
    level
        With ``replicated``, the chance of ever splitting a cluster whose members all have one distribution.
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
    criterion: Literal["thresholds", "replicated"] = "thresholds"
    level: float = 0.01

    def __post_init__(self) -> None:
        eps1_holds = self.eps1 == "auto" if isinstance(self.eps1, str) else self.eps1 > 0
        known, criteria = ("updates", "gradients"), ("thresholds", "replicated")
        held_against, models = ("compared", "updates"), ("round_start", "stationary")
        starts = ("cluster_mean", "own_mean")
        all_train = not (self.fallback and self.stop_done_clusters)
        require(
            ("algorithm.eps1", self.eps1, eps1_holds, "greater than 0, or 'auto'"),
            ("algorithm.eps2", self.eps2, self.eps2 > 0, "greater than 0"),
            ("algorithm.eps2_of", self.eps2_of, self.eps2_of in held_against, "'compared' or 'updates'"),
            ("algorithm.compared_at", self.compared_at, self.compared_at in models, "'round_start' or 'stationary'"),
            (
                "algorithm.children_start",
                self.children_start,
                self.children_start in starts,
                "'cluster_mean' or 'own_mean'",
            ),
            (
                "algorithm.stop_done_clusters",
                self.stop_done_clusters,
                all_train,
                "false with fallback = true, whose root all clients train on",
            ),
            ("algorithm.gamma_max", self.gamma_max, 0 <= self.gamma_max < 1, "in [0, 1)"),
            ("algorithm.similarity", self.similarity, self.similarity in known, "'updates' or 'gradients'"),
            ("algorithm.split_rounds", self.split_rounds, all(r >= 1 for r in self.split_rounds), "rounds from 1 on"),
            ("algorithm.min_cluster_size", self.min_cluster_size, self.min_cluster_size >= 1, "at least 1"),
            ("algorithm.criterion", self.criterion, self.criterion in criteria, "'thresholds' or 'replicated'"),
            ("algorithm.level", self.level, 0 < self.level < 1, "greater than 0 and less than 1"),
        )
        if self.criterion == "replicated":
            unused = "left out: criterion = 'replicated' splits by a test, not by thresholds"
            given = ((name, getattr(self, name)) for name in BY_THRESHOLDS)
            require(*((f"algorithm.{name}", value, value == getattr(CFL, name), unused) for name, value in given))

    def too_few(self, clients: int) -> str:
        """Return that no cluster can be split, if two parts of ``min_cluster_size`` members need more clients."""
        needed = 2 * self.min_cluster_size
        if needed <= max(clients, 2):
            return ""
        return (
            f"CFL splits no cluster of this run: two parts of at least min_cluster_size = {self.min_cluster_size} "
            f"members need {needed} clients, and there are {clients}; it is federated averaging unless that many join, "
            "so set a smaller algorithm.min_cluster_size"
        )

    @property
    def asks_for_gradients(self) -> bool:
        """Whether clients send gradients to be compared."""
        return self.similarity == "gradients"

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients: sums over all of them carry their weights."""
        return not self.weighted or self.children_start == "own_mean"

    def sample_cohort(self, state: CFLState, fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
        """Sample the clients of a round, without those in clusters that train no more."""
        if not state.done:
            return super().sample_cohort(state, fraction, draw)
        waiting = [members for _, members in sorted(state.tree.stragglers.items())]
        clusters = [leaf.members for leaf in state.tree.leaves if leaf.members and leaf.id not in state.done]
        return tuple(client for members in (*clusters, *waiting) for client in sample(members, fraction, draw))

    def init(self, params: Tensor, clients: Clients) -> CFLState:
        """Put all clients in one cluster (line 3)."""
        state = CFLState(ParameterTree.root_only(clients.ids, params), torch.zeros(1, dtype=torch.float64))
        if self.criterion == "thresholds":
            return state
        parting = Parting.to_test("cfl", clients, self.level)
        return replace(state, parts=parting.parts, part_size=parting.size) if parting else state

    def step(
        self, state: CFLState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[CFLState, RoundLog]:
        """Run one round of Algorithm 5 (lines 5 to 23)."""
        if not cohort:  # all clients that are there are in clusters that are done
            return state, RoundLog({}, {})
        tests: Mapping[int, SplitTest] = {}
        examined: list[Examined] = []
        if self.criterion == "replicated":
            parting = Parting(state.parts, state.part_size) if state.parts else None
            parts, tests = train_and_test(
                state, parting, cohort, clients, this_round, self.level, weighted=self.weighted
            )
        else:
            parts = train_clusters(state, cohort, clients, this_round, weighted=self.weighted)  # lines 5 to 9
            examined = [self._examined(part, state, clients, this_round) for part in parts]
            parts = [each.part for each in examined]
        peaks = _raised(state.peaks, parts)
        moved = move_clusters(state.tree, parts)  # line 13; line 7 of the next round
        tree, events = place_stragglers(moved, parts)
        for each in examined:
            two = each.criteria.bipartition
            if self._calls_for_split(each, peaks, this_round) and two:  # line 14
                clusters, numbers = (two.first, two.second), each.criteria.numbers
                tree, event = self._split(
                    tree, each.node, each.updates, clusters, numbers, this_round
                )  # lines 15 to 19
                events.append(event)
        for number, test in tests.items():
            events.append(test.event)
            if test.updates:
                node = state.tree.nodes[number]
                tree, event = self._split(tree, node, test.updates, test.clusters, test.criteria, this_round)
                events.append(event)
        if self.fallback and len(state.tree.nodes) > 1:
            tree = tree.continued(train_beside(state.tree, cohort, clients, this_round, weighted=self.weighted))
        elif self.fallback and len(tree.nodes) > 1:  # in the round of its split the root was trained already
            tree = tree.continued(moved.nodes[0].params)
        phase = "split" if any(isinstance(event, ClusterSplit) for event in events) else "train"
        resting = {*(state.done or ()), *self._resting(examined, peaks, this_round)}
        resting -= {event.node for event in events if isinstance(event, ClusterSplit | Joined)}
        may_end = self.stop_when_stationary or self.stop_done_clusters
        peopled = {leaf.id for leaf in tree.leaves if leaf.members}
        stationary = may_end and not state.tree.stragglers and resting >= peopled
        if stationary:
            events.append(Stationary(0, len(state.tree.leaves)))
        done = tuple(sorted(resting)) if self.stop_done_clusters and resting else None
        state = replace(state, tree=tree, peaks=_inherited(peaks, tree), stationary=stationary, done=done)
        return state, log_of(parts, events, phase)

    def join(
        self, state: CFLState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[CFLState, list[Event]]:
        """Let newcomers join clusters; those that were done train again."""
        state, events = super().join(state, ids, clients, this_round)
        if not state.done:
            return state, events
        leaf_of = state.tree.leaf_of
        changed = {leaf_of[client] for client in ids if client in leaf_of}
        done = tuple(node for node in state.done if node not in changed)
        return replace(state, done=done or None, stationary=state.stationary and not changed), events

    def finished(self, state: CFLState) -> bool:
        """Whether every cluster is at its end, and the run is to end with them."""
        return state.stationary

    def serve(self, state: CFLState, clients: Clients) -> Mapping[int, int]:
        """Return the node whose model each client is served with."""
        return best_on_validation(state.tree, clients) if self.fallback else super().serve(state, clients)

    @property
    def _compares_again(self) -> bool:
        """Whether members of a cluster that may be split are asked for something else than the round's updates."""
        return self.similarity == "gradients" or self.compared_at == "stationary"

    def _calls_for_split(self, examined: Examined, peaks: Tensor, this_round: Round) -> bool:
        """Return whether a cluster is near a stationary point, and its members are not (eqs. 32 and 33)."""
        near = self._may_split(examined.node, examined.part, peaks, this_round)
        return near and examined.decides and examined.criteria.max_norm > self.eps2

    def _may_split(self, node: Node, part: ClusterUpdate, peaks: Tensor, this_round: Round) -> bool:
        """Return whether a cluster can be split, and is near a stationary point (eq. 32) or in a round of splits."""
        if len(node.members) < 2 or not part.enough or part.waits:
            return False
        return this_round.number in self.split_rounds if self.split_rounds else self._is_stationary(part, peaks)

    def _is_stationary(self, part: ClusterUpdate, peaks: Tensor) -> bool:
        """Return whether a cluster is near a stationary point of its objective (eq. 32)."""
        eps1 = float(peaks[part.node]) / 10 if self.eps1 == "auto" else self.eps1
        return part.criteria.mean_norm < eps1

    def _resting(self, examined: Sequence[Examined], peaks: Tensor, this_round: Round) -> set[int]:
        """Return the clusters that are near a stationary point and have been compared, if no split is to come."""
        if this_round.number < max(self.split_rounds, default=0):
            return set()
        replied = [each for each in examined if each.part.enough and not each.part.waits and each.decides]
        return {each.part.node for each in replied if self._is_stationary(each.part, peaks)}

    def _examined(self, part: ClusterUpdate, state: CFLState, clients: Clients, this_round: Round) -> Examined:
        """Compare the members of a cluster. For a split all members are asked, also those outside of the cohort."""
        node = state.tree.nodes[part.node]
        by_updates = not self._compares_again or self.eps2_of == "updates"
        may_split = self._may_split(node, part, state.peaks, this_round)
        if not may_split or (by_updates and part.criteria.max_norm <= self.eps2):
            part = part.compared()
            return Examined(part, node, part.updates, part.criteria)
        from_all = replace(this_round, require_all=True)
        part = self._with_absent_members(part, node, clients, from_all)
        if self._compares_again and not self._may_split(node, part, state.peaks, this_round):
            part = part.compared()  # with all members it is not near a stationary point
            return Examined(part, node, part.updates, part.criteria)
        updates = compared = part.updates
        ids, rows = updates.ids, [0] * len(updates.ids)
        model = node.params
        if self.compared_at == "stationary" and part.step is not None:
            model = model + part.step  # θ*, to which the tree moves the cluster
        if self.similarity == "gradients":
            compared = clients.gradients(ids, model[None], rows, from_all)
        elif self.compared_at == "stationary":
            again = replace(from_all, purpose="stationary")
            updates = compared = clients.train(ids, model[None], rows, again).select(ids)
            node = replace(node, params=model)
        if len(compared.ids) < 2:  # eq. 34 does not hold, and there is nothing to split by
            if compared.ids:
                part = replace(part, criteria=part.criteria.compared(compared.signatures, compared.ids))
            return Examined(part, node, updates, part.criteria, decides=False)
        part = replace(part, criteria=part.criteria.compared(compared.signatures, compared.ids))
        criteria = part.criteria if by_updates else replace(part.criteria, max_norm=float(compared.norms.max()))
        return Examined(part, node, updates, criteria)

    def _with_absent_members(self, part: ClusterUpdate, node: Node, clients: Clients, from_all: Round) -> ClusterUpdate:
        """Ask the members outside of the cohort for their updates at the same model, and measure all members'."""
        replied = set(part.updates.ids)
        updates = part.updates
        if absent := [member for member in node.members if member not in replied]:
            more = clients.train(absent, node.params[None], [0] * len(absent), from_all)
            updates = updates.concat(more).select(node.members)
        moved = mean(updates, weighted=self.weighted)
        return replace(part, updates=updates, mean=moved, criteria=SplitCriteria.of(updates, moved))

    def _split(
        self,
        tree: ParameterTree,
        before: Node,
        made: Updates,
        clusters: Sequence[tuple[int, ...]],
        criteria: Mapping[str, float],
        this_round: Round,
    ) -> tuple[ParameterTree, Event]:
        """Split a cluster in two, unless the noise that γ_max allows for could explain it (eq. 39).

        The node keeps the model of ``before``, at which the updates ``made`` were made.
        """
        because, smallest = "", min(map(len, clusters))
        if "gamma_bound" in criteria and criteria["gamma_bound"] <= self.gamma_max:  # line 18
            because = f"gamma_bound <= {self.gamma_max}"
        elif smallest < self.min_cluster_size:
            because = f"fewer than {self.min_cluster_size} members"
        if because:
            return tree, Rejected(before.id, **criteria, clusters=tuple(clusters), because=because)
        tree = tree.split(
            before.id,
            clusters,
            params=before.params,
            cached=[made.signatures_of(cluster) for cluster in clusters],
            round_number=this_round.number,
            criteria=criteria,
        )
        if self.children_start == "own_mean":
            for child in tree.children(before.id):
                own = made.select(child.members)
                if len(own.ids) >= this_round.min_clients:
                    tree = tree.with_model(child.id, before.params + mean(own, weighted=self.weighted))
        children = tuple(child.id for child in tree.children(before.id))
        return tree, ClusterSplit(before.id, **criteria, clusters=tuple(clusters), children=children)


def _raised(peaks: Tensor, parts: Sequence[ClusterUpdate]) -> Tensor:
    """Return the largest mean-update norm seen in each node's lineage, ``[nodes]``, this round included."""
    peaks = peaks.clone()
    for part in parts:
        peaks[part.node] = max(float(peaks[part.node]), part.criteria.mean_norm)
    return peaks


def _inherited(peaks: Tensor, tree: ParameterTree) -> Tensor:
    """Hand every new node its parent's largest norm: a lineage begins at the root."""
    new = [peaks[node.parent or 0] for node in tree.nodes[len(peaks) :]]
    return torch.cat([peaks, torch.tensor(new, dtype=peaks.dtype)])
