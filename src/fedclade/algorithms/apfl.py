"""APFL, Adaptive Personalized Federated Learning: Deng, Kamani, Mahdavi 2020 (arXiv:2003.13461), Algorithm 1.

FedAvg trains a global model w, and beside it every client a local one v_i where the mixture v̄_i = α_i v_i + (1−α_i) w_i
stands: v_i ← v_i − η ∇_v f_i(v̄_i), which is −η α_i ∇f_i(v̄_i). Clients are served with v̄_i. α = 0 is FedAvg, as v
never moves; with α = 1 it is local training.

Where paper and official code leave a choice, this file makes it:

- α_i is given and stays, as in Algorithm 1; 0.5 is the official code's. ``adaptive`` moves it in every step by
  α_i ← α_i − η ⟨∇f_i(v̄_i), v_i − w_i⟩ (section 4, eq. 10), clipped to [0, 1]. The official code (FedTorch,
  ``alpha_update``) moves it once a round, after the first step, by another slope: with the gradients ∇_v and ∇_w of the
  mixture's loss, ⟨α_i ∇_v + (1 − α_i) ∇_w, v_i − w_i⟩ + 0.02 α_i. ``alpha_step = "code"`` does so; with a mixture of
  parameters that is (α_i² + (1 − α_i)²) ⟨∇f_i(v̄_i), v_i − w_i⟩ + 0.02 α_i, with v_i and w_i after the step.
- Both gradients of a step are on the same batch, at w_i and v̄_i as they are before it (Algorithm 1); the official code
  moves w_i first.
- v_i begins with w as the client is sent it when it first trains. α_i and v_i move only in rounds in which i is in the
  cohort, and so does v̄_i, whose w_i is the client's own at the end of its training. A client that has not trained
  yet, and a newcomer, is served with w. The mixture is one of parameters, as in the paper; the official code mixes the
  outputs of both models in training and in validation, which is another method for networks.
- The global mean is weighted by |D_i| as in FedAvg; the paper's is not. With equal sizes it is the same.
- v_i and α_i never leave their client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedclade.algorithms.ruled import Ruled
from fedclade.core import Interpolation, checked


@checked()
@dataclass(frozen=True, kw_only=True)
class APFL(Ruled):
    """APFL (Deng et al. 2020): each client's model is a mixture of the global one and one of its own.

    Parameters
    ----------
    alpha
        α, in [0, 1]: the share of a client's own model.
    adaptive
        Whether each client learns its α, from this one on.
    alpha_step
        How it does: ``"paper"``, by eq. 10 in every step; or ``"code"``, once a round, as in the authors' code.
    """

    alpha: float = 0.5
    adaptive: bool = False
    alpha_step: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        _ = self.rule

    @property
    def rule(self) -> Interpolation:
        """What clients do in a step."""
        return Interpolation(alpha=self.alpha, adaptive=self.adaptive, alpha_step=self.alpha_step)
