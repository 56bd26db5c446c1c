"""Tasks: the loss that a model trains on, and the metrics that it is scored by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.core import (
    IGNORED,
    ConfigError,
    DataSpec,
    RunError,
    TaskKind,
    call_own,
    checked,
    imported,
    named,
    require,
    shown,
    unknown,
)
from fedclade.tasks.arguments import LossOver, check_arguments
from fedclade.tasks.losses import KINDS, LOSSES, SHAPES, Loss, Shapes, count_targets, cross_entropy
from fedclade.tasks.metrics import Metric, check_metric, metric

Weights = Literal["balanced"] | Sequence[float]


@dataclass(frozen=True)
class Task:
    """A task: targets, loss and metrics of a model.

    Parameters
    ----------
    kind
        Kind of the targets: ``classification`` (a label), ``binary`` (0 or 1), ``multilabel``
        (several of these), ``regression`` (numbers) or ``language`` (the next token at each place).
        None: the kind of the data.
    loss
        A name of :data:`~fedclade.tasks.LOSSES`, ``module:function``, or a function of outputs
        ``[B, ...]`` and targets ``[B, ...]`` that returns the loss of each example, ``[B]``. None:
        the kind's own. Where targets are numbers, or 0 and 1, your own loss gets the outputs in the
        shape of the targets.
    loss_over
        ``"batch"`` declares a loss of your own in which the examples of a batch depend on each
        other, such as a ranking loss or Cox's partial likelihood; it returns one number for a
        batch, or numbers whose mean counts. Any other loss is tried before round 1, and refused if
        an example's loss changes with its batch.
    metrics
        Names, or objects of torchmetrics. The first counts: in targets, validation, tables. Empty:
        the kind's own.
    class_weights
        One for each label of a classification, by which its examples' losses are multiplied, or of
        a binary task for 0 and 1; ``balanced``: by how rare labels are among all clients' training
        examples, so that they weigh 1 in the mean, and labels of none as the rarest. None: all
        weigh 1.

    Raises
    ------
    ConfigError
        If an argument is not of these types; if a name is unknown, or does not fit the kind, once
        the task meets its data.

    Examples
    --------
    >>> Task("regression", loss="huber", metrics=["mae"]).loss
    'huber'
    """

    kind: TaskKind | None = None
    loss: str | Loss | None = None
    metrics: Sequence[Any] = ()
    class_weights: Weights | None = None
    name: str = field(default="", compare=False)  # by which it was asked for
    loss_over: LossOver = "example"

    def __post_init__(self) -> None:
        check_arguments(self.kind, self.loss, self.metrics, self.class_weights, self.loss_over)

    def of(self, spec: DataSpec, label_counts: Tensor | None = None) -> FittedTask:
        """Return the task for some data.

        Parameters
        ----------
        spec
            What the examples look like.
        label_counts
            How many training examples all clients have of each label, ``[outputs]``, or of 0 and 1;
            without them a task of balanced weights has no losses.

        Raises
        ------
        ConfigError
            If the loss, a metric or the weights do not fit.
        """
        kind = self.kind or spec.task
        if kind != spec.task:
            raise ConfigError(
                f"task = {kind!r} does not fit the data ({spec.data}), whose targets are of kind "
                f"{spec.task!r}"
            )
        loss = _resolve_loss(self.loss or LOSS_OF[kind], kind)
        metrics = tuple(
            metric(each, kind, spec.outputs) for each in self.metrics or METRICS_OF[kind]
        )
        names = [each.name for each in metrics]
        require(("task.metrics", names, len(set(names)) == len(names), "different metrics"))
        fitted = FittedTask(
            kind,
            loss,
            metrics,
            weights=_resolve_weights(self.class_weights, spec, label_counts),
            balanced=isinstance(self.class_weights, str),
            over_batch=self.loss_over == "batch",
        )
        _check_loss_over(fitted)
        return fitted

    def as_noted(self, summary: Mapping[str, Any]) -> Task:
        """Return the task with the balanced weights that a run recorded in its summary.

        Raises
        ------
        RunError
            If the run recorded none.
        """
        if not isinstance(self.class_weights, str):
            return self
        if "class_weights" not in summary:
            raise RunError(
                "this run was written before balanced weights were kept, and its clients' labels "
                "are not known here; give fedclade.assign a task=... whose class_weights are "
                "numbers, or run its config.toml again"
            )
        return replace(self, class_weights=summary["class_weights"])

    @property
    def described(self) -> dict[str, Any]:
        """The task as in a config; functions and objects by their names."""
        loss = self.loss if isinstance(self.loss, str | None) else _name(self.loss)
        weights = self.class_weights
        if not isinstance(weights, str | None):
            weights = [*weights]
        values: dict[str, Any] = {
            "name": self.name or self.kind,
            "loss": loss,
            "metrics": [_name_metric(metric) for metric in self.metrics],
            "class_weights": weights,
        }
        if self.loss_over != "example":
            values["loss_over"] = self.loss_over
        return values


LOSS_OF: Mapping[TaskKind, str] = {
    "classification": "cross_entropy",
    "binary": "bce",
    "multilabel": "bce",
    "regression": "mse",
    "language": "cross_entropy",
}
"""The loss of each kind of task."""

METRICS_OF: Mapping[TaskKind, Sequence[str]] = {
    "classification": ("accuracy",),
    "binary": ("accuracy",),
    "multilabel": ("accuracy",),
    "regression": ("mae",),
    "language": ("perplexity", "accuracy"),
}
"""Its metrics."""

TASKS: Mapping[str, Task] = {kind: Task(kind, name=kind) for kind in LOSS_OF}
"""Tasks by name."""

SUMMARIES: Mapping[str, str] = {
    "classification": "one label of several: cross-entropy",
    "binary": "yes or no, from one logit: binary cross-entropy",
    "multilabel": "yes or no for each of several labels: binary cross-entropy",
    "regression": "one number or several: squared error",
    "language": "the next token at each place: cross-entropy",
}
"""Descriptions of tasks, for people."""


@checked()
def build_task(
    name: str | Task | None = None,
    loss: str | None = None,
    metrics: Sequence[str] = (),
    class_weights: str | Sequence[float] | None = None,
    loss_over: str | None = None,
) -> Task:
    """Return the task of a ``[task]`` section.

    Parameters
    ----------
    name
        One of :data:`TASKS`, that of an installed package, or ``module:factory`` of a :class:`Task`
        or of a function that returns one; a task itself stays; None: the data's own.
    loss, metrics, class_weights, loss_over
        In place of the task's own; see :class:`Task`.

    Raises
    ------
    ConfigError
        If the name is unknown or what it names is no task, and if a loss, a metric or weights
        cannot be right, as far as that is known without data: a line for each.
    """
    task = _find_task(name)
    weights = task.class_weights if class_weights is None else class_weights
    checks = [partial(check_metric, metric, task.kind) for metric in metrics]
    if isinstance(loss, str):
        checks.insert(0, partial(_check_loss, loss, task.kind))
    checks.append(partial(_check_weights, weights))
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    given: dict[str, Any] = {
        "loss": loss or task.loss,
        "metrics": tuple(metrics) or task.metrics,
        "class_weights": weights,
        "loss_over": loss_over or task.loss_over,
    }
    if isinstance(name, str):
        given["name"] = name
    return replace(task, **given)


def _find_task(name: str | Task | None) -> Task:
    """Return a task by its name; a task itself stays, and None stands for that of the data."""
    task: Any = name or Task()
    if isinstance(name, str):
        task = named("tasks", name, TASKS, "task:")
    if not isinstance(task, Task) and callable(task):
        task = call_own(f"task {shown(name)}", task)
    if not isinstance(task, Task):
        raise ConfigError(
            f"task {shown(name)} should be a fedclade.Task, or a function that returns one, got "
            f"{shown(task)}"
        )
    return task


@dataclass(frozen=True, eq=False)
class FittedTask:
    """A task for some data, as engines and evaluations use it."""

    kind: TaskKind = "classification"
    loss: Loss = cross_entropy
    metrics: tuple[Metric, ...] = (metric("accuracy", "classification", 0),)
    weights: Tensor | None = None  # of labels, [outputs], or of 0 and 1
    balanced: bool = (
        False  # whether the weights are those of the labels' counts; None until these are known
    )
    over_batch: bool = False  # whether the loss is one number of a whole batch
    shapes: Shapes = "targets"  # in which a loss of the user's own takes outputs and targets

    @cached_property
    def described(self) -> str:
        """Kind, loss, metrics and weights, which clients and server must have in common."""
        parts = [self.loss_name]
        if self.over_batch:
            parts.append("over the batch")
        if self.balanced:
            parts.append("weighted by rarity")
        elif self.weights is not None:
            weights = [f"{weight:g}" for weight in self.weights.tolist()]
            parts.append(f"weighted by {', '.join(weights)}")
        metrics = ", ".join(metric.name for metric in self.metrics)
        return f"{self.kind}: {' '.join(parts)}; {metrics}"

    @cached_property
    def loss_name(self) -> str:
        """Name of the loss: as in configs, or ``module:function``."""
        return next((name for name, loss in LOSSES.items() if loss is self.loss), _name(self.loss))

    @cached_property
    def has_own_loss(self) -> bool:
        """Whether the loss is a function of the user's."""
        return all(loss is not self.loss for loss in LOSSES.values())

    @property
    def has_nonnegative_loss(self) -> bool:
        """Whether no loss is below 0: for all named losses but that of a Poisson regression."""
        return not self.has_own_loss and self.loss is not LOSSES["poisson_nll"]

    @property
    def is_plain(self) -> bool:
        """Whether the loss is cross-entropy without weights, which engines know by heart."""
        return self.loss is cross_entropy and not self.is_weighted

    @property
    def is_weighted(self) -> bool:
        """Whether examples count by their labels."""
        return self.balanced or self.weights is not None

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example, ``[B]``.

        Raises
        ------
        ConfigError
            If the loss does not give one number for each example.
        """
        self.check_losses_of_examples()
        losses = self._values(outputs, targets)
        if losses.shape != (len(targets),):
            raise ConfigError(
                f"the loss should give one number for each of {len(targets)} examples, got shape "
                f"{tuple(losses.shape)}; declare Task(loss_over='batch') if it is one number of a "
                "whole batch"
            )
        if not self.is_weighted:
            return losses
        if self.weights is None:
            raise ConfigError(
                "task.class_weights = 'balanced' needs to know how many examples there are of "
                "each label, and nobody has counted them; give Task.of the counts, or a list of "
                "numbers as class_weights"
            )
        return losses * self.weights.to(losses)[targets.long().clamp(min=0)]

    def check_losses_of_examples(self) -> None:
        """Check that each example has a loss of its own; a ConfigError for a loss of a batch."""
        if self.over_batch:
            raise ConfigError(
                f"task.loss_over = 'batch': {self.loss_name} has no loss of each example by "
                "itself, which this method needs, as it weighs or compares examples; choose "
                "another method, or a loss of each example"
            )

    def batch_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number that a loss over a whole batch gives.

        Raises
        ------
        ConfigError
            If it gives something else than a number, or a number for each example.
        """
        values = self._values(outputs, targets)
        if values.shape not in ((), (1,), (len(targets),)):
            raise ConfigError(
                f"task.loss_over = 'batch': {self.loss_name} should give one number for a batch, "
                f"or one for each of {len(targets)} examples, got shape {tuple(values.shape)}"
            )
        return values.mean()

    def _values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the value of the loss, for outputs and targets in the shapes that it takes."""
        if self.has_own_loss:
            # A user's own loss may work in place, and targets may be a view of the clients' data.
            targets = targets.clone()
        if self.has_own_loss and self.kind in ("binary", "multilabel", "regression"):
            outputs, targets = SHAPES[self.shapes](outputs, targets)
        return self.loss(outputs, targets)

    def mean_loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean over the targets of a batch that count, which is what it trains on.

        With ``weights [B]`` of examples, each loss counts so many times; it is divided by no other
        number.
        """
        if self.over_batch and weights is None:
            return self.batch_loss(outputs, targets)
        if weights is not None:
            counts = count_targets(targets)
            return (
                self.losses(outputs, targets) * counts * weights.to(outputs)
            ).sum() / counts.sum()
        if self.is_plain:
            return functional.cross_entropy(
                outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED
            )
        return self.total_loss(outputs, targets) / count_targets(targets).sum()

    def total_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over the targets of a batch that count."""
        if self.is_plain:
            flat = outputs.flatten(0, -2), targets.flatten()
            return functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum")
        if self.over_batch:
            return self.batch_loss(outputs, targets) * count_targets(targets).sum()
        return (self.losses(outputs, targets) * count_targets(targets)).sum()


def _check_loss_over(task: FittedTask) -> None:
    """Check that whatever needs the loss of each example is not asked of a loss over batches."""
    if not task.over_batch:
        return
    if not task.has_own_loss:
        raise ConfigError(
            f"task.loss_over = 'batch' is for a loss of your own, and {task.loss_name} is one of "
            "each example; leave loss_over out"
        )
    if task.is_weighted:
        raise ConfigError(
            "task.loss_over = 'batch': task.class_weights multiply the loss of each example, and "
            f"{task.loss_name} is one of a whole batch; leave class_weights out"
        )
    if means := [each.name for each in task.metrics if each.terms is None and each.whole is None]:
        raise ConfigError(
            f"task.loss_over = 'batch': {means[0]} is a mean of the loss of each target, and "
            f"{task.loss_name} is one of a whole batch; choose other task.metrics"
        )


def _name_metric(metric: Any) -> str:
    """Return the name of a metric, which is a name or an object."""
    if isinstance(metric, str):
        return metric
    return str(getattr(metric, "name", type(metric).__name__))


def _name(loss: Loss) -> str:
    """Return the name of a function, or of the class of an object."""
    named_object = loss
    if not hasattr(loss, "__qualname__"):
        named_object = type(loss)
    return f"{named_object.__module__}:{named_object.__qualname__}"


def _resolve_loss(loss: str | Loss, kind: TaskKind) -> Loss:
    if not isinstance(loss, str):
        return loss
    _check_loss(loss, kind)
    if loss in LOSSES:
        return LOSSES[loss]
    found: Any = imported(loss, "loss")
    if callable(found):
        return cast("Loss", found)
    raise ConfigError(
        f"task.loss = {loss!r} should name a function of outputs and targets, got {shown(found)}"
    )


def _check_loss(loss: str, kind: TaskKind | None) -> None:
    """Check that the name of a loss is known, and fits a kind if there is one."""
    if loss in LOSSES and kind is not None and kind not in KINDS[loss]:
        fits = [name for name, kinds in KINDS.items() if kind in kinds]
        raise ConfigError(
            f"task.loss = {loss!r} does not fit a {kind} task; choose from {', '.join(fits)}"
        )
    if loss not in LOSSES and ":" not in loss:
        raise ConfigError(
            unknown("loss in [task]:", loss, LOSSES) + "; your own is given as 'module:function'"
        )


def _check_weights(weights: str | Sequence[float] | None) -> None:
    if isinstance(weights, str) and weights != "balanced":
        raise ConfigError(
            f"task.class_weights should be 'balanced' or a list of numbers, got {weights!r}"
        )
    if not isinstance(weights, str | None):
        right = all(weight >= 0 for weight in weights)
        require(
            ("task.class_weights", [*weights], right, "numbers of at least 0, one for each label")
        )


def _resolve_weights(
    weights: Weights | None, spec: DataSpec, counts: Tensor | None
) -> Tensor | None:
    if weights is None:
        return None
    if (labels := spec.labels) is None:
        raise ConfigError(
            f"task.class_weights are for classification and binary tasks, not for {spec.task}"
        )
    if not isinstance(weights, str):
        right = len(weights) == labels and all(weight >= 0 for weight in weights)
        require(
            (
                "task.class_weights",
                [*weights],
                right,
                f"{labels} numbers of at least 0, one for each label",
            )
        )
        return torch.tensor([*weights], dtype=torch.float32)
    if counts is None:
        return None
    is_present = counts > 0
    balanced = counts.sum() / (int(is_present.sum()) * counts.clamp(min=1))
    # Labels without examples weigh as much as the rarest label.
    rarest = torch.tensor(0.0)
    if is_present.any():
        rarest = balanced[is_present].max()
    return torch.where(is_present, balanced, rarest).float()
