"""Stochastic Clustered Federated Learning (StoCFL): Zeng, Hu, Liu, Yu, Wang, Xu 2023 (arXiv:2303.00897).

Every client shows once what its data is like: Ψ_i, how far an anchor model moves when it trains on
it. In each round the clusters of the sampled clients are compared by the mean of these members' Ψ;
pairs whose cosine is at least τ become one. So the number of clusters is found, and no cluster is
ever split. Then the clients train their clusters' models, held near a global model ω that is
trained beside them: min f_i(θ_k) + μ/2‖θ_k − ω‖², and ω as in FedAvg.

This file follows the authors' code (``StoCFL-FCC+CFL.py``) in its order of steps. Choices and
departures:

- The anchor is the initial model, as in the code. Ψ_i is trained as the run's clients train in the
  round in which i is first sampled, for ``anchor_epochs``; the server keeps it, and does not ask
  again should the data change.
- Clients that no round has sampled yet are in no cluster; in the code each is a cluster by itself,
  which is the same, as only sampled clients are compared. They are served with ω.
- Means of Ψ are plain and over the sampled members, and stay as they were while pairs are united,
  as in the code. (The less noisy the means, the larger their cosines: a τ that holds two clusters
  apart while they are small may unite them when they have grown.) Means of models are weighted by
  |D_i| as in FedAvg; the code's are not. With equal sizes it is the same.
- United clusters go on with the model of the larger one, as in the code; of one that has trained
  rather than of one that has not, which the code does or does not by the order of their numbers; of
  equals with that of the older.
- A new cluster starts from ω as it is before the round (code). ω trains as the run is configured,
  beside the clusters' models and over the same batches, from the same ω for all; the code's FEMNIST
  trainer hands it from client to client.
- A client that does not send Ψ_i takes no part in the round. Newcomers during a run are as clients
  not sampled yet. A newcomer to a finished run joins the cluster whose members' mean Ψ has the
  largest cosine with its own, if that is at least τ; otherwise it would be a cluster of its own,
  which begins at ω.
- Defaults are those of the code's example for rotated CIFAR-10; τ depends on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedclade.algorithms.base import OneCohort, RoundLog, State
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    by_cluster,
    log_of,
    membership_events,
    move_clusters,
)
from fedclade.clustering import (
    Assignment,
    Step,
    are_signs,
    assign_to_root,
    compute_cosines,
    cosine_similarity,
    require_updates,
)
from fedclade.core import (
    BESIDE,
    LARGEST,
    Clients,
    Event,
    Group,
    Joined,
    Node,
    ParameterTree,
    Round,
    Updates,
    checked,
    require,
)


@checked()
@dataclass(frozen=True, kw_only=True)
class StoCFL(OneCohort[State]):
    """StoCFL (Zeng et al. 2023): clusters are united where an anchor model moves alike on their clients' data.

    The root has the anchor, and beside it ω, which goes on; each cluster caches the Ψ of its
    members.

    Parameters
    ----------
    tau
        τ, in [-1, 1]: clusters are united if the cosine of their mean Ψ is at least this.
    mu
        μ, at least 0: how strongly clusters' models are held near the global one.
    anchor_epochs
        For how many epochs the anchor trains on a client's data.
    """

    tau: float = 0.65
    mu: float = 0.05
    anchor_epochs: int = 20

    def __post_init__(self) -> None:
        require(
            ("algorithm.tau", self.tau, -1 <= self.tau <= 1, "in [-1, 1]"),
            ("algorithm.mu", self.mu, self.mu >= 0, "at least 0"),
            ("algorithm.mu", self.mu, not self.mu > LARGEST, f"at most {LARGEST:g}"),
            ("algorithm.anchor_epochs", self.anchor_epochs, self.anchor_epochs >= 1, "at least 1"),
        )

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    def init(self, params: Tensor, clients: Clients) -> State:
        """Take the initial model as the anchor and as ω; nobody is in a cluster."""
        return State(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[State, RoundLog]:
        """Observe who has not been, unite clusters, and train their models and ω."""
        before = state.tree
        cohort = sorted(cohort)
        clustered = {client for leaf in _clusters(before) for client in leaf.members}
        unseen = [client for client in cohort if client not in clustered]
        observed = self._observed(unseen, before, clients, this_round) if unseen else None
        tree = self._united(before, cohort, observed, this_round)
        events = membership_events(before, tree) if tree is not before else []
        cohort = [client for client in cohort if tree.leaf_of[client]]
        if not cohort:
            return State(tree), log_of([], events)
        models, rows = tree.models([tree.leaf_of[client] for client in cohort])
        omega = tree.nodes[0].model[None]
        near = replace(this_round, spec=replace(this_round.spec, mu=self.mu))
        models, anchors = torch.cat([models, omega]), [len(models)] * len(cohort)
        parts = by_cluster(tree, clients.train(cohort, models, rows, near, anchors), near)
        # ω has been sent to be held near it
        sent = "updates" if self.mu else this_round.communicates
        beside = replace(this_round, purpose=BESIDE, communicates=sent)
        of_all = ClusterUpdate.of(
            0, clients.train(cohort, omega, [0] * len(cohort), beside), this_round
        )
        moved = move_clusters(tree, parts)
        moved = moved if of_all.step is None else moved.continued(omega[0] + of_all.step)
        return State(moved), log_of(parts, events)

    def join(
        self, state: State, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[State, list[Event]]:
        """Take newcomers in, who are in no cluster until they are sampled."""
        return replace(state, tree=state.tree.with_newcomers(ids)), [Joined(0, tuple(ids))]

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Let newcomers join the cluster with the nearest mean Ψ, if it is near enough; the others are the root's."""
        leaves = _clusters(tree)
        if not leaves:
            return assign_to_root(ids)
        updates = require_updates(ids, self._observed(ids, tree, clients, this_round))
        means = torch.stack([_psi(leaf).mean(0) for leaf in leaves])
        found: list[Assignment] = []
        for client, alpha in zip(
            updates.ids, compute_cosines(updates.signatures, means).tolist(), strict=True
        ):
            scores = {leaf.id: cosine for leaf, cosine in zip(leaves, alpha, strict=True)}
            step = Step(0, "similarity", scores, max(scores, key=scores.__getitem__), fits=True)
            near = step.score >= self.tau
            found.append(Assignment.along(tree, client, [step] if near else []))
        return found

    def _observed(
        self, ids: Sequence[int], tree: ParameterTree, clients: Clients, this_round: Round
    ) -> Updates:
        """Return Ψ of some clients, as the signatures of their training from the anchor."""
        spec = replace(this_round.spec.in_epochs(self.anchor_epochs), mu=0.0)
        observing = replace(this_round, spec=spec, purpose="anchor")
        return clients.train(ids, tree.nodes[0].params[None], [0] * len(ids), observing)

    def _united(
        self,
        tree: ParameterTree,
        cohort: Sequence[int],
        observed: Updates | None,
        this_round: Round,
    ) -> ParameterTree:
        """Return the tree with those clusters united whose sampled members' mean Ψ are alike; the tree, if none are.

        Every client that was observed first is a cluster of its own.
        """
        groups = [Group(leaf.members, leaf.id, leaf.params, _psi(leaf)) for leaf in _clusters(tree)]
        if observed is not None and observed.ids:
            omega = tree.nodes[0].model
            groups += [
                Group((c,), 0, omega, observed.signatures_of([c])) for c in sorted(observed.ids)
            ]
        sampled = set(cohort)
        here = [place for place, group in enumerate(groups) if sampled.intersection(group.members)]
        means = [
            _psi(groups[place])[[c in sampled for c in groups[place].members]].mean(0)
            for place in here
        ]
        became = list(range(len(groups)))
        signs = all(are_signs(_psi(group)) for group in groups)
        for one, other in _pairs(means, self.tau, signs=signs):
            a = _root(became, here[one])
            b = _root(became, here[other])
            if a != b:
                kept, gone = sorted(
                    (a, b), key=lambda k: (not groups[k].leaf, -len(groups[k].members), k)
                )
                groups[kept] = _union(groups[kept], groups[gone])
                became[gone] = kept
        if len(groups) == len(_clusters(tree)) and became == list(range(len(groups))):
            return tree
        left = [group for place, group in enumerate(groups) if became[place] == place]
        anchor = tree.nodes[0].params
        criteria = {"tau": self.tau}
        return tree.regrouped(
            left, params=anchor, round_number=this_round.number, criteria=criteria
        )


