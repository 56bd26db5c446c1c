"""pFedMe, personal models by Moreau envelopes (Dinh, Tran, Nguyen 2020), Algorithm 1.

Source: arXiv:2006.08848.

Clients descend on the Moreau envelope of their loss, min_θ f_i(θ) + λ/2‖θ − w‖². For every
mini-batch they search for the minimiser θ_i near w_i, and take the step w_i ← w_i − ηλ(w_i − θ_i).
The server moves w by β towards the mean of the w_i. Clients are evaluated with θ_i, their personal
model.

Where paper and official code leave a choice, this file decides as follows:

- *Search for θ_i.* It consists of K steps of gradient descent on the mini-batch. θ_i starts from w
  at the start of a round, and continues from one mini-batch to the next (official code, without its
  weight decay of 0.001, for which there is ``local.weight_decay``). K = 5, λ = 15, the step size
  0.09 of θ_i, and β = 1 are the official code's values.
- *Local training.* η is the step size of local training. The R local rounds of the algorithm, each
  of one mini-batch, are its steps: the "20 local epochs" of the official code are ``local.steps =
  20``.
- *Participation.* A client trains, and gets a new θ_i, only in rounds in which it is in the cohort.
  In the algorithm and in the official code all clients train in every round, and the models w_i of
  some of them are averaged. The global model is the same in both; the θ_i of clients outside the
  cohort are older here. A client that has not trained yet, and a newcomer, is evaluated with w.
- *Weights.* The mean is weighted by |D_i| as in FedAvg; the algorithm's is not. With equal sizes
  both are the same.
- *Clipping.* ``local.clip_norm`` limits the gradient of f_i alone, without the proximal term.
- *Evaluated model.* Clients are evaluated with θ_i, as in the paper. The released code intends to
  evaluate θ_i, but evaluates w_i as it is sent at the end of a round: ``test_persionalized_model``
  copies from the model's own parameters, which ``train`` has set to w_i. ``served = "w"`` does so,
  and then all "personalized" scores are those of w_i.
- θ_i never leaves its client. A round's loss is the loss at θ_i before it is trained on a
  mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedclade.algorithms.apfl import Ruled
from fedclade.core import LARGEST, MoreauEnvelope, checked, require


@checked()
@dataclass(frozen=True, kw_only=True)
class PFedMe(Ruled):
    """pFedMe (Dinh et al. 2020): each client has a personal model near the global model.

    Every client i trains a copy w_i of the global model, and for each mini-batch a personal model
    θ_i near w_i. The global model moves towards the mean of the w_i.

    Parameters
    ----------
    lam
        λ, greater than 0: weight of the proximal term. The larger λ, the nearer personal models are
        to the global model.
    steps
        K: number of gradient steps for the personal model on each mini-batch.
    personal_lr
        Step size of the gradient steps for the personal model.
    beta
        β: factor by which the global model moves along the mean update.
    served
        Model with which a client is evaluated: ``"theta"``, its personal model θ_i; or ``"w"``, w_i
        after the client's last step, as in the authors' code.
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
        """Rule for a step of pFedMe's local training, which trains θ_i and w_i."""
        return MoreauEnvelope(
            lam=self.lam, steps=self.steps, lr=self.personal_lr, served=self.served
        )

    @property
    def server_step(self) -> float:
        """Factor β by which the mean update is multiplied before it moves the global model."""
        return self.beta
