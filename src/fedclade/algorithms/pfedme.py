"""pFedMe: Dinh, Tran, Nguyen 2020 (arXiv:2006.08848), Algorithm 1.

Clients descend on the Moreau envelope of their loss, min_θ f_i(θ) + λ/2‖θ − w‖²: with every
mini-batch they look for that θ_i near w_i, and take the step w_i ← w_i − ηλ(w_i − θ_i). The server
moves w by β towards the mean of the w_i. Clients are served with θ_i, their personal model.

Where paper and official code leave a choice, this file makes it:

- θ_i is found by K steps of gradient descent on the mini-batch; it begins with w at the start of a
  round, and goes on from one mini-batch to the next (official code, without the weight decay of
  0.001 there: ``local.weight_decay`` is there for that). K = 5, λ = 15 and the step size 0.09 of
  θ_i are the official code's, and β = 1.
- η is the step size of local training. The R local rounds of the algorithm, each of one mini-batch,
  are its steps: the "20 local epochs" of the official code are ``local.steps = 20``.
- A client trains, and gets another θ_i, only in rounds in which it is in the cohort, as in the
  algorithm; the official code lets all clients train and averages some. One that has not trained
  yet, and a newcomer, is served with w.
- The mean is weighted by |D_i| as in FedAvg; the algorithm's is not. With equal sizes it is the
  same.
- ``local.clip_norm`` is of the gradient of f_i, without the term of λ.
- Clients are served with θ_i, as in the paper. The released code means to score θ_i, but scores w_i
  as it is sent at the end of a round: ``test_persionalized_model`` copies from the model's own
  parameters, which ``train`` has set to w_i. ``served = "w"`` does so, and then all of its
  "personalized" scores are those of w_i.
- θ_i never leaves its client. A round's loss is that at θ_i before it meets a mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedclade.algorithms.apfl import Ruled
from fedclade.core import LARGEST, MoreauEnvelope, checked, require


@checked()
@dataclass(frozen=True, kw_only=True)
class PFedMe(Ruled):
    """pFedMe (Dinh et al. 2020): a personal model of each client near a global one, which moves towards them.

    Parameters
    ----------
    lam
        λ, greater than 0: the larger, the nearer personal models are to the global one.
    steps
        K: steps that look for the personal model on each mini-batch.
    personal_lr
        Their step size.
    beta
        β: how far the global model goes to the mean of the clients'.
    served
        The client's own model: ``"theta"``, its personal model θ_i; or ``"w"``, w_i after its last
        step, as in the authors' code.
    """

    lam: float = 15.0
    steps: int = 5
    personal_lr: float = 0.09
    beta: float = 1.0
    served: Literal["theta", "w"] = "theta"

    def __post_init__(self) -> None:
        require(
            (
                "algorithm.beta",
                self.beta,
                0 < self.beta <= LARGEST,
                f"greater than 0 and at most {LARGEST:g}",
            )
        )
        _ = self.rule

    @property
    def rule(self) -> MoreauEnvelope:
        """What clients do in a step."""
        return MoreauEnvelope(
            lam=self.lam, steps=self.steps, lr=self.personal_lr, served=self.served
        )

    @property
    def server_step(self) -> float:
        """How far the root's model goes to the mean of the clients'."""
        return self.beta
