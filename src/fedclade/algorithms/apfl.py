"""APFL, Adaptive Personalized Federated Learning (arXiv:2003.13461), Algorithm 1.

Deng, Kamani, Mahdavi 2020. FedAvg trains a global model w. In addition every client i trains a
local model v_i by the loss of the mixture v̄_i = α_i v_i + (1−α_i) w_i: v_i ← v_i − η ∇_v
f_i(v̄_i), where the gradient step is −η α_i ∇f_i(v̄_i). Clients are evaluated with v̄_i. With α = 0
the method is FedAvg, as v_i never moves; with α = 1 it is local training.

Where paper and official code leave a choice, this file decides as follows:

- *Choice of α.* α_i is given and constant, as in Algorithm 1; 0.5 is the official code's value.
  ``adaptive`` changes it in every step by α_i ← α_i − η ⟨∇f_i(v̄_i), v_i − w_i⟩ (section 4, eq.
  10), clipped to [0, 1]. The official code (FedTorch, ``alpha_update``) changes it once a round,
  after the first step, by another slope: with the gradients ∇_v and ∇_w of the mixture's loss, ⟨α_i
  ∇_v + (1 − α_i) ∇_w, v_i − w_i⟩ + 0.02 α_i. ``alpha_step = "code"`` does so; with a mixture of
  parameters the slope is (α_i² + (1 − α_i)²) ⟨∇f_i(v̄_i), v_i − w_i⟩ + 0.02 α_i, with v_i and w_i
  after the step.
- *Order of a step.* Both gradients of a step use the same batch, at w_i and v̄_i as they are before
  the step (Algorithm 1); the official code moves w_i first.
- *Local model.* v_i starts from the w that the client receives when it first trains. α_i and v_i
  change only in rounds in which client i is in the cohort, and so does v̄_i, whose w_i is the
  client's own at the end of its training. A client that has not trained yet, and a newcomer, is
  evaluated with w. The mixture is one of parameters, as in the paper; the official code mixes the
  outputs of both models in training and in validation, which for neural networks is a different
  method.
- *Weights.* The global mean is weighted by |D_i| as in FedAvg; the paper's is not. With equal sizes
  both are the same.
- v_i and α_i never leave their client.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedclade.algorithms.base import OneCohort, OwnModels, OwnState, RoundLog
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of, move_clusters, train_root
from fedclade.core import (
    Clients,
    Interpolation,
    LocalRule,
    LocalTraining,
    ParameterTree,
    Round,
    checked,
    require,
)


class Ruled(OwnModels[OwnState], OneCohort[OwnState]):
    """FedAvg whose clients train by a local rule and store the personal model that results."""

    @property
    def server_step(self) -> float:
        """Factor by which the root's model moves along the mean update; 1 is the whole mean."""
        return 1.0

    @property
    @abstractmethod
    def rule(self) -> LocalRule:
        """Rule by which clients take a step of local training."""

    def check_training(self, spec: LocalTraining) -> None:
        """Check that the rule supports the configured local training."""
        self.rule.check_training(spec)

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Put all clients at the global model; no client has a model of its own yet."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OwnState, RoundLog]:
        """Let the cohort train, and move the root's model along the mean of the updates."""
        part = scaled(
            train_root(state, cohort, clients, replace(this_round, rule=self.rule)),
            self.server_step,
        )
        return OwnState(
            move_clusters(state.tree, [part]), state.keepers_after(part.updates)
        ), log_of([part])


def scaled(part: ClusterUpdate, by: float) -> ClusterUpdate:
    """Return a cluster's update with its mean multiplied by a factor."""
    return part if part.mean is None or by == 1 else replace(part, mean=by * part.mean)


@checked()
@dataclass(frozen=True, kw_only=True)
class APFL(Ruled):
    """APFL (Deng et al. 2020): each client uses a mixture of the global model and its own.

    Parameters
    ----------
    alpha
        α, in [0, 1]: the share of a client's own model in its mixture.
    adaptive
        Whether each client learns its α, starting from ``alpha``.
    alpha_step
        Rule by which α is learnt: ``"paper"``, by eq. 10 in every step; or ``"code"``, once a
        round, as in the authors' code.
    """

    alpha: float = 0.5
    adaptive: bool = False
    alpha_step: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        code = self.alpha_step == "code"
        require(
            (
                *("algorithm.alpha_step", self.alpha_step, self.adaptive or not code),
                "'paper' without adaptive = true, as no α is learnt",
            )
        )
        _ = self.rule

    @property
    def rule(self) -> Interpolation:
        """Rule by which clients take a step of local training."""
        return Interpolation(alpha=self.alpha, adaptive=self.adaptive, alpha_step=self.alpha_step)
