"""Devices, precision of matrix products on a GPU, and number of CPU threads for a training step."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedclade.core import ConfigError

# The device on which clients train, and the precision of float32 products on a GPU.


def choose_device(device: str) -> str:
    """Return the device for the setting ``device``: ``cpu``, ``cuda`` or for example ``cuda:1``.

    A numbered GPU also becomes torch's current CUDA device, on which CUDA graphs are recorded.

    Parameters
    ----------
    device
        ``auto``, ``cpu``, ``cuda``, or one GPU of several such as ``cuda:1``. With ``auto``, the
        device is ``cuda`` if torch finds one.

    Raises
    ------
    ConfigError
        If the name is unknown, or torch does not find the CUDA device.
    """
    numbered = re.fullmatch(r"cuda:(\d{1,3})", device)
    if numbered is None and device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device should be auto, cpu, cuda, or a numbered GPU such as cuda:1, got {device!r}"
        )
    if device == "cpu":
        return device
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if has_cuda else "cpu"
    if not has_cuda:
        raise ConfigError(
            f"device {device!r} was requested, but torch finds no CUDA device; use --device cpu"
        )
    if numbered is None:
        return device
    number = int(numbered[1])
    count = torch.cuda.device_count()
    if number >= count:
        devices = ", ".join(["cpu", *(f"cuda:{n}" for n in range(count))])
        raise ConfigError(
            f"device {device!r} was requested, but this machine has the devices {devices}; choose "
            "one of them"
        )
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def choose_devices(device: str | Sequence[str]) -> tuple[str, ...]:
    """Return the devices for a client's setting ``device``, the first one for its data.

    Parameters
    ----------
    device
        A device as :func:`choose_device` accepts it; or several numbered GPUs,
        as a list or as a text with commas such as ``cuda:0,cuda:1``.

    Raises
    ------
    ConfigError
        If a device is unknown or named twice, or if one of several is not a numbered GPU.
    """
    given = device.split(",") if isinstance(device, str) else device
    names = [name.strip() for name in given]
    if not names:
        raise ConfigError("device should name at least one device, got an empty list; name one")
    if len(names) == 1:
        return (choose_device(names[0]),)
    for name in names:
        if not name.startswith("cuda:"):
            raise ConfigError(
                "several devices should be numbered GPUs such as cuda:0,cuda:1, got "
                f"{name!r} among {', '.join(names)}; name one device, or GPUs only"
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"device {name!r} is named twice among {', '.join(names)}; name it once"
            )
    # The first device is chosen last, since the choice also makes it torch's current device.
    chosen = [choose_device(name) for name in reversed(names)]
    return tuple(reversed(chosen))


@contextmanager
def float32_products(tf32: bool) -> Generator[None]:
    """Choose, for a ``with`` block, whether a GPU may compute float32 products in TF32.

    TF32 rounds the factors of products to 10 bits of mantissa, which is faster. By default, torch
    uses TF32 in convolutions and recurrent layers, but not in products of matrices.
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


def allows_tf32() -> tuple[bool, bool]:
    """Return whether products of matrices, and convolutions, may be computed in TF32 on a GPU."""
    # Torch's type stubs have neither setting, hence Any.
    kinds: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn
    return kinds[0].allow_tf32, kinds[1].allow_tf32


WORTH_SHARING = 5e7
"""Number of operations of a forward pass from which several threads are faster than one thread."""

WORTH_SHARING_STACKED = 1e7
"""Number of operations from which several threads are faster, if all clients train together.

It is less than ``WORTH_SHARING``, since such a step has fewer and larger operations.
"""

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File in which Linux reports a container's CPU quota and period in microseconds.

The quota is ``max`` if there is no limit.
"""

_operations: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, ...], int]] = (
    weakref.WeakKeyDictionary()
)
"""Number of operations of a module's forward pass, by module and by the shape of the inputs."""


def cores() -> int:
    """Return the number of threads that can run at the same time in this process.

    The number depends on the process's CPU affinity and on the CPU quota of a Linux container.
    """
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
    """Return the number of CPU threads for a training step of some clients with full batches.

    The result is 1 unless a forward pass has so many operations that more threads make it faster.
    Federated learning takes many tiny steps, and threads that synchronize after every operation of
    a few microseconds lose more time than they save. Operations are counted, not timed: rounding
    depends on the number of threads, so this number has to be the same in every run.

    Parameters
    ----------
    module
        The model.
    inputs
        Inputs of one client, ``[n, ...]``.
    batch_size
        Number of examples in a batch.
    clients
        Number of clients whose steps are computed together.
    worth_sharing
        Number of operations from which all available threads are used.
    """
    available = torch.get_num_threads()
    if available == 1 or inputs.is_cuda:  # the counter's imports would take a second
        return available
    operations = _operations.setdefault(module, {})
    shape = (batch_size, *inputs.shape[1:])
    if shape not in operations:
        module.eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(inputs[torch.arange(batch_size) % len(inputs)])
        operations[shape] = counter.get_total_flops()
    if clients * operations[shape] < worth_sharing:
        return 1
    return available


@contextmanager
def using_threads(count: int) -> Generator[None]:
    """Let torch use ``count`` CPU threads in a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
