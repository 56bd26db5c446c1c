"""StoCFL, Stochastic Clustered Federated Learning (Zeng et al. 2023; arXiv:2303.00897).

Zeng, Hu, Liu, Yu, Wang, Xu 2023. Every client once sends a representation Ψ_i of its data: the
update of an anchor model that it trains on the data. In each round the clusters of the sampled
clients are compared by the mean Ψ of their sampled members, and pairs with a cosine of at least τ
are merged. The number of clusters thus need not be known, and no cluster is ever split. Then the
clients train their clusters' models, near a global model ω that is trained as well: min f_i(θ_k) +
μ/2‖θ_k − ω‖², and ω as in FedAvg.

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
  from the same ω. In the code's trainer for FEMNIST each client instead continues from the ω that
  the client before it has trained.
- *Missing replies and newcomers.* A client that does not send Ψ_i takes no part in the round.
  Newcomers during a run are treated like clients that were never sampled. A newcomer to a finished
  run joins the cluster whose members' mean Ψ has the largest cosine with its own, if that is at
  least τ; otherwise it would be a cluster by itself that begins at ω.
- *Defaults* are those of the code's example for rotated CIFAR-10; τ depends on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedclade.algorithms.base import OneCohort, RoundLog, State
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    by_cluster,
    log_of,
    membership_events,
    move_clusters,
)
from fedclade.algorithms.requires import Requires
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
    ClientWork,
    Event,
    Group,
    Joined,
    Node,
    Nothing,
    ParameterTree,
    Proximal,
    Round,
    RoundPlan,
    Updates,
    checked,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor


@checked()
@dataclass(frozen=True, kw_only=True)
class StoCFL(OneCohort[State]):
    """StoCFL (Zeng et al. 2023): clusters are merged if clients' anchor updates are similar.

    A client's anchor update Ψ is the update of a fixed model, the anchor, after training on the
    client's data. In the tree of clusters, the root's node stores the anchor as ``params``, and the
    global model ω as ``continued``. Each cluster stores the Ψ of its members.

    Parameters
    ----------
    tau
        τ, in [-1, 1]: clusters are merged if the cosine of their mean Ψ is at least τ.
    mu
        μ, at least 0: weight of the proximal term that keeps clusters' models near the global
        model.
    anchor_epochs
        Number of epochs for which the anchor trains on a client's data.
    """

    requires = Requires(updates=False)

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

    def init(self, params: Tensor, clients: Clients) -> State:
        """Return the state before round 1, in which no client is in a cluster yet.

        The initial model is both the anchor and the global model ω.
        """
        return State(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Run one round of StoCFL (Zeng et al. 2023).

        Clients that are sampled for the first time send their anchor updates Ψ, clusters with
        similar Ψ are merged, and the cohort trains the clusters' models and the global model ω.
        """
        before = state.tree
        cohort = sorted(cohort)
        clustered = {client for leaf in _list_clusters(before) for client in leaf.members}
        unseen = [client for client in cohort if client not in clustered]
        observed = self._query_psi(unseen, before, clients, this_round) if unseen else None
        tree = self._merge_similar(before, cohort, observed, this_round)
        events = membership_events(before, tree) if tree is not before else []
        cohort = [client for client in cohort if tree.leaf_of[client]]
        if not cohort:
            return State(tree), log_of([], events)
        models, rows = tree.models([tree.leaf_of[client] for client in cohort])
        omega = tree.nodes[0].model[None]
        work = ClientWork(steps=Proximal(self.mu))
        anchors = [len(models)] * len(cohort)  # ω, the last row
        models = torch.cat([models, omega])
        updates = clients.train(cohort, models, rows, this_round, work, anchors=anchors)
        parts = by_cluster(tree, updates, this_round)
        updates = clients.train(
            cohort,
            omega,
            [0] * len(cohort),
            replace(this_round, purpose=BESIDE),
            work=ClientWork(store=Nothing()),
            # With μ > 0 the clients have already received ω, for the proximal term.
            sent_before=bool(self.mu),
        )
        of_all = ClusterUpdate.of(0, updates, this_round)
        moved = move_clusters(tree, parts)
        moved = moved if of_all.step is None else moved.continued(omega[0] + of_all.step)
        return State(moved), log_of(parts, events)

    def join(
        self, state: State, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[State, list[Event]]:
        """Add clients that join during a run as members of the root only.

        They join a cluster by their anchor updates when they are first sampled.
        """
        return replace(state, tree=state.tree.with_newcomers(ids)), [Joined(0, tuple(ids))]

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Assign new clients of a finished run by their anchor updates Ψ.

        A newcomer is assigned to the cluster with the most similar mean Ψ if the cosine is at least
        τ, and otherwise to the root, whose model is the global model.
        """
        leaves = _list_clusters(tree)
        if not leaves:
            return assign_to_root(ids)
        updates = require_updates(ids, self._query_psi(ids, tree, clients, this_round))
        means = torch.stack([_get_psi(leaf).mean(0) for leaf in leaves])
        found: list[Assignment] = []
        for client, alpha in zip(
            updates.ids, compute_cosines(updates.signatures, means).tolist(), strict=True
        ):
            scores = {leaf.id: cosine for leaf, cosine in zip(leaves, alpha, strict=True)}
            step = Step(0, "similarity", scores, max(scores, key=scores.__getitem__), fits=True)
            near = step.score >= self.tau
            found.append(Assignment.along(tree, client, [step] if near else []))
        return found

    def _query_psi(
        self, ids: Sequence[int], tree: ParameterTree, clients: Clients, this_round: Round
    ) -> Updates:
        """Query clients for their anchor updates Ψ, by training from the anchor."""
        local = replace(this_round.local.in_epochs(self.anchor_epochs), mu=0.0)
        observing = replace(this_round, local=local, purpose="anchor")
        work = ClientWork(store=Nothing())
        return clients.train(ids, tree.nodes[0].params[None], [0] * len(ids), observing, work)

    def _merge_similar(
        self,
        tree: ParameterTree,
        cohort: Sequence[int],
        observed: Updates | None,
        this_round: Round,
    ) -> ParameterTree:
        """Merge clusters whose mean anchor updates Ψ have a cosine of at least τ.

        Every client with a new Ψ starts as a cluster of one client. A cluster's mean Ψ is over its
        sampled members.

        Parameters
        ----------
        tree
            The tree before.
        cohort
            Ids of the clients sampled for this round.
        observed
            Ψ of the clients that were sampled for the first time; None if there are none.
        this_round
            The round.

        Returns
        -------
        ParameterTree
            The tree after the merges; the same object if no cluster changes.
        """
        groups = [
            Group(leaf.members, leaf.id, leaf.params, _get_psi(leaf))
            for leaf in _list_clusters(tree)
        ]
        if observed is not None and observed.ids:
            omega = tree.nodes[0].model
            groups += [
                Group((c,), 0, omega, observed.signatures_of([c])) for c in sorted(observed.ids)
            ]
        sampled = set(cohort)
        here = [place for place, group in enumerate(groups) if sampled.intersection(group.members)]
        means = [
            _get_psi(groups[place])[[c in sampled for c in groups[place].members]].mean(0)
            for place in here
        ]
        signs = all(are_signs(_get_psi(group)) for group in groups)
        pairs = _find_similar_pairs(means, self.tau, signs=signs)
        left = _merge_pairs(groups, [(here[first], here[second]) for first, second in pairs])
        if len(left) == len(groups) == len(_list_clusters(tree)):  # no new cluster, no merge
            return tree
        anchor = tree.nodes[0].params
        criteria = {"tau": self.tau}
        return tree.regrouped(
            left, params=anchor, round_number=this_round.number, criteria=criteria
        )


def _list_clusters(tree: ParameterTree) -> list[Node]:
    """Return the leaves of the tree that have members, without the root."""
    return [leaf for leaf in tree.leaves if leaf.id and leaf.members]


def _get_psi(cluster: Node | Group) -> Tensor:
    """Return the stored anchor updates Ψ of a cluster's n members: R numbers each, ``[n, R]``."""
    assert cluster.cached is not None  # every cluster with members stores their Ψ
    return cluster.cached


def _find_similar_pairs(
    means: Sequence[Tensor], tau: float, *, signs: bool = False
) -> list[tuple[int, int]]:
    """Return the pairs of clusters whose mean anchor updates have a cosine of at least τ.

    Parameters
    ----------
    means
        Mean anchor update of each cluster.
    tau
        Threshold τ.
    signs
        Whether ``means`` are means of signs, since clients sent only the signs of random
        projections of their updates. The cosines of the updates are then estimated from these
        means.

    Returns
    -------
    list of tuple
        Indices of the two clusters of each pair, the most similar pair first.
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


def _merge_pairs(clusters: Sequence[Group], pairs: Sequence[tuple[int, int]]) -> list[Group]:
    """Merge clusters along pairs of their indices, in the order of the pairs.

    A merged cluster continues with the model of the cluster that has trained; if both or neither
    have, with the model of the larger cluster; of equally large ones, with the model of the older
    one. Clusters that remain are returned in their order.
    """
    merged = list(clusters)
    became = list(range(len(merged)))
    for first, second in pairs:
        a = _find_merged(became, first)
        b = _find_merged(became, second)
        if a == b:
            continue
        kept, gone = sorted((a, b), key=lambda k: (not merged[k].leaf, -len(merged[k].members), k))
        merged[kept] = _merge_pair(merged[kept], merged[gone])
        became[gone] = kept
    return [cluster for place, cluster in enumerate(merged) if became[place] == place]


def _find_merged(became: Sequence[int], place: int) -> int:
    """Follow merges to the cluster that now contains the cluster at index ``place``.

    ``became`` has for each cluster the index of the cluster that it was merged into, or its own.
    """
    while became[place] != place:
        place = became[place]
    return place


def _merge_pair(kept: Group, gone: Group) -> Group:
    """Merge two clusters; the merged cluster continues with the model of the cluster ``kept``."""
    members = [*kept.members, *gone.members]
    order = sorted(range(len(members)), key=members.__getitem__)
    cached = torch.cat([_get_psi(kept), _get_psi(gone)])[order]
    return replace(kept, members=tuple(members[i] for i in order), cached=cached)
