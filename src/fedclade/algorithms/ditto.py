"""Ditto, a method with personal models (Li, Hu, Beirami, Smith 2021, Algorithm 1).

FedAvg trains a global model w. In addition every client k trains a personal model v_k that a
proximal term keeps near w: min h_k(v_k; w) = F_k(v_k) + λ/2‖v_k − w‖² (the paper's objective). With
λ = 0 personal models are trained locally only; the larger λ, the nearer they are to FedAvg's model.

Where paper and official code leave a choice, this file decides as follows:

- v_k starts from the initial model (official code); for a client that joins later it starts from w
  as it is when the client first trains. v_k changes only in rounds in which client k is in the
  cohort. A client that has not trained yet is evaluated with the global model.
- w is trained by the configured local training. v_k is trained for as many epochs, over the same
  batches (official code), unless ``epochs`` specifies another number. This training of v_k is what
  Algorithm 1 calls s local iterations.
- The global mean is weighted by the clients' numbers of examples |D_i|, as in FedAvg; the official
  code's mean is not. With equal sizes both are the same.
- v_k never leaves its client, which stores it and is evaluated with it; the server has only w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedclade.algorithms.base import OneCohort, OwnModels, OwnState, RoundLog
from fedclade.algorithms.cluster_update import log_of, move_clusters, train_root
from fedclade.core import (
    LARGEST,
    ClientIds,
    Clients,
    ClientWork,
    FromStored,
    LocalModel,
    NoReply,
    ParameterTree,
    Proximal,
    RoundPlan,
    ascending_ids,
    checked,
    require,
    without_ids,
)


@dataclass(frozen=True, eq=False)
class DittoState(OwnState):
    """State of Ditto between rounds.

    Parameters
    ----------
    initial
        The initial model, ``[S]``; None after all clients have trained their personal models.
    untrained
        Ids of the clients that have not trained a personal model yet. Their first training starts
        from the initial model.
    """

    initial: torch.Tensor | None = None
    untrained: Sequence[int] = ()


@checked()
@dataclass(frozen=True, kw_only=True)
class Ditto(OwnModels[DittoState], OneCohort[DittoState]):
    """Ditto (Li et al. 2021): each client trains a personal model near the global model.

    The tree contains only the global model w.

    Parameters
    ----------
    lam
        λ, at least 0: weight of the proximal term that pulls personal models towards the global
        model. The official scripts use 1; a variant in them chooses among 0.1, 1 and 2 for each
        client by its validation loss.
    epochs
        Number of epochs for which the personal model is trained in a round. None: the number of
        epochs of the local training.
    """

    state_type = DittoState

    lam: float = 1.0
    epochs: int | None = None

    def __post_init__(self) -> None:
        require(
            ("algorithm.lam", self.lam, self.lam >= 0, "at least 0"),
            ("algorithm.lam", self.lam, not self.lam > LARGEST, f"at most {LARGEST:g}"),
            (
                "algorithm.epochs",
                self.epochs,
                self.epochs is None or self.epochs >= 1,
                "at least 1, or left out",
            ),
        )

    def init(self, params: torch.Tensor, clients: Clients) -> DittoState:
        """Return the state before round 1, in which no personal model has been trained yet."""
        return DittoState(
            ParameterTree.root_only(clients.ids, params), (), params, ascending_ids(clients.ids)
        )

    def step(
        self, state: DittoState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[DittoState, RoundLog]:
        """Run one round of Ditto (Li et al. 2021, Algorithm 1).

        The cohort trains the global model w. Each of its clients k also trains its personal model
        v_k, with a proximal term at the global model from before the round.
        """
        part = train_root(state, cohort, clients, this_round)
        local = this_round.local if self.epochs is None else this_round.local.in_epochs(self.epochs)
        personal_round = replace(this_round, local=local)
        work = ClientWork(
            start=FromStored(), steps=Proximal(self.lam), store=LocalModel(), reply=NoReply()
        )
        w = state.tree.nodes[0].params
        models = torch.stack([w] if state.initial is None else [w, state.initial])
        waiting = state.untrained if isinstance(state.untrained, ClientIds) else {*state.untrained}
        first = [
            1 if c in waiting else row for c, row in zip(cohort, state.rows(cohort), strict=True)
        ]
        updates = clients.train(
            cohort,
            models,
            first,
            personal_round,
            work=work,
            anchors=[0] * len(cohort),
            sent_before=True,  # the clients received w for the global training of this round
        )
        untrained = without_ids(state.untrained, updates.ids)
        initial = state.initial if untrained else None
        tree = move_clusters(state.tree, [part])
        keepers = state.keepers_after(updates)
        return DittoState(tree, keepers, initial, untrained), log_of([part])
