"""FedEM: Marfoq, Neglia, Bellet, Kameni, Vidal 2021, Algorithm 1.

Every client's distribution is a mixture of M ones that all share: h_t = Σ_m π_tm h_θm. In every round each participant
receives all M models, finds how likely each has made each of its examples (E-step), and from that its weights π_t and
an update of every model (M-step). It predicts with the weighted mean of all models' probabilities.

Where paper and official code leave a choice, this file makes it:

- The M initial models are drawn one by one, as in the official code: from copies of one, all would stay copies. π_t
  begins uniform.
- The M-step in θ_m is local training as it is configured, from θ_m, on losses that are multiplied by q_j(m); a batch's
  sum is divided by the number of its examples, as in the official code: while weights are even, a step is 1/M as long
  as FedAvg's. All M models see the same batches.
- The server's mean has the weights |D_t|, as in the paper. The official code takes it over all clients, with old models
  of those that were not sampled; here a cohort's is its own, as Algorithm 1 has it where everybody takes part.
- π_t and q never leave the client, which keeps π_t. It tells which component it weighs most: that is its leaf in the
  tree, and nothing else depends on it.
- A client that has no weights yet (that no cohort has had, or a newcomer) takes one E-step and one M-step in π with the
  models as they are, from even weights, whenever it is evaluated (the official code's test clients go on from those of
  the time before); it is in no cluster before it has trained. Newcomers to a finished run stand at the leaf of the
  lowest training loss, and predict with all models.
- A model's ``mean_norm`` is that of its step; a client's ``max_norm`` that of its updates of all M models together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedclade.algorithms.base import RoundLog
from fedclade.algorithms.shared_mixture import SharedMixture
from fedclade.algorithms.state import State
from fedclade.core import Clients, Mixture, Round, checked, require


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

    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Run one round of Algorithm 1."""
        tree, _, _, log = self.trained(state, cohort, clients, this_round)
        return replace(state, tree=tree), log
