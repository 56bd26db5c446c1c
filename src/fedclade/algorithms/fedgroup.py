"""FedGroup and FedGrouProx: Duan et al. 2020 (arXiv:2010.06870), Algorithms 2 to 4.

Where the paper leaves a choice, or its text and its formulas differ, this file makes it:

- A group starts from w_0 plus the weighted mean of its pre-training updates; Algorithm 4 line 7 forgets w_0.
- A group's update in eq. 10 is w_t^(g) − w_t, from the global model at which newcomers pre-train, as line 8 has it for
  t = 0. What the group learnt in its last round, at a model of its own, would send newcomers astray.
- In eq. 10 argmin is right, as (1 − cos)/2 is a distance: a newcomer joins where the cosine is largest.
- A newcomer trains for all E epochs from its group's model; section III-E has E − 1 more from where it pre-trained.
- A client that does not answer when it pre-trains is in no group yet, and takes no part in the round. If fewer than m
  do, the group cold start is left to the next round.
- Clients never sampled are tested with the global model; ``accuracy_weighted`` leaves them out, as the paper does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedclade.algorithms.base import (
    ClusterRound,
    OneCohort,
    RoundLog,
    State,
    log_of,
    membership_events,
    move_clusters,
    postponed,
    sample,
    train_clusters,
)
from fedclade.algorithms.groups import assigned, directions_to_groups, moved_together, pretrain, with_groups
from fedclade.clients import Clients, Round
from fedclade.errors import require
from fedclade.routing import Assignment
from fedclade.ternary import k_means, nearest_of_random, ternary_similarity
from fedclade.tree import ParameterTree


@dataclass(frozen=True, kw_only=True)
class FedGroup(OneCohort):
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
    base_directions
        Columns of V: three, or the number of groups in the paper's later version.
    rcc
        The ablation "random cluster centers": pre-trained clients go to the nearest of m of them.
    rac
        The ablation "randomly assign cold clients": those that did not pre-train for the groups join any of them.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    groups: int = 3
    pretrain_scale: int = 20
    eta_g: float = 0.01
    mu: float | None = None
    base_directions: int = 3
    rcc: bool = False
    rac: bool = False

    def __post_init__(self) -> None:
        require(
            ("algorithm.groups", self.groups, self.groups >= 1, "at least 1"),
            ("algorithm.pretrain_scale", self.pretrain_scale, self.pretrain_scale >= 1, "at least 1"),
            ("algorithm.eta_g", self.eta_g, self.eta_g >= 0, "at least 0"),
            ("algorithm.mu", self.mu, self.mu is None or self.mu >= 0, "at least 0, or left out"),
            ("algorithm.base_directions", self.base_directions, self.base_directions >= 1, "at least 1"),
        )

    def init(self, params: Tensor, clients: Clients) -> State:
        """Give the global model, which is the root's, and all groups w_0 (line 2); nobody is in a group.

        Raises
        ------
        ConfigError
            If there are more groups than clients to pre-train.
        """
        rule = f"at most {len(clients.ids)}, the number of clients that can pre-train"
        require(("algorithm.groups", self.groups, self.groups <= len(clients.ids), rule))
        return State(ParameterTree.star([()] * self.groups, params, unassigned=clients.ids))

    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Run one round of Algorithm 2 (lines 4 to 11); the first begins with the group cold start."""
        before, pretrained = state.tree, list[ClusterRound]()
        if not any(leaf.members for leaf in before.leaves):
            state, pretrained = self._group_cold_start(state, clients, this_round)
            if state.tree is before:
                log = log_of(pretrained, [postponed(pretrained[0], self.groups)], "pretrain")
                return state, replace(log, norms={})
        state = self._client_cold_start(state, cohort, clients, this_round)
        grouped = [client for client in cohort if state.tree.leaf_of[client]]
        local = this_round if self.mu is None else replace(this_round, spec=replace(this_round.spec, mu=self.mu))
        trained = train_clusters(state, grouped, clients, local) if grouped else []  # lines 5 to 7
        tree = move_clusters(state.tree, trained)
        if any(part.enough for part in trained):
            tree = moved_together(tree, self.eta_g, trained[0].updates.n_parameters)  # lines 10 and 11
        log = log_of([*pretrained, *trained], membership_events(before, tree), "pretrain" if pretrained else "train")
        return State(tree), replace(log, norms=log_of(trained).norms)  # eq. 4 is for S_t

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Let newcomers join groups as cold clients do (eq. 10), from the last global model."""
        return assigned(tree, ids, clients, this_round)

    def _group_cold_start(self, state: State, clients: Clients, this_round: Round) -> tuple[State, list[ClusterRound]]:
        """Let αm clients pre-train, cluster them, and give each group its first model (Algorithms 3 and 4)."""
        share = min(1.0, self.pretrain_scale * self.groups / len(clients.ids))
        chosen = sample(clients.ids, share, this_round.generator("pretrain"))  # Algorithm 3, line 2
        updates = pretrain(chosen, state.tree, clients, replace(this_round, insists=True))
        part = ClusterRound.of(0, updates, this_round)
        if not part.enough or len(updates.ids) < self.groups:
            return state, [part]
        points, draw = ternary_similarity(updates.signatures, self.base_directions), this_round.generator("centers")
        groups = (nearest_of_random if self.rcc else k_means)(points, self.groups, draw)  # Algorithm 4, line 3
        return State(with_groups(state.tree, updates, groups)), [part]  # Algorithm 4, line 7

    def _client_cold_start(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> State:
        """Let every client of the cohort that is in no group join one (eq. 10)."""
        tree = state.tree
        cold: Sequence[int] = sorted(client for client in cohort if tree.leaf_of[client] == 0)
        if not cold:
            return state
        if self.rac:
            groups = this_round.generator("cold start").integers(self.groups, size=len(cold))
        else:
            updates = pretrain(cold, state.tree, clients, this_round)
            cold, groups = updates.ids, directions_to_groups(updates, tree).argmax(axis=1)
        return State(tree.reassigned(dict(zip(cold, (1 + groups).tolist(), strict=True))))
