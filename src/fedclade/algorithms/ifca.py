"""Iterative Federated Clustering Algorithm: Ghosh, Chung, Yin, Ramchandran 2020, Algorithm 1.

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
  cluster's step is as small as its share of them. Gradients are those of all the client's data;
  buffers, such as BatchNorm's, do not change.
- *Clients that were never sampled.* They are in no cluster, and are evaluated with the model that
  they would choose. (The official code evaluates by the lowest loss on *test* data.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedclade.algorithms.base import OneCohort, RoundLog, State
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    by_cluster,
    log_of,
    membership_events,
    move_clusters,
)
from fedclade.clustering import LossEstimate, estimate_by_loss
from fedclade.core import Clients, ConfigError, ParameterTree, Restart, Round, checked, require

CLEARLY_WORSE = 0.1
"""Relative difference of mean losses from which one set of models is clearly worse."""


@dataclass(frozen=True, eq=False)
class IFCAState(State):
    """State of IFCA: all sets of models, while several compete.

    The tree is that of the best set. The other fields are None after the choice of one set.

    Parameters
    ----------
    models
        The models of all sets, ``[sets, k, S]``.
    leaves
        The leaf of each client in each set, ``[sets, n]``.
    ids
        Clients of the columns of ``leaves``.
    """

    models: Tensor | None = None
    leaves: Tensor | None = None
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
        ``models`` after local training (option II), or ``gradients`` of one full-batch step (option
        I).
    restarts
        Number of sets of k initial models that compete.
    restart_rounds
        Number of rounds for which they compete, before the best set is chosen.
    reports
        Information that clients report about the models: their ``losses``, or only the ``choice``
        of the model with the lowest loss. Both give the same clusters, but finding the best of
        several sets needs losses. Secure aggregation needs ``choice``.
    """

    state_type = IFCAState
    clusters_from = "clusters"
    asks_for = "training losses"
    clients_choose = True

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
                "1 with algorithm.reports = 'choice', since the best of several sets is known by "
                "losses only",
            ),
        )

    @property
    def asks_for_gradients(self) -> bool:
        """Return whether clients send gradients instead of updates."""
        return self.average == "gradients"

    @property
    def needs_updates(self) -> bool:
        """Return whether a step uses the whole updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Return whether a step uses signatures of updates."""
        return False

    @property
    def discloses(self) -> tuple[str, ...]:
        """Kinds of data that the server must see of each client; there is no name for losses."""
        return ("choice",) if self.reports == "choice" else ()

    def asks(self, clients: int, fraction: float) -> str:
        """Return the information that clients report in addition to updates and scores."""
        if self.reports == "choice":
            return "the choice of the model with the lowest loss on their training data"
        return self.asks_for

    @property
    def initial_models(self) -> int:
        """Number of initial models, each drawn separately."""
        return self.clusters * self.restarts

    def init(self, params: Tensor, clients: Clients) -> IFCAState:
        """Return the state with the initial models ``[restarts · k, S]``, which must all differ."""
        models = params.view(-1, params.shape[-1])
        needed = self.initial_models
        if (found := len(models.unique(dim=0))) < needed:
            raise ConfigError(
                f"ifca needs {needed} different initial models, got {found}; let them depend on "
                "the seed"
            )
        sets = models.view(self.restarts, self.clusters, -1)
        return _packed(
            [ParameterTree.star([()] * self.clusters, each, clients.ids) for each in sets],
            0,
            clients.ids,
        )

    def step(
        self, state: IFCAState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[IFCAState, RoundLog]:
        """Run one round of Algorithm 1 for every set of models that still competes."""
        estimates = [
            self._estimated(tree, cohort, clients) for tree in _unpacked(state, clients.ids)
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
            moved[k] = self._moved(
                sets[k], cohort, clients, replace(this_round, communicates="updates")
            )
        log = log_of(moved[best][1], events)
        # A discrepancy compares models, and gradients are none.
        log = log if self.average == "models" else replace(log, discrepancy=None)
        return _packed([moved[k][0] for k in range(len(sets))], best, clients.ids), log

    def serve(self, state: IFCAState, clients: Clients) -> Mapping[int, int]:
        """Return for each client the node that it chose last, or would choose now."""
        unseen = [client for client, node in state.tree.leaf_of.items() if node == 0]
        return (
            self._estimated(state.tree, unseen, clients).tree.leaf_of
            if unseen
            else state.tree.leaf_of
        )

    def _estimated(self, tree: ParameterTree, ids: Sequence[int], clients: Clients) -> LossEstimate:
        """Estimate the cluster identities of some clients (Algorithm 1, line 7)."""
        return estimate_by_loss(tree, ids, clients, by_choice=self.reports == "choice")

    def _moved(
        self, tree: ParameterTree, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ParameterTree, list[ClusterUpdate]]:
        """Move every model by the updates of the clients that chose it (options I and II).

        A model that no client chose does not move.
        """
        # A client that did not report losses is at the root: it chose no model.
        cohort = [client for client in cohort if tree.leaf_of[client]]
        if not cohort:
            return tree, []
        models, rows = tree.models([tree.leaf_of[client] for client in cohort])
        ask = clients.train if self.average == "models" else clients.gradients
        updates = ask(cohort, models, rows, this_round)
        parts = by_cluster(tree, updates, this_round)
        if self.average == "models":
            return move_clusters(tree, parts), parts
        for part in parts:
            if part.step is not None:
                share = float(part.updates.sizes.sum() / updates.sizes.sum())
                tree = tree.moved(part.node, this_round.lr * share * part.step)
        return tree, parts


def _best_set(estimates: Sequence[LossEstimate]) -> int:
    """Return the index of the set of models with the lowest mean loss.

    If another set is clearly better once the highest and lowest losses are left out, return that
    one. Without this check, a single client that reports a false loss could decide.
    """
    means = [estimate.mean for estimate in estimates]
    trimmed = [estimate.trimmed for estimate in estimates]
    best = means.index(min(means))
    unspoiled = trimmed.index(min(trimmed))
    is_worse = trimmed[best] - trimmed[unspoiled] > CLEARLY_WORSE * abs(trimmed[unspoiled])
    return unspoiled if is_worse else best


def _packed(sets: Sequence[ParameterTree], best: int, ids: Sequence[int]) -> IFCAState:
    if len(sets) == 1:
        return IFCAState(sets[0])
    models = torch.stack([torch.stack([leaf.params for leaf in tree.leaves]) for tree in sets])
    leaves = torch.tensor([[tree.leaf_of[client] for client in ids] for tree in sets])
    return IFCAState(sets[best], models, leaves, tuple(ids))


def _unpacked(state: IFCAState, ids: Sequence[int]) -> list[ParameterTree]:
    """Return one tree for each set of models, with the current clients.

    Newcomers are in no cluster.
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
