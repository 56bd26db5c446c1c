"""Callbacks by name: the trackers, those of installed packages, and a user's own by ``module:factory``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedclade.core import ConfigError, named, shown
from fedclade.runs import Callback
from fedclade.trackers.mlflow import MLflowTracker, TensorBoardTracker, WandbTracker

TRACKERS: Mapping[str, Callable[[], Callback]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
}


def build_callback(name: str) -> Callback:
    """Return a callback by its name: a tracker, an entry point of ``fedclade.callbacks``, or ``module:factory``.

    A factory is a class or a function that is called without arguments.

    Raises
    ------
    ConfigError
        If there is nothing of that name, or what it names makes no callback.
    MissingExtraError
        If the tracker's package is not installed.
    """
    factory = named("callbacks", name, TRACKERS, "callback")
    made = factory() if callable(factory) else factory
    if not isinstance(made, Callback):
        raise ConfigError(f"callback {shown(name)} should make a fedclade.Callback, got {shown(made)}")
    return made
