"""Hooks on a model that give it inputs of the type that it computes in, and copies if its forward works in place.

Inputs are views of the data of all clients. What a forward pass writes into them would be seen by
every later pass. A trial finds out which hooks a model needs, before the first round; most models
need none, and have none.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedclade.core import Layout, has_same_values, rng, state_preserved
from fedclade.data import Federation

TRIED = 2
"""Examples in the batch of a trial."""

Inputs = tuple[Tensor, ...]


class CopyInputs:
    """A hook by which a module works on a copy of its inputs."""

    def __call__(self, module: nn.Module, inputs: Inputs) -> Inputs:
        """Return a copy of the inputs."""
        return (inputs[0].clone(), *inputs[1:])


@dataclass
class CastInputs:
    """A hook by which a module gets its inputs in a type, that of its parameters."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, inputs: Inputs) -> Inputs:
        """Return the inputs in that type."""
        return (inputs[0].to(self.dtype), *inputs[1:])


def with_input_hooks(
    module: nn.Module, layout: Layout, federation: Federation, device: torch.device
) -> nn.Module:
    """Return a module that takes a federation's inputs and leaves them as they are.

    It is the module itself if that does so already; otherwise a copy of it with hooks. Inputs are
    cast to the type of the parameters only if the module does not take them as they are: an
    embedding takes whole numbers.
    """
    inputs = federation.pool.inputs(federation.clients[0].train[:TRIED]).to(device)
    hooked = module
    if (dtype := _dtype_to_cast_to(module, inputs)) is not None:
        hooked = copy.deepcopy(module)
        hooked.register_forward_pre_hook(CastInputs(dtype))
    if writes_into_inputs(hooked, layout, inputs):
        hooked = copy.deepcopy(module) if hooked is module else hooked
        # Before the hook that augments, which may work in place, too.
        hooked.register_forward_pre_hook(CopyInputs(), prepend=True)
    return hooked


def writes_into_inputs(module: nn.Module, layout: Layout, inputs: Tensor) -> bool:
    """Return whether a forward pass, in training or evaluation mode, writes into the inputs that it is given."""
    for in_training in (None, layout):
        given = inputs.clone()
        version = given._version  # counts what is written, be it what was there before
        _takes(module, given, in_training)
        if given._version != version or not has_same_values(given, inputs):
            return True
    return False


def cast_inputs_to(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module that casts its inputs cast them to another type."""
    for hook in module._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]  (no other way)
        if isinstance(hook, CastInputs):
            hook.dtype = dtype


def _dtype_to_cast_to(module: nn.Module, inputs: Tensor) -> torch.dtype | None:
    """Return the type of the parameters if the module takes inputs of that type alone; None if it needs no cast."""
    dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    dtype = next(dtypes, inputs.dtype)
    if inputs.dtype == dtype or _takes(module, inputs.clone()):
        return None
    if _takes(module, inputs.to(dtype)):
        return dtype
    # It fails in either type, and the check that follows reports why. An embedding's own error is
    # the clearer one.
    has_embedding = any(
        isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules()
    )
    return None if has_embedding and not inputs.is_floating_point() else dtype


def _takes(module: nn.Module, inputs: Tensor, in_training: Layout | None = None) -> bool:
    """Return whether a module takes inputs in evaluation mode, or in the training mode of a layout.

    Its buffers, its modes and torch's generators stay as they are.
    """
    with state_preserved(module), rng.seeded_globally(0, inputs.device), torch.no_grad():
        if in_training is None:
            module.eval()
        else:
            in_training.set_training(module)
        try:
            module(inputs)
        except Exception:  # whatever a user's module raises
            return False
    return True
