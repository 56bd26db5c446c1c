"""Checks of a task's arguments that take no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from fedclade.core import ConfigError, TaskKind, shown, unknown

LossOver = Literal["example", "batch"]
"""What a loss is one number of."""


def check_arguments(
    kind: object, loss: object, metrics: object, class_weights: object, loss_over: object
) -> None:
    """Check the types of a :class:`~fedclade.Task`'s arguments.

    Raises
    ------
    ConfigError
        If one is of another type; names it and what it should be.
    """
    kinds = get_args(TaskKind)
    if kind is not None and kind not in kinds:
        raise ConfigError(unknown("kind of task:", str(kind), kinds))
    if not isinstance(loss, str | None) and not callable(loss):
        raise ConfigError(
            f"task.loss should be a name or a function of outputs and targets, got {shown(loss)}"
        )
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise ConfigError(
            "task.metrics should be a list of names or torchmetrics objects, got "
            f"{shown(metrics)}; a single one is given as a list, too, such as metrics=['f1']"
        )
    if not isinstance(class_weights, str | None) and not _are_numbers(class_weights):
        raise ConfigError(
            "task.class_weights should be 'balanced' or a list of numbers, got "
            f"{shown(class_weights)}"
        )
    if loss_over not in get_args(LossOver):
        raise ConfigError(unknown("task.loss_over:", str(loss_over), get_args(LossOver)))


def _are_numbers(values: Any) -> bool:
    """Whether something is a list, an array or a tensor of numbers."""
    try:
        entries = list(values)
        numbers = [float(entry) for entry in entries]
    except (TypeError, ValueError):
        return False
    return bool(numbers) and not any(isinstance(entry, str) for entry in entries)
