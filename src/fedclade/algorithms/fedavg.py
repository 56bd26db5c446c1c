"""FedAvg, and the two ends between which every clustered method lies: no federation, and the true clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fedclade.algorithms.base import Algorithm, OwnModels, RoundLog
from fedclade.algorithms.cluster_update import log_of, membership_events, move_clusters, train_clusters
from fedclade.algorithms.state import OwnState, S, State
from fedclade.core import Clients, ConfigError, Event, ParameterTree, Round, checked


class _FixedClusters(Algorithm[S]):
    """Clusters that never change: each is a FedAvg of its own."""

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates."""
        return False

    def step(self, state: S, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[S, RoundLog]:
        """Train every cluster for one round."""
        parts = train_clusters(state, cohort, clients, this_round)
        return replace(state, tree=move_clusters(state.tree, parts)), log_of(parts)


@dataclass(frozen=True)
class FedAvg(_FixedClusters[State]):
    """Federated averaging: one model for all clients (McMahan et al. 2017; CFL Algorithm 2 without its stopping rule).

    With ``mu`` > 0 in the local training it is FedProx (Li et al. 2020).
    """

    def init(self, params: Tensor, clients: Clients) -> State:
        """Put all clients in one cluster."""
        return State(ParameterTree.root_only(clients.ids, params))


@dataclass(frozen=True)
class Local(OwnModels[OwnState]):
    """No federation: every client trains a model of its own, for as many rounds and epochs as the others.

    The models stay with the clients, who are sent the initial one, which the root has, before they first train.
    """

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Put all clients under the initial model."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def sample_cohort(self, state: OwnState, fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
        """Return all clients: none waits for another, whatever the fraction."""
        return state.tree.nodes[0].members

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OwnState, RoundLog]:
        """Train every client for one round, at home."""
        at_home, initial = replace(this_round, communicates="models"), state.tree.nodes[0].params[None]
        updates = clients.train(cohort, initial, state.rows(cohort), at_home, own=True)
        losses = dict(zip(updates.ids, updates.losses.tolist(), strict=True))
        return replace(state, keepers=state.keepers_after(updates)), RoundLog({}, losses, discrepancy=0.0)


@dataclass(frozen=True, eq=False)
class OracleState(State):
    """The true cluster of each leaf."""

    labels: tuple[int, ...]


@checked()
@dataclass(frozen=True)
class Oracle(_FixedClusters[OracleState]):
    """FedAvg within the true clusters: what a clustered method could reach at best, had it known them from the start.

    Parameters
    ----------
    true_clusters
        By client. No other algorithm knows it.
    later
        Those from some rounds on, by the round, where clients' data changes.
    """

    state_type = OracleState

    true_clusters: Mapping[int, int]
    later: Mapping[int, Mapping[int, int]] = field(default_factory=dict[int, Mapping[int, int]])

    def init(self, params: Tensor, clients: Clients) -> OracleState:
        """Put the clients in their true clusters.

        Raises
        ------
        ConfigError
            If the clusters do not name every client.
        """
        missing = [client for client in clients.ids if client not in self.true_clusters]
        if missing:
            raise ConfigError(
                f"oracle: no true cluster is known for clients {missing}; choose data.shift or label groups"
            )
        labels = sorted({truth[client] for truth in self._all for client in clients.ids if client in truth})
        members = [[client for client in clients.ids if self.true_clusters[client] == label] for label in labels]
        return OracleState(ParameterTree.star(members, params), tuple(labels))

    @property
    def _all(self) -> list[Mapping[int, int]]:
        return [self.true_clusters, *(self.later[first] for first in sorted(self.later))]

    def _now(self, this_round: Round) -> Mapping[int, int]:
        """Return the true clusters in a round."""
        return self._all[sum(first <= this_round.number for first in self.later)]

    def step(
        self, state: OracleState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OracleState, RoundLog]:
        """Run one round of FedAvg in the true clusters, as they are in the round."""
        events: list[Event] = []
        if self.later:
            leaf_of = {label: leaf for leaf, label in enumerate(state.labels, start=1)}
            truth = {c: leaf_of[label] for c, label in self._now(this_round).items() if c in state.tree.leaf_of}
            placed = state.tree.reassigned(truth)
            events, state = membership_events(state.tree, placed), replace(state, tree=placed)
        state, log = super().step(state, cohort, clients, this_round)
        return state, replace(log, events=(*events, *log.events))

    def join(
        self, state: OracleState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OracleState, list[Event]]:
        """Put newcomers in their true clusters.

        Raises
        ------
        ConfigError
            If one is in a cluster that nobody was in at the start, or in none that is known.
        """
        leaf_of = {label: leaf for leaf, label in enumerate(state.labels, start=1)}
        truth = self._now(this_round)
        if lost := [client for client in ids if truth.get(client) not in leaf_of]:
            raise ConfigError(f"oracle: newcomers {lost} are in no cluster that the run began with")
        state, events = super().join(state, ids, clients, this_round)
        placed = state.tree.reassigned({client: leaf_of[truth[client]] for client in ids})
        return replace(state, tree=placed), [*events, *membership_events(state.tree, placed)]
