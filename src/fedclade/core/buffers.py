"""Buffers of a module: those that are averaged like parameters, and those that stay unchanged.

A running statistic is a float that training changes: it is part of a model's vector and is
averaged. No other buffer is a quantity of which a mean makes sense: position ids, hash seeds,
attention masks of ``-inf``, tables of sines, counters. These buffers are in no vector. Most of them
are recognized by their type. Whether training changes a float buffer is only known after a forward
pass (:func:`fedclade.training.note_unsent_buffers`); its result is stored in the module, so that
copies of the module have the same layout.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  (all of batches and instances)

_NOTED = "_fedclade_unsent_buffers"


def is_statistic(module: nn.Module, name: str) -> bool:
    """Return whether a buffer belongs to BatchNorm or InstanceNorm, or counts batches."""
    owner, _, attribute = name.rpartition(".")
    return isinstance(module.get_submodule(owner), _NormBase) or attribute == "num_batches_tracked"


def can_be_averaged(buffer: Tensor) -> bool:
    """Return whether a mean of such buffers makes sense: they are real numbers, all finite."""
    return buffer.is_floating_point() and bool(buffer.isfinite().all())


def unsent_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that are in no vector.

    These are the buffers that :func:`set_unsent_buffers` recorded. If nothing was recorded, the
    types of the buffers decide.
    """
    noted: frozenset[str] | None = vars(module).get(_NOTED)
    if noted is not None:
        return noted
    named = module.named_buffers()
    return frozenset(n for n, b in named if not is_statistic(module, n) and not can_be_averaged(b))


def set_unsent_buffers(module: nn.Module, names: Collection[str]) -> None:
    """Record in a module which of its buffers are in no vector."""
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
    """Restore a module's buffers and training modes at the end of the block."""
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
    """Set a buffer to a value, even if a forward pass has replaced the buffer by another tensor."""
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
