"""Hooks between the examples and a model: they prepare its inputs, and select its scored output.

Hooks are used since they leave names of parameters unchanged, and run in every engine. A model whose
examples are dicts or tuples gets them from rows of numbers (:class:`UnpackInputs`). A model that
returns several tensors gets a hook that selects one of them (:class:`SelectOutput`).

Inputs are views of the data of all clients. A forward pass that changes its inputs in place would
therefore change the data of every later pass, so such a model gets copies. A trial before the first
round finds out which hooks a model needs; most models need none.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.core import Layout, ModelError, Structure, has_same_values, rng, state_preserved
from fedclade.data import Federation
from fedclade.tasks import FittedTask

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


class UnpackInputs:
    """Forward pre-hook that divides rows of numbers into the several inputs of a module.

    Inputs that are not one tensor are unchanged, so that the module can also be called directly.

    Parameters
    ----------
    structure
        Structure of an input, which each row stores.
    module
        The module. The inputs of a dict become keyword arguments if its forward method has
        parameters of these names. Otherwise a method with one parameter gets the whole dict, or the
        tensor if there is only one. The inputs of a tuple become positional arguments.

    Raises
    ------
    ModelError
        If the forward method takes neither the named inputs nor one dict.
    """

    def __init__(self, structure: Structure, module: nn.Module) -> None:
        self.structure = structure
        self._by_name = False
        if structure.is_named:
            self._by_name = _takes_names(module, structure)

    def __call__(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the positional and keyword arguments of the module's forward method."""
        if len(arguments) != 1 or keywords or not isinstance(arguments[0], Tensor):
            return None
        tensors = self.structure.unpack(arguments[0], _dtype_of(module))
        if isinstance(tensors, tuple):
            return tensors, {}
        if self._by_name:
            return (), dict(tensors)
        if len(tensors) == 1:
            return tuple(tensors.values()), {}
        return (tensors,), {}


def _takes_names(module: nn.Module, structure: Structure) -> bool:
    """Return whether a module's forward method takes named inputs as keyword arguments.

    The result is False if the method takes one argument: a dict, or the only tensor.

    Raises
    ------
    ModelError
        If the method takes neither.
    """
    parameters = inspect.signature(module.forward).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    is_open = inspect.Parameter.VAR_KEYWORD in kinds
    if is_open or all(name in parameters for name in structure.names):
        return True
    needed = [
        parameter
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.kind != parameter.VAR_POSITIONAL
    ]
    if len(needed) <= 1 and len(parameters) >= 1:
        return False
    raise ModelError(
        f"the forward method of {type(module).__name__} has the parameters "
        f"{', '.join(parameters)}, but the inputs are named {', '.join(structure.names)}; give the "
        "inputs the names of these parameters, by inputs={parameter: column} for data with "
        "columns, or define forward(self, inputs) with one dict"
    )


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the data type of a module's first floating-point parameter; None without one."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


Entry = str | int
"""Name of an entry of a model's output that is a dict or an object, or position in a tuple."""


class SelectOutput:
    """Forward hook that selects the scored tensor of a module's output.

    Parameters
    ----------
    entry
        The entry to select; None for the entry ``logits``, or the only tensor.
    is_dense
        Whether outputs ``[B, C, H, W]`` have their C channels in dimension 1. The hook then moves
        them to the end, where losses and metrics expect the scores of labels.
    """

    def __init__(self, entry: Entry | None, is_dense: bool) -> None:
        self._entry = entry
        self._is_dense = is_dense

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> Tensor:
        """Return the scored output, as a tensor ``[B, ...]``.

        Raises
        ------
        ModelError
            If the output has no such entry, or several tensors of which none is selected.
        """
        tensor = outputs
        if not isinstance(outputs, Tensor):
            tensor = select_output(outputs, self._entry, type(module).__name__)
        if self._is_dense and tensor.dim() > 2:
            # Contiguous, as losses reuse memory for outputs at the same address.
            return tensor.movedim(1, -1).contiguous()
        return tensor


def select_output(outputs: Any, entry: Entry | None, model: str) -> Tensor:
    """Return one tensor of a model's output that is a dict, a tuple or an object.

    Parameters
    ----------
    outputs
        The output, such as a tuple, a dict, or a ``ModelOutput`` of Hugging Face.
    entry
        Name or position of the tensor; None for the entry ``logits``, or the only tensor.
    model
        Name of the model's class in messages.

    Raises
    ------
    ModelError
        If the output has no such entry, or the choice is open.
    """
    entries = _entries_of(outputs)
    if entries is None:
        raise ModelError(
            f"the model {model} should return a tensor, or a tuple or dict of tensors, got "
            f"{type(outputs).__name__}"
        )
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    wanted: Entry | None = entry
    if wanted is None and "logits" in tensors:
        wanted = "logits"
    if wanted is None and len(tensors) == 1:
        wanted = next(iter(tensors))
    if isinstance(wanted, int) and wanted not in tensors and 0 <= wanted < len(tensors):
        wanted = list(tensors)[wanted]
    if wanted not in tensors:
        problem = "state" if entry is None else f"has no tensor {entry!r}, so state another one:"
        raise ModelError(
            f"the model {model} returns the tensors {', '.join(map(str, tensors)) or 'none'}; "
            f"{problem} the one that is scored, such as Task(output={next(iter(tensors), 0)!r}) or "
            "task.output in a config"
        )
    return tensors[wanted]


