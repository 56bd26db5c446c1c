"""FedAvg whose clients take the steps of a local rule, and keep a model of their own that comes of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fedclade.algorithms.base import OneCohort, OwnModels, RoundLog
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of, move_clusters, train_root
from fedclade.algorithms.state import OwnState
from fedclade.core import Clients, LocalRule, LocalTraining, ParameterTree, Round


class Ruled(OwnModels[OwnState], OneCohort[OwnState]):
    """An algorithm whose clients train the root's model by a rule, which leaves each a model that it is served with."""

    @property
    def server_step(self) -> float:
        """How far the root's model goes to the mean of the clients'."""
        return 1.0

    @property
    @abstractmethod
    def rule(self) -> LocalRule:
        """What clients do in a step."""

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is one that the rule can take the steps of."""
        self.rule.check_training(spec)

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Put all clients under the global model; nobody has a model of its own."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OwnState, RoundLog]:
        """Let the cohort train, and move the root's model by the mean of the updates."""
        part = scaled(train_root(state, cohort, clients, replace(this_round, rule=self.rule)), self.server_step)
        return OwnState(move_clusters(state.tree, [part]), state.keepers_after(part.updates)), log_of([part])


def scaled(part: ClusterUpdate, by: float) -> ClusterUpdate:
    """Return a cluster's part of a round with a step that is so many times as long."""
    return part if part.mean is None or by == 1 else replace(part, mean=by * part.mean)
