"""Hooks that cast a model's inputs to the data type of its parameters, or copy the inputs.

Inputs are views of the data of all clients. A forward pass that changes its inputs in place would
therefore change the data of every later pass, so such a model gets copies. A trial before the first
round finds out which hooks a model needs; most models need none.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedclade.core import Layout, has_same_values, rng, state_preserved
from fedclade.data import Federation

TRIED = 2
"""Number of examples in the batch on which a model is tried before the first round."""

Inputs = tuple[Tensor, ...]


class CopyInputs:
    """Forward pre-hook that gives a module a copy of its inputs, which it may then overwrite."""

    def __call__(self, module: nn.Module, inputs: Inputs) -> Inputs:
        """Return the module's inputs with the first input copied."""
        return (inputs[0].clone(), *inputs[1:])


@dataclass
class CastInputs:
    """Forward pre-hook that casts a module's inputs to the data type of its parameters."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, inputs: Inputs) -> Inputs:
        """Return the module's inputs with the first input cast to ``dtype``."""
        return (inputs[0].to(self.dtype), *inputs[1:])


def with_input_hooks(
    module: nn.Module, layout: Layout, federation: Federation, device: torch.device
) -> nn.Module:
    """Return a module that accepts a federation's inputs and does not change them in place.

    Parameters
    ----------
    module
        The model.
    layout
        Layout of the model's parameter vector.
    federation
        The clients, whose inputs the model is tried on.
    device
        Device of the model.

    Returns
    -------
    nn.Module
        The module itself if it needs no hooks; otherwise a copy with hooks. Inputs are cast to the
        data type of the parameters only if the module fails on the original inputs: an embedding,
        for example, needs integers.
    """
    inputs = federation.pool.inputs(federation.clients[0].train[:TRIED]).to(device)
    return with_hooks_for(module, layout, inputs)


def with_hooks_for(module: nn.Module, layout: Layout, inputs: Tensor) -> nn.Module:
    """Return a module that accepts inputs like the given ones, and does not change them in place.

    Parameters
    ----------
    module, layout
        See :func:`with_input_hooks`.
    inputs
        A few inputs ``[n, ...]``, on the device of the model.
    """
    hooked = module
    if (dtype := _dtype_to_cast_to(module, inputs)) is not None:
        hooked = copy.deepcopy(module)
        hooked.register_forward_pre_hook(CastInputs(dtype))
    if writes_into_inputs(hooked, layout, inputs):
        if hooked is module:
            hooked = copy.deepcopy(module)
        # Prepended, so that the copy is made before the augmentation hook, which may change its
        # inputs in place.
        hooked.register_forward_pre_hook(CopyInputs(), prepend=True)
    return hooked


def writes_into_inputs(module: nn.Module, layout: Layout, inputs: Tensor) -> bool:
    """Return whether a forward pass in training or evaluation mode changes its inputs in place."""
    for in_training in (None, layout):
        given = inputs.clone()
        version = given._version  # counts all writes, also of equal values
        _accepts_inputs(module, given, in_training)
        if given._version != version or not has_same_values(given, inputs):
            return True
    return False


def cast_inputs_to(module: nn.Module, dtype: torch.dtype) -> None:
    """Change the data type to which a module casts its inputs.

    A module without a :class:`CastInputs` hook stays unchanged.
    """
    for hook in module._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]  (no other way)
        if isinstance(hook, CastInputs):
            hook.dtype = dtype


def _dtype_to_cast_to(module: nn.Module, inputs: Tensor) -> torch.dtype | None:
    """Return the data type of a module's parameters if its inputs must be cast to this type.

    The result is None if the module accepts the inputs unchanged.
    """
    dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    dtype = next(dtypes, inputs.dtype)
    if inputs.dtype == dtype or _accepts_inputs(module, inputs.clone()):
        return None
    if _accepts_inputs(module, inputs.to(dtype)):
        return dtype
    # The module fails with either data type, and a later check reports the error. For an embedding,
    # the error that torch raises for integer inputs is clearer than the error for cast inputs.
    has_embedding = any(
        isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules()
    )
    if has_embedding and not inputs.is_floating_point():
        return None
    return dtype


def _accepts_inputs(module: nn.Module, inputs: Tensor, in_training: Layout | None = None) -> bool:
    """Return whether a module accepts inputs without raising an exception.

    The module is called in evaluation mode, or, if ``in_training`` has a layout, in the training
    mode that this layout sets. Buffers, training modes and the states of torch's random generators
    are restored.
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
