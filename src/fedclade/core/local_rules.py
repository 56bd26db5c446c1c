"""Local rules: update rules of federated methods that replace the plain SGD step in local training.

In this module, a rule consists of a name and numbers, so that it can be sent with a query. The
steps of each rule, and the tensors that a client stores for it, are defined in
``training/local_rules.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from fedclade.core.arguments import check_arguments, checked
from fedclade.core.errors import ConfigError, require, unknown
from fedclade.core.local import LARGEST, LocalTraining
from fedclade.core.work import Steps


@dataclass(frozen=True, kw_only=True)
class LocalRule(Steps):
    """Base class of update rules that replace the plain SGD step in local training.

    :data:`RULES` lists all rules.

    Attributes
    ----------
    name
        Name by which a query refers to the rule.
    serves
        Whether the rule trains a personal model for each client, with which the client is
        evaluated.
    batches
        Number of mini-batches that a step uses, each from its own random order of the examples.
    vectors
        Number of vectors of the model's size that a client needs in memory in addition to its
        model.
    """

    name: ClassVar[str]
    serves: ClassVar[bool] = False

    @property
    def batches(self) -> int:
        """Number of mini-batches that one step of the rule uses."""
        return 1

    @property
    def gradients(self) -> int:
        """Number of gradients that one step of the rule computes."""
        return 1

    @property
    def vectors(self) -> int:
        """Number of vectors of the model's size that a client needs in addition to its model."""
        return 2

    def check_training(self, spec: LocalTraining) -> None:
        """Check that the settings of local training specify plain SGD.

        A local rule replaces the steps of plain SGD, so it cannot be combined with another
        optimizer, optimizer options, a stored optimizer state or a proximal term.

        Raises
        ------
        ConfigError
            If a setting differs from plain SGD; the message has a line for each such setting.
        """
        what = f"with the local rule {self.name!r}, which takes steps of SGD"
        require(
            ("local.optimizer", spec.optimizer, spec.optimizer == "sgd", f"'sgd' {what}"),
            ("local.options", dict(spec.options), not spec.options, f"empty {what}"),
            ("local.keep_state", spec.keep_state, not spec.keep_state, f"false {what}"),
            ("local.mu", spec.mu, spec.mu == 0, f"0 {what} without a proximal term"),
        )

    def described(self) -> dict[str, Any]:
        """Return the rule's name and numbers as a dictionary that can be sent with a query.

        :func:`local_rule` is the inverse function.
        """
        return {"name": self.name, **asdict(self)}


@checked()
@dataclass(frozen=True, kw_only=True)
class Interpolation(LocalRule):
    """Local rule of APFL (Deng et al. 2020), which interpolates a personal and a shared model.

    It is the local step of the clients in the paper's Algorithm 1. A client trains the shared
    model w, and a personal model v by the gradient at the mixture αv + (1−α)w. Clients are
    evaluated with the mixture.

    Parameters
    ----------
    alpha
        Initial weight α of the personal model, in [0, 1]. The weight is constant unless
        ``adaptive`` is set.
    adaptive
        Whether each client adapts its α by gradient descent.
    alpha_step
        ``paper``: α changes in every step, as in the paper. ``code``: α changes once per round, as
        in the authors' code.
    """

    name = "mixture"
    serves = True

    alpha: float
    adaptive: bool = False
    alpha_step: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        require(
            ("algorithm.alpha", self.alpha, 0 <= self.alpha <= 1, "in [0, 1]"),
            (
                "algorithm.alpha_step",
                self.alpha_step,
                self.alpha_step in ("paper", "code"),
                "'paper' or 'code'",
            ),
        )

    @property
    def gradients(self) -> int:
        """Number of gradients per step: 2, at the shared model and at the mixture."""
        return 2

    @property
    def vectors(self) -> int:
        """Number of additional vectors of the model's size.

        They are the personal model and the mixture, the gradients, and the momentum.
        """
        return 6


@checked()
@dataclass(frozen=True, kw_only=True)
class MoreauEnvelope(LocalRule):
    """Local rule of pFedMe (Dinh et al. 2020), which minimizes the Moreau envelope of the loss.

    It is the local step of the clients in the paper's Algorithm 1. For each mini-batch, a client
    finds a personal model θ with a low loss near its local model w, and then moves w towards θ.
    Clients are evaluated with θ.

    Parameters
    ----------
    lam
        Weight λ of the penalty on the distance from θ to w.
    steps
        Number K of gradient steps by which θ is found on each mini-batch.
    lr
        Step size of the K steps.
    served
        Model with which clients are evaluated: ``theta`` for the personal model θ, or ``w`` for the
        local model at the end of a round, as in the authors' code.
    """

    name = "moreau_envelope"
    serves = True

    lam: float
    steps: int
    lr: float
    served: Literal["theta", "w"] = "theta"

    def __post_init__(self) -> None:
        require(
            (
                "algorithm.lam",
                self.lam,
                0 < self.lam <= LARGEST,
                f"greater than 0 and at most {LARGEST:g}",
            ),
            ("algorithm.steps", self.steps, self.steps >= 1, "at least 1"),
            (
                "algorithm.personal_lr",
                self.lr,
                0 < self.lr <= LARGEST,
                f"greater than 0 and at most {LARGEST:g}",
            ),
            ("algorithm.served", self.served, self.served in ("theta", "w"), "'theta' or 'w'"),
        )

    @property
    def gradients(self) -> int:
        """Number of gradients per step: one for each of the K inner steps that find θ."""
        return self.steps

    @property
    def vectors(self) -> int:
        """Number of additional vectors of the model's size: θ, its gradient, and the momentum."""
        return 4


