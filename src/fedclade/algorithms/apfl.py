"""APFL, Adaptive Personalized Federated Learning: Deng, Kamani, Mahdavi 2020 (arXiv:2003.13461), Algorithm 1.

FedAvg trains a global model w, and beside it every client a local one v_i where the mixture v̄_i =
α_i v_i + (1−α_i) w_i stands: v_i ← v_i − η ∇_v f_i(v̄_i), which is −η α_i ∇f_i(v̄_i). Clients are
served with v̄_i. α = 0 is FedAvg, as v never moves; with α = 1 it is local training.

Where paper and official code leave a choice, this file makes it:

- α_i is given and stays, as in Algorithm 1; 0.5 is the official code's. ``adaptive`` moves it in
  every step by α_i ← α_i − η ⟨∇f_i(v̄_i), v_i − w_i⟩ (section 4, eq. 10), clipped to [0, 1]. The
  official code (FedTorch, ``alpha_update``) moves it once a round, after the first step, by another
  slope: with the gradients ∇_v and ∇_w of the mixture's loss, ⟨α_i ∇_v + (1 − α_i) ∇_w, v_i − w_i⟩
  + 0.02 α_i. ``alpha_step = "code"`` does so; with a mixture of parameters that is (α_i² + (1 −
  α_i)²) ⟨∇f_i(v̄_i), v_i − w_i⟩ + 0.02 α_i, with v_i and w_i after the step.
- Both gradients of a step are on the same batch, at w_i and v̄_i as they are before it (Algorithm
  1); the official code moves w_i first.
- v_i begins with w as the client is sent it when it first trains. α_i and v_i move only in rounds
  in which i is in the cohort, and so does v̄_i, whose w_i is the client's own at the end of its
  training. A client that has not trained yet, and a newcomer, is served with w. The mixture is one
  of parameters, as in the paper; the official code mixes the outputs of both models in training and
  in validation, which is another method for networks.
- The global mean is weighted by |D_i| as in FedAvg; the paper's is not. With equal sizes it is the
  same.
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

# FedAvg whose clients take the steps of a local rule, and keep a model of their own that comes of
# it.


class Ruled(OwnModels[OwnState], OneCohort[OwnState]):
    """An algorithm whose clients train the root's model by a rule, which leaves each a model that it is served with."""

    @property
    def server_step(self) -> float:
        """How far the root's model goes to the mean of the clients'."""
        return 1.0

    @property
    @abstractmethod
    def rule(self) -> LocalRule:
        """What clients do in a step."""

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is one that the rule can take the steps of."""
        self.rule.check_training(spec)

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Put all clients under the global model; nobody has a model of its own."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[OwnState, RoundLog]:
        """Let the cohort train, and move the root's model by the mean of the updates."""
        part = scaled(
            train_root(state, cohort, clients, replace(this_round, rule=self.rule)),
            self.server_step,
        )
        return OwnState(
            move_clusters(state.tree, [part]), state.keepers_after(part.updates)
        ), log_of([part])


def scaled(part: ClusterUpdate, by: float) -> ClusterUpdate:
    """Return a cluster's part of a round with a step that is so many times as long."""
    return part if part.mean is None or by == 1 else replace(part, mean=by * part.mean)


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
        How it does: ``"paper"``, by eq. 10 in every step; or ``"code"``, once a round, as in the
        authors' code.
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
        """What clients do in a step."""
        return Interpolation(alpha=self.alpha, adaptive=self.adaptive, alpha_step=self.alpha_step)
