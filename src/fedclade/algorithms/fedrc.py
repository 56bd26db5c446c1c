"""FedRC: Guo, Tang, Lin 2024, as in their official code: FedEM whose responsibilities are divided by label rates.

Clients that differ in their labels alone should share a model, clients that differ in concept should not. So an example
belongs to component k not if θ_k has made its label likely, but if that has made it more likely than the label is in k:
γ_jk ∝ ω_ik exp(−ℓ_jk) / P̂_k(y_j). ω_ik = mean_j γ_jk; θ_k trains on losses weighted by γ_jk.

What the header of ``fedem.py`` says holds here too. Where paper and official code leave a choice besides:

- P̂_k(c) is the share of label c in Σ γ_jk over all examples of the clients that took part in the last round, each sum
  at least 1e-8 before it is normalised (official code). The official code adds the tables of the clients that did not
  take part, as they last were; with everybody in every round it is the same.
- In the first round P̂ is uniform, so that it is a round of FedEM (official code).
- Clients that have no weights yet find them with the run's P̂; the official code's test clients keep a uniform one.
  Newcomers to a finished run find theirs without P̂, as these do.
- A client sends its K × C table as a mean over its examples: it shows how common each label is with it. With K = 1 its
  columns are its label counts.
- Prediction is soft; the official code can also predict with the largest component alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedclade.algorithms.base import RoundLog
from fedclade.algorithms.shared_mixture import SharedMixture
from fedclade.algorithms.state import State
from fedclade.core import Clients, Mixture, Round, checked, label_rates, require


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