def _clusters(tree: ParameterTree) -> list[Node]:
    """Return the clusters that have members; before the first there are none."""
    return [leaf for leaf in tree.leaves if leaf.id and leaf.members]


def _psi(cluster: Node | Group) -> Tensor:
    """Return Ψ of a cluster's members, ``[n, R]``."""
    assert cluster.cached is not None  # as of every cluster with members
    return cluster.cached


def _pairs(means: Sequence[Tensor], tau: float, *, signs: bool = False) -> list[tuple[int, int]]:
    """Return the pairs of rows whose cosine is at least τ, the largest first; rows may be means of ``signs``."""
    if len(means) < 2:
        return []
    alpha = cosine_similarity(torch.stack(list(means)), signs=signs)
    rows, columns = np.triu_indices(len(means), k=1)
    near = alpha[rows, columns] >= tau
    rows = rows[near]
    columns = columns[near]
    order = np.argsort(-alpha[rows, columns], kind="stable")
    return list(zip(rows[order].tolist(), columns[order].tolist(), strict=True))


def _root(became: Sequence[int], place: int) -> int:
    """Return which cluster one has become part of."""
    while became[place] != place:
        place = became[place]
    return place


def _union(kept: Group, gone: Group) -> Group:
    """Return two clusters as one, with the model of the first."""
    members = [*kept.members, *gone.members]
    order = sorted(range(len(members)), key=members.__getitem__)
    cached = torch.cat([_psi(kept), _psi(gone)])[order]
    return replace(kept, members=tuple(members[i] for i in order), cached=cached)
