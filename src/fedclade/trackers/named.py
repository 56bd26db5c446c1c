"""Creation of a run's callbacks by name, as the option ``--log`` names them."""

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
    """Create a callback by its name.

    Parameters
    ----------
    name
        Name of a tracker, an entry point of ``fedclade.callbacks``, or ``module:factory``. A
        factory is a class or a function that is called without arguments.

    Returns
    -------
    Callback
        The new callback.

    Raises
    ------
    ConfigError
        If the name is unknown, or does not name a factory that creates a callback.
    MissingExtraError
        If the tracker's package is not installed.
    """
    factory = named("callbacks", name, TRACKERS, "callback")
    callback = factory() if callable(factory) else factory
    if not isinstance(callback, Callback):
        raise ConfigError(
            f"callback {shown(name)} should create a fedclade.Callback, got {shown(callback)}"
        )
    return callback
