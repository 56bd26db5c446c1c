"""FedEM: Marfoq, Neglia, Bellet, Kameni, Vidal 2021, Algorithm 1.

Every client's distribution is a mixture of M distributions that all clients share: h_t = Σ_m π_tm
h_θm. In every round each participant receives all M models, computes for each of its examples the
probability that it belongs to each component (E-step), and from these probabilities q its weights
π_t and an update of every model (M-step). It predicts with the weighted mean of all models'
probabilities.

Where paper and official code leave a choice, this file decides as follows:

- *Start.* The M initial models are drawn separately, as in the official code: copies of one model
  would stay equal. π_t starts uniform.
- *M-step in θ_m.* It is the configured local training, from θ_m, on losses that are multiplied by
  q_j(m). A batch's sum is divided by its number of examples, as in the official code: while weights
  are uniform, a step is 1/M as long as FedAvg's. All M models see the same batches.
- *Mean.* The server's mean has the weights |D_t|, as in the paper. The official code averages over
  all clients, with old models of those that were not sampled; here the mean is over the cohort, as
  in Algorithm 1 when all clients take part.
- *Disclosure.* π_t and q never leave the client, which stores π_t. The client reports the component
  with its largest weight: that is its leaf in the tree, and nothing else depends on it.
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
from torch import Tensor

from fedclade.algorithms.base import OneCohort, RoundLog, S, State
from fedclade.algorithms.cluster_update import membership_events
from fedclade.clustering import SplitCriteria
from fedclade.core import (
    Clients,
    ConfigError,
    Mixture,
    ParameterTree,
    Round,
    TooFew,
    Updates,
    checked,
    label_rates,
    mean,
    require,
    unpacked,
)


class SharedMixture(OneCohort[S]):
    """Base of FedEM and FedRC: clients train all models, and each predicts with its own mixture.

    The mixture is one of all leaves' models; ``clusters`` is the number of models.
    """

    is_soft = True

    clusters: int

    @property
    def needs_updates(self) -> bool:
        """Return whether a step uses the whole updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Return whether a step uses signatures of updates."""
        return False

    @property
    def initial_models(self) -> int:
        """Number of initial models, each drawn separately, that :meth:`init` receives."""
        return self.clusters

    def star(self, params: Tensor, clients: Clients) -> ParameterTree:
        """Return a tree with an empty leaf for each initial model.

        Parameters
        ----------
        params
            Initial models ``[K, S]``, all different.
        clients
            All clients of the run.

        Raises
        ------
        ConfigError
            If two of the initial models are equal, and would stay so.
        """
        models = params.view(-1, params.shape[-1])
        if (found := len(models.unique(dim=0))) < self.clusters:
            name = type(self).__name__.lower()
            raise ConfigError(
                f"{name} needs {self.clusters} different initial models, got {found}; let them "
                "depend on the seed"
            )
        return ParameterTree.star([()] * self.clusters, models, clients.ids)

    def trained(
        self, state: S, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ParameterTree, Updates, Tensor, RoundLog]:
        """Train all models with a cohort.

        If too few clients reply, the models stay as they are.

        Returns
        -------
        tuple
            The tree after the round, the updates, the mean table ``[K, C]`` (``[K, 0]`` if too few
            clients replied), and the round's log.
        """
        tree = state.tree
        K = self.clusters
        models, _ = tree.models(leaves := [leaf.id for leaf in tree.leaves])
        updates = clients.train(
            cohort, models, [0] * len(cohort), this_round, mixture=self.mixture(state)
        )
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
# every round, both are the same.
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
        P̂ ``[K, C]``: the frequency of each label in each component; None before the first round.
    """

    rates: Tensor | None = None


@checked()
@dataclass(frozen=True, kw_only=True)
class FedRC(SharedMixture[FedRCState]):
    """FedRC (Guo et al. 2024): FedEM that does not separate clients by their labels alone.

    Parameters
    ----------
    clusters
        Number K of models.
    """

    state_type = FedRCState
    clusters_from = "clusters"
    asks_for = "the component that they weigh most, and how their labels lean towards each,"

    clusters: int = 3

    def __post_init__(self) -> None:
        require(("algorithm.clusters", self.clusters, self.clusters >= 1, "at least 1"))

    def mixture(self, state: FedRCState | None) -> Mixture:
        """Return the mixture of all leaves' models, with P̂."""
        return Mixture(by_label=True, rates=None if state is None else state.rates)

    def init(self, params: Tensor, clients: Clients) -> FedRCState:
        """Return the state with the initial models ``[K, S]``, which must all differ."""
        return FedRCState(self.star(params, clients))

    def step(
        self, state: FedRCState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FedRCState, RoundLog]:
        """Run one round: the clients' E-step and M-steps, the mean of each model, and P̂."""
        tree, updates, table, log = self.trained(state, cohort, clients, this_round)
        rates = label_rates(table, float(updates.sizes.sum())) if table.shape[1] else state.rates
        return FedRCState(tree, rates), log


@checked()
@dataclass(frozen=True, kw_only=True)
class FedEM(SharedMixture[State]):
    """FedEM (Marfoq et al. 2021): M models, of which every client uses its own mixture.

    Parameters
    ----------
    clusters
        Number M of models.
    """

    clusters_from = "clusters"
    asks_for = "the component that they weigh most"

    clusters: int = 3

    def __post_init__(self) -> None:
        require(("algorithm.clusters", self.clusters, self.clusters >= 1, "at least 1"))

    def mixture(self, state: State | None) -> Mixture:
        """Return the mixture of all leaves' models."""
        return Mixture()

    def init(self, params: Tensor, clients: Clients) -> State:
        """Return the state with the initial models ``[M, S]``, which must all differ."""
        return State(self.star(params, clients))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[State, RoundLog]:
        """Run one round of Algorithm 1."""
        tree, _, _, log = self.trained(state, cohort, clients, this_round)
        return replace(state, tree=tree), log
