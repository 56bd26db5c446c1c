"""Local training of a client in a round: epochs, or steps, of an optimizer at a step size."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from fedclade.core.arguments import check_arguments, checked
from fedclade.core.errors import ConfigError, require, shown, unknown
from fedclade.core.plugins import imported

# Optimizers by name: those of ``torch.optim``, a user's own by ``module:name``, and the options
# that each takes.

OF_TORCH: Mapping[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
"""The classes of ``torch.optim`` by name, in small letters."""

OF_LOCAL_TRAINING: Mapping[str, float] = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
"""Arguments that local training gives, with what SGD takes where they are left out."""

NO_OPTIONS = ("params", "capturable", "differentiable", *OF_LOCAL_TRAINING)
"""Arguments that are no options: engines know which parameters there are, and how steps are recorded."""


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of a name.

    Raises
    ------
    ConfigError
        If there is none, or it needs more than one gradient for a step.
    """
    kind = OF_TORCH.get(name.lower())
    if kind is None and ":" in name:
        kind = imported(name, "optimizer")
        if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
            raise ConfigError(
                f"optimizer {shown(name)} should be a subclass of torch.optim.Optimizer"
            )
    if kind is None:
        raise ConfigError(unknown("optimizer", name, OF_TORCH))
    if issubclass(kind, torch.optim.LBFGS):
        raise ConfigError(
            f"optimizer {shown(name)} needs several gradients for a step; take another, such as "
            "adam"
        )
    return kind


def optimizer_name(kind: type[Any]) -> str:
    """Return the name by which a class is noted; a ConfigError if it has none."""
    name = next(
        (name for name, known in OF_TORCH.items() if known is kind),
        f"{kind.__module__}:{kind.__qualname__}",
    )
    if "<locals>" in name:
        raise ConfigError(
            f"optimizer {name} should be defined at the top of a module, by whose name it is noted"
        )
    return name


def own_defaults(kind: type[Optimizer]) -> dict[str, float]:
    """Return which of :data:`OF_LOCAL_TRAINING` an optimizer has, with what it takes where they are left out."""
    if kind is torch.optim.SGD:  # torch's step size for it is one that nobody wants
        return {**OF_LOCAL_TRAINING}
    parameters = inspect.signature(kind).parameters
    own = {name: parameters[name].default for name in OF_LOCAL_TRAINING if name in parameters}
    return {
        name: OF_LOCAL_TRAINING[name] if d is inspect.Parameter.empty else float(d)
        for name, d in own.items()
    }