@checked()
@dataclass(frozen=True, kw_only=True)
class MetaLearning(LocalRule):
    """Local rule of Per-FedAvg (Fallah et al. 2020), which applies meta-learning (MAML).

    It is the local step of the clients in the paper's Algorithm 1. A client minimizes the loss that
    its model w has after one gradient step of size α.

    Parameters
    ----------
    alpha
        Size α of the inner gradient step.
    hessian
        Whether the product of the Hessian and the gradient is computed, by central differences
        (variant HF). If false, the product is left out (variant FO).
    delta
        Width δ of the central differences: the two points are w plus and minus δ times the
        gradient.
    """

    name = "meta_learning"

    alpha: float
    hessian: bool
    delta: float

    def __post_init__(self) -> None:
        require(
            (
                "algorithm.alpha",
                self.alpha,
                0 <= self.alpha <= LARGEST,
                f"at least 0 and at most {LARGEST:g}",
            ),
            (
                "algorithm.delta",
                self.delta,
                0 < self.delta <= LARGEST,
                f"greater than 0 and at most {LARGEST:g}",
            ),
        )

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is plain SGD, and without gradient clipping in variant HF.

        The difference of two clipped gradients does not approximate the product of the Hessian and
        a vector.
        """
        super().check_training(spec)
        holds = spec.clip_norm is None or not self.hessian
        require(("local.clip_norm", spec.clip_norm, holds, "left out with variant = 'HF'"))

    @property
    def batches(self) -> int:
        """Number of mini-batches per step: D and D′ of the paper, and D″ in variant HF."""
        return 3 if self.hessian else 2

    @property
    def gradients(self) -> int:
        """Number of gradients per step: 2 in variant FO, and 4 in variant HF.

        One gradient is computed at the model w, and one at the model after the inner step. In
        variant HF, the product of the Hessian and a vector is computed from the difference of two
        further gradients.
        """
        return 4 if self.hessian else 2

    @property
    def vectors(self) -> int:
        """Number of additional vectors of the model's size.

        They are the model after the inner step, two gradients, a point near w, and the momentum.
        """
        return 5


@checked()
@dataclass(frozen=True, kw_only=True)
class ControlVariates(LocalRule):
    """Local rule of SCAFFOLD (Karimireddy et al. 2020), which corrects the drift of clients.

    It is the local step of the clients in the paper's Algorithm 1. A client i adds c − c_i to every
    gradient. The server's control variate c is sent to the client as its anchor; the client stores
    its own control variate c_i itself.
    """

    name = "control_variates"

    @property
    def needs_anchor(self) -> bool:
        """Whether the client is sent an anchor: always true, the server's control variate c."""
        return True

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is plain SGD without momentum.

        The rule computes the client's control variate from the sum of the client's steps, which
        is proportional to the sum of its gradients only without momentum.
        """
        super().check_training(spec)
        require(
            (
                "local.momentum",
                spec.momentum,
                not spec.momentum,
                f"0 with the local rule {self.name!r}",
            )
        )


RULES: Mapping[str, type[LocalRule]] = {
    rule.name: rule for rule in (Interpolation, MoreauEnvelope, MetaLearning, ControlVariates)
}
"""All local rules by name."""


def local_rule(described: Mapping[str, Any]) -> LocalRule:
    """Build a local rule from its name and numbers, the result of :meth:`LocalRule.described`.

    Raises
    ------
    ConfigError
        If no rule has the name, or if a number is missing, unknown or out of range.
    """
    numbers = dict(described)
    if not isinstance(name := numbers.pop("name", None), str) or name not in RULES:
        raise ConfigError(unknown("local rule", name, RULES))
    kind = RULES[name]
    arguments = check_arguments(f"local rule {name!r}", kind, numbers)
    try:
        return kind(**arguments)
    except TypeError as error:  # a number is missing
        raise ConfigError(
            f"local rule {name!r} lacks a number: {error}; add the number to the rule's description"
        ) from error
