"""FedAvg, and every client fine-tunes its own copy of the global model: the plainest personalisation.

The global model never sees what the copies learn. Copies are made anew from it in every round that is evaluated, since
they are what clients are served with; ``evaluate_every`` decides how often. The copy of a client that does not answer
is the global model as it is. Nothing travels for them: a client has the global model, and keeps its copy. Official code
that has this baseline (of Ditto, Li et al. 2021) does it once, at the end; the last round's copies are the same either
way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedclade.algorithms.base import OneCohort, OwnModels, RoundLog
from fedclade.algorithms.cluster_update import log_of, move_clusters, train_root
from fedclade.algorithms.state import State
from fedclade.core import Clients, ParameterTree, Round, checked, require


@checked()
@dataclass(frozen=True, kw_only=True)
class FineTune(OwnModels[State], OneCohort[State]):
    """FedAvg with local fine-tuning: the root is the global model, and each client's leaf its own copy.

    Parameters
    ----------
    epochs
        Of fine-tuning, over the client's training data; all else is as in local training.
    """

    epochs: int = 1

    def __post_init__(self) -> None:
        require(("algorithm.epochs", self.epochs, self.epochs >= 1, "at least 1"))

    def init(self, params: Tensor, clients: Clients) -> State:
        """Give every client a copy of the initial model."""
        return State(ParameterTree.star([[client] for client in clients.ids], params, split_in=None))

    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Run one round of FedAvg; if it is evaluated, let all clients fine-tune what comes out."""
        part = train_root(state, cohort, clients, this_round)
        tree = move_clusters(state.tree, [part])
        if this_round.evaluated:
            tree = self._fine_tuned(tree, clients, this_round)
        return State(tree), log_of([part])

    def _fine_tuned(self, tree: ParameterTree, clients: Clients, this_round: Round) -> ParameterTree:
        root, ids = tree.nodes[0], clients.ids
        spec = this_round.spec.in_epochs(self.epochs)
        at_home = replace(this_round, spec=spec, purpose="finetune", communicates="nothing")
        updates = clients.train(ids, root.params[None], [0] * len(ids), at_home)
        deltas = dict(zip(updates.ids, updates.required_deltas, strict=True))
        for client in ids:
            tree = tree.with_model(tree.leaf_of[client], root.params + deltas.get(client, 0.0))
        return tree
