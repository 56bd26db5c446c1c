"""Hooks that cast a model's inputs to its type, and copy inputs that its forward pass changes.

Inputs are views of the data of all clients, so every later pass would see what a forward pass
writes into them. A trial before the first round finds out which hooks a model needs; most models
need no hook, and have none.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedclade.core import Layout, has_same_values, rng, state_preserved
from fedclade.data import Federation

TRIED = 2
"""Number of examples in the batch of a trial."""

Inputs = tuple[Tensor, ...]


class CopyInputs:
    """Forward pre-hook that passes a copy of the inputs to a module."""

    def __call__(self, module: nn.Module, inputs: Inputs) -> Inputs:
        """Return a copy of the inputs."""
        return (inputs[0].clone(), *inputs[1:])


@dataclass
class CastInputs:
    """Forward pre-hook that casts a module's inputs to a type: the type of its parameters."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, inputs: Inputs) -> Inputs:
        """Return the inputs in the type."""
        return (inputs[0].to(self.dtype), *inputs[1:])


def with_input_hooks(
    module: nn.Module, layout: Layout, federation: Federation, device: torch.device
) -> nn.Module:
    """Return a module that takes a federation's inputs and does not change them.

    Parameters
    ----------
    module
        The model.
    layout
        Its layout.
    federation
        The clients.
    device
        Device of the model.

    Returns
    -------
    nn.Module
        The module itself if it needs no hooks; otherwise a copy with hooks. Inputs are cast to the
        type of the parameters only if the module does not take them unchanged: an embedding takes
        whole numbers.
    """
    inputs = federation.pool.inputs(federation.clients[0].train[:TRIED]).to(device)
    hooked = module
    if (dtype := _dtype_to_cast_to(module, inputs)) is not None:
        hooked = copy.deepcopy(module)
        hooked.register_forward_pre_hook(CastInputs(dtype))
    if writes_into_inputs(hooked, layout, inputs):
        hooked = copy.deepcopy(module) if hooked is module else hooked
        # Before the hook that augments inputs, which may also work in place.
        hooked.register_forward_pre_hook(CopyInputs(), prepend=True)
    return hooked


def writes_into_inputs(module: nn.Module, layout: Layout, inputs: Tensor) -> bool:
    """Return whether a forward pass, in training or evaluation mode, writes into its inputs."""
    for in_training in (None, layout):
        given = inputs.clone()
        version = given._version  # counts all writes, also of equal values
        _takes(module, given, in_training)
        if given._version != version or not has_same_values(given, inputs):
            return True
    return False


def cast_inputs_to(module: nn.Module, dtype: torch.dtype) -> None:
    """Change the type to which a module casts its inputs, if it casts them."""
    for hook in module._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]  (no other way)
        if isinstance(hook, CastInputs):
            hook.dtype = dtype


def _dtype_to_cast_to(module: nn.Module, inputs: Tensor) -> torch.dtype | None:
    """Return the type of the parameters if the module needs inputs of that type; otherwise None."""
    dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    dtype = next(dtypes, inputs.dtype)
    if inputs.dtype == dtype or _takes(module, inputs.clone()):
        return None
    if _takes(module, inputs.to(dtype)):
        return dtype
    # The module fails with either type, and a later check reports the error. With an embedding, the
    # error for inputs that are not cast is clearer.
    has_embedding = any(
        isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules()
    )
    return None if has_embedding and not inputs.is_floating_point() else dtype


def _takes(module: nn.Module, inputs: Tensor, in_training: Layout | None = None) -> bool:
    """Return whether a module takes inputs in evaluation mode, or in the training mode of a layout.

    Its buffers, its modes and torch's generators stay unchanged.
    """
    with state_preserved(module), rng.seeded_globally(0, inputs.device), torch.no_grad():
        if in_training is None:
            module.eval()
        else:
            in_training.set_training(module)
        try:
            module(inputs)
        except Exception:  # a user's module may raise anything
            return False
    return True
