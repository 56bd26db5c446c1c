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

import numpy as np
import torch
from torch import Tensor

from fedclade.aggregate import inter_group, weighted_mean
from fedclade.algorithms.base import (
    Algorithm,
    ClusterRound,
    RoundLog,
    State,
    log_of,
    membership_events,
    move_clusters,
    postponed,
    sample,
    train_clusters,
)
from fedclade.clients import Clients, Round
from fedclade.errors import require
from fedclade.routing import Assignment, Step, fits_by_loss, leaf_losses
from fedclade.similarity import Similarity, cosines
from fedclade.ternary import k_means, nearest_of_random, ternary_similarity
from fedclade.tree import ParameterTree
from fedclade.updates import Updates


@dataclass(frozen=True, kw_only=True)
class FedGroup(Algorithm):
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

    def cohort(self, state: State, fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
        """Sample from all clients, whatever their group (line 4)."""
        return sample(state.tree.nodes[0].members, fraction, draw)

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
        tree = self._stepped(state.tree, trained)
        log = log_of([*pretrained, *trained], membership_events(before, tree), "pretrain" if pretrained else "train")
        answered = {client for part in trained for client in part.updates.ids}
        norms = {client: log.norms[client] for client in cohort if client in answered}  # eq. 4 is for S_t
        return State(tree), replace(log, norms=norms)

    def _stepped(self, tree: ParameterTree, trained: Sequence[ClusterRound]) -> ParameterTree:
        """Move all groups by their members' updates and by each other, and the global model with them (line 10 f.)."""
        if not any(part.enough for part in trained):
            return tree
        tree = move_clusters(tree, trained)
        n_parameters = trained[0].updates.n_parameters
        models = inter_group(torch.stack([leaf.params for leaf in tree.leaves]), self.eta_g, n_parameters)  # line 10
        for leaf, model in zip(tree.leaves, models, strict=True):
            tree = tree.with_model(leaf.id, model)
        return tree.with_model(0, models.mean(0))  # line 11

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Let newcomers join groups as cold clients do (eq. 10), from the last global model.

        Whether they fit is told by their losses. The largest cosine of a newcomer with 40 images can be as small as a
        stranger's: 0.12 and 0.11, measured as in :mod:`fedclade.routing`.
        """
        updates, losses = _pretrain(ids, tree, clients, this_round), leaf_losses(tree, ids, clients)
        peopled = [leaf.id for leaf in tree.leaves if leaf.members]
        places = [place for place, leaf in enumerate(tree.leaves) if leaf.members]
        similar = _directions_to_groups(updates, tree)[:, places].tolist()
        scores = {c: dict(zip(peopled, mine, strict=True)) for c, mine in zip(updates.ids, similar, strict=True)}
        taken = {client: max(mine, key=mine.__getitem__) for client, mine in scores.items()}
        fits = fits_by_loss(losses, taken, tree, clients)
        steps = {c: Step(0, "similarity", mine, taken[c], fits[c]) for c, mine in scores.items()}
        return [Assignment.along(tree, client, [steps[client]]) for client in ids]

    def _group_cold_start(self, state: State, clients: Clients, this_round: Round) -> tuple[State, list[ClusterRound]]:
        """Let αm clients pre-train, cluster them, and give each group its first model (Algorithms 3 and 4)."""
        share = min(1.0, self.pretrain_scale * self.groups / len(clients.ids))
        chosen = sample(clients.ids, share, this_round.generator("pretrain"))  # Algorithm 3, line 2
        updates = _pretrain(chosen, state.tree, clients, replace(this_round, insists=True))
        part = ClusterRound.of(0, updates, this_round)
        if not part.enough or len(updates.ids) < self.groups:
            return state, [part]
        points, draw = ternary_similarity(updates.signatures, self.base_directions), this_round.generator("centers")
        groups = (nearest_of_random if self.rcc else k_means)(points, self.groups, draw)  # Algorithm 4, line 3
        tree = state.tree.reassigned(dict(zip(updates.ids, (1 + groups).tolist(), strict=True)))
        for leaf in (leaf for leaf in tree.leaves if leaf.members):
            tree = tree.moved(leaf.id, weighted_mean(updates.of(leaf.members)))  # Algorithm 4, line 7
        return State(tree), [part]

    def _client_cold_start(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> State:
        """Let every client of the cohort that is in no group join one (eq. 10)."""
        tree = state.tree
        cold: Sequence[int] = sorted(client for client in cohort if tree.leaf_of[client] == 0)
        if not cold:
            return state
        if self.rac:
            groups = this_round.generator("cold start").integers(self.groups, size=len(cold))
        else:
            updates = _pretrain(cold, state.tree, clients, this_round)
            cold, groups = updates.ids, _directions_to_groups(updates, tree).argmax(axis=1)
        return State(tree.reassigned(dict(zip(cold, (1 + groups).tolist(), strict=True))))


def _pretrain(ids: Sequence[int], tree: ParameterTree, clients: Clients, this_round: Round) -> Updates:
    """Let clients train for one epoch from the current global model (Algorithm 3, lines 11 to 16)."""
    asked = replace(this_round, spec=replace(this_round.spec, epochs=1, mu=0.0), purpose="pretrain")
    return clients.train(ids, *tree.models([0] * len(ids)), asked)


def _directions_to_groups(updates: Updates, tree: ParameterTree) -> Similarity:
    """Return the cosine of each pre-training update with each group's update (eq. 10), ``[n, m]``."""
    of_groups = torch.stack([leaf.params - tree.nodes[0].params for leaf in tree.leaves])
    return cosines(updates.each[:, : updates.n_parameters], of_groups[:, : updates.n_parameters])
