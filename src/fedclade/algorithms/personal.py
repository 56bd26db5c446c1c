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

Any other method gets personal parameters by ``model.personal`` in the same way, and then clusters what is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedclade.algorithms.base import RoundLog
from fedclade.algorithms.fedavg import FedAvg
from fedclade.algorithms.state import State
from fedclade.core import Clients, Round, checked, require


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
    """

    personal = "head"

    head_epochs: int = 10

    def __post_init__(self) -> None:
        require(("algorithm.head_epochs", self.head_epochs, self.head_epochs >= 1, "at least 1"))

    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Run one round of Algorithm 1 (lines 4 to 14)."""
        return super().step(state, cohort, clients, replace(this_round, personal_epochs=self.head_epochs))
