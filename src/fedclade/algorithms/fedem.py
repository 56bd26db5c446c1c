"""FedEM: Marfoq, Neglia, Bellet, Kameni, Vidal 2021, Algorithm 1.

Every client's distribution is a mixture of M ones that all share: h_t = Σ_m π_tm h_θm. In every
round each participant receives all M models, finds how likely each has made each of its examples
(E-step), and from that its weights π_t and an update of every model (M-step). It predicts with the
weighted mean of all models' probabilities.

Where paper and official code leave a choice, this file makes it:

- The M initial models are drawn one by one, as in the official code: from copies of one, all would
  stay copies. π_t begins uniform.
- The M-step in θ_m is local training as it is configured, from θ_m, on losses that are multiplied
  by q_j(m); a batch's sum is divided by the number of its examples, as in the official code: while
  weights are even, a step is 1/M as long as FedAvg's. All M models see the same batches.
- The server's mean has the weights |D_t|, as in the paper. The official code takes it over all
  clients, with old models of those that were not sampled; here a cohort's is its own, as Algorithm
  1 has it where everybody takes part.
- π_t and q never leave the client, which keeps π_t. It tells which component it weighs most: that
  is its leaf in the tree, and nothing else depends on it.
- A client that has no weights yet (that no cohort has had, or a newcomer) takes one E-step and one
  M-step in π with the models as they are, from even weights, whenever it is evaluated (the official
  code's test clients go on from those of the time before); it is in no cluster before it has
  trained. Newcomers to a finished run stand at the leaf of the lowest training loss, and predict
  with all models.
- A model's ``mean_norm`` is that of its step; a client's ``max_norm`` that of its updates of all M
  models together.
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

# What FedEM and FedRC share: clients train all models, and are served with a mixture of their own
# of them.


class SharedMixture(OneCohort[S]):
    """An algorithm whose clients train and are served with a mixture of all the leaves' models.

    ``clusters`` is their number.
    """

    is_soft = True

    clusters: int

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates."""
        return False

    @property
    def initial_models(self) -> int:
        """How many initial models, each drawn by itself, ``init`` starts from."""
        return self.clusters

    def star(self, params: Tensor, clients: Clients) -> ParameterTree:
        """Return a tree with a leaf for each initial model, rows of ``[K, S]``, which must differ; all are empty."""
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
        """Let a cohort train; return the tree after the round, the updates, the mean table ``[K, C]``, and the log.

        With too few answers all stays as it is.
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


# FedRC: Guo, Tang, Lin 2024, as in their official code: FedEM whose responsibilities are divided by
# label rates.
#
# Clients that differ in their labels alone should share a model, clients that differ in concept
# should not. So an example belongs to component k not if θ_k has made its label likely, but if that
# has made it more likely than the label is in k: γ_jk ∝ ω_ik exp(−ℓ_jk) / P̂_k(y_j). ω_ik = mean_j
# γ_jk; θ_k trains on losses weighted by γ_jk.
#
# What the header of ``fedem.py`` says holds here too. Where paper and official code leave a choice
# besides:
#
# - P̂_k(c) is the share of label c in Σ γ_jk over all examples of the clients that took part in the
#   last round, each sum at least 1e-8 before it is normalised (official code). The official code
#   adds the tables of the clients that did not take part, as they last were; with everybody in
#   every round it is the same.
# - In the first round P̂ is uniform, so that it is a round of FedEM (official code).
# - Clients that have no weights yet find them with the run's P̂; the official code's test clients
#   keep a uniform one. Newcomers to a finished run find theirs without P̂, as these do.
# - A client sends its K × C table as a mean over its examples: it shows how common each label is
#   with it. With K = 1 its columns are its label counts.
# - Prediction is soft; the official code can also predict with the largest component alone.


@dataclass(frozen=True, eq=False)
class FedRCState(State):
    """P̂ ``[K, C]``: how common each label is in each component; None before the first round."""

    rates: Tensor | None = None


@checked()
@dataclass(frozen=True, kw_only=True)
class FedRC(SharedMixture[FedRCState]):
    """FedRC (Guo et al. 2024): FedEM that does not part clients by their labels alone.

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
        """Take the initial models ``[K, S]``, which must differ; nobody has trained yet."""
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
    """FedEM (Marfoq et al. 2021): M models, and every client a mixture of its own of them.

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
        """Take the initial models ``[M, S]``, which must differ; nobody has trained yet."""
        return State(self.star(params, clients))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[State, RoundLog]:
        """Run one round of Algorithm 1."""
        tree, _, _, log = self.trained(state, cohort, clients, this_round)
        return replace(state, tree=tree), log
