"""Memory of a round, memory of a client in it, and the blocks of clients that fit."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.core import ConfigError, Indices, Layout, LocalTraining, ModelError, Round, shown
from fedclade.data import Federation, Pool
from fedclade.training.jobs import Workload
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stages import Held, Stages

SHARE = 4
"""Divisor of the machine's memory that gives the default limit."""

SMALLEST = 2**30
"""Assumed memory in bytes of a machine that does not report its memory."""

CACHE = 2**22
"""Bytes of parameters that a CPU thread can process in every step without waiting for memory."""

RECEIVED = 2**25
"""Bytes of updates that a streaming run receives at a time on a CPU.

From 32 MiB on, the C library of Linux returns memory to the system as soon as it is freed. Mapping
each of its pages again, block after block, can take as long as the training.
"""

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Options of the C library's ``mallopt``, as defined in ``malloc.h``."""

LARGEST_THRESHOLD = 2**30
"""Bytes from which memory is returned to the system even if a process keeps its freed memory."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""File in which Linux reports the memory limit of a container; ``max`` if there is no limit."""

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def memory_bytes(memory: int | str) -> int:
    """Return a size such as ``"2GB"``, ``"500 MiB"`` or a number of bytes, in bytes.

    Raises
    ------
    ConfigError
        If it is not a size, or not above 0.
    """
    size: float = 0.0 if isinstance(memory, str | bool) else memory
    if isinstance(memory, str) and (
        found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", memory.strip())
    ):
        size = float(found[1]) * UNITS.get((found[2] or "B").upper(), 0)
    if not 1 <= size < 2**63:  # a number of too many digits becomes infinity
        raise ConfigError(
            f"memory should be a size such as 2GB, 500MiB or a number of bytes, got {shown(memory)}"
        )
    return int(size)


def default_memory(device: torch.device) -> int:
    """Return a quarter of the memory of the machine, its container or its GPU, in bytes.

    The total is used, not the free memory, so that a repeated run is cut into the same blocks.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // SHARE
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not available on every system
        total = SMALLEST
    with suppress(OSError, ValueError):  # not in a container, or no limit
        total = min(total, int(CGROUP_LIMIT.read_text()))
    return total // SHARE


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next use.

    For processes that only train. By default, the C library of Linux returns large tensors, and
    memory at the end of its heap, to the system as soon as they are freed, and has them mapped
    again, page by page, when the next step creates the same tensors.
    """
    with suppress(AttributeError):  # other C libraries have no mallopt
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_TRIM_THRESHOLD, LARGEST_THRESHOLD)
        # Older versions of the C library accept at most 32 MiB.
        if not set_option(M_MMAP_THRESHOLD, LARGEST_THRESHOLD):
            set_option(M_MMAP_THRESHOLD, RECEIVED)


def hot_bytes(module: nn.Module, layout: Layout) -> int:
    """Return the bytes of a client's parameters that a step processes, without embeddings.

    A step uses only few rows of an embedding.
    """
    tables = [layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding)]
    rows = sum(table.numel() for table in tables if table.requires_grad)
    return (layout.n_parameters - rows) * layout.dtype.itemsize


