"""Tasks: the targets of a model, the loss on which it trains, and the metrics that score it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch

from fedclade import catalogue
from fedclade.core import (
    IGNORED,
    ConfigError,
    DataSpec,
    RunError,
    Structure,
    TaskKind,
    call_own,
    checked,
    imported,
    named,
    require,
    shown,
    unknown,
)
from fedclade.tasks.arguments import LossOver, check_arguments, check_output
from fedclade.tasks.losses import KINDS, LOSSES, SHAPES, Loss, Shapes, count_targets, cross_entropy
from fedclade.tasks.metrics import MEAN_LOSS, Metric, check_metric, metric
from fedclade.tasks.target_scale import SCALED_LOSSES, TargetScale

Weights = Literal["balanced"] | Sequence[float]


@dataclass(frozen=True)
class Task:
    """Task of a model: its targets, its loss and its metrics.

    Parameters
    ----------
    kind
        Kind of the targets: ``classification`` (a label), ``binary`` (0 or 1), ``multilabel``
        (0 or 1 for each of several labels), ``regression`` (numbers), ``language`` (the next token
        at each position) or ``segmentation`` (a label of each pixel). None: the kind of the data.
    loss
        A name of :data:`~fedclade.tasks.LOSSES`, ``module:function``, or a function of outputs
        ``[B, ...]`` and targets ``[B, ...]`` of B examples that returns the loss of each example,
        ``[B]``. None: the default loss of the kind. Where targets are numbers, or 0 and 1, your own
        loss receives the outputs in the shape of the targets. If all metrics are your own, too, the
        model may return more or fewer numbers than a target has; the loss and the metrics then get
        the outputs as the model returns them.
    loss_over
        ``"example"``: the loss of an example does not depend on the other examples of its batch;
        this is tested before round 1, and a loss that fails the test is refused. ``"batch"`` is for
        a loss of your own that does depend on them, such as a ranking loss or Cox's partial
        likelihood. Such a loss returns one number for a batch, or numbers of which the mean is
        used.
    metrics
        Names of metrics, or objects of torchmetrics. The first metric is the main metric, which is
        used for target scores, validation and tables. Empty: the default metrics of the kind.
    class_weights
        A list of weights by which the losses of examples are multiplied: one weight for each label
        of a classification, or for 0 and 1 of a binary task. ``balanced``: weights that are larger
        for labels that are rare among all clients' training examples, with a mean weight of 1 over
        the examples; labels without examples have the weight of the rarest label. None: all weights
        are 1.
    output
        Entry of the model's output that is scored, if the model returns a tuple, a dict or an
        object: its position or its name. None: the entry ``logits``, or the only tensor.
    name
        Name under which the task was selected; empty if the task was created directly.

    Raises
    ------
    ConfigError
        If an argument has a wrong type. Names that are unknown, or do not fit the kind, raise the
        error only when the task is combined with its data (:meth:`of`).

    Examples
    --------
    >>> Task("regression", loss="huber", metrics=["mae"]).loss
    'huber'
    """

    kind: TaskKind | None = None
    loss: str | Loss | None = None
    metrics: Sequence[Any] = ()
    class_weights: Weights | None = None
    name: str = field(default="", compare=False)
    loss_over: LossOver = "example"
    output: int | str | None = None

    def __post_init__(self) -> None:
        check_arguments(self.kind, self.loss, self.metrics, self.class_weights, self.loss_over)
        check_output(self.output)

    @property
    def can_scale_targets(self) -> bool:
        """Whether a regression may train on standardized targets with the loss of this task."""
        return self.loss is None or self.loss in SCALED_LOSSES

    def of(
        self,
        spec: DataSpec,
        label_counts: torch.Tensor | None = None,
        target_scale: TargetScale | None = None,
    ) -> FittedTask:
        """Combine the task with the specification of its data.

        Parameters
        ----------
        spec
            Specification of the examples: the kind of their targets and the number of outputs.
        label_counts
            Number of training examples of all clients for each label, ``[outputs]``, or for 0 and
            1; None if unknown, in which case a task with balanced weights cannot compute losses.
        target_scale
            Scale of the targets of a regression, by which targets are standardized for the loss;
            None to use targets unchanged.

        Raises
        ------
        ConfigError
            If the loss, a metric or the weights do not fit the data.
        """
        kind = self.kind or spec.task
        if kind != spec.task:
            raise ConfigError(
                f"task = {kind!r} does not fit the data ({spec.data}), whose targets are of kind "
                f"{spec.task!r}; choose a task of this kind"
            )
        loss = _resolve_loss(self.loss or LOSS_OF[kind], kind)
        has_own_loss = all(each is not loss for each in LOSSES.values())
        metrics = tuple(
            metric(each, kind, spec.outputs, is_tried=not has_own_loss)
            for each in self.metrics or METRICS_OF[kind]
        )
        structure = spec.target_structure
        if structure is not None:
            _check_own_targets(has_own_loss, self.metrics, structure)
            metrics = tuple(each.with_targets(structure) for each in metrics)
        names = [each.name for each in metrics]
        require(
            ("task.metrics", names, len(set(names)) == len(names), "metrics with different names")
        )
        fitted = FittedTask(
            kind,
            loss,
            metrics,
            weights=_resolve_weights(self.class_weights, spec, label_counts),
            balanced=isinstance(self.class_weights, str),
            over_batch=self.loss_over == "batch",
            target_scale=target_scale if self.can_scale_targets else None,
            output=self.output,
            has_own_metrics=bool(self.metrics) and all(map(_is_own_metric, self.metrics)),
            target_structure=structure,
        )
        _check_loss_over(fitted)
        return fitted

    def as_noted(self, summary: Mapping[str, Any]) -> Task:
        """Return the task of a finished run, with the class weights that the run's summary records.

        The weights replace ``balanced``, which cannot be computed again without the clients'
        labels.

        Raises
        ------
        RunError
            If the task has balanced weights and the summary records no weights.
        """
        if not isinstance(self.class_weights, str):
            return self
        if "class_weights" not in summary:
            raise RunError(
                "the version of fedclade that wrote this run did not record balanced class "
                "weights, and the labels of its clients are unknown here; call fedclade.assign "
                "with a task=... whose class_weights are numbers, or repeat the run from its "
                "config.toml"
            )
        return replace(self, class_weights=summary["class_weights"])

    @property
    def described(self) -> dict[str, Any]:
        """Section ``[task]`` of a config for this task; functions and objects by their names."""
        if isinstance(self.loss, str | None):
            loss = self.loss
        else:
            loss = _name(self.loss)
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
        if self.output is not None:
            values["output"] = self.output
        return values


LOSS_OF: Mapping[TaskKind, str] = {
    "classification": "cross_entropy",
    "binary": "bce",
    "multilabel": "bce",
    "regression": "mse",
    "language": "cross_entropy",
    "segmentation": "cross_entropy",
}
"""Default loss of each kind of task."""

METRICS_OF: Mapping[TaskKind, Sequence[str]] = {
    "classification": ("accuracy",),
    "binary": ("accuracy",),
    "multilabel": ("accuracy",),
    "regression": ("mae",),
    "language": ("perplexity", "accuracy"),
    "segmentation": ("iou", "dice", "accuracy"),
}
"""Default metrics of each kind of task."""

TASKS: Mapping[str, Task] = {kind: Task(kind, name=kind) for kind in LOSS_OF}
"""Built-in tasks by name."""

SUMMARIES: Mapping[str, str] = catalogue.TASKS
"""Short descriptions of the built-in tasks, for the command line and the documentation."""


@checked()
def build_task(
    name: str | Task | None = None,
    loss: str | None = None,
    metrics: Sequence[str] = (),
    class_weights: str | Sequence[float] | None = None,
    loss_over: str | None = None,
    output: int | str | None = None,
) -> Task:
    """Build the task that the ``[task]`` section of a config describes.

    Parameters
    ----------
    name
        A name in :data:`TASKS`, the name of a task from an installed package, or ``module:factory``
        for a :class:`Task` or a function that returns a task. A :class:`Task` object is used
        directly. None: the task of the data.
    loss, metrics, class_weights, loss_over, output
        Values that replace those of the named task; see :class:`Task`.

    Raises
    ------
    ConfigError
        If the name is unknown or the named object is no task, or if a loss, a metric or weights are
        invalid for any data; one line for each problem.
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
        "output": task.output if output is None else output,
    }
    if isinstance(name, str):
        given["name"] = name
    return replace(task, **given)


