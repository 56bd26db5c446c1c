"""APFL, Adaptive Personalized Federated Learning (arXiv:2003.13461), Algorithm 1.

Deng, Kamani, Mahdavi 2020. FedAvg trains a global model w; client i's copy of it is w_i. In
addition every client i trains a local model v_i by the loss of the mixture v̄_i = α_i v_i + (1−α_i)
w_i: v_i ← v_i − η ∇_v f_i(v̄_i). Here η is the step size, f_i the client's loss, and ∇_v f_i(v̄_i)
= α_i ∇f_i(v̄_i) by the chain rule. Clients are evaluated with v̄_i. With α = 0 the method is
FedAvg, as v_i never moves; with α = 1 it is local training.

Where paper and official code leave a choice, this file decides as follows:

- *Choice of α.* α_i is given and constant, as in Algorithm 1; 0.5 is the official code's value.
  With ``adaptive`` it changes in every step: α_i ← α_i − η ⟨∇f_i(v̄_i), v_i − w_i⟩ (section 4, eq.
  10), clipped to [0, 1]. The official code (FedTorch, ``alpha_update``) changes it once a round,
  after the first step, and replaces the inner product by ⟨α_i ∇_v + (1 − α_i) ∇_w, v_i − w_i⟩ +
  0.02 α_i, where ∇_v and ∇_w are the gradients of the mixture's loss with respect to v_i and w_i.
  For the mixture v̄_i they are ∇_v = α_i ∇f_i(v̄_i) and ∇_w = (1 − α_i) ∇f_i(v̄_i), so the
  replacement equals (α_i² + (1 − α_i)²) ⟨∇f_i(v̄_i), v_i − w_i⟩ + 0.02 α_i. In this expression v_i
  and w_i are the models after the step. ``alpha_step = "code"`` selects this rule.
- *Order of a step.* Both gradients of a step use the same batch, at w_i and v̄_i as they are before
  the step (Algorithm 1); the official code moves w_i first.
- *Local model.* v_i starts from the global model w that client i receives when it first trains.
  α_i, v_i and the mixture v̄_i change only in rounds in which client i is in the cohort. Between
  these rounds v̄_i contains w_i as it was at the end of the client's last training, not the newer
  global model. A client that has not trained yet, and a newcomer, is evaluated with w. The
  parameters of both models are mixed, as in the paper; the official code mixes the outputs of both
  models in training and in validation, which for neural networks is a different method.
- *Weights.* The global mean is weighted by |D_i| as in FedAvg; the paper's is not. With equal sizes
  both are the same.
- v_i and α_i never leave their client.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fedclade.algorithms.base import OneCohort, OwnModels, OwnState, RoundLog
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of, move_clusters, train_root
from fedclade.algorithms.requires import RunFacts
from fedclade.core import (
    Clients,
    ClientWork,
    Interpolation,
    LocalRule,
    ParameterTree,
    RoundPlan,
    checked,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor


class Ruled(OwnModels[OwnState], OneCohort[OwnState]):
    """Base class of FedAvg variants that differ in the clients' training step and personal models.

    Clients train by a :class:`~fedclade.core.LocalRule`, send their updates of the global model,
    and store the personal model that results from the training.
    """

    @property
    def server_step(self) -> float:
        """Factor by which the mean update is multiplied to move the global model; 1 by default."""
        return 1.0

    @property
    @abstractmethod
    def rule(self) -> LocalRule:
        """Rule that determines how clients take a step of local training."""

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that the method's training rule supports the configured local training."""
        if run.local is not None:
            self.rule.check_training(run.local)
        return super().check(run)

    def init(self, params: Tensor, clients: Clients) -> OwnState:
        """Return the state before round 1, in which no client has a personal model yet."""
        return OwnState(ParameterTree.root_only(clients.ids, params), keepers=())

    def step(
        self, state: OwnState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[OwnState, RoundLog]:
        """Run one round: the cohort trains by the method's local rule, and the global model moves.

        The global model moves by the mean update, multiplied by :attr:`server_step`.
        """
        work = ClientWork(steps=self.rule)
        part = scaled(train_root(state, cohort, clients, this_round, work), self.server_step)
        return OwnState(
            move_clusters(state.tree, [part]), state.keepers_after(part.updates)
        ), log_of([part])


def scaled(part: ClusterUpdate, by: float) -> ClusterUpdate:
    """Multiply the mean update of a cluster by a factor, the step size of the server.

    Parameters
    ----------
    part
        The round's result for the cluster.
    by
        The factor.
    """
    return part if part.mean is None or by == 1 else replace(part, mean=by * part.mean)


@checked()
@dataclass(frozen=True, kw_only=True)
class APFL(Ruled):
    """APFL (Deng et al. 2020): each client uses a mixture of the global model and its own model.

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
                "'paper' unless adaptive = true, since α is learnt only then",
            )
        )
        _ = self.rule

    @property
    def rule(self) -> Interpolation:
        """Rule for a step of APFL's local training (Algorithm 1).

        The step trains the client's copy w_i of the global model, and its local model v_i by the
        loss of the mixture of both.
        """
        return Interpolation(alpha=self.alpha, adaptive=self.adaptive, alpha_step=self.alpha_step)
