"""Buffers of a PyTorch module: running statistics, which are averaged, and all other buffers.

A running statistic is a float buffer that training changes. Running statistics are part of a
model's parameter vector and are averaged over clients. A mean of other buffers makes no sense:
position ids, hash seeds, attention masks of ``-inf``, tables of sines, counters. Such buffers are
"unsent": they are not part of the vector. Most unsent buffers are recognized by their type. Whether
training changes a float buffer is only known after a forward pass
(:func:`fedclade.training.note_unsent_buffers`). The names found by the forward pass are stored in
the module, so that copies of the module have the same vector layout.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

_NOTED = "_fedclade_unsent_buffers"


def is_statistic(module: nn.Module, name: str) -> bool:
    """Return whether a module's buffer is a running statistic of BatchNorm or InstanceNorm.

    Counters named ``num_batches_tracked`` are included.
    """
    from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  (base of BatchNorm and InstanceNorm)

    owner, _, attribute = name.rpartition(".")
    return isinstance(module.get_submodule(owner), _NormBase) or attribute == "num_batches_tracked"


def can_be_averaged(buffer: Tensor) -> bool:
    """Return whether a buffer can be averaged: its values are floats, and all are finite."""
    return buffer.is_floating_point() and bool(buffer.isfinite().all())


def unsent_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's buffers that are not part of the model's parameter vector.

    If :func:`set_unsent_buffers` has recorded names in the module, these names are returned.
    Otherwise, the types of the buffers decide.
    """
    noted: frozenset[str] | None = vars(module).get(_NOTED)
    if noted is not None:
        return noted
    named = module.named_buffers()
    return frozenset(n for n, b in named if not is_statistic(module, n) and not can_be_averaged(b))


def set_unsent_buffers(module: nn.Module, names: Collection[str]) -> None:
    """Record in a module the names of the buffers that its parameter vector does not contain."""
    # Bypass nn.Module.__setattr__, since subclasses may override it.
    object.__setattr__(module, _NOTED, frozenset(names))


def has_same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, type and values; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    both_nan = (one != one) & (other != other)
    return bool(((one == other) | both_nan).all())


@contextmanager
def state_preserved(module: nn.Module) -> Generator[None]:
    """Restore a module's buffers and training modes at the end of a ``with`` block."""
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    modes = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for name, value in buffers.items():
            restore_buffer(module, name, value)
        for part, mode in modes.items():
            part.training = mode


def restore_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a module's buffer, given by its name, to a value.

    The buffer is looked up by name, since a forward pass can replace the tensor of a buffer by a
    new tensor. A tensor that was looked up earlier may then no longer belong to the module.
    """
    owner, _, attribute = name.rpartition(".")
    part = module.get_submodule(owner)
    buffer = part._buffers.get(attribute)  # pyright: ignore[reportPrivateUsage]  (attributes may shadow it)
    can_be_copied_to = (
        buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype
    )
    if buffer is not None and can_be_copied_to and not buffer.is_inference():
        buffer.detach().copy_(value)
        return
    with torch.inference_mode(False):  # a normal tensor, since training may follow an evaluation
        part._buffers[attribute] = value.clone()  # pyright: ignore[reportPrivateUsage]
