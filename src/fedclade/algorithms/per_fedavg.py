"""Per-FedAvg, meta-learning of a global model (Fallah, Mokhtari, Ozdaglar 2020), Algorithm 1.

Source: arXiv:2002.07948.

The global model w should perform well after one gradient step of each client on its own data: min
Σ_i f_i(w − α∇f_i(w)). So a client's training step is w ← w − β (I − α∇²f_i(w; D″)) ∇f_i(w −
α∇f_i(w; D); D′), with three independent batches. The variant FO omits the Hessian; HF computes its
product with a gradient by differences of gradients, at w ± δ∇f_i (section 5).

Where paper and other implementations leave a choice, this file decides as follows:

- β is the step size of the configured local training, the τ local steps are the steps of this
  training, and D′ is its batch in each step. D and D″ are drawn from separate orders of the
  client's data. So with α = 0 the method is FedAvg.
- Clients are evaluated with w after ``adapt_steps`` steps of size α on batches of their training
  data. All clients, in the cohort or not, take these steps again in every round that is evaluated,
  as in :class:`~fedclade.algorithms.FineTune`. So do newcomers, which start from w, during a run or
  after it. With α = 0 all clients are evaluated with w.
- The algorithm has no default for α, and HF has none for δ: 0.005 and 0.001 are the values of later
  implementations of the method, in the code of pFedMe and in FL-bench.
- The mean is weighted by |D_i| as in FedAvg; the algorithm's is not. With equal sizes both are the
  same.
- The training loss that a round reports is the loss on D of the model before each local step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedclade.algorithms.apfl import Ruled
from fedclade.algorithms.base import OwnState, RoundLog
from fedclade.algorithms.cluster_update import log_of, move_clusters, train_root
from fedclade.core import (
    Clients,
    ClientWork,
    LocalTraining,
    MetaLearning,
    RoundPlan,
    checked,
    require,
)


@checked()
@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Ruled):
    """Per-FedAvg (Fallah et al. 2020): a global model that performs well after a local step.

    Parameters
    ----------
    variant
        ``FO``, the first-order variant, which omits the Hessian; or ``HF``, which computes the
        Hessian's product with a gradient by differences of gradients.
    alpha
        α, at least 0: step size of the local step after which the global model should perform well.
    delta
        δ, the distance for the differences of gradients of the variant ``HF``.
    adapt_steps
        Number of local steps of size α that a client takes before its model is evaluated; one or a
        few in the paper.
    """

    variant: Literal["FO", "HF"] = "FO"
    alpha: float = 0.005
    delta: float = 0.001
    adapt_steps: int = 1

    def __post_init__(self) -> None:
        require(
            ("algorithm.variant", self.variant, self.variant in ("FO", "HF"), "'FO' or 'HF'"),
            ("algorithm.adapt_steps", self.adapt_steps, self.adapt_steps >= 1, "at least 1"),
        )
        _ = self.rule

    @property
    def rule(self) -> MetaLearning:
        """Rule for a step of Per-FedAvg's local training (Algorithm 1).

        The step reduces the loss that the model has after a further gradient step of size α.
        """
        return MetaLearning(alpha=self.alpha, hessian=self.variant == "HF", delta=self.delta)

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[OwnState, RoundLog]:
        """Run one round of Per-FedAvg (Algorithm 1).

        If the round is evaluated, all clients then adapt a copy of the global model to their data
        by ``adapt_steps`` local steps, and store it.
        """
        part = train_root(state, cohort, clients, this_round, ClientWork(steps=self.rule))
        new = OwnState(move_clusters(state.tree, [part]), keepers=())
        return self.tune(new, clients, this_round), log_of([part])

    def tuning(self, local: LocalTraining) -> LocalTraining | None:
        """Return the settings with which clients adapt the global model before an evaluation.

        These are ``adapt_steps`` steps of plain SGD of size α. The result is None if α = 0.
        """
        own = {
            "epochs": None,
            "steps": self.adapt_steps,
            "lr": self.alpha,
            "lr_decay": 1.0,
            "momentum": 0.0,
        }
        return replace(local, **own) if self.alpha else None
