"""Per-FedAvg: Fallah, Mokhtari, Ozdaglar 2020 (arXiv:2002.07948), Algorithm 1.

The global model w is to do well after one step of each client: min Σ_i f_i(w − α∇f_i(w)). So a
client's step is w ← w − β (I − α∇²f_i(w; D″)) ∇f_i(w − α∇f_i(w; D); D′), with three independent
batches. The variant FO leaves the Hessian out; HF has its product with a gradient by differences of
gradients, at w ± δ∇f_i (section 5).

Where paper and others leave a choice, this file makes it:

- β is the step size of local training, and the τ local steps are its steps: D′ are its batches, D
  and D″ are drawn from orders of their own. So α = 0 is FedAvg.
- Clients are served with w after ``adapt_steps`` steps of size α on batches of their training data.
  They take these anew in every round that is evaluated, as in :mod:`~fedclade.algorithms.finetune`,
  in the cohort or not; so does a newcomer, who has w before, during a run or after it. With α = 0
  all are served with w.
- The algorithm has no default of α, nor HF of δ: 0.005 and 0.001 are those of later code that has
  this method (that of pFedMe, and FL-bench).
- The mean is weighted by |D_i| as in FedAvg; the algorithm's is not. With equal sizes it is the
  same.
- A round's loss is that of w before the steps, on D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedclade.algorithms.apfl import Ruled
from fedclade.algorithms.base import OwnState, RoundLog
from fedclade.algorithms.cluster_update import log_of, move_clusters, train_root
from fedclade.core import Clients, LocalTraining, MetaLearning, Round, checked, require


@checked()
@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Ruled):
    """Per-FedAvg (Fallah et al. 2020): a global model that is good after a step of each client on its own data.

    Parameters
    ----------
    variant
        ``FO``, the first-order one, or ``HF`` with the Hessian's product by differences.
    alpha
        α, at least 0: the size of a client's own step.
    delta
        δ of HF.
    adapt_steps
        How many of these steps a client takes before it is served with the model; the paper has
        one, or a few.
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
        """What clients do in a step."""
        return MetaLearning(alpha=self.alpha, hessian=self.variant == "HF", delta=self.delta)

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OwnState, RoundLog]:
        """Run one round of Algorithm 1; if it is evaluated, let all clients take their own step from what comes out."""
        part = train_root(state, cohort, clients, replace(this_round, rule=self.rule))
        new = OwnState(move_clusters(state.tree, [part]), keepers=())
        return self.tuned(new, clients, this_round), log_of([part])

    def tunes(self, spec: LocalTraining) -> LocalTraining | None:
        """Return the client's own steps, of size α; None where that is 0."""
        own = {
            "epochs": None,
            "steps": self.adapt_steps,
            "lr": self.alpha,
            "lr_decay": 1.0,
            "momentum": 0.0,
        }
        return replace(spec, **own) if self.alpha else None
