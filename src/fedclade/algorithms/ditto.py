"""Ditto: Li, Hu, Beirami, Smith 2021, Algorithm 1.

FedAvg trains a global model w, and beside it every client its own model v_k, which a proximal term holds near w:
min h_k(v_k; w) = F_k(v_k) + λ/2‖v_k − w‖² (the paper's objective). λ = 0 is local training; the larger λ, the nearer to
FedAvg.

Where paper and official code leave a choice, this file makes it:

- v_k starts from the initial model (official code), that of a client who joins later from w; it moves only in rounds in
  which k is in the cohort. A client that has not trained yet is served with the global model.
- w is solved for by local training as it is configured. v_k moves by as many epochs of the same, over the same batches
  (official code), unless ``epochs`` says otherwise: the s local iterations of the algorithm.
- The global mean is weighted by |D_i| as in FedAvg; the official code's is not. With equal sizes it is the same.
- v_k never leaves its client, so nothing travels for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.algorithms.base import OneCohort, OwnModels, RoundLog
from fedclade.algorithms.cluster_update import log_of, move_clusters, train_root
from fedclade.algorithms.state import State
from fedclade.core import LARGEST, Clients, Event, ParameterTree, Round, checked, require


@dataclass(frozen=True, eq=False)
class DittoState(State):
    """The client of each leaf, in their order."""

    owners: tuple[int, ...]


@checked()
@dataclass(frozen=True, kw_only=True)
class Ditto(OwnModels[DittoState], OneCohort[DittoState]):
    """Ditto (Li et al. 2021): a personal model beside the global one; the root is w, and each client's leaf its v_k.

    Parameters
    ----------
    lam
        λ, at least 0: how strongly personal models are held near the global one. The official scripts run with 1; a
        variant there chooses for each client among 0.1, 1 and 2 by its validation loss.
    epochs
        Of personal training in a round; as many as of global training if left out.
    """

    state_type = DittoState

    lam: float = 1.0
    epochs: int | None = None

    def __post_init__(self) -> None:
        require(
            ("algorithm.lam", self.lam, self.lam >= 0, "at least 0"),
            ("algorithm.lam", self.lam, not self.lam > LARGEST, f"at most {LARGEST:g}"),
            ("algorithm.epochs", self.epochs, self.epochs is None or self.epochs >= 1, "at least 1, or left out"),
        )

    def init(self, params: Tensor, clients: Clients) -> DittoState:
        """Keep a leaf for every client; it has the global model alone until it has trained."""
        tree = ParameterTree.star([()] * len(clients.ids), params, unassigned=clients.ids, split_in=None)
        return DittoState(tree, tuple(clients.ids))

    def step(
        self, state: DittoState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[DittoState, RoundLog]:
        """Run one round of Algorithm 1: both models start from what w was before it."""
        part = train_root(state, cohort, clients, this_round)
        tree = move_clusters(state.tree, [part])
        leaf_of = {client: leaf for leaf, client in enumerate(state.owners, start=1)}
        personal = torch.stack([state.tree.nodes[leaf_of[client]].params for client in cohort])
        models = torch.cat([personal, state.tree.nodes[0].params[None]])
        spec = this_round.spec if self.epochs is None else this_round.spec.in_epochs(self.epochs)
        spec = replace(spec, mu=self.lam)
        at_home = replace(this_round, spec=spec, communicates="nothing")
        updates = clients.train(cohort, models, range(len(cohort)), at_home, anchors=[len(cohort)] * len(cohort))
        for client, delta in zip(updates.ids, updates.required_deltas, strict=True):
            tree = tree.with_model(leaf_of[client], state.tree.nodes[leaf_of[client]].params + delta)
        tree = tree.reassigned({client: leaf_of[client] for client in updates.ids})
        return replace(state, tree=tree), log_of([part])

    def join(
        self, state: DittoState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[DittoState, list[Event]]:
        """Give each newcomer a leaf, whose model starts from the global one."""
        state, events = super().join(state, ids, clients, this_round)
        return replace(state, owners=(*state.owners, *ids)), events
