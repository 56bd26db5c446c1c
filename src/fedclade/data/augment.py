"""Augmentation: a function that changes the inputs of a batch, in training alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor

from fedclade.core import ConfigError, imported, shown

Augment = Callable[[Tensor], Tensor]
"""Takes the inputs of a batch ``[B, ...]``, as the model would, and returns what the model gets in their place.

It treats each example by itself, and what it draws, it draws from torch's generators, so that the run's seed sets it.
"""


def augment_of(given: object) -> Augment | None:
    """Return an augmentation given as a function or by ``module:function``.

    Raises
    ------
    ConfigError
        If it cannot be imported, or is no function of the inputs alone.
    """
    if given is None:
        return None
    found: Augment = imported(given, "augment") if isinstance(given, str) else given  # pyright: ignore[reportAssignmentType]  (checked next)
    if not callable(found):
        raise ConfigError(f"augment should be a function of a batch of inputs, got {shown(given)}")
    try:
        needed = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty]
    except ValueError:  # of some functions that are not written in Python
        return found
    if sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed) > 1:
        raise ConfigError(
            f"augment should be a function of the inputs x alone, got {shown(given)} of "
            f"({', '.join(p.name for p in needed)}); what changes the targets too cannot be done in a batch"
        )
    return found
