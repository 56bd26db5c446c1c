"""FedEM and FedRC, in which every client uses a mixture of models that all clients share.

FedEM (Marfoq, Neglia, Bellet, Kameni, Vidal 2021, Algorithm 1) assumes that every client's
distribution is a mixture of M distributions that all clients share: client t predicts with h_t =
Σ_m π_tm h_θm. In every round each participant receives all M models, computes for each of its
examples the probability that it comes from each of the M distributions, the *components* (E-step),
and from these probabilities q its weights π_t and an update of every model (M-step). It predicts
with the weighted mean of all models' probabilities.

Where paper and official code leave a choice, this file decides as follows:

- *Start.* The M initial models are drawn separately, as in the official code: copies of one model
  would stay equal. π_t starts uniform.
- *M-step in θ_m.* It is the configured local training, from θ_m, on losses that are multiplied by
  q_j(m). A batch's sum is divided by its number of examples, as in the official code: while weights
  are uniform, a step is 1/M as long as FedAvg's. All M models see the same batches.
- *Mean.* The server's mean has the weights |D_t|, as in the paper. The official code averages over
  all clients, with the old models of clients that were not sampled; here the mean is over the
  cohort, as in Algorithm 1 if all clients are sampled.
- *Disclosure.* π_t and q never leave the client, which stores π_t. Of its weights the client
  reports only which one is largest. In the tree the client is a member of the leaf of that
  component; nothing else depends on the report.
- *Clients without weights*, that is newcomers and clients that were never sampled. Whenever such a
  client is evaluated, it takes one E-step and one M-step in π with the current models, from uniform
  weights (the official code's test clients continue from their previous weights). It is in no
  cluster before it has trained. Newcomers to a finished run are assigned to the leaf of the lowest
  training loss, and predict with all models.
- *Norms.* A model's ``mean_norm`` is the norm of its step; ``max_norm`` is the largest norm of a
  client's updates of all M models together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedclade.algorithms.base import OneCohort, RoundLog, S, State, require_different_models
from fedclade.algorithms.cluster_update import membership_events
from fedclade.algorithms.requires import EvaluatedModels, Requires
from fedclade.clustering import SplitCriteria
from fedclade.core import (
    Clients,
    ClientWork,
    Em,
    Mixture,
    ParameterTree,
    RoundPlan,
    TooFew,
    Updates,
    checked,
    label_rates,
    mean,
    require,
    unpacked,
)


class SharedMixture(OneCohort[S]):
    """Base class of FedEM and FedRC, in which clients share several models and mix them.

    Every client trains all models and predicts with a mixture of them, with weights of its own.
    Each leaf of the tree stores one of the models; ``clusters`` is their number.
    """

    clusters: int

    @property
    def requires(self) -> Requires:
        """Needs of the method that a run checks, such as one initial model for each leaf."""
        return Requires(
            updates=False,
            signatures=False,
            initial_models=self.clusters,
            mixture=Mixture(),
            soft_clusters=True,
            clusters_from="clusters",
        )

    def mixture_after(self, state: S) -> Mixture:
        """Return the settings of the mixture of models that clients train and predict with."""
        return Mixture()

    def models_for(self, state: S, clients: Clients) -> EvaluatedModels:
        """Return the model with which clients are evaluated: the mixture of all leaves' models."""
        return EvaluatedModels(nodes=state.tree.leaf_of, mixture=self.mixture_after(state))

    def star(self, params: torch.Tensor, clients: Clients) -> ParameterTree:
        """Return the initial tree, with a leaf without members for each initial model.

        Parameters
        ----------
        params
            Initial models ``[K, S]``, one parameter vector in each row; all must differ.
        clients
            All clients of the run, which are in no cluster yet.

        Raises
        ------
        ConfigError
            If two of the initial models are equal, since they would stay equal in training.
        """
        name = type(self).__name__.lower()
        models = require_different_models(params, self.clusters, name)
        return ParameterTree.star([()] * self.clusters, models, clients.ids)

    def trained(
        self, state: S, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[ParameterTree, Updates, torch.Tensor, RoundLog]:
        """Train all models with the clients of a cohort.

        If too few clients reply, the models do not change.

        Returns
        -------
        tuple
            The tree after the round; the updates; the mean of the clients' tables, which contain
            the frequency of each of C labels in each of K components, ``[K, C]`` (``[K, 0]`` if the
            method has no tables or too few clients replied); and the round's log.
        """
        tree = state.tree
        K = self.clusters
        models, _ = tree.models(leaves := [leaf.id for leaf in tree.leaves])
        work = ClientWork(steps=Em(self.mixture_after(state)))
        updates = clients.train(cohort, models, [0] * len(cohort), this_round, work)
        updates = updates.select(sorted(cohort))
        losses = dict(zip(updates.ids, updates.losses.tolist(), strict=True))
        if (
            not updates.ids
            or len(updates.ids) < this_round.min_clients
            or updates.components is None
        ):
            events = [TooFew(leaf, len(updates.ids)) for leaf in leaves]
            return tree, updates, models.new_zeros(K, 0), RoundLog({}, losses, events=tuple(events))
        D = updates.n_parameters // K
        steps, tables = unpacked(mean(updates), K, models.shape[1], D)
        component_of = dict(zip(updates.ids, updates.components.tolist(), strict=True))
        after = tree.reassigned(
            {client: leaves[component] for client, component in component_of.items()}
        )
        criteria = dict[int, SplitCriteria]()
        for component, leaf in enumerate(leaves):
            after = after.moved(leaf, steps[component])
            if members := tuple(
                sorted(c for c, theirs in component_of.items() if theirs == component)
            ):
                norm = torch.linalg.vector_norm(steps[component, :D], dtype=torch.float64)
                largest = updates.norms[updates.components == component].max()
                criteria[leaf] = SplitCriteria(members, float(norm), float(largest), None)
        return (
            after,
            updates,
            tables,
            RoundLog(criteria, losses, events=tuple(membership_events(tree, after))),
        )


# FedRC: Guo, Tang, Lin 2024, as in their official code: FedEM with responsibilities that are
# divided by label rates.
#
# Clients that differ only in their label distribution should share a model, clients that differ in
# concept should not. So an example belongs to component k not if θ_k makes its label likely, but if
# θ_k makes it more likely than the label is within component k: γ_jk ∝ ω_ik exp(−ℓ_jk) / P̂_k(y_j).
# ω_ik = mean_j γ_jk; θ_k trains on losses weighted by γ_jk.
#
# The decisions at the top of this file apply here too. In addition:
#
# - P̂_k(c) is the share of label c in Σ γ_jk over all examples of the clients that took part in the
#   last round, each sum at least 1e-8 before it is normalised (official code). The official code
#   adds the last known tables of the clients that did not take part; if all clients take part in
#   every round, both are the same.
# - In the first round P̂ is uniform, so that it is a round of FedEM (official code).
# - Clients without weights estimate them with the run's P̂; the official code's test clients use a
#   uniform P̂. Newcomers to a finished run estimate theirs without P̂, like these test clients.
# - A client sends its K × C table as a mean over its examples: the table discloses how common each
#   label is in its data. With K = 1 its columns are its label counts.
# - Prediction uses all components; the official code can also predict with the largest component
#   alone.


@dataclass(frozen=True, eq=False)
class FedRCState(State):
    """State of FedRC between rounds.

    Parameters
    ----------
    rates
        P̂ ``[K, C]``: the frequency of each of C labels in each of K components; None before the
        first round.
    """

    rates: torch.Tensor | None = None


@checked()
@dataclass(frozen=True, kw_only=True)
class FedRC(SharedMixture[FedRCState]):
    """FedRC (Guo et al. 2024): mixture of shared models, robust to different label frequencies.

    As in FedEM, every client uses its own mixture of K models. Clients whose data differs only in
    how often each label occurs use the same model.

    Parameters
    ----------
    clusters
        Number K of models.
    """

    state_type = FedRCState

    clusters: int = 3

    def __post_init__(self) -> None:
        require(("algorithm.clusters", self.clusters, self.clusters >= 1, "at least 1"))

    @property
    def requires(self) -> Requires:
        """Needs of FedRC that a run checks, in addition to those of FedEM.

        Clients report which component they weigh most, and how often each label occurs in their
        data of each component.
        """
        return replace(
            super().requires,
            reports="the component that they weigh most, and how their labels lean towards each,",
            mixture=Mixture(by_label=True),
        )

    def mixture_after(self, state: FedRCState) -> Mixture:
        """Return the settings of the mixture that clients train and predict with.

        They contain P̂, the frequency of each label in each component.
        """
        return Mixture(by_label=True, rates=state.rates)

    def init(self, params: torch.Tensor, clients: Clients) -> FedRCState:
        """Return the state before round 1, from K different initial models ``[K, S]``."""
        return FedRCState(self.star(params, clients))

    def step(
        self, state: FedRCState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[FedRCState, RoundLog]:
        """Run one round of FedRC.

        Clients run an E-step and an M-step, each model moves by its mean update, and the server
        recomputes P̂, the frequency of each label in each component.
        """
        tree, updates, table, log = self.trained(state, cohort, clients, this_round)
        rates = label_rates(table, float(updates.sizes.sum())) if table.shape[1] else state.rates
        return FedRCState(tree, rates), log


@checked()
@dataclass(frozen=True, kw_only=True)
class FedEM(SharedMixture[State]):
    """FedEM (Marfoq et al. 2021): shared models, of which every client uses its own mixture.

    Parameters
    ----------
    clusters
        Number M of models.
    """

    clusters: int = 3

    def __post_init__(self) -> None:
        require(("algorithm.clusters", self.clusters, self.clusters >= 1, "at least 1"))

    @property
    def requires(self) -> Requires:
        """Needs of FedEM that a run checks.

        It needs M different initial models; and each client reports the component (one of the M
        models) to which it gives the largest weight.
        """
        return replace(super().requires, reports="the component that they weigh most")

    def init(self, params: torch.Tensor, clients: Clients) -> State:
        """Return the state before round 1, from M different initial models ``[M, S]``."""
        return State(self.star(params, clients))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Run one round of FedEM (Algorithm 1): E-step and M-step of clients, and mean updates."""
        tree, _, _, log = self.trained(state, cohort, clients, this_round)
        return replace(state, tree=tree), log
