"""The local training that a server asks for: read by the client, and refused where it is not known there."""

from __future__ import annotations

from typing import Any, cast

from fedclade.core import (
    OF_TORCH,
    ConfigError,
    LocalRule,
    LocalTraining,
    UpdateError,
    check_arguments,
    local_rule,
    unknown,
)
from fedclade.flower.wire import Content


def read_spec(content: Content) -> LocalTraining:
    """Return the local training that a query names; an UpdateError if there is none like that here."""
    kept = content.json("spec")
    optimizer = kept.get("optimizer", "sgd")
    if not isinstance(optimizer, str) or optimizer not in OF_TORCH:  # a module:name imports what the server likes
        raise UpdateError(unknown("optimizer of its local training:", optimizer, OF_TORCH))
    options = kept.get("options")
    if isinstance(options, dict) and cast("dict[str, Any]", options).get("dampening"):
        raise UpdateError("asked for dampened momentum, by which an update may be made from a few examples alone")
    try:
        return LocalTraining(**check_arguments("its local training", LocalTraining, kept))
    except (ConfigError, OverflowError) as error:  # a key that another version has, or a value of another type
        raise UpdateError(f"asked for local training that is not known here: {error}") from error


def read_rule(content: Content) -> LocalRule | None:
    """Return the local rule that a query names, if it does; an UpdateError if there is none like that here."""
    if "rule" not in content.values:
        return None
    try:
        return local_rule(content.json("rule"))
    except (ConfigError, OverflowError) as error:
        raise UpdateError(f"asked for a local rule that is not known here: {error}") from error
