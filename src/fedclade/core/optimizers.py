"""Optimizers by name: those of ``torch.optim``, a user's own by ``module:name``, and the options that each takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fedclade.core.arguments import check_arguments
from fedclade.core.errors import ConfigError, shown, unknown
from fedclade.core.plugins import imported

OF_TORCH: Mapping[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
"""The classes of ``torch.optim`` by name, in small letters."""

OF_LOCAL_TRAINING: Mapping[str, float] = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
"""Arguments that local training gives, with what SGD takes where they are left out."""

NO_OPTIONS = ("params", "capturable", "differentiable", *OF_LOCAL_TRAINING)
"""Arguments that are no options: engines know which parameters there are, and how steps are recorded."""


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of a name.

    Raises
    ------
    ConfigError
        If there is none, or it needs more than one gradient for a step.
    """
    kind = OF_TORCH.get(name.lower())
    if kind is None and ":" in name:
        kind = imported(name, "optimizer")
        if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
            raise ConfigError(f"optimizer {shown(name)} should be a subclass of torch.optim.Optimizer")
    if kind is None:
        raise ConfigError(unknown("optimizer", name, OF_TORCH))
    if issubclass(kind, torch.optim.LBFGS):
        raise ConfigError(f"optimizer {shown(name)} needs several gradients for a step; take another, such as adam")
    return kind


def optimizer_name(kind: type[Any]) -> str:
    """Return the name by which a class is noted; a ConfigError if it has none."""
    name = next((name for name, known in OF_TORCH.items() if known is kind), f"{kind.__module__}:{kind.__qualname__}")
    if "<locals>" in name:
        raise ConfigError(f"optimizer {name} should be defined at the top of a module, by whose name it is noted")
    return name


def own_defaults(kind: type[Optimizer]) -> dict[str, float]:
    """Return which of :data:`OF_LOCAL_TRAINING` an optimizer has, with what it takes where they are left out."""
    if kind is torch.optim.SGD:  # torch's step size for it is one that nobody wants
        return {**OF_LOCAL_TRAINING}
    parameters = inspect.signature(kind).parameters
    own = {name: parameters[name].default for name in OF_LOCAL_TRAINING if name in parameters}
    return {name: OF_LOCAL_TRAINING[name] if d is inspect.Parameter.empty else float(d) for name, d in own.items()}


def checked_options(
    kind: type[Optimizer], arguments: Mapping[str, float], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of an optimizer in the types that it says, given its other arguments.

    Raises
    ------
    ConfigError
        If one is unknown, of the wrong type or out of range; or if one belongs to local training itself.
    """
    name = kind.__name__
    if own := [option for option in options if option in OF_LOCAL_TRAINING]:
        raise ConfigError("\n".join(f"local.options should not have {each}, give it as local.{each}" for each in own))
    if kind is torch.optim.SGD and not options:  # whose arguments are in range
        return {}
    tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    fitted = check_arguments(f"the options of {name}", kind, tuples, NO_OPTIONS, positional=True)
    try:
        parameter = nn.Parameter(torch.zeros(1, 1))
        parameter.grad = torch.zeros(1, 1)
        kind([parameter], **arguments, **fitted).step()
    except Exception as error:  # whatever torch, or the user's own class, finds wrong
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"optimizer {name} with local.options {shown(dict(options))} takes no step: {first_line}"
        ) from error
    return fitted
