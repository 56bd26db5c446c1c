"""Local training of a client in one round: a number of epochs or steps of an optimizer."""

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

# Optimizers by name (of ``torch.optim``, or a user's own as ``module:name``) and their options.

OF_TORCH: Mapping[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
"""The classes of ``torch.optim`` by name, in lower case."""

OF_LOCAL_TRAINING: Mapping[str, float] = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
"""Optimizer arguments that are settings of local training itself, with their defaults for SGD."""

NO_OPTIONS = ("params", "capturable", "differentiable", *OF_LOCAL_TRAINING)
"""Optimizer arguments that are not options.

The engines set them (parameters, and how steps are recorded), or local training has settings of its
own for them.
"""


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the optimizer class that a name stands for.

    Parameters
    ----------
    name
        A class of ``torch.optim`` in any case, or ``module:name``.

    Raises
    ------
    ConfigError
        If there is no such optimizer, or it needs more than one gradient for a step.
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
    """Return the name by which a config notes an optimizer class.

    Raises
    ------
    ConfigError
        If the class is defined in a function, so that it cannot be imported by a name.
    """
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
    """Return the arguments in :data:`OF_LOCAL_TRAINING` that an optimizer has, with defaults.

    The defaults are the optimizer's own, or those of :data:`OF_LOCAL_TRAINING` for SGD and for
    arguments without a default.
    """
    if kind is torch.optim.SGD:  # torch's default step size for SGD is of no practical use
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
    """Return the options of an optimizer, converted to the types that it declares.

    Parameters
    ----------
    kind
        The optimizer.
    arguments
        Its arguments that local training sets, see :data:`OF_LOCAL_TRAINING`.
    options
        All other arguments, as the user set them.

    Raises
    ------
    ConfigError
        If an option is unknown, of the wrong type or out of range, or if it is a setting of local
        training itself.
    """
    name = kind.__name__
    if own := [option for option in options if option in OF_LOCAL_TRAINING]:
        raise ConfigError(
            "\n".join(
                f"local.options should not have {each}, give it as local.{each}" for each in own
            )
        )
    if kind is torch.optim.SGD and not options:  # its arguments are checked already
        return {}
    tuples = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    fitted = check_arguments(f"the options of {name}", kind, tuples, NO_OPTIONS, positional=True)
    try:
        parameter = nn.Parameter(torch.zeros(1, 1))
        parameter.grad = torch.zeros(1, 1)
        kind([parameter], **arguments, **fitted).step()
    except Exception as error:  # an optimizer, which may be the user's, can raise anything
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"optimizer {name} with local.options {shown(dict(options))} takes no step: "
            f"{first_line}"
        ) from error
    return fitted


PRECISIONS = ("float32", "bfloat16")

SMALLEST_BATCH = 4
"""Smallest batch, in examples, to which batches are reduced for parts of a client's data.

A step on fewer examples is mostly noise.
"""

LARGEST = 3.4e38
"""Largest step size or weight of a penalty: float32 has no larger number."""


