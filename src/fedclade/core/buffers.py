"""Buffers of a module: which of them are averaged like parameters, and which stay as the model has them.

A running statistic is a float that training changes: it travels in a model's vector and is
averaged. Whatever else a module keeps in its buffers is no quantity of which a mean makes sense:
position ids, hash seeds, attention masks of ``-inf``, tables of sines, counters. These buffers are
in no vector. Their type tells most of them; whether training changes a float, only a forward pass
tells (:func:`fedclade.training.note_unsent_buffers`), and its result is noted at the module, so
that copies of the module have the same layout.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  (all of batches and instances)

_NOTED = "_fedclade_unsent_buffers"


def is_statistic(module: nn.Module, name: str) -> bool:
    """Return whether a buffer belongs to BatchNorm or InstanceNorm, or counts batches as these do."""
    owner, _, attribute = name.rpartition(".")
    return isinstance(module.get_submodule(owner), _NormBase) or attribute == "num_batches_tracked"


def can_be_averaged(buffer: Tensor) -> bool:
    """Return whether a mean of such buffers makes sense: they are real numbers, and all finite."""
    return buffer.is_floating_point() and bool(buffer.isfinite().all())


def unsent_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that are in no vector.

    They are those that :func:`set_unsent_buffers` noted. If nothing was noted, their types decide.
    """
    noted: frozenset[str] | None = vars(module).get(_NOTED)
    if noted is not None:
        return noted
    named = module.named_buffers()
    return frozenset(n for n, b in named if not is_statistic(module, n) and not can_be_averaged(b))


def set_unsent_buffers(module: nn.Module, names: Collection[str]) -> None:
    """Note at a module which of its buffers are in no vector."""
    # Not by nn.Module's own __setattr__, which subclasses replace.
    object.__setattr__(module, _NOTED, frozenset(names))


def has_same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one shape, one type and the same values, where NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    both_nan = (one != one) & (other != other)
    return bool(((one == other) | both_nan).all())


@contextmanager
def state_preserved(module: nn.Module) -> Generator[None]:
    """Give a module its buffers and modes back at the end of the block."""
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
    """Give a buffer a value, whatever a forward pass has put in its place."""
    owner, _, attribute = name.rpartition(".")
    part = module.get_submodule(owner)
    buffer = part._buffers.get(attribute)  # pyright: ignore[reportPrivateUsage]  (attributes may shadow it)
    can_be_copied_to = (
        buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype
    )
    if buffer is not None and can_be_copied_to and not buffer.is_inference():
        buffer.detach().copy_(value)
        return
    with torch.inference_mode(False):  # training may follow an evaluation
        part._buffers[attribute] = value.clone()  # pyright: ignore[reportPrivateUsage]
