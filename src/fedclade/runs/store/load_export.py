"""Loading of exported models into a module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from fedclade.core import ModelError, RunError, checked
from fedclade.tasks import ModelMixture


@checked()
def load_export(path: str | Path, model: nn.Module) -> nn.Module:
    """Load a model that :func:`~fedclade.export_model` wrote.

    Parameters
    ----------
    path
        The file, which ends in ``.safetensors``.
    model
        A module of the architecture that was trained.

    Returns
    -------
    nn.Module
        The module itself, with the exported parameters; or a :class:`~fedclade.ModelMixture` of
        copies of it if the exported model is a mixture. Either is in evaluation mode.

    Raises
    ------
    RunError
        If the file cannot be read.
    ModelError
        If the module has other tensors than the file.
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
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"the model in {path} does not fit into this {kind}: {error}") from error
    return model.eval()