def clients_in_cache(hot: int, threads: int) -> int:
    """Return the number of clients that a CPU should train at the same time, given their bytes.

    ``hot`` is the number of :func:`hot_bytes` of a client. With more clients, parameters are read
    from memory at each step.
    """
    return max(1, threads * CACHE // max(1, hot))


def updates_at_once(size: int, device: torch.device, budget: int) -> int:
    """Return the number of updates of ``size`` bytes that a streaming run receives at a time.

    The updates, and copies of them on their way, must not use up the budget.
    """
    largest = RECEIVED if device.type == "cpu" else budget
    return max(1, min(largest, budget // 8) // size)


def bytes_per_client(module: nn.Module, layout: Layout, batch: Tensor, spec: LocalTraining) -> int:
    """Estimate the bytes that the training of one more client takes, on batches like this.

    These are its parameters, gradients, momentum or other state of the optimizer, and update; the
    model to which a proximal term pulls; the gradients before they are clipped; and the tensors
    that a step saves for the backward pass, counted twice, since the backward pass creates as many
    again.
    """
    kept: dict[int, int] = {}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # Frozen tensors exist once for all clients.
    common = {tensors[name].untyped_storage().data_ptr() for name in layout.frozen}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in common:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    module.eval()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(batch)
    optimizer = LocalOptimizer.of(spec, 1.0)
    kept_by_it = 1 if optimizer.is_plain else len(optimizer.states)
    vectors = 3 + kept_by_it + (spec.mu > 0) + (spec.clip_norm is not None)
    return vectors * layout.size * layout.dtype.itemsize + 2 * sum(kept.values())


# Blocks of clients that train at the same time: as many as fit into memory.


class Blocks:
    """Splits clients into blocks that fit into memory; data and module are on one device.

    Parameters
    ----------
    federation
        The clients.
    module
        The model's structure.
    layout
        Layout of the whole model.
    stages
        Data that is gathered, whose bytes are subtracted from the memory.
    memory
        Bytes that data and training may take.
    """

    def __init__(
        self, federation: Federation, module: nn.Module, layout: Layout, stages: Stages, memory: int
    ) -> None:
        self._federation = federation
        self._module = module
        self._layout = layout
        self._stages = stages
        self._memory = memory
        self._bytes_by_spec: dict[LocalTraining, int] = {}

    def of(
        self, sizes: Indices, this_round: Round, held: Held, models: int = 1
    ) -> Sequence[Sequence[int]]:
        """Return the places of clients in blocks, sorted by size.

        Parameters
        ----------
        sizes
            Number of examples of each client, ``[n]``.
        this_round
            The round.
        held
            The clients' data.
        models
            Number of models of each client. They are trained one after the other, and their updates
            are kept until all have been trained.
        """
        spec = this_round.spec
        rule = this_round.rule
        by_size = sorted(range(len(sizes)), key=lambda place: -sizes[place])
        if spec not in self._bytes_by_spec:
            largest = int(held.data.splits["train"].sizes.max())
            some = np.resize(self._federation.clients[0].train, min(spec.batch_size, largest))
            batch = self._federation.pool.inputs(some).to(held.data.device)
            self._bytes_by_spec[spec] = bytes_per_client(self._module, self._layout, batch, spec)
        own_data = 0 if held.data.bytes_kept else held.data.bytes_each * int(max(sizes))
        vectors = (models - 1) + (0 if rule is None else rule.vectors)
        each = (
            self._bytes_by_spec[spec]
            + own_data
            + vectors * self._layout.size * self._layout.dtype.itemsize
        )
        at_once = max(1, (self._memory - self._stages.bytes_kept) // each)
        return [block.tolist() for block in np.array_split(by_size, -(-len(sizes) // at_once))]


# Check of a model with the data of a federation.

MODULE_ERRORS = (RuntimeError, ValueError, IndexError)
"""Exceptions that a module raises if it does not fit a client's data."""


def check_model_fits(module: nn.Module, federation: Federation, device: torch.device) -> None:
    """Check that the model takes two examples, and that its outputs fit the targets.

    Raises
    ------
    ModelError
        If the model fails on the examples, or its outputs have another shape than the targets need.
    """
    pool = federation.pool
    inputs = pool.inputs(federation.clients[0].train[:2])
    module.eval()
    try:
        with torch.inference_mode():
            outputs = module(inputs.to(device))
    except Exception as error:
        raise ModelError(
            f"the model cannot take inputs of shape {pool.input_shape} ({pool.name}): {error}"
        ) from error
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if pool.task in ("classification", "language"):
        expected = (len(inputs), *pool.y.shape[1:], pool.outputs)
        of_what = f"{pool.outputs} labels"
    else:
        expected = (len(inputs), pool.outputs)
        of_what = f"the targets of a {pool.task} task"
        got = (*got, 1) if got == (len(inputs),) and pool.outputs == 1 else got
    if got != expected:
        raise ModelError(
            f"the model should give {expected} outputs for {of_what} of {pool.name}, got {got}"
            f"{_ignored_hint(pool, got, expected)}"
        )


def _ignored_hint(pool: Pool, got: object, expected: tuple[int, ...]) -> str:
    """Return advice if a model lacks an output only for a last label that may mean "no label".

    Such a label is often 255.
    """
    if pool.task != "classification" or not isinstance(got, tuple) or got[:-1] != expected[:-1]:
        return ""
    outputs = int(got[-1])
    largest = int(pool.y.max())
    beyond = pool.y[pool.y >= outputs]
    if len(beyond) == 0 or int(beyond.min()) < largest:
        return ""
    return (
        f"; if label {largest} means that there is no label, leave its {len(beyond)} examples out"
    )


def model_error(
    error: Exception,
    each: Iterable[tuple[int, Workload]],
    federation: Federation,
    number: int,
    engine: str,
    train: Callable[[Workload], object],
) -> ModelError:
    """Return the error for clients that could not be trained together in a round.

    It names the client on whose data training fails.

    Parameters
    ----------
    error
        The error of the training together.
    each
        Id and workload of each client by itself.
    federation
        The clients.
    number
        Number of the round.
    engine
        Name of the engine.
    train
        Trains one workload, to find the client.
    """
    together = list(each)
    for client, work in together:
        try:
            train(work)
        except MODULE_ERRORS as its_own:
            return ModelError(
                f"round {number}: the model fails on the data of client {client} "
                f"({federation.by_id[client].name!r}): {its_own}"
            )
    return ModelError(
        f"round {number}: engine {engine!r} fails on {len(together)} clients together, each of "
        f"whom trains alone: {error}; use --engine loop, or less memory"
    )
