"""FedAvg, and the two ends between which every clustered method lies: no federation, and the true clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fedclade.algorithms.base import Algorithm, OneCohort, OwnModels, OwnState, RoundLog, S, State
from fedclade.algorithms.cluster_update import (
    log_of,
    membership_events,
    move_clusters,
    train_clusters,
    train_root,
)
from fedclade.core import (
    Clients,
    ConfigError,
    Event,
    LocalTraining,
    ParameterTree,
    Round,
    checked,
    require,
)


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

    def step(
        self, state: S, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[S, RoundLog]:
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

    The models stay with the clients, who are sent the initial one, which the root has, before they
    first train.
    """

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Put all clients under the initial model."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def sample_cohort(
        self, state: OwnState, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Return all clients: none waits for another, whatever the fraction."""
        return state.tree.nodes[0].members

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OwnState, RoundLog]:
        """Train every client for one round, at home."""
        at_home = replace(this_round, communicates="models")
        initial = state.tree.nodes[0].params[None]
        updates = clients.train(cohort, initial, state.rows(cohort), at_home, own=True)
        losses = dict(zip(updates.ids, updates.losses.tolist(), strict=True))
        return replace(state, keepers=state.keepers_after(updates)), RoundLog(
            {}, losses, discrepancy=0.0
        )


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
                f"oracle: no true cluster is known for clients {missing}; choose data.shift or "
                "label groups"
            )
        labels = sorted(
            {truth[client] for truth in self._all for client in clients.ids if client in truth}
        )
        members = [
            [client for client in clients.ids if self.true_clusters[client] == label]
            for label in labels
        ]
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
            truth = {
                c: leaf_of[label]
                for c, label in self._now(this_round).items()
                if c in state.tree.leaf_of
            }
            placed = state.tree.reassigned(truth)
            events = membership_events(state.tree, placed)
            state = replace(state, tree=placed)
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


# Methods whose clients keep a part of their model for themselves: FedAvg of the rest.
#
# - FedPer: Arivazhagan, Aggarwal, Singh, Choudhary 2019 (arXiv:1912.00818), Algorithms 1 and 2: the
#   last layers.
# - LG-FedAvg: Liang, Liu, Liu et al. 2020 (arXiv:2001.01523), Algorithm 1: the representation,
#   under a shared head.
# - FedBN: Li, Jiang, Zhang, Kamp, Dou 2021 (arXiv:2102.07623), Algorithm 1: normalisation layers
#   with their statistics.
# - FedRep: Collins, Hassani, Mokhtari, Shakkottai 2021 (arXiv:2102.07078), Algorithm 1: the head,
#   trained by itself.
#
# Which layers these are is the papers' choice for a model: here the head is the last layer with
# parameters, and ``model.personal`` names others. Where a paper leaves a choice, or is departed
# from:
#
# - Personal parameters start as the initial model has them, for all clients; in FedPer each draws
#   its own.
# - Means are weighted by |D_i| as in FedAvg; FedRep's and FedBN's are not. With equal sizes it is
#   the same.
# - FedRep's τ_h steps are epochs over all the client's data, and its single step of the
#   representation is the local training as it is configured (section 5 has 10 epochs of the head,
#   then 1 or 5). Both take mini-batches.
# - FedRep's official code adds a last round that Algorithm 1 does not have: all clients, sampled
#   before or not, fit their head to the final representation for max(10, τ_h) epochs, and are
#   scored with it. A method does not know which round is the last, so ``last_fit`` names it; by
#   default there is no such round.
# - LG-FedAvg's official code starts from a model that FedAvg has trained, not from a random one,
#   and shares the last layers up to a number, ``num_layers_keep``, not the head alone; it reports
#   each client's best round on test data. Here it starts from the initial model, which may be a
#   trained one, ``model.personal`` names other layers, and the last round is reported.
#
# Any other method gets personal parameters by ``model.personal`` in the same way, and then clusters
# what is shared.

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
        τ_h: epochs of the head in a round, with the representation as it was sent. The
        representation then has those of the local training.
    last_fit
        Number of the last round, in which all clients fit their head to the representation, for
        max(10, τ_h) epochs, and nothing else is trained, as in the authors' code. Left out: there
        is no such round, as in Algorithm 1. Clients send updates in it as in any round, which are
        not used: private clients spend a release. Not with central privacy, which accounts for the
        clients that a round draws.
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

    @property
    def trains_outside_cohort(self) -> bool:
        """Whether all clients train in one of the rounds, whatever the cohort."""
        return self.last_fit is not None

    def too_short(self, rounds: int) -> str:
        """Return that the last fit never happens, if the run has fewer rounds."""
        if self.last_fit is None or self.last_fit <= rounds:
            return ""
        return (
            f"FedRep fits the heads of all clients in round {self.last_fit}, and this run has "
            f"{rounds}: they are not fitted at its end; set algorithm.last_fit = {rounds}, or "
            "leave it out"
        )

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[State, RoundLog]:
        """Run one round of Algorithm 1 (lines 4 to 14), or the last round of the authors' code."""
        if this_round.number == self.last_fit:
            return state, self._fit_heads(state, clients, this_round)
        return super().step(
            state, cohort, clients, replace(this_round, personal_epochs=self.head_epochs)
        )

    def _fit_heads(self, state: State, clients: Clients, this_round: Round) -> RoundLog:
        """Let all clients fit their heads, which they keep. Their updates of the representation are not used.

        These updates are sent as in any other round, so that privacy clips them, puts noise on them
        and books them.
        """
        epochs = max(SHORTEST_FIT, self.head_epochs)
        fit = replace(this_round, personal_epochs=epochs)
        parts = train_clusters(state, state.tree.nodes[0].members, clients, fit)
        return replace(log_of(parts), criteria={}, discrepancy=None)  # no model moves


# FedAvg, and every client fine-tunes its own copy of the global model: the plainest
# personalisation.
#
# The global model never sees what the copies learn. Copies are made anew from it in every round
# that is evaluated, since they are what clients are served with; ``evaluate_every`` decides how
# often. A client that makes none then is served with the global model as it is. Nothing travels for
# them: a client has the global model, and keeps its copy. Official code that has this baseline (of
# Ditto, Li et al. 2021) does it once, at the end; the last round's copies are the same either way.


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
