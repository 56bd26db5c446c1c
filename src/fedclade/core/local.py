"""Settings of a client's local training in one round: optimizer, epochs or steps, and batches.

The class :class:`LocalTraining` is the ``[local]`` section of a config. The module also contains
the rule by which all engines divide examples into mini-batches, see :func:`count_batches`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from fedclade.core.arguments import check_arguments, checked
from fedclade.core.errors import ConfigError, shown, unknown
from fedclade.core.plugins import check_function, imported, installed, name_of, named
from fedclade.core.schedules import factor_in, find_schedule
from fedclade.core.settings import (
    Check,
    about,
    as_section,
    at_least,
    check_settings,
    document_settings,
    greater_than,
    in_range,
    one_of,
    setting,
)

# Optimizers by name (of ``torch.optim``, or a user's own as ``module:name``) and their options.

OF_LOCAL_TRAINING: Mapping[str, float] = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
"""Optimizer arguments that have their own setting in ``[local]``, with their defaults for SGD."""

NO_OPTIONS = ("params", "capturable", "differentiable", *OF_LOCAL_TRAINING)
"""Optimizer arguments that users cannot set in ``local.options``.

The engines set ``params``, ``capturable`` and ``differentiable``. The remaining arguments have
their own setting in ``[local]``.
"""


@cache
def torch_optimizers() -> Mapping[str, type[torch.optim.Optimizer]]:
    """Return the optimizer classes of ``torch.optim`` by their names in lower case."""
    optimizers: dict[str, type[torch.optim.Optimizer]] = {}
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer):
            optimizers[name.lower()] = kind
    del optimizers["optimizer"]  # the base class
    return optimizers


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class of a given name.

    Parameters
    ----------
    name
        Name of a class in ``torch.optim``, in upper or lower case, or ``module:name``.

    Raises
    ------
    ConfigError
        If there is no such optimizer, or if it needs more than one gradient for a step.
    """
    kind = torch_optimizers().get(name.lower())
    if kind is None and ":" in name:
        kind = imported(name, "optimizer")
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError(
                f"optimizer {shown(name)} should name a subclass of torch.optim.Optimizer"
            )
    if kind is None:
        raise ConfigError(unknown("optimizer", name, torch_optimizers()))
    if issubclass(kind, torch.optim.LBFGS):
        raise ConfigError(
            f"optimizer {shown(name)} is not supported, since it needs several gradients for a "
            "step; choose another optimizer, such as 'adam'"
        )
    return kind


def optimizer_name(kind: type[Any]) -> str:
    """Return the name by which a run's config records an optimizer class.

    Raises
    ------
    ConfigError
        If the class is defined in a function, so that it cannot be imported by a name.
    """
    name = next(
        (name for name, known in torch_optimizers().items() if known is kind),
        f"{kind.__module__}:{kind.__qualname__}",
    )
    if "<locals>" in name:
        raise ConfigError(
            f"optimizer {name} should be defined at the top level of a module, not inside a "
            "function, since a run's config records the class by a name that can be imported"
        )
    return name


