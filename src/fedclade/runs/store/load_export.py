"""Loading of an exported model into a PyTorch module."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fedclade.core import ModelError, RunError, checked
from fedclade.tasks import ModelMixture, TargetScale

UNIT_HOOK = "_fedclade_unit_hook"
"""Attribute of a module that stores the handle of the hook that rescales the module's outputs."""


@checked()
def load_export(path: str | Path, model: nn.Module) -> nn.Module:
    """Load a model that :func:`~fedclade.export_model` wrote into a PyTorch module.

    Parameters
    ----------
    path
        The file, which ends in ``.safetensors``.
    model
        A module with the architecture of the exported model.

    Returns
    -------
    nn.Module
        The given module with the exported parameters, in evaluation mode. If the exported model is
        a mixture, the result is a :class:`~fedclade.ModelMixture` of copies of the module. If the
        model was trained on standardized targets, the result has a forward hook that converts
        outputs to the unit of the data.

    Raises
    ------
    RunError
        If the file cannot be read.
    ModelError
        If the tensors of the module differ from the tensors in the file by name or shape.
    """
    try:
        with safe_open(path, "pt") as file:
            card: dict[str, Any] = json.loads((file.metadata() or {}).get("fedclade", "{}"))
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"cannot read the model in {path}: {error}") from error
    mixture = card.get("mixture")
    kind = type(model).__name__
    if mixture is not None:
        model = ModelMixture(model, len(mixture["nodes"]), mixture["task"])
        for copied in model.models:
            _remove_unit_hook(copied)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(
            f"the model in {path} does not fit into this {kind}, which should have tensors of the "
            f"same names and shapes: {error}"
        ) from error
    _remove_unit_hook(model)
    scale = TargetScale.of_inputs(card.get("data", {}))
    if scale is not None:
        hook = model.register_forward_hook(partial(_restore_unit, scale))
        model.__dict__[UNIT_HOOK] = hook
    return model.eval()


def _remove_unit_hook(model: nn.Module) -> None:
    """Remove the hook that an earlier call of :func:`load_export` has registered on a module.

    The hook converts outputs to the unit of the targets. A module also has the hook if it is a copy
    of a module with the hook.
    """
    hook = model.__dict__.pop(UNIT_HOOK, None)
    if hook is not None:
        hook.remove()


def _restore_unit(scale: TargetScale, _module: nn.Module, _inputs: Any, outputs: Tensor) -> Tensor:
    """Convert outputs for standardized targets to the unit of the targets, as a forward hook."""
    return scale.restore(outputs)
