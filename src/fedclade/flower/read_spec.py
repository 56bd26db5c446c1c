"""The local training that a server asks for, as a client reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedclade.core import OF_TORCH, ConfigError, LocalTraining, UpdateError, check_arguments, unknown


def read_spec(kept: Mapping[str, Any]) -> LocalTraining:
    """Check and read a local training; an UpdateError if it is none that is known here."""
    optimizer = kept.get("optimizer", "sgd")
    if not isinstance(optimizer, str) or optimizer not in OF_TORCH:  # a module:name imports what the server likes
        raise UpdateError(unknown("optimizer of its local training:", optimizer, OF_TORCH))
    try:
        return LocalTraining(**check_arguments("its local training", LocalTraining, kept))
    except (ConfigError, OverflowError) as error:  # a key that another version has, or a value of another type
        raise UpdateError(f"asked for local training that is not known here: {error}") from error
