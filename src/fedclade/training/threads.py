"""Devices, precision of products on a GPU, and number of threads for a step of local training."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedclade.core import ConfigError

# The device on which clients train, and the precision of float32 products on a GPU.


def choose_device(device: str) -> str:
    """Return the device for a setting: ``cpu`` or ``cuda``.

    Parameters
    ----------
    device
        ``auto``, ``cpu`` or ``cuda``.

    Raises
    ------
    ConfigError
        If the name is unknown, or there is no such device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device should be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


@contextmanager
def float32_products(tf32: bool) -> Generator[None]:
    """Choose whether a GPU may use TF32 for float32 products in the block.

    TF32 rounds the factors of products to 10 bits of mantissa. By default, torch uses it in
    convolutions and recurrent layers, but not in products of matrices.
    """
    # Torch's type stubs have neither setting, hence Any.
    kinds: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [kind.allow_tf32 for kind in kinds]
    try:
        for kind in kinds:
            kind.allow_tf32 = tf32
        yield
    finally:
        for kind, allowed in zip(kinds, before, strict=True):
            kind.allow_tf32 = allowed


WORTH_SHARING = 5e7
"""Floating-point operations of a forward pass above which several threads are faster than one."""

WORTH_SHARING_STACKED = 1e7
"""The same limit for a step of all clients together, which has fewer and larger operations."""

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File in which Linux reports a container's CPU quota and period in microseconds.

The quota is ``max`` if there is no limit.
"""

_operations: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, ...], int]] = (
    weakref.WeakKeyDictionary()
)
"""Number of operations of a forward pass of a module, by the shape of its inputs."""


def cores() -> int:
    """Return the number of threads that can run at once in this process, as the system reports."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        count = os.cpu_count() or 1
    with suppress(OSError, ValueError):  # not in a container, or no limit
        quota, period = map(int, CGROUP_QUOTA.read_text().split())
        count = min(count, max(1, quota // max(1, period)))
    return count


def threads_of_step(
    module: nn.Module,
    inputs: Tensor,
    batch_size: int,
    clients: int = 1,
    worth_sharing: float = WORTH_SHARING,
) -> int:
    """Return the number of threads for a step of some clients with full batches.

    It is 1 unless the number of operations of a forward pass makes more threads faster. Federated
    learning takes many tiny steps, and threads that synchronize after every operation of a few
    microseconds lose more time than they save. Operations are counted, not timed, so that the
    number of threads, on which rounding depends, is the same in every run.

    Parameters
    ----------
    module
        The model.
    inputs
        Inputs of one client, ``[n, ...]``.
    batch_size
        Number of examples in a batch.
    clients
        Number of clients that take the step together.
    worth_sharing
        Number of operations from which all available threads are used.
    """
    available = torch.get_num_threads()
    if available == 1 or inputs.is_cuda:  # saves a second of imports by the counter
        return available
    operations = _operations.setdefault(module, {})
    shape = (batch_size, *inputs.shape[1:])
    if shape not in operations:
        module.eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(inputs[torch.arange(batch_size) % len(inputs)])
        operations[shape] = counter.get_total_flops()
    return available if clients * operations[shape] >= worth_sharing else 1


@contextmanager
def using_threads(count: int) -> Generator[None]:
    """Let torch use ``count`` threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
