"""Checks of the types of a task's arguments, which can be made before any data is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from fedclade.core import ConfigError, TaskKind, is_choice, shown, unknown

LossOver = Literal["example", "batch"]
"""Whether a loss function returns one number for each example or one for each batch."""


def check_arguments(
    kind: object, loss: object, metrics: object, class_weights: object, loss_over: object
) -> None:
    """Check the types of a :class:`~fedclade.Task`'s arguments.

    Raises
    ------
    ConfigError
        If an argument has a wrong type or an unknown value; the message names the argument.
    """
    kinds = get_args(TaskKind)
    if kind is not None and not (isinstance(kind, str) and kind in kinds):
        raise ConfigError(unknown("kind of task:", str(kind), kinds))
    if not isinstance(loss, str | None) and not callable(loss):
        raise ConfigError(
            f"task.loss should be a name or a function of outputs and targets, got {shown(loss)}"
        )
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise ConfigError(
            "task.metrics should be a list of names or torchmetrics objects, got "
            f"{shown(metrics)}; give a single metric as a list, too, such as metrics=['f1']"
        )
    if not isinstance(class_weights, str | None) and not _are_numbers(class_weights):
        raise ConfigError(
            "task.class_weights should be 'balanced' or a list of numbers, got "
            f"{shown(class_weights)}"
        )
    if not is_choice(loss_over, LossOver):
        raise ConfigError(unknown("value of task.loss_over:", str(loss_over), get_args(LossOver)))


def check_output(output: object) -> None:
    """Check the type of the entry of a model's output that is scored.

    Raises
    ------
    ConfigError
        If it is neither a name, nor a position of at least 0.
    """
    is_position = type(output) is int and output >= 0
    is_name = isinstance(output, str) and output != ""
    if output is not None and not is_position and not is_name:
        raise ConfigError(
            "task.output should be the name or the position (0, 1, ...) of an entry of the model's "
            f"output, got {shown(output)}"
        )


def _are_numbers(values: Any) -> bool:
    """Return whether a value is a non-empty list, array or tensor of numbers."""
    try:
        entries = list(values)
        numbers = [float(entry) for entry in entries]
    except (TypeError, ValueError):
        return False
    return bool(numbers) and not any(isinstance(entry, str) for entry in entries)
