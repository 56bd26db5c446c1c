"""Methods whose clients keep a part of their model for themselves: FedAvg of the rest.

- FedPer: Arivazhagan, Aggarwal, Singh, Choudhary 2019 (arXiv:1912.00818), Algorithms 1 and 2: the last layers.
- LG-FedAvg: Liang, Liu, Liu et al. 2020 (arXiv:2001.01523), Algorithm 1: the representation, under a shared head.
- FedBN: Li, Jiang, Zhang, Kamp, Dou 2021 (arXiv:2102.07623), Algorithm 1: normalisation layers with their statistics.
- FedRep: Collins, Hassani, Mokhtari, Shakkottai 2021 (arXiv:2102.07078), Algorithm 1: the head, trained by itself.

Which layers these are is the papers' choice for a model: here the head is the last layer with parameters, and
``model.personal`` names others. Where a paper leaves a choice, or is departed from:

- Personal parameters start as the initial model has them, for all clients; in FedPer each draws its own.
- Means are weighted by |D_i| as in FedAvg; FedRep's and FedBN's are not. With equal sizes it is the same.
- FedRep's τ_h steps are epochs over all the client's data, and its single step of the representation is the local
  training as it is configured (section 5 has 10 epochs of the head, then 1 or 5). Both take mini-batches.
- FedRep's official code adds a last round that Algorithm 1 does not have: all clients, sampled before or not, fit their
  head to the final representation for max(10, τ_h) epochs, and are scored with it. A method does not know which round
  is the last, so ``last_fit`` names it; by default there is no such round.
- LG-FedAvg's official code starts from a model that FedAvg has trained, not from a random one, and shares the last
  layers up to a number, ``num_layers_keep``, not the head alone; it reports each client's best round on test data. Here
  it starts from the initial model, which may be a trained one, ``model.personal`` names other layers, and the last
  round is reported.

Any other method gets personal parameters by ``model.personal`` in the same way, and then clusters what is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedclade.algorithms.base import RoundLog
from fedclade.algorithms.cluster_update import log_of, train_clusters
from fedclade.algorithms.fedavg import FedAvg
from fedclade.algorithms.state import State
from fedclade.core import Clients, Round, checked, require

SHORTEST_FIT = 10
"""Epochs of the last fit of the heads in FedRep's official code, if τ_h is less."""


@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedPer (Arivazhagan et al. 2019): FedAvg of the base layers W_B; the head W_P stays with each client."""

    personal = "head"


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """LG-FedAvg (Liang et al. 2020): FedAvg of the head; the representation below it stays with each client."""

    personal = "body"


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedBN (Li et al. 2021): FedAvg of all but normalisation layers, which stay with each client."""

    personal = "norm"


@checked()
@dataclass(frozen=True, kw_only=True)
class FedRep(FedAvg):
    """FedRep (Collins et al. 2021, Algorithm 1): clients fit their head to the representation, then that to the head.

    Parameters
    ----------
    head_epochs
        τ_h: epochs of the head in a round, with the representation as it was sent. The representation then has those of
        the local training.
    last_fit
        Number of the last round, in which all clients fit their head to the representation, for max(10, τ_h) epochs,
        and nothing else is trained, as in the authors' code. Left out: there is no such round, as in Algorithm 1.
    """

    personal = "head"

    head_epochs: int = 10
    last_fit: int | None = None

    def __post_init__(self) -> None:
        names_a_round = self.last_fit is None or self.last_fit >= 1
        require(
            ("algorithm.head_epochs", self.head_epochs, self.head_epochs >= 1, "at least 1"),
            ("algorithm.last_fit", self.last_fit, names_a_round, "at least 1, or left out"),
        )

    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Run one round of Algorithm 1 (lines 4 to 14), or the last round of the authors' code."""
        if this_round.number == self.last_fit:
            return state, self._fit_heads(state, clients, this_round)
        return super().step(state, cohort, clients, replace(this_round, personal_epochs=self.head_epochs))

    def _fit_heads(self, state: State, clients: Clients, this_round: Round) -> RoundLog:
        """Let all clients fit their heads, which they keep. Their updates of the representation are not used."""
        epochs = max(SHORTEST_FIT, self.head_epochs)
        fit = replace(this_round, personal_epochs=epochs, communicates="models")
        parts = train_clusters(state, state.tree.nodes[0].members, clients, fit)
        return replace(log_of(parts), discrepancy=None)  # no model moves
