"""IFCA, the iterative federated clustering algorithm (Ghosh et al. 2020, Algorithm 1).

Source: Ghosh, Chung, Yin, Ramchandran 2020.

In every round each participant receives all k models and chooses the one with the lowest loss on
its training data (the "cluster identity estimate"). It trains this model (option II, model
averaging) or sends its gradient (option I).

Where paper and official code leave a choice, this file decides as follows:

- *Initial models.* They are drawn separately, as in the official code: copies of one model would
  all have the same loss. If hardly any client chooses a model at first, two true clusters may share
  another model permanently. The paper's remedy is restarts: here ``restarts`` sets of models train
  in parallel for some rounds; then only the set of the lowest training loss continues. To resist
  malicious clients, a set is not chosen if it is clearly worse without the lowest and the highest
  losses. Otherwise a client that spoils a model of one set, and then claims a low loss for it,
  could make this set win.
- *Weights.* Means are weighted by |D_i| as in FedAvg; the paper's are not. With equal sizes both
  are the same.
- *Option I.* Gradients are divided by the number of *all* participants, as in paper and code: a
  cluster's step is scaled by its share of the participants. Gradients are those of all the client's
  data; buffers, such as BatchNorm's, do not change.
- *Clients that were never sampled.* They are in no cluster, and are evaluated with the model that
  they would choose. (The official code evaluates by the lowest loss on *test* data.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fedclade.algorithms.base import OneCohort, RoundLog, State, require_different_models
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    by_cluster,
    log_of,
    membership_events,
    move_clusters,
)
from fedclade.algorithms.requires import EvaluatedModels, Requires
from fedclade.clustering import LossEstimate, estimate_by_loss
from fedclade.core import Clients, ParameterTree, Restart, RoundPlan, checked, require

CLEARLY_WORSE = 0.1
"""Relative difference of mean losses above which a set of models counts as clearly worse."""


@dataclass(frozen=True, eq=False)
class IFCAState(State):
    """State of IFCA between rounds, with all sets of models while several sets compete.

    The tree contains the models of the best set so far. The other fields are None if there is only
    one set of models, or after one set has been chosen.

    Parameters
    ----------
    models
        The k models of each set, ``[sets, k, S]`` (S is the number of entries of a model).
    leaves
        In each set, the leaf of the model that each of n clients has chosen, ``[sets, n]``; 0 for
        clients that have not chosen yet.
    ids
        Ids of the n clients, in the order of the columns of ``leaves``.
    """

    models: torch.Tensor | None = None
    leaves: torch.Tensor | None = None
    ids: tuple[int, ...] | None = None


@checked()
@dataclass(frozen=True, kw_only=True)
class IFCA(OneCohort[IFCAState]):
    """IFCA (Ghosh et al. 2020): every client trains the model with the lowest loss on its data.

    Parameters
    ----------
    clusters
        Number k of models.
    average
        Quantities that the server averages: ``models`` after local training (option II), or
        ``gradients`` of all of a client's data (option I).
    restarts
        Number of sets of k initial models that compete.
    restart_rounds
        Number of rounds for which the sets compete, before the best set is chosen.
    reports
        Information that clients report about the models: their ``losses``, or only the ``choice``
        of the model with the lowest loss. Both give the same clusters, but finding the best of
        several sets needs losses. Secure aggregation needs ``choice``.
    """

    state_type = IFCAState

    clusters: int = 2
    average: Literal["models", "gradients"] = "models"
    restarts: int = 1
    restart_rounds: int = 2
    reports: Literal["losses", "choice"] = "losses"

    def __post_init__(self) -> None:
        require(
            ("algorithm.clusters", self.clusters, self.clusters >= 1, "at least 1"),
            (
                "algorithm.average",
                self.average,
                self.average in ("models", "gradients"),
                "'models' or 'gradients'",
            ),
            ("algorithm.restarts", self.restarts, self.restarts >= 1, "at least 1"),
            (
                "algorithm.restart_rounds",
                self.restart_rounds,
                self.restart_rounds >= 1,
                "at least 1",
            ),
            (
                "algorithm.reports",
                self.reports,
                self.reports in ("losses", "choice"),
                "'losses' or 'choice'",
            ),
            (
                "algorithm.restarts",
                self.restarts,
                self.restarts == 1 or self.reports != "choice",
                "1 with algorithm.reports = 'choice', since choosing the best of several sets of "
                "models needs losses",
            ),
        )

    @property
    def requires(self) -> Requires:
        """Needs of IFCA that a run checks, such as k different initial models for each set.

        Clients report their losses with the models, or the model that they chose (``reports``). If
        they report losses, ``disclosures`` is empty, since losses are not among the kinds of
        information that clients' policies name. Secure aggregation then refuses the method.
        """
        reports = "training losses"
        disclosures: tuple[str, ...] = ()
        if self.reports == "choice":
            reports = "the choice of the model with the lowest loss on their training data"
            disclosures = ("choice",)
        return Requires(
            updates=False,
            signatures=False,
            gradients=self.average == "gradients",
            reports=reports,
            disclosures=disclosures,
            initial_models=self.clusters * self.restarts,
            clients_choose=True,
            clusters_from="clusters",
        )

    def init(self, params: torch.Tensor, clients: Clients) -> IFCAState:
        """Return the state before round 1, with a set of k different models for each restart.

        Parameters
        ----------
        params
            Initial models ``[restarts · k, S]``, one parameter vector in each row.
        clients
            All clients of the run, which have not chosen a model yet.

        Raises
        ------
        ConfigError
            If two of the initial models are equal.
        """
        models = require_different_models(params, self.requires.initial_models, "ifca")
        sets = models.view(self.restarts, self.clusters, -1)
        return _pack_sets(
            [ParameterTree.star([()] * self.clusters, each, clients.ids) for each in sets],
            0,
            clients.ids,
        )

    def step(
        self, state: IFCAState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[IFCAState, RoundLog]:
        """Run one round of IFCA (Algorithm 1) for every set of models that still competes.

        Each sampled client chooses the model with the lowest loss and trains it. After
        ``restart_rounds`` rounds only the best set of models continues.
        """
        estimates = [
            self._estimate_clusters(tree, cohort, clients)
            for tree in _unpack_sets(state, clients.ids)
        ]
        sets = [estimate.tree for estimate in estimates]
        losses = [estimate.mean for estimate in estimates]
        best = _best_set(estimates)
        events = membership_events(state.tree, sets[best])
        if len(sets) > 1 and this_round.number > self.restart_rounds:
            events.insert(0, Restart(0, best, tuple(losses)))
            sets = [sets[best]]
            best = 0
        moved = dict[int, tuple[ParameterTree, list[ClusterUpdate]]]()
        # The best set trains last, because clients store the model that they trained last.
        for k in sorted(range(len(sets)), key=lambda k: k == best):
            moved[k] = self._train_models(sets[k], cohort, clients, this_round)
        log = log_of(moved[best][1], events)
        # A discrepancy compares models after local training; gradients are no such models.
        log = log if self.average == "models" else replace(log, discrepancy=None)
        return _pack_sets([moved[k][0] for k in range(len(sets))], best, clients.ids), log

    def models_for(self, state: IFCAState, clients: Clients) -> EvaluatedModels:
        """Return the models with which clients are evaluated: the models that they chose last.

        A client that is evaluated and has not chosen a model yet is queried for its choice now.
        """
        tree = state.tree
        unseen = [client for client in clients.evaluated if tree.leaf_of.get(client) == 0]
        if unseen:
            tree = self._estimate_clusters(tree, unseen, clients).tree
        return EvaluatedModels(nodes=tree.leaf_of)

    def _estimate_clusters(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients
    ) -> LossEstimate:
        """Query clients for the model with the lowest loss on their data (Algorithm 1, line 7)."""
        return estimate_by_loss(tree, ids, clients, by_choice=self.reports == "choice")

    def _train_models(
        self, tree: ParameterTree, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[ParameterTree, list[ClusterUpdate]]:
        """Train the models of one set, and move each by the updates of the clients that chose it.

        Clients send updates (option II) or gradients (option I). A model that no client chose does
        not move.

        Returns
        -------
        tuple
            The tree with the moved models, and the round's result for each cluster.
        """
        # A client that did not reply to the query for losses is at the root: it chose no model.
        cohort = [client for client in cohort if tree.leaf_of[client]]
        if not cohort:
            return tree, []
        models, rows = tree.models([tree.leaf_of[client] for client in cohort])
        # The clients have already received the models of this round, to compute losses.
        if self.average == "models":
            updates = clients.train(cohort, models, rows, this_round, sent_before=True)
        else:
            updates = clients.gradients(cohort, models, rows, this_round)
        parts = by_cluster(tree, updates, this_round)
        if self.average == "models":
            return move_clusters(tree, parts), parts
        for part in parts:
            if part.step is not None:
                share = float(part.updates.weights.sum() / updates.weights.sum())
                tree = tree.moved(part.node, this_round.lr * share * part.step)
        return tree, parts


def _best_set(estimates: Sequence[LossEstimate]) -> int:
    """Return the index of the best set of models: the set with the lowest mean loss.

    If another set is clearly better once the highest and lowest losses are left out, return that
    set instead. Without this check, a single client that reports a false loss could decide.
    """
    means = [estimate.mean for estimate in estimates]
    trimmed = [estimate.trimmed for estimate in estimates]
    best = means.index(min(means))
    unspoiled = trimmed.index(min(trimmed))
    is_worse = trimmed[best] - trimmed[unspoiled] > CLEARLY_WORSE * abs(trimmed[unspoiled])
    return unspoiled if is_worse else best


def _pack_sets(sets: Sequence[ParameterTree], best: int, ids: Sequence[int]) -> IFCAState:
    """Build IFCA's state from the trees of the competing sets; the inverse of ``_unpack_sets``."""
    if len(sets) == 1:
        return IFCAState(sets[0])
    models = torch.stack([torch.stack([leaf.params for leaf in tree.leaves]) for tree in sets])
    leaves = torch.tensor([[tree.leaf_of[client] for client in ids] for tree in sets])
    return IFCAState(sets[best], models, leaves, tuple(ids))


def _unpack_sets(state: IFCAState, ids: Sequence[int]) -> list[ParameterTree]:
    """Return the tree of each competing set of models, with the present clients as members.

    Clients that joined after the state was stored are in no cluster.
    """
    if state.models is None or state.leaves is None or state.ids is None:
        return [state.tree]
    there = set(ids)
    trees = list[ParameterTree]()
    for models, leaves in zip(state.models, state.leaves.tolist(), strict=True):
        leaf_of = {
            client: leaf for client, leaf in zip(state.ids, leaves, strict=True) if client in there
        }
        trees.append(ParameterTree.star([()] * len(models), models, ids).reassigned(leaf_of))
    return trees
