"""The model that a client makes itself, of whatever it was given for it."""

from __future__ import annotations

from torch import nn

from fedclade.data import Federation
from fedclade.models import Parts
from fedclade.runs import Maker, module_for


def maker_of(model: nn.Module | str | Maker, federation: Federation, parts: Parts) -> Maker:
    """Return a function that makes a model of some parts from a seed; a module is the same for every seed."""

    def make(seed: int) -> nn.Module:
        if isinstance(model, str):
            return module_for(model, federation.pool.schema, seed)
        return model if isinstance(model, nn.Module) else model(seed)

    return lambda seed: parts.applied(make(seed), seed)
