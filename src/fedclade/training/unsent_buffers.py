"""Trial before a run that finds the buffers of a model that training changes.

Only such buffers are part of the parameter vectors that server and clients exchange. Both have to
agree on these buffers without sharing data, so the inputs of the trial are drawn with a fixed seed
from properties of the data that both know: its :class:`~fedclade.core.DataSpec`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedclade.core import (
    DataSpec,
    Layout,
    ModelError,
    can_be_averaged,
    has_same_values,
    is_statistic,
    rng,
    set_unsent_buffers,
    state_preserved,
)

EXAMPLES = 4
"""Number of examples in a batch of the trial."""

PASSES = 2
"""Number of forward passes of the trial, on different inputs."""

_log = logging.getLogger(__name__)


def note_unsent_buffers(module: nn.Module, spec: DataSpec) -> None:
    """Find the buffers that are not part of parameter vectors, and register them at the module.

    Parameter vectors contain the statistics of normalisation layers, and finite floating-point
    buffers that a forward pass in training mode changes. If the module fails on all inputs of the
    trial, vectors contain all finite floating-point buffers. A warning names integer and boolean
    buffers that training changes: such buffers are not averaged, and every client starts from their
    initial values. See :mod:`fedclade.core.buffers`.

    Parameters
    ----------
    module
        The model.
    spec
        Properties of the data, such as the shape of the inputs.

    Raises
    ------
    ModelError
        If training changes a buffer of complex numbers, or a buffer that has NaN or infinite values
        before training: such buffers cannot be averaged.
    """
    saved = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    uncertain = [name for name in buffers if not is_statistic(module, name)]
    if not uncertain:
        return
    changed = _changed_buffers(module, spec, uncertain)
    unsent: list[str] = []
    for name in uncertain:
        buffer = buffers[name]
        is_changed = changed is not None and name in changed
        if can_be_averaged(buffer):
            if changed is not None and not is_changed:
                unsent.append(name)
            continue
        unsent.append(name)
        if is_changed:
            _report_changed_buffer(module, name, buffer)
    set_unsent_buffers(module, unsent)


def _report_changed_buffer(module: nn.Module, name: str, buffer: Tensor) -> None:
    """Report a buffer that training changes, although it cannot be averaged.

    A warning is logged for a buffer of integers or booleans.

    Raises
    ------
    ModelError
        If the buffer has complex numbers, or NaN or infinite values before training.
    """
    if buffer.is_floating_point() or buffer.is_complex():
        kind = "with a value that is NaN or infinite"
        if buffer.is_complex():
            kind = "of complex numbers"
        raise ModelError(
            f"training changes buffer {name!r} of {type(module).__name__}, {kind}, which "
            "cannot be averaged; initialise this buffer with finite real numbers, or register "
            "it with persistent=False if the buffer need not be shared between clients"
        )
    _log.warning(
        "training changes buffer %r of %s (%s), but only real floating-point buffers are "
        "averaged: every client starts each round from the buffer's initial value, and changes "
        "by training are discarded",
        name,
        type(module).__name__,
        str(buffer.dtype).removeprefix("torch."),
    )


def _changed_buffers(module: nn.Module, spec: DataSpec, names: list[str]) -> set[str] | None:
    """Return the names of the buffers that forward passes in training mode change.

    The result is None if the module fails on all inputs of the trial.
    """
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    device = next(iter(before.values())).device
    for inputs in _example_inputs(module, spec):
        with state_preserved(module), rng.seeded_globally(0, device), torch.no_grad():
            try:
                Layout.of(module).set_training(module)
                for batch in inputs:
                    module(batch.to(device))
            except Exception:  # a user's module may raise anything; other inputs may work
                continue
            now = dict(module.named_buffers())
            return {name for name in names if not has_same_values(now[name], before[name])}
    return None


def _example_inputs(module: nn.Module, spec: DataSpec) -> Iterator[list[Tensor]]:
    """Yield batches of random inputs of each kind that the data may have, the most likely first."""
    # A fixed seed on the CPU: server and clients must draw the same inputs.
    draw = torch.Generator().manual_seed(0)
    shape = (EXAMPLES, *spec.input_shape)
    dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    dtype = next(dtypes, torch.float32)
    numbers: list[Tensor] = []
    tokens: list[Tensor] = []
    for _ in range(PASSES):
        numbers.append(torch.rand(shape, generator=draw))
        tokens.append(torch.randint(max(2, spec.vocabulary_size), shape, generator=draw))
    if spec.scaled is not None:
        mean, std = spec.scaled
        numbers = [(batch - mean) / std for batch in numbers]
    if spec.vocabulary_size:
        yield tokens
    yield numbers
    yield [batch.to(dtype) for batch in numbers]
    if not spec.vocabulary_size:
        yield tokens