def _find_task(name: str | Task | None) -> Task:
    """Return a task by its name.

    A :class:`Task` object is returned unchanged, and None gives a task that takes its kind from the
    data.
    """
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
    """Task combined with the specification of its data, as engines and evaluations use it.

    The loss and the metrics are functions and objects in place of names, and class weights are
    numbers.
    """

    kind: TaskKind = "classification"
    loss: Loss = cross_entropy
    metrics: tuple[Metric, ...] = (metric("accuracy", "classification", 0),)
    weights: torch.Tensor | None = None  # class weights of labels, [outputs], or of 0 and 1
    balanced: bool = (
        False  # whether weights follow from label counts; weights are None until these are known
    )
    over_batch: bool = False  # whether the loss is one number of a whole batch
    shapes: Shapes = "targets"  # shapes in which a user-defined loss takes outputs and targets
    target_scale: TargetScale | None = None  # scale by which targets are standardized for the loss
    output: int | str | None = None  # scored entry of a model's output, see Task
    has_own_metrics: bool = False  # whether all metrics are the user's own
    target_structure: Structure | None = None  # tensors of a target that is a dict or tuple

    @cached_property
    def described(self) -> str:
        """Text with kind, loss, weights and metrics of the task.

        The text must be equal for all clients and the server of a network.
        """
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
        """Name of the loss as in configs, or ``module:function`` for a user-defined loss."""
        return next((name for name, loss in LOSSES.items() if loss is self.loss), _name(self.loss))

    @cached_property
    def has_own_loss(self) -> bool:
        """Whether the loss is a user-defined function."""
        return all(loss is not self.loss for loss in LOSSES.values())

    @property
    def has_own_widths(self) -> bool:
        """Whether outputs need not fit the targets, as loss and metrics are all the user's own."""
        return self.has_own_loss and self.has_own_metrics and self.kind == "regression"

    @property
    def has_nonnegative_loss(self) -> bool:
        """Whether losses are never below 0: true for all built-in losses but ``poisson_nll``."""
        return not self.has_own_loss and self.loss is not LOSSES["poisson_nll"]

    @property
    def is_plain(self) -> bool:
        """Whether the loss is cross-entropy without weights, for which engines have fast code."""
        return self.loss is cross_entropy and not self.is_weighted

    @property
    def is_weighted(self) -> bool:
        """Whether the loss of an example is multiplied by the class weight of its label."""
        return self.balanced or self.weights is not None

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each example of a batch, ``[B]``, with class weights.

        Raises
        ------
        ConfigError
            If the loss function does not return one number for each example.
        """
        self.check_losses_of_examples()
        losses = self._values(outputs, targets)
        if losses.shape != (len(targets),):
            raise ConfigError(
                f"the loss function should return one number for each of {len(targets)} examples, "
                f"got shape {tuple(losses.shape)}; declare Task(loss_over='batch') if it returns "
                "one number for a whole batch"
            )
        if not self.is_weighted:
            return losses
        if self.weights is None:
            raise ConfigError(
                "task.class_weights = 'balanced' needs the number of examples of each label, which "
                "is unknown; pass label_counts to Task.of, or set class_weights to a list of "
                "numbers"
            )
        return losses * self.weights.to(losses)[targets.long().clamp(min=0)]

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the predictions of a model in the unit of the targets, as metrics need them.

        If targets are standardized for the loss, the model's outputs are scaled back.
        """
        if self.target_scale is None:
            return outputs
        return self.target_scale.restore(outputs)

    def check_losses_of_examples(self) -> None:
        """Check that the loss gives the loss of each example, which some methods need.

        Raises
        ------
        ConfigError
            If ``loss_over`` is ``"batch"``: the loss then returns one number for a whole batch.
        """
        if self.over_batch:
            raise ConfigError(
                "this method needs the loss of each example, but with task.loss_over = 'batch' "
                f"the loss {self.loss_name} returns one number for a whole batch; choose another "
                "method, or a loss that returns one number for each example"
            )

    def batch_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch, for a loss function with ``loss_over = "batch"``.

        Such a loss function computes the loss of a whole batch, since its examples depend on each
        other.

        Raises
        ------
        ConfigError
            If the loss function returns neither one number nor one number for each example.
        """
        values = self._values(outputs, targets)
        if values.shape not in ((), (1,), (len(targets),)):
            raise ConfigError(
                f"with task.loss_over = 'batch', the loss {self.loss_name} should return one "
                f"number for a batch, or one for each of {len(targets)} examples, got shape "
                f"{tuple(values.shape)}"
            )
        return values.mean()

    def _values(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Call the loss function with outputs and targets in the shapes that it needs.

        Targets are in the user's unit; they are first standardized if the task has a target scale.
        """
        if self.target_scale is not None:
            targets = self.target_scale.standardize(targets)
        if self.has_own_loss:
            # A user-defined loss may change its arguments, and targets may be a view of client
            # data.
            targets = targets.clone()
            if self.kind == "segmentation":  # as the model returns them, [B, C, H, W]
                outputs = outputs.movedim(-1, 1)
        if self.target_structure is not None:
            return self.loss(outputs, self.target_structure.unpack(targets))
        if self.has_own_widths and outputs.numel() != targets.numel():
            return self.loss(outputs, targets)
        if self.has_own_loss and self.kind in ("binary", "multilabel", "regression"):
            outputs, targets = SHAPES[self.shapes](outputs, targets)
        return self.loss(outputs, targets)

    def mean_loss(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean loss of a batch, which training minimizes.

        The mean is over all targets that are not ignored.

        Parameters
        ----------
        outputs, targets
            Outputs of the model and targets of B examples.
        weights
            Factors ``[B]`` by which the losses of examples are multiplied; the sum is still divided
            by the number of targets. None: all factors are 1.
        """
        if self.over_batch and weights is None:
            return self.batch_loss(outputs, targets)
        if weights is not None:
            counts = count_targets(targets)
            return (
                self.losses(outputs, targets) * counts * weights.to(outputs)
            ).sum() / counts.sum()
        if self.is_plain:
            return torch.nn.functional.cross_entropy(
                outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED
            )
        return self.total_loss(outputs, targets) / count_targets(targets).sum()

    def total_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of a batch, over all targets that are not ignored."""
        if self.is_plain:
            flat = outputs.flatten(0, -2), targets.flatten()
            return torch.nn.functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum")
        if self.over_batch:
            return self.batch_loss(outputs, targets) * count_targets(targets).sum()
        return (self.losses(outputs, targets) * count_targets(targets)).sum()


def _is_own_metric(metric: Any) -> bool:
    """Return whether a metric is the user's own, or the mean of a loss of the user's own."""
    return not isinstance(metric, str) or metric == MEAN_LOSS


def _check_own_targets(has_own_loss: bool, metrics: Sequence[Any], structure: Structure) -> None:
    """Check that loss and metrics are the user's own, as targets of several tensors need.

    Raises
    ------
    ConfigError
        If the loss or a metric is built in, or the metrics are left out.
    """
    if has_own_loss and metrics and all(map(_is_own_metric, metrics)):
        return
    raise ConfigError(
        f"the targets {structure.described} need a loss and metrics of your own, which get them as "
        f"a dict or tuple; set task.loss, and metrics=[{MEAN_LOSS!r}] or fedclade.Metric objects"
    )


def _check_loss_over(task: FittedTask) -> None:
    """Check that a task with ``loss_over="batch"`` needs no losses of single examples.

    Raises
    ------
    ConfigError
        If the loss is built in, or if the task has class weights or a metric that is a mean of
        losses: all of these are defined for the loss of each example.
    """
    if not task.over_batch:
        return
    if not task.has_own_loss:
        raise ConfigError(
            f"task.loss_over = 'batch' is only for losses of your own, but {task.loss_name} is a "
            "built-in loss of each example; remove task.loss_over"
        )
    if task.is_weighted:
        raise ConfigError(
            "task.class_weights multiply the loss of each example, but with task.loss_over = "
            f"'batch' the loss {task.loss_name} returns one number for a whole batch; remove "
            "task.class_weights"
        )
    if means := [each.name for each in task.metrics if each.terms is None and each.whole is None]:
        raise ConfigError(
            f"the metric {means[0]} is a mean over the losses of targets, but with "
            f"task.loss_over = 'batch' the loss {task.loss_name} returns one number for a whole "
            "batch; choose other task.metrics"
        )


def _name_metric(metric: Any) -> str:
    """Return the name of a metric that is given by its name or as an object."""
    if isinstance(metric, str):
        return metric
    return str(getattr(metric, "name", type(metric).__name__))


def _name(loss: Loss) -> str:
    """Return ``module:function`` of a loss function, or ``module:Class`` of a loss object."""
    named_object: Any = loss
    if not hasattr(loss, "__qualname__"):
        named_object = type(loss)
    return f"{named_object.__module__}:{named_object.__qualname__}"


def _resolve_loss(loss: str | Loss, kind: TaskKind) -> Loss:
    """Return the loss function that a name or ``module:function`` refers to; check that it fits."""
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
    """Check that the name of a loss is known, and that the loss fits the kind of task if given."""
    if loss in LOSSES and kind is not None and kind not in KINDS[loss]:
        fits = [name for name, kinds in KINDS.items() if kind in kinds]
        raise ConfigError(
            f"task.loss = {loss!r} does not fit a {kind} task; choose from {', '.join(fits)}"
        )
    if loss not in LOSSES and ":" not in loss:
        raise ConfigError(
            unknown("loss in [task]:", loss, LOSSES)
            + "; name a loss of your own as 'module:function'"
        )


def _check_weights(weights: str | Sequence[float] | None) -> None:
    """Raise a ConfigError if class weights are invalid for any data."""
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
    weights: Weights | None, spec: DataSpec, counts: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the class weights as numbers, ``[labels]``.

    The result is None without weights, and for balanced weights if the label counts are unknown.
    """
    if weights is None:
        return None
    if (labels := spec.labels) is None:
        raise ConfigError(
            "task.class_weights are only for classification and binary tasks, not for "
            f"{spec.task}; remove task.class_weights"
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
