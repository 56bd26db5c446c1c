"""StoCFL, Stochastic Clustered Federated Learning (arXiv:2303.00897).

Zeng, Hu, Liu, Yu, Wang, Xu 2023. Every client once sends a representation Ψ_i of its data: the
update of an anchor model that it trains on the data. In each round the clusters of the sampled
clients are compared by the mean Ψ of their sampled members, and pairs with a cosine of at least τ
are merged. So the number of clusters is found, and no cluster is ever split. Then the clients train
their clusters' models, near a global model ω that is trained as well: min f_i(θ_k) + μ/2‖θ_k − ω‖²,
and ω as in FedAvg.

This file follows the authors' code (``StoCFL-FCC+CFL.py``) in its order of steps. Choices and
departures:

- *Anchor.* It is the initial model, as in the code. Ψ_i is trained with the local training of the
  round in which client i is first sampled, for ``anchor_epochs``. The server stores it, and does
  not query it again if the data changes.
- *Clients that were never sampled* are in no cluster. In the code each is a cluster by itself,
  which is equivalent, as only sampled clients are compared. They are evaluated with ω.
- *Means of Ψ* are plain means over the sampled members, and are not updated while pairs are merged,
  as in the code. (The less noisy the means, the larger their cosines: a τ that separates two
  clusters while they are small may merge them when they have grown.) Means of models are weighted
  by |D_i| as in FedAvg; the code's are not. With equal sizes both are the same.
- *Merged clusters* continue with the model of the larger one, as in the code. A cluster that has
  trained takes precedence over one that has not; in the code this depends on the order of their
  numbers. Of equals, the older one's model continues.
- *New clusters* start from ω as it is before the round (code). ω is trained by the configured local
  training, in addition to the clusters' models and over the same batches, and all clients start
  from the same ω; the code's FEMNIST trainer passes it from client to client.
- *Missing replies and newcomers.* A client that does not send Ψ_i takes no part in the round.
  Newcomers during a run are treated like clients that were never sampled. A newcomer to a finished
  run joins the cluster whose members' mean Ψ has the largest cosine with its own, if that is at
  least τ; otherwise it would be a cluster by itself that begins at ω.
- *Defaults* are those of the code's example for rotated CIFAR-10; τ depends on the data.
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
    """StoCFL (Zeng et al. 2023): clusters are merged if clients' anchor updates are similar.

    The root stores the anchor and, as its continued model, ω. Each cluster caches the Ψ of its
    members.

    Parameters
    ----------
    tau
        τ, in [-1, 1]: clusters are merged if the cosine of their mean Ψ is at least τ.
    mu
        μ, at least 0: weight of the proximal term that keeps clusters' models near the global one.
    anchor_epochs
        Number of epochs for which the anchor trains on a client's data.
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
        """Return whether a step uses the whole updates of single clients."""
        return False

    def init(self, params: Tensor, clients: Clients) -> State:
        """Take the initial model as the anchor and as ω; no client is in a cluster yet."""
        return State(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[State, RoundLog]:
        """Query Ψ of new clients, merge clusters, and train their models and ω."""
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
        # With μ > 0 the clients have already received ω, for the proximal term.
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
        """Add newcomers at the root; they join a cluster when they are first sampled."""
        return replace(state, tree=state.tree.with_newcomers(ids)), [Joined(0, tuple(ids))]

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Let newcomers join the cluster of the most similar mean Ψ, or else use the root's model.

        They join if the cosine is at least τ.
        """
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
        """Return the tree after similar clusters are merged; the same tree if no cluster changes.

        Every client with a new Ψ starts as a cluster by itself. Clusters are compared by the mean Ψ
        of their sampled members.
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
    """Return the clusters that have members."""
    return [leaf for leaf in tree.leaves if leaf.id and leaf.members]


def _psi(cluster: Node | Group) -> Tensor:
    """Return Ψ of a cluster's members, ``[n, R]``."""
    assert cluster.cached is not None  # every cluster with members caches its Ψ
    return cluster.cached


def _pairs(means: Sequence[Tensor], tau: float, *, signs: bool = False) -> list[tuple[int, int]]:
    """Return the pairs of rows whose cosine is at least τ, the most similar pair first.

    With ``signs`` the rows are means of signatures that consist of signs.
    """
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
    """Return the index of the cluster that the cluster at ``place`` has become part of."""
    while became[place] != place:
        place = became[place]
    return place


def _union(kept: Group, gone: Group) -> Group:
    """Return the union of two clusters, with the model of the first."""
    members = [*kept.members, *gone.members]
    order = sorted(range(len(members)), key=members.__getitem__)
    cached = torch.cat([_psi(kept), _psi(gone)])[order]
    return replace(kept, members=tuple(members[i] for i in order), cached=cached)