@checked()
@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Settings of local training: by default plain SGD, the SGD_n of eq. 1 of the CFL paper.

    Parameters
    ----------
    epochs
        Passes over the client's training data; n in CFL, E in FedAvg. By default 1, unless
        ``steps`` is set.
    batch_size
        Examples per step; the last batch of an epoch may be smaller. B in FedAvg.
    smallest_batch
        Examples that the last batch of an epoch must have, at most ``batch_size``; a smaller rest
        is joined to the batch before. By default 1; a run uses 2 for a model that cannot train on
        one example, such as one with BatchNorm.
    lr
        Step size η in round 1. By default 0.1 with SGD, and the optimizer's own default with
        others.
    momentum
        In [0, 1), for optimizers that have momentum. It starts at zero in every round, unless
        ``keep_state`` is set.
    weight_decay
        At least 0, applied in the optimizer's own way: an L2 penalty with SGD. By default the
        optimizer's own value, which is 0.01 with AdamW, 0.1 with Muon, and 0 with others.
    lr_decay
        Factor by which the step size is multiplied after every round, in (0, 1].
    mu
        Weight μ of the proximal term μ/2·‖θ − θ_anchor‖²; 0 leaves the term out. The anchor is the
        model that the client starts from (FedProx), unless the algorithm names another one (Ditto,
        whose λ this is).
    clip_norm
        Largest L2 norm of the gradient of a step: the gradient of the mean loss over the batch and
        of the proximal term, before the optimizer uses it. A longer gradient is scaled down to this
        norm, as by ``torch.nn.utils.clip_grad_norm_``; None leaves gradients unchanged.
    steps
        Number of steps, used in place of epochs and the same for every client: if an epoch ends
        earlier, another one begins.
    optimizer
        A class of ``torch.optim`` or its name in any case; or a user's own class, or
        ``module:name``.
    options
        Further arguments of the optimizer, such as ``{"betas": (0.9, 0.99)}`` of Adam.
    precision
        Precision of the forward pass, by ``torch.autocast``: float32 or bfloat16. Parameters and
        gradients keep their type.
    keep_state
        Whether a client stores the state of its optimizer from round to round, rather than starting
        with a new state.
    reshuffle
        Whether a client puts its examples in a new random order before every epoch. If false, it
        splits them into batches once per round, and all epochs of the round use the same batches
        (FL+HC Algorithm 1, lines 27 to 32; FedGroup Algorithm 1, lines 11 to 13). Each training is
        split separately: the epochs of FedRep's head and the epochs of its representation use
        different batches, and so do the pre-training of FedGroup and the epochs that remain. DP-SGD
        draws every batch independently, whatever the value.

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
        # Store the defaults that were filled in; the dataclass is frozen.
        for key, value in {
            **arguments,
            "epochs": epochs,
            "optimizer": name,
            "options": options,
        }.items():
            object.__setattr__(self, key, value)

    def with_smallest_batch(self, examples: int) -> LocalTraining:
        """Return these settings with batches that are large enough for a model.

        Parameters
        ----------
        examples
            Smallest batch that the model can be trained on.

        Raises
        ------
        ConfigError
            If ``batch_size`` is smaller.
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
        """Return these settings with the given number of epochs, in place of epochs or steps."""
        return replace(self, epochs=epochs, steps=None)

    def on_part(self, parts: int, examples: int = 0) -> LocalTraining:
        """Return these settings for one of several parts of a client's data.

        Training on one part passes through about 1/r as many examples as training on all the data,
        r being the number of parts.

        For equal parts, batches are smaller by the factor r, but have at least
        :data:`SMALLEST_BATCH` examples: training on a part then takes about as many steps as
        training on all the data. The step size is scaled by the square root of the batch size
        (Krizhevsky 2014, section 5), which leaves the variance of a step unchanged. Batch sizes
        that would leave a last batch of one example, which BatchNorm does not accept, are avoided
        if possible.

        Parameters
        ----------
        parts
            Number r of parts.
        examples
            Number of examples in each part if all are equally large; 0 if they are not.
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
        """Return the number of epochs that a client with this number of examples begins."""
        return self.epochs or -(-(self.steps or 0) // self.batches_per_epoch(examples))

    def steps_with(self, examples: int) -> int:
        """Return the number of steps that a client with this number of examples takes."""
        return self.steps or (self.epochs or 0) * self.batches_per_epoch(examples)

    def passed(self, examples: int) -> int:
        """Return the number of examples, with repetitions, in all steps of a client.

        Parameters
        ----------
        examples
            Number of the client's training examples. Each counts once for each epoch in which it is
            used.
        """
        epochs, rest = divmod(self.steps_with(examples), self.batches_per_epoch(examples))
        # only the last batch of an epoch has another size
        return epochs * examples + rest * self.batch_size

    def lr_at(self, round_number: int) -> float:
        """Return the step size of a round, numbered from 1."""
        return (self.lr or 0.0) * self.lr_decay ** (round_number - 1)


def count_batches(examples: int, batch_size: int, smallest_batch: int) -> int:
    """Return the number of batches in an epoch.

    All engines form batches by this rule, and all counts of steps use it. Batches are full except
    for the last one, which has the rest. A rest of fewer than ``smallest_batch`` examples is joined
    to the batch before; if it is the only batch, it is used as it is.
    """
    full, rest = divmod(examples, batch_size)
    if full > 0 and rest < smallest_batch:
        return full
    return full + 1 if rest else full


# Local rules, which replace the plain step of SGD in local training.
#
# A rule consists of a name and numbers, so that it can be sent with a query. Its steps, and the
# tensors that a client stores for it, are defined in ``training/local_rules.py``.


@dataclass(frozen=True, kw_only=True)
class LocalRule:
    """Rule that replaces plain steps of SGD. :data:`RULES` lists all rules.

    Attributes
    ----------
    name
        Name by which a query refers to the rule.
    serves
        Whether the rule gives each client a model of its own, with which the client is evaluated.
    needs_anchor
        Whether a client is sent a second vector ``[S]``, in the row of its anchor.
    batches
        Number of batches that a step takes, each from its own random order of the examples.
    vectors
        Number of vectors of the size of a model that a client needs in addition to its model.
    """

    name: ClassVar[str]
    serves: ClassVar[bool] = False
    needs_anchor: ClassVar[bool] = False

    @property
    def batches(self) -> int:
        """Number of batches that a step takes."""
        return 1

    @property
    def gradients(self) -> int:
        """Number of gradients that a step takes."""
        return 1

    @property
    def vectors(self) -> int:
        """Number of vectors of the size of a model that a client needs in addition to its model."""
        return 2

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is set to plain SGD, whose steps the rule replaces.

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
        """Return the rule's name and numbers, from which :func:`local_rule` builds it again."""
        return {"name": self.name, **asdict(self)}


@checked()
@dataclass(frozen=True, kw_only=True)
class Interpolation(LocalRule):
    """Rule of APFL (Deng et al. 2020): train w, and v at the mixture αv + (1−α)w.

    Clients are evaluated with the mixture.

    Parameters
    ----------
    alpha
        α in [0, 1] with which a client begins. It stays constant unless it is ``adaptive``.
    adaptive
        Whether each client adapts its α by gradient descent.
    alpha_step
        ``paper``: α changes in every step, as in the paper; ``code``: once per round, as in the
        authors' code.
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
        """Two gradients per step: at w and at the mixture."""
        return 2

    @property
    def vectors(self) -> int:
        """The personal model and the mixture, a gradient of each, and momentum."""
        return 6


@checked()
@dataclass(frozen=True, kw_only=True)
class MoreauEnvelope(LocalRule):
    """Rule of pFedMe (Dinh et al. 2020): move w towards θ, the best model near w.

    Clients are evaluated with θ.

    Parameters
    ----------
    lam
        λ, weight of the penalty on the distance from θ to w.
    steps
        K, number of steps by which θ is found on each batch.
    lr
        Step size of these steps.
    served
        ``w``: clients are evaluated with their w at the end of a round in place of θ, as in the
        authors' code.
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
        """K gradients per step: one for each step of θ."""
        return self.steps

    @property
    def vectors(self) -> int:
        """θ and its gradient, and momentum."""
        return 4


@checked()
@dataclass(frozen=True, kw_only=True)
class MetaLearning(LocalRule):
    """Rule of Per-FedAvg (Fallah et al. 2020): descend on the loss after a step of size α.

    Parameters
    ----------
    alpha
        α, size of the inner step.
    hessian
        Whether the product of the Hessian and the gradient is computed (variant HF), by central
        differences; if false, it is left out (variant FO).
    delta
        δ of these differences: the two points are w ± δ times the gradient.
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
        """Also check that gradients are not clipped in variant HF.

        The difference of clipped gradients would not be the Hessian's product.
        """
        super().check_training(spec)
        holds = spec.clip_norm is None or not self.hessian
        require(("local.clip_norm", spec.clip_norm, holds, "left out with variant = 'HF'"))

    @property
    def batches(self) -> int:
        """Batches D′ and D, and with the Hessian D″."""
        return 3 if self.hessian else 2

    @property
    def gradients(self) -> int:
        """Number of gradients that a step takes.

        Two are taken at w and after the inner step; with the Hessian, its product is the difference
        of two more.
        """
        return 4 if self.hessian else 2

    @property
    def vectors(self) -> int:
        """The model after the inner step, both gradients, a point near w, and momentum."""
        return 5


@checked()
@dataclass(frozen=True, kw_only=True)
class ControlVariates(LocalRule):
    """Rule of SCAFFOLD (Karimireddy et al. 2020): add c − c_i to every gradient.

    The client's anchor is c; the client stores c_i itself.
    """

    name = "control_variates"
    needs_anchor = True

    def check_training(self, spec: LocalTraining) -> None:
        """Also check that steps have no momentum.

        The rule computes c_i from the sum of a client's steps, which must be the sum of its
        gradients.
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
"""All rules by name."""


def local_rule(described: Mapping[str, Any]) -> LocalRule:
    """Return the rule that :meth:`LocalRule.described` describes.

    Raises
    ------
    ConfigError
        If no rule has this name, or the rule has other numbers.
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
