"""Entries of installed packages, such as algorithms and models, which ``fedclade ls`` describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedclade.algorithms import method_named
from fedclade.core import Kind, named
from fedclade.data import find_partition, find_shift
from fedclade.models import model_factory
from fedclade.tasks import build_task


def load_entry(group: Kind, name: str) -> object:
    """Load an entry of an installed package; raise a ConfigError if it cannot be used.

    Parameters
    ----------
    group
        Kind of the entry, such as ``algorithms``.
    name
        Name of the entry point.
    """
    return _LOADERS[group](name)


def _load_task(name: str) -> object:
    """Return the object that summarizes a task of an installed package.

    The result is the function that makes the task, whose docstring is the summary. If the package
    provides the task itself, the result is a text with the task's settings.
    """
    task = build_task(name)
    entry = named("tasks", name, {}, "task")
    if callable(entry):
        return entry
    return ", ".join(f"{key} {value}" for key, value in task.described.items() if value)


def _load_dataset(name: str) -> object:
    """Return the data set that an installed package adds with this name."""
    return named("data", name, {}, "dataset")


def _load_callback(name: str) -> object:
    """Return the callback that an installed package adds with this name."""
    return named("callbacks", name, {}, "callback")


_LOADERS: Mapping[Kind, Callable[[str], object]] = {
    "algorithms": method_named,
    "data": _load_dataset,
    "partitions": find_partition,
    "shifts": find_shift,
    "models": model_factory,
    "tasks": _load_task,
    "callbacks": _load_callback,
}