def own_defaults(kind: type[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the defaults of an optimizer's step size, momentum and weight decay, by argument name.

    Arguments that the optimizer does not have are left out. The defaults are those of the
    optimizer's class. For SGD, and for arguments without a default in the class, the values in
    :data:`OF_LOCAL_TRAINING` are used instead.
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
    kind: type[torch.optim.Optimizer], arguments: Mapping[str, float], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Check a user's options of an optimizer, and convert them to the declared types.

    The check includes a trial step of the optimizer.

    Parameters
    ----------
    kind
        The optimizer class.
    arguments
        Arguments of the optimizer that have their own setting in ``[local]``, see
        :data:`OF_LOCAL_TRAINING`.
    options
        All other arguments of the optimizer, as the user set them in ``local.options``.

    Returns
    -------
    dict
        The converted options by name.

    Raises
    ------
    ConfigError
        If an option is unknown, has the wrong type or is out of range, or if it has its own setting
        in ``[local]``.
    """
    name = kind.__name__
    if own := [option for option in options if option in OF_LOCAL_TRAINING]:
        raise ConfigError(
            "\n".join(
                f"local.options should not contain {each}; set local.{each} instead" for each in own
            )
        )
    tuples = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    fitted = check_arguments(f"the options of {name}", kind, tuples, NO_OPTIONS, positional=True)
    try:
        parameter = torch.nn.Parameter(torch.zeros(1, 1))
        parameter.grad = torch.zeros(1, 1)
        kind([parameter], **arguments, **fitted).step()
    except Exception as error:  # an optimizer, which may be the user's, can raise anything
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"optimizer {name} with local.options {shown(dict(options))} failed in a trial step: "
            f"{first_line}; correct local.options, or choose another optimizer"
        ) from error
    return fitted


ROUNDING = 1e-9
"""Tolerance by which a product of epochs and batches may exceed a whole number."""


# A user's own training function, ``fn(model, batches, context)``.


def trainer_function(trainer: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the training function of a given name, or the function itself.

    Parameters
    ----------
    trainer
        A function, or its name: an entry point of the group ``fedclade.trainers``, or
        ``module:name``.

    Raises
    ------
    ConfigError
        If there is no such function, or if it does not take a model, batches and a context.
    """
    found = trainer
    what = "trainer"
    if isinstance(trainer, str):
        found = named("trainers", trainer, {}, "trainer")
        what = f"trainer {shown(trainer)}"
    if inspect.isclass(found):
        raise ConfigError(
            f"{what} should be a function, got the class {found.__name__}; an algorithm uses such "
            "a class as the steps of its ClientWork, for example ClientWork(steps="
            f"{found.__name__}(...))"
        )
    return check_function(
        found, what, "the mean training loss", takes=("model", "batches", "context")
    )


def trainer_name(trainer: str | Callable[..., Any]) -> str:
    """Return the name of a training function, by which a run's config records it.

    A function that cannot be imported by a name, such as a function of ``__main__``, has its
    ``__name__`` as its name.

    Raises
    ------
    ConfigError
        If the trainer is an object without a name, such as ``functools.partial``.
    """
    if isinstance(trainer, str):
        return trainer
    if not hasattr(trainer, "__qualname__"):
        raise ConfigError(
            f"trainer should be a function, got {shown(trainer)}; define a function that calls it"
        )
    return name_of("trainers", trainer, {})


PRECISIONS = ("float32", "bfloat16")

SMALLEST_BATCH = 4
"""Lower bound, in examples, on the reduced batch size for training on a part of a client's data.

A gradient step on fewer examples is mostly noise.
"""

LARGEST = 3.4e38
"""Largest allowed step size or weight of a penalty; float32 has no larger numbers."""


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Settings of a client's local training in one round (section ``[local]`` of a config).

    By default, a client trains by plain SGD, as SGD_n in eq. 1 of the CFL paper.

    Raises
    ------
    ConfigError
        If a value is out of range or unknown; the message has a line for each such value.
    """

    epochs: int | float | None = setting(
        None,
        greater_than(0),
        doc="""Passes over the client's training data; n in CFL, E in FedAvg. By default 1, unless
        ``steps`` is set. A fraction is possible: with 0.5, a client trains on half of its batches,
        rounded up.""",
    )
    batch_size: int = setting(
        20,
        at_least(1),
        doc="Examples per step; the last batch of an epoch may be smaller. B in FedAvg.",
    )
    lr: float | None = setting(
        None,
        greater_than(0),
        doc="""Step size η in round 1. By default 0.1 with SGD, and the optimizer's own default with
        others.""",
    )
    momentum: float | None = setting(
        None,
        in_range("[0, 1)"),
        doc="""In [0, 1), for optimizers that have momentum. It starts at zero in every round,
        unless ``keep_state`` is set.""",
    )
    weight_decay: float | None = setting(
        None,
        at_least(0),
        doc="""At least 0, applied in the optimizer's own way: an L2 penalty with SGD. By default
        the optimizer's own value, which is 0.01 with AdamW, 0.1 with Muon, and 0 with others.""",
    )
    lr_decay: float = setting(
        1.0,
        in_range("(0, 1]"),
        doc="Factor by which the step size is multiplied after every round, in (0, 1].",
    )
    lr_schedule: str | Callable[..., Any] | None = setting(
        None,
        doc="""Schedule of the step size: in round t of T rounds, ``lr`` is multiplied by
        ``cosine``, ½(1 + cos(π(t − 1)/T)); ``step``, 1, then 1/10 after half and 1/100 after three
        quarters of the rounds; ``warmup_cosine``, a linear warm-up over the first tenth and then a
        cosine; or by the result of ``module:function``, or of a function, of t and T.""",
        later=True,
    )
    mu: float = setting(
        0.0,
        at_least(0),
        doc="""Weight μ of the proximal term μ/2·‖θ − θ_anchor‖²; 0 leaves the term out. The anchor
        is the model that the client starts from (FedProx), unless the algorithm names another one
        (Ditto, whose λ this is).""",
    )
    clip_norm: float | None = setting(
        None,
        greater_than(0),
        doc="""Largest L2 norm of the gradient of a step: the gradient of the mean loss over the
        batch and of the proximal term, before the optimizer uses it. A longer gradient is scaled
        down to this norm, as by ``torch.nn.utils.clip_grad_norm_``; None leaves gradients
        unchanged.""",
    )
    steps: int | None = setting(
        None,
        at_least(1),
        doc="""Number of steps, used in place of epochs and the same for every client: if an epoch
        ends earlier, another one begins.""",
    )
    optimizer: str | type[Any] = setting(
        "sgd",
        doc="""A class of ``torch.optim`` or its name in any case; or a user's own class, or
        ``module:name``.""",
    )
    options: Mapping[str, Any] = field(
        default_factory=dict[str, Any],
        hash=False,
        metadata=about(
            doc="Further arguments of the optimizer, such as ``{'betas': (0.9, 0.99)}`` of Adam."
        ),
    )
    precision: str = setting(
        "float32",
        one_of(*PRECISIONS, text=" or ".join(PRECISIONS)),
        doc="""Precision of the forward pass, by ``torch.autocast``: float32 or bfloat16. Parameters
        and gradients keep their type.""",
    )
    keep_state: bool = setting(
        False,
        doc="""Whether a client stores the state of its optimizer from round to round, rather than
        starting with a new state.""",
    )
    smallest_batch: int | None = setting(
        None,
        doc="""Smallest number of examples in the last batch of an epoch, at most ``batch_size``. A
        smaller last batch is joined to the batch before it. By default 1; a run uses 2 for a model
        that cannot train on one example, such as a model with BatchNorm.""",
    )
    reshuffle: bool = setting(
        True,
        doc="""Whether a client puts its examples in a new random order before every epoch. If
        false, it splits them into batches once per round, and all epochs of the round use the same
        batches (FL+HC Algorithm 1, lines 27 to 32; FedGroup Algorithm 1, lines 11 to 13). Each
        training is split separately: the epochs of FedRep's head and the epochs of its
        representation use different batches, and so do the pre-training of FedGroup and the epochs
        that remain. DP-SGD draws every batch independently, whatever the value.""",
    )
    trainer: str | Callable[..., Any] | None = setting(
        None,
        doc="""A training function of your own, ``fn(model, batches, context)``, or its name:
        ``module:name``, or a name that a package registers. It trains one client and replaces the
        optimizer's steps. By default clients take the optimizer's steps.""",
        later=True,
    )

    def __post_init__(self) -> None:
        if self.lr_schedule is not None and not _is_reference(self.lr_schedule):
            find_schedule(self.lr_schedule)  # raises an error now, not in round 1
        name = self.optimizer if isinstance(self.optimizer, str) else optimizer_name(self.optimizer)
        # Plain SGD, the default, is checked without an import of torch.
        kind = None if name.lower() == "sgd" and not self.options else optimizer_class(name)
        own = OF_LOCAL_TRAINING if kind is None else own_defaults(kind)
        given = {
            key: value for key in OF_LOCAL_TRAINING if (value := getattr(self, key)) is not None
        }
        arguments = {**OF_LOCAL_TRAINING, **own, **given}
        epochs = 1 if self.epochs is None and self.steps is None else self.epochs
        if isinstance(epochs, float) and epochs.is_integer():
            epochs = int(epochs)  # recorded as a whole number
        # Store the defaults that were filled in; the dataclass is frozen.
        for key, value in {**arguments, "epochs": epochs}.items():
            object.__setattr__(self, key, value)
        unused = {key: value for key, value in given.items() if key not in own}
        self._check_values(name, unused)
        options: dict[str, Any] = {}
        if kind is not None:
            options = checked_options(kind, {key: arguments[key] for key in own}, self.options)
        name = name if ":" in name else name.lower()
        object.__setattr__(self, "optimizer", name)
        object.__setattr__(self, "options", options)
        if self.trainer is not None:
            object.__setattr__(self, "trainer", _importable(self.trainer))

    def _check_values(self, optimizer: str, unused: Mapping[str, Any]) -> None:
        """Check all settings; the optimizer does not take those in ``unused``: they should be 0."""
        smallest = self.smallest_batch
        requirements: list[Check] = [
            (
                "local.steps",
                self.steps,
                None in (self.steps, self.epochs),
                "left out if local.epochs is set",
            ),
            (
                "local.lr_decay",
                self.lr_decay,
                self.lr_schedule is None or self.lr_decay == 1,
                "1, or left out, with local.lr_schedule",
            ),
            (
                "local.smallest_batch",
                smallest,
                smallest is None or 1 <= smallest <= max(1, self.batch_size),
                f"at least 1 and at most local.batch_size, {self.batch_size}",
            ),
        ]
        if self.trainer is not None:
            what = "false with local.trainer, which creates its own optimizer"
            requirements.append(("local.keep_state", self.keep_state, not self.keep_state, what))
        for key in ("lr", "weight_decay", "mu"):
            value = getattr(self, key)
            requirements.append(
                (f"local.{key}", value, not value > LARGEST, f"at most {LARGEST:g}")
            )
        for key, value in unused.items():
            requirements.append((f"local.{key}", value, not value, f"0 with {optimizer}"))
        check_settings(self, "local", *requirements)

    @property
    def described(self) -> dict[str, Any]:
        """The settings as a section of a config, with a training function replaced by its name."""
        section = as_section(self)
        if self.trainer is not None:
            section["trainer"] = trainer_name(self.trainer)
        return section

    def with_smallest_batch(self, examples: int) -> LocalTraining:
        """Return the settings with ``smallest_batch`` raised to the number that a model needs.

        Parameters
        ----------
        examples
            Number of examples in the smallest batch on which the model can be trained.

        Raises
        ------
        ConfigError
            If ``batch_size`` is smaller than ``examples``.
        """
        if examples <= (self.smallest_batch or 1):
            return self
        if self.batch_size < examples:
            raise ConfigError(
                f"local.batch_size should be at least {examples} for a model that cannot be "
                "trained on fewer examples, such as a model with BatchNorm, got "
                f"{self.batch_size}"
            )
        return replace(self, smallest_batch=examples)

    def in_epochs(self, epochs: float) -> LocalTraining:
        """Return the settings with a number of epochs, which replaces a number of steps if set."""
        return replace(self, epochs=epochs, steps=None)

    def repeated(self, times: int) -> LocalTraining:
        """Return the settings with ``times`` as many epochs, or as many steps if these are set."""
        if self.steps is not None:
            return replace(self, steps=self.steps * times)
        return replace(self, epochs=(self.epochs or 1) * times)

    def on_part(self, parts: int, examples: int = 0) -> LocalTraining:
        """Return adapted settings for training on one of several parts of a client's data.

        If the data is divided into r parts, training on one part processes about 1/r as many
        examples as training on all the data.

        If all parts have the same size, the batch size is divided by r, so that training on a part
        takes about as many steps as training on all the data. The new batch size is at least
        :data:`SMALLEST_BATCH` examples (or the old batch size if that is smaller). It is increased
        if the last batch of an epoch would otherwise have a single example, which BatchNorm does
        not accept. The step size is multiplied by the square root of the new over the old batch
        size (Krizhevsky 2014, section 5), which leaves the variance of a step unchanged.

        If the parts differ in size, batch size and step size do not change, and training on a part
        takes fewer steps.

        Parameters
        ----------
        parts
            Number r of parts.
        examples
            Number of examples in each part if all parts have the same size; otherwise 0.
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
        """Return the number of mini-batches per epoch for a client with ``examples`` examples."""
        return count_batches(examples, self.batch_size, self.smallest_batch or 1)

    def batch_sizes(self, examples: int) -> list[int]:
        """Return the sizes of the mini-batches of an epoch, given a client's number of examples."""
        full = self.batches_per_epoch(examples) - 1
        return [self.batch_size] * full + [examples - full * self.batch_size]

    def epochs_with(self, examples: int) -> int:
        """Return the number of epochs per round for a client with ``examples`` examples.

        If the settings specify a number of steps or a fraction, the last epoch may be incomplete.
        """
        if self.epochs is not None:
            return math.ceil(self.epochs)
        return -(-(self.steps or 0) // self.batches_per_epoch(examples))

    def steps_with(self, examples: int) -> int:
        """Return the number of steps per round for a client with ``examples`` training examples."""
        if self.steps is not None:
            return self.steps
        # The exact product of a decimal fraction, such as 0.1 of 10 batches, may be rounded up.
        steps = math.ceil((self.epochs or 0) * self.batches_per_epoch(examples) - ROUNDING)
        return max(1, steps)

    @property
    def has_whole_epochs(self) -> bool:
        """Whether each client trains for the same whole number of epochs."""
        return isinstance(self.epochs, int)

    def passed(self, examples: int) -> int:
        """Return the number of examples that a client processes in a round, with repetitions.

        An example counts once for each epoch in which it is used.

        Parameters
        ----------
        examples
            Number of the client's training examples.
        """
        epochs, rest = divmod(self.steps_with(examples), self.batches_per_epoch(examples))
        # only the last batch of an epoch has another size
        return epochs * examples + rest * self.batch_size

    def in_round(self, number: int, rounds: int) -> LocalTraining:
        """Return the settings of one round, with the step size of the schedule and no schedule.

        The server computes the step size, since clients do not know the number of rounds.

        Parameters
        ----------
        number
            Number of the round, from 1.
        rounds
            Number of rounds of the run.
        """
        if self.lr_schedule is None:
            return self
        factor = factor_in(self.lr_schedule, max(1, number), max(1, number, rounds))
        return replace(self, lr=(self.lr or 0.0) * factor, lr_schedule=None)

    def lr_at(self, round_number: int) -> float:
        """Return the step size (learning rate) in a round; rounds are numbered from 1."""
        return (self.lr or 0.0) * self.lr_decay ** (round_number - 1)


def _is_reference(value: object) -> bool:
    """Return whether a value is a name ``module:name``, whose module is imported only in use."""
    return isinstance(value, str) and ":" in value


def _importable(trainer: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Return the name of a training function if the function can be imported by it.

    A name can be recorded and sent to other processes. The result for any other function is the
    function itself.
    """
    trainer_function(trainer)
    name = trainer_name(trainer)
    if isinstance(trainer, str) or ":" in name or name in installed("trainers"):
        return name
    return trainer


def count_batches(examples: int, batch_size: int, smallest_batch: int) -> int:
    """Return the number of mini-batches into which an epoch over ``examples`` examples is divided.

    All engines divide examples by this rule, and all counts of steps use it. Every batch has
    ``batch_size`` examples except the last batch, which has the remaining examples. If fewer than
    ``smallest_batch`` examples remain, they are added to the batch before; if there is no batch
    before, they are used as the only batch.
    """
    full, rest = divmod(examples, batch_size)
    if full > 0 and rest < smallest_batch:
        return full
    return full + 1 if rest else full
