"""Iterative Federated Clustering Algorithm: Ghosh, Chung, Yin, Ramchandran 2020, Algorithm 1.

In every round each participant receives all k models, takes the one with the lowest loss on its
training data (the "cluster identity estimate"), and trains it (option II, model averaging) or sends
its gradient (option I).

Where paper and official code leave a choice, this file makes it:

- The initial models are drawn one by one, as in the official code: copies of one model would all
  have the same loss. If hardly anyone takes a model at first, two true clusters may share another
  for good. The paper's remedy is restarts: here ``restarts`` sets of models train side by side for
  some rounds; then that of lowest training loss goes on alone. Where clients may lie, that is not a
  set which is clearly worse without the lowest and the highest losses. Otherwise a client that
  spoils a model of one set, and then claims a low loss for it, makes this set go on.
- Means are weighted by |D_i| as in FedAvg; the paper's are not. With equal sizes it is the same.
- Option I divides by the number of *all* participants, as paper and code do: a cluster's step is as
  small as its share of them. Gradients are those of all the client's data; buffers, such as
  BatchNorm's, stay as they are.
- A client that no cohort has had yet is in no cluster, and is served with the model that it would
  take. (The official code evaluates by the lowest loss on *test* data.)
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
"""Relative difference of two mean losses from which on one set of models is clearly worse than the other."""


@dataclass(frozen=True, eq=False)
class IFCAState(State):
    """While sets of models compete: their models ``[sets, k, S]``, and the clients' leaves in each ``[sets, n]``."""

    models: Tensor | None = None
    leaves: Tensor | None = None
    ids: tuple[int, ...] | None = None


@checked()
@dataclass(frozen=True, kw_only=True)
class IFCA(OneCohort[IFCAState]):
    """IFCA (Ghosh et al. 2020): k models, and every client trains the one with the lowest loss on its data.

    Parameters
    ----------
    clusters
        Number k of models.
    average
        ``models`` after local training (option II), or ``gradients`` of one full-batch step (option
        I).
    restarts
        How many sets of k initial models are tried.
    restart_rounds
        For how many rounds, before the best set is chosen.
    reports
        What clients report of the models: their ``losses``, or the ``choice`` of the one with the
        lowest loss alone. Both make the same clusters, but the best of several sets is known by
        losses only. Secure aggregation needs the choice.
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
        """Whether clients send gradients in place of updates."""
        return self.average == "gradients"

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates."""
        return False

    @property
    def discloses(self) -> tuple[str, ...]:
        """What of each client's data the server must see; losses have no name."""
        return ("choice",) if self.reports == "choice" else ()

    def asks(self, clients: int, fraction: float) -> str:
        """Return what clients report besides updates and scores."""
        if self.reports == "choice":
            return "the choice of the model with the lowest loss on their training data"
        return self.asks_for

    @property
    def initial_models(self) -> int:
        """How many initial models, each drawn by itself, ``init`` starts from."""
        return self.clusters * self.restarts

    def init(self, params: Tensor, clients: Clients) -> IFCAState:
        """Take the initial models ``[restarts · k, S]``, which must differ; no client has chosen yet."""
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
        """Run one round of Algorithm 1 for every set of models that is still in the running."""
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
        # the best last: clients keep what they train last
        for k in sorted(range(len(sets)), key=lambda k: k == best):
            moved[k] = self._moved(
                sets[k], cohort, clients, replace(this_round, communicates="updates")
            )
        log = log_of(moved[best][1], events)
        # gradients are no models
        log = log if self.average == "models" else replace(log, discrepancy=None)
        return _packed([moved[k][0] for k in range(len(sets))], best, clients.ids), log

    def serve(self, state: IFCAState, clients: Clients) -> Mapping[int, int]:
        """Return the node that each client is served with: the one it took, or would take now."""
        unseen = [client for client, node in state.tree.leaf_of.items() if node == 0]
        return (
            self._estimated(state.tree, unseen, clients).tree.leaf_of
            if unseen
            else state.tree.leaf_of
        )

    def _estimated(self, tree: ParameterTree, ids: Sequence[int], clients: Clients) -> LossEstimate:
        """Estimate the cluster identities of some clients (Algorithm 1, line 7), and how low their losses are."""
        return estimate_by_loss(tree, ids, clients, by_choice=self.reports == "choice")

    def _moved(
        self, tree: ParameterTree, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ParameterTree, list[ClusterUpdate]]:
        """Move every model by the updates of those that took it (options II and I); one that nobody took stays."""
        # one that did not report losses took none
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
    """Return the place of the set of models with the lowest mean loss.

    If this set is clearly worse than another by the losses without their extremes, it is that other
    one: a single client that claims a false loss could otherwise choose.
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
    """Return the sets of models, with the clients that are there; newcomers are in no cluster."""
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
