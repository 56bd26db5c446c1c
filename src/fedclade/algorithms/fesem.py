"""FeSEM, Federated Stochastic Expectation Maximization (Xie et al. 2020), Algorithm 1.

Xie, Long, Shen, Zhou, Wang, Jiang, Zhang 2020. Each of k centres is a model. A client trains from
its centre to a local model W_i. In the E-step the client is assigned to the centre that is nearest
to W_i in parameter space; in the M-step a centre becomes the mean of the local models assigned to
it.

Where the paper leaves a choice, this file decides as follows:

- *Initial centres.* All clients begin at one model, because distances to randomly drawn centres are
  not informative: local training moves a client by far less than the distance between such centres.
  The first centres are the means of k clusters of the first local models by Ward's method, which
  minimises the same sum of squares as the E- and the M-step and needs no random draws. (The code
  published with the paper runs five iterations of k-means from k of the local models.)
- *Distances* are between parameters; buffers, such as BatchNorm's, are averaged but not compared.
  (The published code compares one layer.)
- *Weights.* Means are weighted by |D_i| as in FedAvg; the paper's are not. With equal sizes both
  are the same.
- *Client fraction below 1.* Both steps use only the cohort: a local model of an earlier round
  belongs to centres that have moved since. Clients that were never sampled are in no cluster; they
  start from, and are evaluated with, the mean of the centres, weighted by their numbers of members.
- *Empty centres.* A centre to which no local model is assigned, or fewer than ``min_clients``, does
  not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedclade.algorithms.base import OneCohort, RoundLog, State
from fedclade.algorithms.cluster_update import by_cluster, log_of, membership_events
from fedclade.algorithms.requires import Requires
from fedclade.clustering import agglomerate, compute_distances, cut
from fedclade.core import (
    Clients,
    ParameterTree,
    RoundPlan,
    TooFew,
    Updates,
    centre_of,
    checked,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor


@checked()
@dataclass(frozen=True, kw_only=True)
class FeSEM(OneCohort[State]):
    """FeSEM, multi-center federated learning (Xie et al. 2020): k-means on clients' local models.

    Each round of training is one iteration of k-means.

    Parameters
    ----------
    clusters
        Number K of centres, each of which is a model.
    """

    requires = Requires(clusters_from="clusters", server_steps=False)

    clusters: int = 2

    def __post_init__(self) -> None:
        require(("algorithm.clusters", self.clusters, self.clusters >= 1, "at least 1"))

    def init(self, params: Tensor, clients: Clients) -> State:
        """Return the state before round 1: all centres are equal, and no client is assigned."""
        return State(ParameterTree.star([()] * self.clusters, params, unassigned=clients.ids))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Run one round of FeSEM (Algorithm 1), which begins with the local updates.

        Clients train from their centres (the last step of the algorithm's loop). Then each client
        is assigned to the centre nearest to its local model (E-step), and each centre becomes the
        mean of the local models assigned to it (M-step).
        """
        tree = state.tree
        models, rows = tree.models([tree.leaf_of[client] for client in cohort])
        # LocalUpdate of Algorithm 1
        updates = clients.train(cohort, models, rows, this_round).select(sorted(cohort))
        if not updates.ids:
            return state, log_of([])
        start = dict(zip(cohort, rows, strict=True))
        local = models[[start[client] for client in updates.ids]] + updates.required_deltas
        centres = torch.stack([leaf.params for leaf in tree.leaves])
        D = updates.n_parameters
        if not any(leaf.members for leaf in tree.leaves):
            merges = agglomerate(compute_distances(local[:, :D], "l2"), "ward")
            labels = torch.from_numpy(cut(merges, min(self.clusters, len(local))))
            centres = _average_by_label(local, updates, labels, centres)
        # E-step. A matrix product would be faster, but loses small distances to rounding.
        apart = torch.cdist(
            local[:, :D], centres[:, :D], compute_mode="donot_use_mm_for_euclid_dist"
        )
        nearest = apart.argmin(dim=1)
        centres = _average_by_label(
            local, updates, nearest, centres, this_round.min_clients
        )  # M-step
        moved = tree.reassigned(
            {client: 1 + k for client, k in zip(updates.ids, nearest.tolist(), strict=True)}
        )
        for leaf, centre in zip(tree.leaves, centres, strict=True):
            moved = moved.with_model(leaf.id, centre)
        members = torch.tensor([len(leaf.members) for leaf in moved.leaves]).to(centres)
        moved = moved.with_model(0, members @ centres / members.sum())
        # min_clients applies to the centres to which clients are assigned, not to those they left.
        came = by_cluster(tree, updates, replace(this_round, min_clients=0))
        gone = nearest.bincount(minlength=len(centres)).tolist()
        too_few = [
            TooFew(k, n) for k, n in enumerate(gone, start=1) if 0 < n < this_round.min_clients
        ]
        log = log_of(came, [*too_few, *membership_events(tree, moved)])
        apart = torch.linalg.vector_norm(
            (local - centres[nearest])[:, :D], dim=1, dtype=torch.float64
        )
        return State(moved), replace(log, discrepancy=float(apart.sum()))


def _average_by_label(
    local: Tensor, updates: Updates, labels: Tensor, otherwise: Tensor, least: int = 1
) -> Tensor:
    """Compute the k centres ``[k, S]`` as means of the local models assigned to them.

    Parameters
    ----------
    local
        Local models of n clients, ``[n, S]``.
    updates
        The clients' updates, which give numbers of examples as weights, and the aggregation rule.
    labels
        Number of the centre to which each local model is assigned, ``[n]``.
    otherwise
        Old centres ``[k, S]``; a centre with fewer than ``least`` local models does not change.
    least
        Smallest number of local models for a new centre.
    """
    means = otherwise.clone()
    sizes = updates.weights.to(local)
    for k in labels.unique().tolist():
        mine = labels == k
        if int(mine.sum()) >= least and updates.aggregation is not None:
            members = [
                client
                for client, label in zip(updates.ids, labels.tolist(), strict=True)
                if label == k
            ]
            means[k] = centre_of(updates, local, members, otherwise[k])
        elif int(mine.sum()) >= least:
            means[k] = sizes[mine] @ local[mine] / sizes[mine].sum()
    return means
