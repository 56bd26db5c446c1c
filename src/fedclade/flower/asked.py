"""What a client is asked to train: the model that it makes itself, and the local training that a message names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedclade.core import OF_TORCH, ConfigError, LocalTraining, UpdateError, check_arguments, unknown
from fedclade.data import Federation
from fedclade.models import Parts
from fedclade.runs import Maker, module_for


def read_spec(kept: Mapping[str, Any]) -> LocalTraining:
    """Return the local training that a message names; an UpdateError if it is not known here."""
    optimizer = kept.get("optimizer", "sgd")
    if not isinstance(optimizer, str) or optimizer not in OF_TORCH:  # a module:name imports what the server likes
        raise UpdateError(unknown("optimizer of its local training:", optimizer, OF_TORCH))
    try:
        return LocalTraining(**check_arguments("its local training", LocalTraining, kept))
    except (ConfigError, OverflowError) as error:  # a key that another version has, or a value of another type
        raise UpdateError(f"asked for local training that is not known here: {error}") from error


def maker_of(model: nn.Module | str | Maker, federation: Federation, parts: Parts) -> Maker:
    """Return a function that makes a model of some parts from a seed; a module is the same for every seed."""

    def make(seed: int) -> nn.Module:
        if isinstance(model, str):
            return module_for(model, federation.pool.schema, seed)
        return model if isinstance(model, nn.Module) else model(seed)

    return lambda seed: parts.applied(make(seed), seed)
