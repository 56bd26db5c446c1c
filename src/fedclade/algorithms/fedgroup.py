"""FedGroup and FedGrouProx: Duan et al. 2020 (arXiv:2010.06870), Algorithms 2 to 4.

Where the paper leaves a choice, or its text and its formulas differ, this file makes it:

- A group starts from w_0 plus the mean of its pre-training updates; Algorithm 4 line 7 forgets w_0. The mean gives all
  clients the same weight, as the line reads; ``weighted_start`` weights them by their examples, as Algorithm 1 does.
- All clients join a group before round 1: "the groups and clients need to tackle cold start issues before training"
  (section III-B), and so does the authors' code. Section III-E may be read otherwise, that a client pre-trains in the
  first round that it is sampled in (``cold_start = "sampled"``); but by the letter of eq. 10 Table III is then out of
  reach, as ``fedclade reproduce fedgroup-eq10`` shows. Who joins the run later pre-trains when it is first sampled.
- A group's latest update in eq. 10 is w − w', where w' is the model from which its clients trained last: what they
  learnt then, and all steps along other groups' models since. (The authors' code adds these to it, too.) With
  ``direction = "position"`` it is w_t^(g) − w_t, which Algorithm 4 line 8 has for t = 0: where the group stands, seen
  from the global model at which newcomers pre-train.
- RCC: m clients pre-train, and each is the first of a group; all others join by eq. 10. The paper says "random cluster
  centers" and no more; this is what the authors' code does.
- In eq. 10 argmin is right, as (1 − cos)/2 is a distance: a newcomer joins where the cosine is largest.
- A newcomer trains for all E epochs from its group's model; section III-E has E − 1 more from where it pre-trained.
- A client that does not answer when it pre-trains is in no group yet, and takes no part in the round. If fewer than m
  do, the group cold start is left to the next round.
- Clients never sampled are tested with the global model; ``accuracy_weighted`` leaves them out, as the paper does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from fedclade.algorithms.base import OneCohort, RoundLog, sample
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of, membership_events, train_clusters
from fedclade.algorithms.groups import (
    GroupDirection,
    assigned,
    directions_to_groups,
    moved_together,
    pretrain,
    with_groups,
)
from fedclade.algorithms.state import State
from fedclade.clustering import Assignment, k_means, ternary_similarity
from fedclade.core import LARGEST, Clients, ParameterTree, Postponed, Round, checked, require, row_norms

AT_ONCE = 500
"""Clients, at most, whose pre-training updates are held in memory together when all join a group."""


@checked()
@dataclass(frozen=True, kw_only=True)
class FedGroup(OneCohort[State]):
    """FedGroup (Duan et al. 2020, Algorithm 2): clients are grouped once, by the directions of their first updates.

    Parameters
    ----------
    groups
        Number m of groups, at most the number of clients.
    pretrain_scale
        α: so many clients for each group pre-train before round 1, or all if there are fewer.
    eta_g
        η_g, the step of a group's model along the other groups' models in every round; 0 for none.
    mu
        μ of FedGrouProx, the proximal term within the groups; left out: that of the local training.
    pretrain_steps
        Steps of pre-training; one epoch if left out.
    base_directions
        Columns of V: three, or None for the number of groups, as in the paper's later version. From the number of
        clients on there are no more of them.
    weighted_start
        Whether a group's first model weights its clients by their examples; Algorithm 4 line 7 does not.
    cold_start
        When clients in no group pre-train to join one: all of them at the ``start``, or each in the first round that it
        is ``sampled`` in.
    direction
        Of a group in eq. 10: its latest ``update``, or its ``position``, where its model is from the global one.
    rcc
        The ablation "random cluster centers": m clients pre-train, and are the groups; all others are cold.
    rac
        The ablation "randomly assign cold clients": those that did not pre-train for the groups join any of them.
    """

    _directions: ClassVar[tuple[GroupDirection, ...]] = ("update", "position")

    groups: int = 3
    pretrain_scale: int = 20
    eta_g: float = 0.01
    mu: float | None = None
    pretrain_steps: int | None = None
    base_directions: int | None = 3
    weighted_start: bool = False
    cold_start: Literal["start", "sampled"] = "start"
    direction: GroupDirection = "update"
    rcc: bool = False
    rac: bool = False

    def __post_init__(self) -> None:
        moments, steps, columns = ("start", "sampled"), self.pretrain_steps, self.base_directions
        directions = " or ".join(f"'{name}'" for name in self._directions)
        require(
            ("algorithm.groups", self.groups, self.groups >= 1, "at least 1"),
            ("algorithm.pretrain_scale", self.pretrain_scale, self.pretrain_scale >= 1, "at least 1"),
            ("algorithm.eta_g", self.eta_g, self.eta_g >= 0, "at least 0"),
            ("algorithm.eta_g", self.eta_g, not self.eta_g > LARGEST, f"at most {LARGEST:g}"),
            ("algorithm.mu", self.mu, self.mu is None or self.mu >= 0, "at least 0, or left out"),
            ("algorithm.mu", self.mu, self.mu is None or not self.mu > LARGEST, f"at most {LARGEST:g}"),
            ("algorithm.pretrain_steps", steps, steps is None or steps >= 1, "at least 1, or left out"),
            ("algorithm.base_directions", columns, columns is None or columns >= 1, "at least 1"),
            ("algorithm.cold_start", self.cold_start, self.cold_start in moments, "'start' or 'sampled'"),
            ("algorithm.direction", self.direction, self.direction in self._directions, directions),
        )

    def check_clients(self, clients: int) -> None:
        """Check that there are as many clients as groups, and as base directions beyond the paper's three."""
        largest = max(3, clients)
        require(
            (
                *("algorithm.groups", self.groups, self.groups <= clients),
                f"at most {clients}, the number of clients that can pre-train",
            ),
            (
                *("algorithm.base_directions", self.base_directions, (self.base_directions or 1) <= largest),
                f"at most {largest}, as {clients} clients have no more directions",
            ),
        )

    def init(self, params: Tensor, clients: Clients) -> State:
        """Give the global model, which is the root's, and all groups w_0 (line 2); nobody is in a group."""
        return State(ParameterTree.star([()] * self.groups, params, unassigned=clients.ids))

    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Run one round of Algorithm 2 (lines 4 to 11); the first begins with the group cold start."""
        before, pretrained = state.tree, list[ClusterUpdate]()
        if not any(leaf.members for leaf in before.leaves):
            state, pretrained = self._group_cold_start(state, clients, this_round)
            if state.tree is before:
                log = log_of(pretrained, [Postponed(0, len(pretrained[0].updates.ids), self.groups)], "pretrain")
                return state, replace(log, discrepancy=None)
        joining = clients.ids if pretrained and self.cold_start == "start" else cohort
        state = self._client_cold_start(state, joining, clients, this_round)
        grouped = [client for client in cohort if state.tree.leaf_of[client]]
        local = this_round if self.mu is None else replace(this_round, spec=replace(this_round.spec, mu=self.mu))
        trained = train_clusters(state, grouped, clients, local) if grouped else []  # lines 5 to 7
        tree = self._moved(state.tree, trained)
        log = log_of([*pretrained, *trained], membership_events(before, tree), "pretrain" if pretrained else "train")
        return State(tree), replace(log, discrepancy=_discrepancy(trained, state.tree, tree))

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Let newcomers join groups as cold clients do (eq. 10), from the last global model."""
        return assigned(tree, ids, clients, this_round, self.direction, self.pretrain_steps)

    def _moved(self, tree: ParameterTree, trained: Sequence[ClusterUpdate]) -> ParameterTree:
        """Return the tree after groups moved by what their clients trained, and by each other (lines 8 to 11)."""
        for part in trained:
            tree = tree if part.step is None else tree.trained(part.node, part.step)
        if not any(part.enough for part in trained):
            return tree
        return moved_together(tree, self.eta_g, trained[0].updates.n_parameters)

    def _group_cold_start(self, state: State, clients: Clients, this_round: Round) -> tuple[State, list[ClusterUpdate]]:
        """Let αm clients pre-train, cluster them, and give each group its first model (Algorithms 3 and 4)."""
        wanted = self.groups if self.rcc else self.pretrain_scale * self.groups
        share = min(1.0, wanted / len(clients.ids))
        chosen = sample(clients.ids, share, this_round.generator("pretrain"))  # Algorithm 3, line 2
        updates = pretrain(chosen, state.tree, clients, replace(this_round, require_all=True), self.pretrain_steps)
        part = ClusterUpdate.of(0, updates, this_round)
        if not part.enough or len(updates.ids) < self.groups:
            return state, [part]
        if self.rcc:
            groups = np.arange(self.groups)
        else:
            points = ternary_similarity(updates.signatures, self.base_directions or self.groups)
            groups = k_means(points, self.groups, this_round.generator("centers"))  # Algorithm 4, line 3
        tree = with_groups(state.tree, updates, groups, weighted=self.weighted_start)  # Algorithm 4, line 7
        return State(tree), [part]

    def _client_cold_start(
        self, state: State, ids: Sequence[int], clients: Clients, this_round: Round, *, at_random: bool = True
    ) -> State:
        """Let every one of some clients that is in no group join one (eq. 10), or where it may be one at random."""
        tree = state.tree
        cold = sorted(client for client in ids if tree.leaf_of[client] == 0)
        joined: dict[int, int] = {}
        at_random = self.rac and at_random
        if at_random:
            groups = this_round.generator("cold start").integers(self.groups, size=len(cold))
            joined = dict(zip(cold, (1 + groups).tolist(), strict=True))
        for first in range(0, 0 if at_random else len(cold), AT_ONCE):
            updates = pretrain(cold[first : first + AT_ONCE], tree, clients, this_round, self.pretrain_steps)
            groups = directions_to_groups(updates, tree, self.direction).argmax(axis=1)
            joined |= dict(zip(updates.ids, (1 + groups).tolist(), strict=True))
        return State(tree.reassigned(joined)) if joined else state


def _discrepancy(trained: Sequence[ClusterUpdate], before: ParameterTree, after: ParameterTree) -> float | None:
    """Return Σ ‖w_i − w_t‖ (eq. 4) over the cohort, from the groups' models after all aggregation; None for nobody."""
    found: list[float] = []
    for part in (part for part in trained if part.updates.ids):
        D, moved = part.updates.n_parameters, after.nodes[part.node].params - before.nodes[part.node].params
        found.append(float(row_norms(part.updates.required_deltas[:, :D], moved[:D]).sum()))
    return sum(found) if found else None
