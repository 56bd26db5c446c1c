"""Local rules: what clients do in a step of their local training in place of a plain step of SGD.

A rule is numbers and a name, so that it travels with a query. What it does, and what it keeps with the client, is in
``training/local_rules.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

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
class Mixture(LocalRule):
    """Beside w, train v where αv + (1−α)w stands, and be served with that: APFL (Deng et al. 2020).

    ``alpha`` is α where a client begins, and stays so unless it is ``adaptive``.
    """

    name = "mixture"
    serves = True

    alpha: float
    adaptive: bool = False

    def __post_init__(self) -> None:
        require(("algorithm.alpha", self.alpha, 0 <= self.alpha <= 1, "in [0, 1]"))

    @property
    def gradients(self) -> int:
        """Those at w and at the mixture."""
        return 2

    @property
    def vectors(self) -> int:
        """The personal model and the mixture, each with its gradient, and momentum."""
        return 6


RULES: Mapping[str, type[LocalRule]] = {rule.name: rule for rule in (Mixture,)}
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


def finite_above(value: float, least: float = 0.0) -> bool:
    """Return whether a number is above another, and float32 can hold it."""
    return math.isfinite(value) and least < value <= LARGEST
