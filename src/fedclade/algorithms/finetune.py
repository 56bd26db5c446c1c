"""FedAvg, and every client fine-tunes its own copy of the global model: the plainest personalisation.

The global model never sees what the copies learn. Copies are made anew from it in every round that is evaluated, since
they are what clients are served with; ``evaluate_every`` decides how often. A client that makes none then is served
with the global model as it is. Nothing travels for them: a client has the global model, and keeps its copy. Official
code that has this baseline (of Ditto, Li et al. 2021) does it once, at the end; the last round's copies are the same
either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedclade.algorithms.base import OneCohort, OwnModels, RoundLog
from fedclade.algorithms.cluster_update import log_of, move_clusters, train_root
from fedclade.algorithms.state import OwnState
from fedclade.core import Clients, LocalTraining, ParameterTree, Round, checked, require


@checked()
@dataclass(frozen=True, kw_only=True)
class FineTune(OwnModels[OwnState], OneCohort[OwnState]):
    """FedAvg with local fine-tuning: each client keeps its own copy of the global model.

    Parameters
    ----------
    epochs
        Of fine-tuning, over the client's training data; all else is as in local training.
    """

    epochs: int = 1

    def __post_init__(self) -> None:
        require(("algorithm.epochs", self.epochs, self.epochs >= 1, "at least 1"))

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Put all clients under the global model; nobody has a copy."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OwnState, RoundLog]:
        """Run one round of FedAvg; if it is evaluated, let all clients fine-tune what comes out."""
        part = train_root(state, cohort, clients, this_round)
        new = OwnState(move_clusters(state.tree, [part]), keepers=())
        return self.tuned(new, clients, this_round), log_of([part])

    def tunes(self, spec: LocalTraining) -> LocalTraining:
        """Return the fine-tuning."""
        return spec.in_epochs(self.epochs)
