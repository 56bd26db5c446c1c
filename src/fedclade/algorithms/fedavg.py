"""FedAvg with its variants, and the two baselines of clustered methods.

The baselines are ``Local``, in which each client trains alone, and ``Oracle``, which is FedAvg
within the true clusters. The variants are methods in which a part of the model is personal (FedPer,
LG-FedAvg, FedBN, FedRep), and FedAvg with fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fedclade.algorithms.base import Algorithm, OneCohort, OwnModels, OwnState, RoundLog, S, State
from fedclade.algorithms.cluster_update import (
    log_of,
    membership_events,
    move_clusters,
    train_clusters,
    train_root,
)
from fedclade.algorithms.requires import Requires, RunFacts
from fedclade.core import (
    Clients,
    ClientWork,
    ConfigError,
    FromStored,
    HeadThenBody,
    LocalModel,
    LocalTraining,
    NoReply,
    ParameterTree,
    Round,
    RoundPlan,
    checked,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fedclade.core import Event


class _FixedClusters(Algorithm[S]):
    """Base class of methods that train given clusters by FedAvg and never split or merge them."""

    requires = Requires(updates=False, signatures=False)

    @property
    def _client_work(self) -> ClientWork:
        """Work of each client that is sampled for a round; by default regular local training."""
        return ClientWork()

    def step(
        self, state: S, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[S, RoundLog]:
        """Run one round of FedAvg in every cluster (McMahan et al. 2017, Algorithm 1).

        Sampled clients train their clusters' models, and each model moves by the mean update.
        """
        parts = train_clusters(state, cohort, clients, this_round, self._client_work)
        return replace(state, tree=move_clusters(state.tree, parts)), log_of(parts)


@dataclass(frozen=True)
class FedAvg(_FixedClusters[State]):
    """Federated averaging: one model for all clients (McMahan et al. 2017).

    The method equals CFL Algorithm 2 without its stopping rule. If the local training has a
    proximal term (``mu`` > 0), the method is FedProx (Li et al. 2020).
    """

    def init(self, params: Tensor, clients: Clients) -> State:
        """Return the state before round 1: all clients share one model."""
        return State(ParameterTree.root_only(clients.ids, params))


@dataclass(frozen=True)
class Local(OwnModels[OwnState]):
    """No federation: every client trains only its own model.

    The number of rounds and epochs is as with other methods. A client receives the initial model
    before its first training; its trained model never leaves the client.
    """

    requires = replace(OwnModels.requires, server_steps=False)

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Return the state before round 1, in which no client has trained its own model yet."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def sample_cohort(
        self, state: OwnState, fraction: float, draw: np.random.Generator
    ) -> Sequence[int]:
        """Return the ids of all clients: each trains alone, so the fraction does not apply."""
        return state.tree.nodes[0].members

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[OwnState, RoundLog]:
        """Let every client of the cohort train its own model for one round."""
        work = ClientWork(start=FromStored(), store=LocalModel(), reply=NoReply())
        initial = state.tree.nodes[0].params[None]
        updates = clients.train(cohort, initial, state.rows(cohort), this_round, work)
        losses = dict(zip(updates.ids, updates.losses.tolist(), strict=True))
        return replace(state, keepers=state.keepers_after(updates)), RoundLog(
            {}, losses, discrepancy=0.0
        )


@dataclass(frozen=True, eq=False)
class OracleState(State):
    """State of the baseline ``Oracle`` between rounds.

    Parameters
    ----------
    labels
        Label of the true cluster of each leaf of the tree, in the order of the leaves.
    """

    labels: tuple[int, ...]


@checked()
@dataclass(frozen=True)
class Oracle(_FixedClusters[OracleState]):
    """FedAvg within the true clusters: the result that a clustered method could reach at best.

    Parameters
    ----------
    true_clusters
        Label of the true cluster of each client. No other algorithm receives it.
    later
        True clusters after changes of the clients' data: for the first round after each change, the
        label of each client.
    """

    state_type = OracleState

    true_clusters: Mapping[int, int]
    later: Mapping[int, Mapping[int, int]] = field(default_factory=dict[int, Mapping[int, int]])

    def init(self, params: Tensor, clients: Clients) -> OracleState:
        """Return the state before round 1: all clients are in their true clusters.

        Raises
        ------
        ConfigError
            If the true cluster of a client is not given.
        """
        missing = [client for client in clients.ids if client not in self.true_clusters]
        if missing:
            raise ConfigError(
                f"algorithm 'oracle' needs the true cluster of every client, and none is known for "
                f"the clients {missing}; set data.shift or a partition with label groups"
            )
        labels = sorted(
            {
                truth[client]
                for truth in self._true_clusters_in_time
                for client in clients.ids
                if client in truth
            }
        )
        members = [
            [client for client in clients.ids if self.true_clusters[client] == label]
            for label in labels
        ]
        return OracleState(ParameterTree.star(members, params), tuple(labels))

    @property
    def _true_clusters_in_time(self) -> list[Mapping[int, int]]:
        """True clusters of all clients at the start and after each change, in order of time."""
        return [self.true_clusters, *(self.later[first] for first in sorted(self.later))]

    def _get_true_clusters(self, this_round: Round) -> Mapping[int, int]:
        """Return the label of each client's true cluster in the given round."""
        return self._true_clusters_in_time[sum(first <= this_round.number for first in self.later)]

    def step(
        self, state: OracleState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[OracleState, RoundLog]:
        """Run one round of FedAvg in the true clusters.

        If the clients' data has changed, clients are first moved to their new true clusters.
        """
        events: list[Event] = []
        if self.later:
            leaf_of = {label: leaf for leaf, label in enumerate(state.labels, start=1)}
            truth = {
                c: leaf_of[label]
                for c, label in self._get_true_clusters(this_round).items()
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
        """Add clients that join during a run to their true clusters.

        Raises
        ------
        ConfigError
            If a newcomer's true cluster had no clients at the start, or is not known.
        """
        leaf_of = {label: leaf for leaf, label in enumerate(state.labels, start=1)}
        truth = self._get_true_clusters(this_round)
        if lost := [client for client in ids if truth.get(client) not in leaf_of]:
            raise ConfigError(
                f"algorithm 'oracle' cannot assign the newcomers {lost}: their true clusters are "
                "not known, or had no clients at the start of the run; give each newcomer the "
                "label of a true cluster that had clients at the start"
            )
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
#   representation is replaced by the configured local training (in section 5 of the paper: 10
#   epochs of the head, then 1 or 5 of the representation). Both use mini-batches.
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
"""Smallest number of epochs of the last training of all heads in FedRep's official code."""


@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedPer (Arivazhagan et al. 2019): FedAvg of the base layers, with a personal head.

    The base layers are the paper's W_B. The head, the paper's W_P, stays with each client.
    """

    requires = replace(FedAvg.requires, personal="head")


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """LG-FedAvg (Liang et al. 2020): FedAvg of the head, with a personal representation.

    The representation consists of all layers before the head; they stay with each client. Training
    starts from the initial model, as in Algorithm 1 of the paper. The authors' code starts from a
    model that FedAvg has trained, shares more layers than the head, and reports for each client the
    round that was best on test data. For the first two points, pass a trained model and name the
    layers that are not shared by ``personal``; the third is not available.
    """

    requires = replace(FedAvg.requires, personal="body")


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedBN (Li et al. 2021): FedAvg of all layers except normalisation layers.

    The normalisation layers, with their statistics, are personal: they stay with each client.
    """

    requires = replace(FedAvg.requires, personal="norm")


@checked()
@dataclass(frozen=True, kw_only=True)
class FedRep(FedAvg):
    """FedRep (Collins et al. 2021): clients train their personal head, then the representation.

    Each round follows Algorithm 1 of the paper: a client first trains its head on top of the
    representation (all layers before the head) that it received, then the representation with that
    head.

    Parameters
    ----------
    head_epochs
        τ_h: number of epochs for which the head is trained in a round, while the representation
        stays as received. The representation is then trained for the epochs of the local training.
    last_fit
        Number of the last round, in which all clients train their heads for max(10, τ_h) epochs and
        the representation does not change, as in the authors' code. None: there is no such round,
        as in Algorithm 1. Clients send updates in this round, too, although the server does not use
        them; with differential privacy the round therefore counts as a release. Not available with
        central privacy, which accounts only for clients that were sampled for a round.
    """

    head_epochs: int = 10
    last_fit: int | None = None

    def __post_init__(self) -> None:
        names_a_round = self.last_fit is None or self.last_fit >= 1
        require(
            ("algorithm.head_epochs", self.head_epochs, self.head_epochs >= 1, "at least 1"),
            ("algorithm.last_fit", self.last_fit, names_a_round, "at least 1, or left out"),
        )

    @property
    def requires(self) -> Requires:
        """Needs of FedRep that a run checks: the model's head is personal.

        If ``last_fit`` is set, FedRep also trains clients that are not sampled, since in that round
        all clients train.
        """
        return replace(
            FedAvg.requires, personal="head", clients_outside_cohort=self.last_fit is not None
        )

    def check(self, run: RunFacts) -> Sequence[str]:
        """Return a warning if the run ends before round ``last_fit``."""
        warnings = super().check(run)
        if run.rounds is None or self.last_fit is None or self.last_fit <= run.rounds:
            return warnings
        return (
            *warnings,
            f"FedRep trains the heads of all clients in round {self.last_fit}, but this run has "
            f"only {run.rounds} rounds; set algorithm.last_fit = {run.rounds}, or leave it out",
        )

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Run one round of FedRep (Collins et al. 2021, Algorithm 1, lines 4 to 14).

        In round ``last_fit`` all clients train only their heads, as in the authors' code.
        """
        if this_round.number == self.last_fit:
            return state, self._fit_heads(state, clients, this_round)
        return super().step(state, cohort, clients, this_round)

    @property
    def _client_work(self) -> ClientWork:
        """Work of each sampled client: train the head, then all other layers (Algorithm 1)."""
        return ClientWork(steps=HeadThenBody(self.head_epochs))

    def _fit_heads(self, state: State, clients: Clients, this_round: RoundPlan) -> RoundLog:
        """Let all clients train and store their heads, while the shared layers do not change.

        Clients send updates of the shared layers as in any other round, and the server ignores
        them. Differential privacy can thus clip the updates, add noise to them and account for them
        as usual.
        """
        work = ClientWork(steps=HeadThenBody(max(SHORTEST_FIT, self.head_epochs)))
        parts = train_clusters(state, state.tree.nodes[0].members, clients, this_round, work)
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
        Epochs of fine-tuning over the client's training data; other settings are as in the local
        training.
    """

    epochs: int = 1

    def __post_init__(self) -> None:
        require(("algorithm.epochs", self.epochs, self.epochs >= 1, "at least 1"))

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Return the state before round 1, in which no client stores a fine-tuned copy yet."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[OwnState, RoundLog]:
        """Run one round of FedAvg.

        If the round is evaluated, all clients then fine-tune a copy of the global model.
        """
        part = train_root(state, cohort, clients, this_round)
        new = OwnState(move_clusters(state.tree, [part]), keepers=())
        return self.tune(new, clients, this_round), log_of([part])

    def tuning(self, local: LocalTraining) -> LocalTraining:
        """Return the settings of fine-tuning: the local training, for ``epochs`` epochs."""
        return local.in_epochs(self.epochs)
