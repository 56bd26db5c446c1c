"""Whether a model fits the data of a federation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedclade.core import ModelError
from fedclade.data import Federation


def check_model_fits(module: nn.Module, federation: Federation, device: torch.device) -> None:
    """Run two examples through the model and compare its outputs with the targets; a ModelError if they differ."""
    pool = federation.pool
    inputs = pool.inputs(federation.clients[0].train[:2])
    module.eval()
    try:
        with torch.inference_mode():
            outputs = module(inputs.to(device))
    except Exception as error:
        raise ModelError(f"the model cannot take inputs of shape {pool.input_shape} ({pool.name}): {error}") from error
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if pool.task in ("classification", "language"):
        expected, of_what = (len(inputs), *pool.y.shape[1:], pool.outputs), f"{pool.outputs} labels"
    else:
        expected, of_what = (len(inputs), pool.outputs), f"the targets of a {pool.task} task"
        got = (*got, 1) if got == (len(inputs),) and pool.outputs == 1 else got
    if got != expected:
        raise ModelError(f"the model should give {expected} outputs for {of_what} of {pool.name}, got {got}")
