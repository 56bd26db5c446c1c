"""Local rules: what clients do in a step of their local training in place of a plain step of SGD.

A rule is numbers and a name, so that it travels with a query. What it does, and what it keeps with the client, is in
``training/local_rules.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from fedclade.core.arguments import check_arguments, checked
from fedclade.core.errors import ConfigError, require, unknown
from fedclade.core.local import LARGEST, LocalTraining


@dataclass(frozen=True, kw_only=True)
class LocalRule:
    """What takes the place of plain steps; the subclasses are all that there are.

    Attributes
    ----------
    name
        By which it travels.
    serves
        Whether each client keeps a model of its own that comes of it.
    needs_anchor
        Whether a client is sent a second vector ``[S]``, in the row of its anchor.
    batches
        How many batches a step takes, each from an order of the examples of its own.
    vectors
        How many vectors like a model a client needs besides its model.
    """

    name: ClassVar[str]
    serves: ClassVar[bool] = False
    needs_anchor: ClassVar[bool] = False

    @property
    def batches(self) -> int:
        """How many batches a step takes."""
        return 1

    @property
    def gradients(self) -> int:
        """How many gradients a step takes."""
        return 1

    @property
    def vectors(self) -> int:
        """How many vectors like a model a client needs besides its model."""
        return 2

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is that of plain SGD, whose steps the rule takes the place of.

        Raises
        ------
        ConfigError
            If it is not; one line for each setting.
        """
        what = f"with the local rule {self.name!r}, which takes steps of SGD"
        require(
            ("local.optimizer", spec.optimizer, spec.optimizer == "sgd", f"'sgd' {what}"),
            ("local.options", dict(spec.options), not spec.options, f"empty {what}"),
            ("local.keep_state", spec.keep_state, not spec.keep_state, f"false {what}"),
            ("local.mu", spec.mu, spec.mu == 0, f"0 {what} without a proximal term"),
        )

    def described(self) -> dict[str, Any]:
        """Return its name and numbers, from which :func:`local_rule` makes it again."""
        return {"name": self.name, **asdict(self)}


@checked()
@dataclass(frozen=True, kw_only=True)
class Interpolation(LocalRule):
    """Beside w, train v where αv + (1−α)w stands, and be served with that: APFL (Deng et al. 2020).

    ``alpha`` is α where a client begins, and stays so unless it is ``adaptive``. It then moves as ``alpha_step`` says:
    in every step, as in the paper, or once a round, as in the authors' code.
    """

    name = "mixture"
    serves = True

    alpha: float
    adaptive: bool = False
    alpha_step: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        require(
            ("algorithm.alpha", self.alpha, 0 <= self.alpha <= 1, "in [0, 1]"),
            ("algorithm.alpha_step", self.alpha_step, self.alpha_step in ("paper", "code"), "'paper' or 'code'"),
        )

    @property
    def gradients(self) -> int:
        """Those at w and at the mixture."""
        return 2

    @property
    def vectors(self) -> int:
        """The personal model and the mixture, each with its gradient, and momentum."""
        return 6


@checked()
@dataclass(frozen=True, kw_only=True)
class MoreauEnvelope(LocalRule):
    """Move w towards the θ that is best near it, and be served with θ: pFedMe (Dinh et al. 2020).

    ``lam`` is λ, ``steps`` K, and ``lr`` the step size with which θ is found. With ``served = "w"`` clients are served
    with their w at the end of a round in place of θ, as in the authors' code.
    """

    name = "moreau_envelope"
    serves = True

    lam: float
    steps: int
    lr: float
    served: Literal["theta", "w"] = "theta"

    def __post_init__(self) -> None:
        require(
            ("algorithm.lam", self.lam, 0 < self.lam <= LARGEST, f"greater than 0 and at most {LARGEST:g}"),
            ("algorithm.steps", self.steps, self.steps >= 1, "at least 1"),
            ("algorithm.personal_lr", self.lr, 0 < self.lr <= LARGEST, f"greater than 0 and at most {LARGEST:g}"),
            ("algorithm.served", self.served, self.served in ("theta", "w"), "'theta' or 'w'"),
        )

    @property
    def gradients(self) -> int:
        """One for each step of θ."""
        return self.steps

    @property
    def vectors(self) -> int:
        """θ and its gradient, and momentum."""
        return 4


@checked()
@dataclass(frozen=True, kw_only=True)
class MetaLearning(LocalRule):
    """Descend on the loss after a step of size α: Per-FedAvg (Fallah et al. 2020).

    With ``hessian`` the Hessian's product with a gradient is taken by differences, ``delta`` times that to both sides.
    """

    name = "meta_learning"

    alpha: float
    hessian: bool
    delta: float

    def __post_init__(self) -> None:
        require(
            ("algorithm.alpha", self.alpha, 0 <= self.alpha <= LARGEST, f"at least 0 and at most {LARGEST:g}"),
            ("algorithm.delta", self.delta, 0 < self.delta <= LARGEST, f"greater than 0 and at most {LARGEST:g}"),
        )

    def check_training(self, spec: LocalTraining) -> None:
        """Check besides that with the Hessian nothing is clipped: of clipped gradients it would not be the product."""
        super().check_training(spec)
        holds = spec.clip_norm is None or not self.hessian
        require(("local.clip_norm", spec.clip_norm, holds, "left out with variant = 'HF'"))

    @property
    def batches(self) -> int:
        """D′ and D, and D″ of the Hessian."""
        return 3 if self.hessian else 2

    @property
    def gradients(self) -> int:
        """Those at w and after the step, and two of which the Hessian's product is the difference."""
        return 4 if self.hessian else 2

    @property
    def vectors(self) -> int:
        """The model after the step, both gradients, a point beside w, and momentum."""
        return 5


@checked()
@dataclass(frozen=True, kw_only=True)
class ControlVariates(LocalRule):
    """Add c − c_i to every gradient: SCAFFOLD (Karimireddy et al. 2020). The anchor is c, and c_i the client's own."""

    name = "control_variates"
    needs_anchor = True

    def check_training(self, spec: LocalTraining) -> None:
        """Check besides that steps have no momentum: c_i is read off their sum, which must be that of the gradients."""
        super().check_training(spec)
        require(("local.momentum", spec.momentum, not spec.momentum, f"0 with the local rule {self.name!r}"))


RULES: Mapping[str, type[LocalRule]] = {
    rule.name: rule for rule in (Interpolation, MoreauEnvelope, MetaLearning, ControlVariates)
}
"""Every rule by its name."""


def local_rule(described: Mapping[str, Any]) -> LocalRule:
    """Return the rule that :meth:`LocalRule.described` described.

    Raises
    ------
    ConfigError
        If there is none of that name, or it has other numbers.
    """
    numbers = dict(described)
    if not isinstance(name := numbers.pop("name", None), str) or name not in RULES:
        raise ConfigError(unknown("local rule", name, RULES))
    kind = RULES[name]
    arguments = check_arguments(f"local rule {name!r}", kind, numbers)
    try:
        return kind(**arguments)
    except TypeError as error:  # a number is missing
        raise ConfigError(f"local rule {name!r}: {error}") from error