def _entries_of(outputs: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a model's output by name or position; None if it has none."""
    if isinstance(outputs, Mapping):
        return outputs
    if hasattr(outputs, "_asdict"):  # a named tuple
        return outputs._asdict()
    if isinstance(outputs, tuple | list):
        return dict(enumerate(outputs))
    if is_dataclass(outputs):
        return vars(outputs)
    return None


def input_structure(module: nn.Module) -> Structure | None:
    """Return the structure by which a module divides rows of numbers; None if it does not."""
    hooks = module._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
    return next((hook.structure for hook in hooks if isinstance(hook, UnpackInputs)), None)


def unpacks_inputs(module: nn.Module) -> bool:
    """Return whether a module divides rows of numbers into its inputs."""
    return input_structure(module) is not None


def unpack_inputs(module: nn.Module, structure: Structure | None) -> nn.Module:
    """Let a module take rows of numbers that store several inputs, in place.

    Parameters
    ----------
    module
        The module, which is also returned. It is unchanged if it takes such rows already.
    structure
        Structure of an input; None for inputs of one tensor, for which nothing changes.

    Raises
    ------
    ModelError
        If the module's forward method does not take these inputs.
    """
    if structure is not None and not unpacks_inputs(module):
        module.register_forward_pre_hook(UnpackInputs(structure, module), with_kwargs=True)
    return module


def _with_scored_output(
    module: nn.Module, layout: Layout, inputs: Tensor, output: int | str | None, *, is_dense: bool
) -> nn.Module:
    """Return a module whose output is the scored tensor: a copy with a hook, if it needs one."""
    if not is_dense and not _returns_several(module, layout, inputs):
        return module
    hooked = copy.deepcopy(module)
    hooked.register_forward_hook(SelectOutput(output, is_dense))
    return hooked


def _returns_several(module: nn.Module, layout: Layout, inputs: Tensor) -> bool:
    """Return whether a module's output is no tensor, in training or in evaluation mode."""
    for in_training in (None, layout):
        outputs = _outputs_of(module, inputs.clone(), in_training)
        if outputs is not None and not isinstance(outputs, Tensor):
            return True
    return False


def with_input_hooks(
    module: nn.Module,
    layout: Layout,
    federation: Federation,
    device: torch.device,
    task: FittedTask | None = None,
) -> nn.Module:
    """Return a module that accepts a federation's inputs and does not change them in place.

    The returned module returns one tensor, the scored output.

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
    task
        The task, which states the scored output of a model that returns several; None for the
        default output.

    Returns
    -------
    nn.Module
        The module itself if it needs no hooks; otherwise a copy with hooks. Inputs are cast to the
        data type of the parameters only if the module fails on the original inputs: an embedding,
        for example, needs integers.
    """
    inputs = federation.pool.inputs(federation.clients[0].train[:TRIED]).to(device)
    structure = federation.pool.structure
    if structure is not None and not unpacks_inputs(module):
        module = unpack_inputs(copy.deepcopy(module), structure)
    if task is None:
        return with_hooks_for(module, layout, inputs)
    is_dense = task.kind == "segmentation"
    return with_hooks_for(module, layout, inputs, output=task.output, is_dense=is_dense)


def with_hooks_for(
    module: nn.Module,
    layout: Layout,
    inputs: Tensor,
    *,
    output: int | str | None = None,
    is_dense: bool = False,
) -> nn.Module:
    """Return a module that accepts inputs like the given ones, and does not change them in place.

    The returned module returns one tensor, the scored output.

    Parameters
    ----------
    module, layout
        See :func:`with_input_hooks`.
    inputs
        A few inputs ``[n, ...]``, on the device of the model.
    output
        Scored entry of a model's output that is not a tensor; None for the default.
    is_dense
        Whether the model has outputs for each pixel.
    """
    module = _with_scored_output(module, layout, inputs, output, is_dense=is_dense)
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

    See :func:`_outputs_of` for the parameters.
    """
    return _outputs_of(module, inputs, in_training) is not None


def _outputs_of(module: nn.Module, inputs: Tensor, in_training: Layout | None = None) -> Any:
    """Return the outputs of a module for some inputs; None if it raises an exception.

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
            outputs = module(inputs)
        except Exception:  # a user's module may raise anything
            return None
    return () if outputs is None else outputs