def checked_options(
    kind: type[Optimizer], arguments: Mapping[str, float], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of an optimizer in the types that it says, given its other arguments.

    Raises
    ------
    ConfigError
        If one is unknown, of the wrong type or out of range; or if one belongs to local training
        itself.
    """
    name = kind.__name__
    if own := [option for option in options if option in OF_LOCAL_TRAINING]:
        raise ConfigError(
            "\n".join(
                f"local.options should not have {each}, give it as local.{each}" for each in own
            )
        )
    if kind is torch.optim.SGD and not options:  # whose arguments are in range
        return {}
    tuples = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    fitted = check_arguments(f"the options of {name}", kind, tuples, NO_OPTIONS, positional=True)
    try:
        parameter = nn.Parameter(torch.zeros(1, 1))
        parameter.grad = torch.zeros(1, 1)
        kind([parameter], **arguments, **fitted).step()
    except Exception as error:  # whatever torch, or the user's own class, finds wrong
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"optimizer {name} with local.options {shown(dict(options))} takes no step: "
            f"{first_line}"
        ) from error
    return fitted


PRECISIONS = ("float32", "bfloat16")

SMALLEST_BATCH = 4
"""Examples of a step on a part of a client's data, where a step on all of it has more: of fewer it is mostly noise."""

LARGEST = 3.4e38
"""Largest step size or weight of a penalty: float32 holds no larger number."""


@checked()
@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Local training: by default plain SGD, the SGD_n of eq. 1 of the CFL paper.

    Parameters
    ----------
    epochs
        Passes over the client's training data; n in CFL, E in FedAvg. 1 if neither these nor steps
        are given.
    batch_size
        Examples per step; the last batch of an epoch may be smaller. B in FedAvg.
    smallest_batch
        Examples that the last batch of an epoch must have, at most ``batch_size``; fewer are joined
        to the batch before. By default 1; a run takes 2 for a model that cannot train on one
        example, such as one with BatchNorm.
    lr
        Step size η in round 1. By default 0.1 with SGD, and with others what they take themselves.
    momentum
        In [0, 1), of optimizers that have one. It starts at zero in every round, unless
        ``keep_state``.
    weight_decay
        At least 0, in the optimizer's own way: an L2 penalty with SGD. By default the optimizer's
        own, which is 0.01 with AdamW, 0.1 with Muon, and 0 with others.
    lr_decay
        The step size is multiplied by this after every round, in (0, 1].
    mu
        Weight μ of the proximal term μ/2·‖θ − θ_anchor‖²; 0 leaves it out. The anchor is the model
        that the client starts from (FedProx), unless the algorithm names another (Ditto, whose λ
        this is).
    clip_norm
        Largest L2 norm of the gradient of a step: that of the mean loss over the batch and of the
        proximal term, before the optimizer sees it. A longer one is scaled down to it, as
        ``torch.nn.utils.clip_grad_norm_`` does; None leaves gradients as they are.
    steps
        Steps in place of epochs, the same number for every client: where an epoch ends before,
        another begins.
    optimizer
        A class of ``torch.optim``, or its name in any case; or a user's own class, or
        ``module:name``.
    options
        What else the optimizer takes, such as ``{"betas": (0.9, 0.99)}`` of Adam.
    precision
        Of the forward pass, by ``torch.autocast``: float32 or bfloat16. Parameters and gradients
        stay as they are.
    keep_state
        Whether a client keeps the state of its optimizer from round to round, rather than starting
        with a new one.
    reshuffle
        Whether a client puts its examples in a new random order before every epoch. If false, it
        splits them into batches once per round, and all epochs of the round pass through the same
        batches (FL+HC Algorithm 1, lines 27 to 32; FedGroup Algorithm 1, lines 11 to 13). Each
        training is split by itself: the epochs of FedRep's head and those of its representation
        pass through different batches, and so do the pre-training of FedGroup and the epochs that
        remain. DP-SGD draws every batch independently, whatever the value.

    Raises
    ------
    ConfigError
        If a value is out of range or unknown; one line for each.
    """

    epochs: int | None = None
    batch_size: int = 20
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    lr_decay: float = 1.0
    mu: float = 0.0
    clip_norm: float | None = None
    steps: int | None = None
    optimizer: str | type[Any] = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    precision: str = "float32"
    keep_state: bool = False
    smallest_batch: int | None = None
    reshuffle: bool = True

    def __post_init__(self) -> None:
        name = self.optimizer if isinstance(self.optimizer, str) else optimizer_name(self.optimizer)
        kind = optimizer_class(name)
        own = own_defaults(kind)
        given = {
            key: value for key in OF_LOCAL_TRAINING if (value := getattr(self, key)) is not None
        }
        arguments = {**OF_LOCAL_TRAINING, **own, **given}
        lr, momentum, weight_decay = arguments.values()
        epochs = 1 if self.epochs is None and self.steps is None else self.epochs
        scales = ("local.lr", lr), ("local.weight_decay", weight_decay), ("local.mu", self.mu)
        require(
            ("local.epochs", epochs, epochs is None or epochs >= 1, "at least 1"),
            ("local.steps", self.steps, self.steps is None or self.steps >= 1, "at least 1"),
            (
                "local.steps",
                self.steps,
                None in (self.steps, epochs),
                "left out where local.epochs is set",
            ),
            ("local.batch_size", self.batch_size, self.batch_size >= 1, "at least 1"),
            (
                "local.smallest_batch",
                self.smallest_batch,
                self.smallest_batch is None or 1 <= self.smallest_batch <= max(1, self.batch_size),
                f"at least 1 and at most local.batch_size, {self.batch_size}",
            ),
            ("local.lr", lr, lr > 0, "greater than 0"),
            ("local.momentum", momentum, 0 <= momentum < 1, "in [0, 1)"),
            ("local.weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
            ("local.lr_decay", self.lr_decay, 0 < self.lr_decay <= 1, "in (0, 1]"),
            ("local.mu", self.mu, self.mu >= 0, "at least 0"),
            (
                "local.clip_norm",
                self.clip_norm,
                self.clip_norm is None or self.clip_norm > 0,
                "greater than 0",
            ),
            (
                "local.precision",
                self.precision,
                self.precision in PRECISIONS,
                " or ".join(PRECISIONS),
            ),
            *((name, value, not value > LARGEST, f"at most {LARGEST:g}") for name, value in scales),
            *(
                (f"local.{key}", arguments[key], not arguments[key], f"0 with {name}")
                for key in given
                if key not in own
            ),
        )
        options = checked_options(kind, {key: arguments[key] for key in own}, self.options)
        name = name if ":" in name else name.lower()
        for key, value in {
            **arguments,
            "epochs": epochs,
            "optimizer": name,
            "options": options,
        }.items():
            object.__setattr__(self, key, value)

    def with_smallest_batch(self, examples: int) -> LocalTraining:
        """Return the same with batches of at least this number of examples, for a model that needs them.

        Raises
        ------
        ConfigError
            If batches have fewer.
        """
        if examples <= (self.smallest_batch or 1):
            return self
        if self.batch_size < examples:
            raise ConfigError(
                f"local.batch_size should be at least {examples} for a model that cannot be "
                "trained on fewer examples, such as one that normalises over the batch, got "
                f"{self.batch_size}"
            )
        return replace(self, smallest_batch=examples)

    def in_epochs(self, epochs: int) -> LocalTraining:
        """Return the same for so many epochs."""
        return replace(self, epochs=epochs, steps=None)

    def on_part(self, parts: int, examples: int = 0) -> LocalTraining:
        """Return the same for one of r parts of a client's data, in which an r-th as many examples pass.

        Of equal parts, which have so many examples, batches are an r-th as large, if that leaves
        :data:`SMALLEST_BATCH`: a part takes about as many steps as all of the data would. The step
        size goes by the square root of the batch's (Krizhevsky 2014, section 5), which leaves the
        variance of a step as it is. No batch is of one example, which BatchNorm does not take, if
        there is another way.
        """
        batch = self.batch_size
        if examples:
            batch = max(-(-batch // parts), min(SMALLEST_BATCH, batch))
            while batch < self.batch_size and examples % batch == 1:
                batch += 1
        share = self.batch_size / batch
        steps = None if self.steps is None else math.ceil(self.steps * share / parts)
        smallest = None if self.smallest_batch is None else min(self.smallest_batch, batch)
        lr = (self.lr or 0.0) / math.sqrt(share)
        return replace(self, steps=steps, batch_size=batch, smallest_batch=smallest, lr=lr)

    def batches_per_epoch(self, examples: int) -> int:
        """Return the number of batches in an epoch of a client with this number of examples."""
        return count_batches(examples, self.batch_size, self.smallest_batch or 1)

    def batch_sizes(self, examples: int) -> list[int]:
        """Return the sizes of the batches in an epoch of a client with this number of examples."""
        full = self.batches_per_epoch(examples) - 1
        return [self.batch_size] * full + [examples - full * self.batch_size]

    def epochs_with(self, examples: int) -> int:
        """Return how many epochs a client begins that has so many examples."""
        return self.epochs or -(-(self.steps or 0) // self.batches_per_epoch(examples))

    def steps_with(self, examples: int) -> int:
        """Return how many steps a client takes that has so many examples."""
        return self.steps or (self.epochs or 0) * self.batches_per_epoch(examples)

    def passed(self, examples: int) -> int:
        """Return how many examples pass in the steps of a client that has so many, each as often as it does."""
        epochs, rest = divmod(self.steps_with(examples), self.batches_per_epoch(examples))
        # only the last batch of an epoch is of another size
        return epochs * examples + rest * self.batch_size

    def lr_at(self, round_number: int) -> float:
        """Return the step size of a round, counted from 1."""
        return (self.lr or 0.0) * self.lr_decay ** (round_number - 1)


def count_batches(examples: int, batch_size: int, smallest_batch: int) -> int:
    """Return the number of batches in an epoch: the rule by which all engines and all counts of steps form batches.

    Batches are full but for the last one, which has the rest. A rest of fewer than
    ``smallest_batch`` examples is joined to the batch before; where there is none before, it is a
    batch all the same.
    """
    full, rest = divmod(examples, batch_size)
    if full > 0 and rest < smallest_batch:
        return full
    return full + 1 if rest else full


# Local rules: what clients do in a step of their local training in place of a plain step of SGD.
#
# A rule is numbers and a name, so that it travels with a query. What it does, and what it keeps
# with the client, is in ``training/local_rules.py``.


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

    ``alpha`` is α where a client begins, and stays so unless it is ``adaptive``. It then moves as
    ``alpha_step`` says: in every step, as in the paper, or once a round, as in the authors' code.
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

    ``lam`` is λ, ``steps`` K, and ``lr`` the step size with which θ is found. With ``served = "w"``
    clients are served with their w at the end of a round in place of θ, as in the authors' code.
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

    With ``hessian`` the Hessian's product with a gradient is taken by differences, ``delta`` times
    that to both sides.
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
