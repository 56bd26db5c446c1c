"""Local training of a client in a round: epochs, or steps, of an optimizer at a step size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedclade.core.arguments import checked
from fedclade.core.errors import ConfigError, require
from fedclade.core.optimizers import OF_LOCAL_TRAINING, checked_options, optimizer_class, optimizer_name, own_defaults

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
        Passes over the client's training data; n in CFL, E in FedAvg. 1 if neither these nor steps are given.
    batch_size
        Examples per step; the last batch of an epoch may be smaller. B in FedAvg.
    smallest_batch
        Examples that the last batch of an epoch must have, at most ``batch_size``; fewer are joined to the batch
        before. By default 1; a run takes 2 for a model that cannot train on one example, such as one with BatchNorm.
    lr
        Step size η in round 1. By default 0.1 with SGD, and with others what they take themselves.
    momentum
        In [0, 1), of optimizers that have one. It starts at zero in every round, unless ``keep_state``.
    weight_decay
        At least 0, in the optimizer's own way: an L2 penalty with SGD. By default the optimizer's own, which is 0.01
        with AdamW, 0.1 with Muon, and 0 with others.
    lr_decay
        The step size is multiplied by this after every round, in (0, 1].
    mu
        Weight μ of the proximal term μ/2·‖θ − θ_anchor‖²; 0 leaves it out. The anchor is the model that the client
        starts from (FedProx), unless the algorithm names another (Ditto, whose λ this is).
    clip_norm
        Largest L2 norm of the gradient of a step: that of the mean loss over the batch and of the proximal term, before
        the optimizer sees it. A longer one is scaled down to it, as ``torch.nn.utils.clip_grad_norm_`` does; None
        leaves gradients as they are.
    steps
        Steps in place of epochs, the same number for every client: where an epoch ends before, another begins.
    optimizer
        A class of ``torch.optim``, or its name in any case; or a user's own class, or ``module:name``.
    options
        What else the optimizer takes, such as ``{"betas": (0.9, 0.99)}`` of Adam.
    precision
        Of the forward pass, by ``torch.autocast``: float32 or bfloat16. Parameters and gradients stay as they are.
    keep_state
        Whether a client keeps the state of its optimizer from round to round, rather than starting with a new one.
    reshuffle
        Whether a client puts its examples in a new random order before every epoch. If false, it splits them into
        batches once per round, and all epochs of the round pass through the same batches (FL+HC Algorithm 1, lines 27
        to 32; FedGroup Algorithm 1, lines 11 to 13). DP-SGD draws every batch independently, whatever the value.

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
        given = {key: value for key in OF_LOCAL_TRAINING if (value := getattr(self, key)) is not None}
        arguments = {**OF_LOCAL_TRAINING, **own, **given}
        lr, momentum, weight_decay = arguments.values()
        epochs = 1 if self.epochs is None and self.steps is None else self.epochs
        scales = ("local.lr", lr), ("local.weight_decay", weight_decay), ("local.mu", self.mu)
        require(
            ("local.epochs", epochs, epochs is None or epochs >= 1, "at least 1"),
            ("local.steps", self.steps, self.steps is None or self.steps >= 1, "at least 1"),
            ("local.steps", self.steps, None in (self.steps, epochs), "left out where local.epochs is set"),
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
            ("local.clip_norm", self.clip_norm, self.clip_norm is None or self.clip_norm > 0, "greater than 0"),
            ("local.precision", self.precision, self.precision in PRECISIONS, " or ".join(PRECISIONS)),
            *((name, value, not value > LARGEST, f"at most {LARGEST:g}") for name, value in scales),
            *(
                (f"local.{key}", arguments[key], not arguments[key], f"0 with {name}")
                for key in given
                if key not in own
            ),
        )
        options = checked_options(kind, {key: arguments[key] for key in own}, self.options)
        name = name if ":" in name else name.lower()
        for key, value in {**arguments, "epochs": epochs, "optimizer": name, "options": options}.items():
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
                f"local.batch_size should be at least {examples} for a model that cannot be trained on fewer examples, "
                f"such as one that normalises over the batch, got {self.batch_size}"
            )
        return replace(self, smallest_batch=examples)

    def in_epochs(self, epochs: int) -> LocalTraining:
        """Return the same for so many epochs."""
        return replace(self, epochs=epochs, steps=None)

    def on_part(self, parts: int, examples: int = 0) -> LocalTraining:
        """Return the same for one of r parts of a client's data, in which an r-th as many examples pass.

        Of equal parts, which have so many examples, batches are an r-th as large, if that leaves
        :data:`SMALLEST_BATCH`: a part takes about as many steps as all of the data would. The step size goes by the
        square root of the batch's (Krizhevsky 2014, section 5), which leaves the variance of a step as it is. No batch
        is of one example, which BatchNorm does not take, if there is another way.
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
        return epochs * examples + rest * self.batch_size  # only the last batch of an epoch is of another size

    def lr_at(self, round_number: int) -> float:
        """Return the step size of a round, counted from 1."""
        return (self.lr or 0.0) * self.lr_decay ** (round_number - 1)


def count_batches(examples: int, batch_size: int, smallest_batch: int) -> int:
    """Return the number of batches in an epoch: the rule by which all engines and all counts of steps form batches.

    Batches are full but for the last one, which has the rest. A rest of fewer than ``smallest_batch`` examples is
    joined to the batch before; where there is none before, it is a batch all the same.
    """
    full, rest = divmod(examples, batch_size)
    if full > 0 and rest < smallest_batch:
        return full
    return full + 1 if rest else full
