"""FedAvg, and the two baselines of every clustered method: no federation, and the true clusters."""

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
    """Clusters that never change, each of which is trained by FedAvg."""

    @property
    def needs_updates(self) -> bool:
        """Return whether a step uses the whole updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Return whether a step uses signatures of updates."""
        return False

    def step(
        self, state: S, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[S, RoundLog]:
        """Train every cluster for one round."""
        parts = train_clusters(state, cohort, clients, this_round)
        return replace(state, tree=move_clusters(state.tree, parts)), log_of(parts)


@dataclass(frozen=True)
class FedAvg(_FixedClusters[State]):
    """Federated averaging: one model for all clients (McMahan et al. 2017).

    It is CFL Algorithm 2 without its stopping rule. With ``mu`` > 0 in the local training it is
    FedProx (Li et al. 2020).
    """

    def init(self, params: Tensor, clients: Clients) -> State:
        """Put all clients in one cluster."""
        return State(ParameterTree.root_only(clients.ids, params))


@dataclass(frozen=True)
class Local(OwnModels[OwnState]):
    """No federation: every client trains only its own model.

    It trains for as many rounds and epochs as with other methods. The models stay with the clients.
    Before its first training a client receives the initial model, which the root stores.
    """

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Put all clients at the initial model."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def sample_cohort(
        self, state: OwnState, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Return all clients whatever the fraction, since no client waits for another."""
        return state.tree.nodes[0].members

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OwnState, RoundLog]:
        """Let every client of the cohort train its own model for one round."""
        at_home = replace(this_round, communicates="models")
        initial = state.tree.nodes[0].params[None]
        updates = clients.train(cohort, initial, state.rows(cohort), at_home, own=True)
        losses = dict(zip(updates.ids, updates.losses.tolist(), strict=True))
        return replace(state, keepers=state.keepers_after(updates)), RoundLog(
            {}, losses, discrepancy=0.0
        )


@dataclass(frozen=True, eq=False)
class OracleState(State):
    """State of the oracle: the label of the true cluster of each leaf."""

    labels: tuple[int, ...]


@checked()
@dataclass(frozen=True)
class Oracle(_FixedClusters[OracleState]):
    """FedAvg within the true clusters: the result that a clustered method could reach at best.

    Parameters
    ----------
    true_clusters
        The true cluster of each client. No other algorithm knows it.
    later
        True clusters after changes of the clients' data, by the first round in which they hold.
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
        """Return the true cluster of each client in a round."""
        return self._all[sum(first <= this_round.number for first in self.later)]

    def step(
        self, state: OracleState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OracleState, RoundLog]:
        """Run one round of FedAvg in the clusters that are the true ones in this round."""
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
            If a newcomer's true cluster had no clients at the start, or is not known.
        """
        leaf_of = {label: leaf for leaf, label in enumerate(state.labels, start=1)}
        truth = self._now(this_round)
        if lost := [client for client in ids if truth.get(client) not in leaf_of]:
            raise ConfigError(f"oracle: newcomers {lost} are in no cluster that the run began with")
        state, events = super().join(state, ids, clients, this_round)
        placed = state.tree.reassigned({client: leaf_of[truth[client]] for client in ids})
        return replace(state, tree=placed), [*events, *membership_events(state.tree, placed)]


# Methods with personal layers: a part of the model stays with each client, and FedAvg trains the
# rest. The personal parts are:
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
# The papers choose these layers for each model. Here the head is the last layer with parameters,
# and ``model.personal`` names others. Choices that a paper leaves open, and departures from papers:
#
# - Personal parameters of all clients start from the initial model; in FedPer each client draws its
#   own.
# - Means are weighted by |D_i| as in FedAvg; FedRep's and FedBN's are not. With equal sizes both
#   are the same.
# - FedRep's τ_h steps are epochs over all the client's data, and its single step of the
#   representation is the configured local training (section 5 has 10 epochs of the head, then 1 or
#   5). Both use mini-batches.
# - FedRep's official code adds a last round that Algorithm 1 does not have: all clients, sampled
#   before or not, fit their head to the final representation for max(10, τ_h) epochs, and are
#   evaluated with it. A method does not know which round is the last, so ``last_fit`` gives its
#   number; by default there is no such round.
# - LG-FedAvg's official code starts from a model trained by FedAvg, not from a random one, and
#   shares the last ``num_layers_keep`` layers, not only the head; it reports each client's best
#   round on test data. Here training starts from the initial model, which may be a trained one,
#   ``model.personal`` can name other layers, and the last round is reported.
#
# ``model.personal`` gives personal parameters to any other method in the same way; the method then
# clusters clients by the shared part.

SHORTEST_FIT = 10
"""Smallest number of epochs of the last fit of the heads in FedRep's official code."""


@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedPer (Arivazhagan et al. 2019): FedAvg of the base layers, with a personal head.

    The base layers are the paper's W_B; the head W_P stays with each client.
    """

    personal = "head"


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """LG-FedAvg (Liang et al. 2020): FedAvg of the head, with a personal representation."""

    personal = "body"


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedBN (Li et al. 2021): FedAvg of all layers except personal normalisation layers."""

    personal = "norm"


@checked()
@dataclass(frozen=True, kw_only=True)
class FedRep(FedAvg):
    """FedRep (Collins et al. 2021): clients train their personal head, then the representation.

    Each round follows Algorithm 1: a client first fits its head to the representation that it
    received, then the representation to that head.

    Parameters
    ----------
    head_epochs
        τ_h: epochs of training the head in a round, with the representation as received. The
        representation is then trained for the epochs of the local training.
    last_fit
        Number of the last round, in which all clients fit their head to the representation for
        max(10, τ_h) epochs and nothing else is trained, as in the authors' code. None: there is no
        such round, as in Algorithm 1. In this round clients send updates as in any other, which are
        not used; with differential privacy they therefore count as a release. It is not available
        with central privacy, which accounts only for the clients that a round samples.
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
        """Return whether all clients train in one of the rounds, whatever the cohort."""
        return self.last_fit is not None

    def too_short(self, rounds: int) -> str:
        """Return a warning if the run has fewer rounds than ``last_fit``."""
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
        """Let all clients fit and store their heads, and ignore their other updates.

        Updates of the representation are sent as in any other round, so that privacy clips them,
        adds noise to them and accounts for them.
        """
        epochs = max(SHORTEST_FIT, self.head_epochs)
        fit = replace(this_round, personal_epochs=epochs)
        parts = train_clusters(state, state.tree.nodes[0].members, clients, fit)
        return replace(log_of(parts), criteria={}, discrepancy=None)  # no model moves


# FedAvg with fine-tuning, the simplest personalisation: every client fine-tunes its own copy of the
# global model.
#
# The copies do not influence the global model. Clients are evaluated with them, so they are made
# from it again in every round that is evaluated; ``evaluate_every`` sets how often. A client that
# makes no copy in such a round is evaluated with the global model. Nothing is sent for the copies:
# a client has the global model, and stores its copy. Official code with this baseline (of Ditto, Li
# et al. 2021) fine-tunes once, at the end; the last round's copies are the same either way.


@checked()
@dataclass(frozen=True, kw_only=True)
class FineTune(OwnModels[OwnState], OneCohort[OwnState]):
    """FedAvg with local fine-tuning: each client stores its own copy of the global model.

    Parameters
    ----------
    epochs
        Epochs of fine-tuning over the client's training data; other settings are those of the local
        training.
    """

    epochs: int = 1

    def __post_init__(self) -> None:
        require(("algorithm.epochs", self.epochs, self.epochs >= 1, "at least 1"))

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Put all clients at the global model; no client has a copy yet."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OwnState, RoundLog]:
        """Run one round of FedAvg; if it is evaluated, let all clients fine-tune the result."""
        part = train_root(state, cohort, clients, this_round)
        new = OwnState(move_clusters(state.tree, [part]), keepers=())
        return self.tuned(new, clients, this_round), log_of([part])

    def tunes(self, spec: LocalTraining) -> LocalTraining:
        """Return the local training with ``epochs`` epochs of fine-tuning."""
        return spec.in_epochs(self.epochs)
