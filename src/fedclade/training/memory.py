"""Memory limit of a round, memory that one more client needs, and blocks of clients that fit.

A block is a group of clients that train at the same time. The module also checks that a model fits
the data of a federation.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.core import DENSE, Indices, Layout, LocalTraining, ModelError, TrainQuery
from fedclade.data import Federation, Pool
from fedclade.tasks import FittedTask
from fedclade.training.jobs import Workload
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stages import Held, Stages

SHARE = 4
"""Divisor of the machine's memory that gives the default memory limit of a run."""

SMALLEST = 2**30
"""Assumed memory in bytes of a machine that does not report its memory."""

CACHE = 2**22
"""Bytes of parameters that a CPU thread can read in every step from its cache."""

RECEIVED = 2**25
"""Bytes of updates that a streaming run receives at a time on a CPU.

The C library of Linux returns memory blocks of 32 MiB or more to the system as soon as they are
freed. Mapping the pages of such memory again, block after block, can take as long as the training.
"""

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Options of the C library's ``mallopt``, as defined in ``malloc.h``."""

LARGEST_THRESHOLD = 2**30
"""Size of a memory block in bytes from which :func:`keep_freed_memory` has no effect."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""File in which Linux reports the memory limit of a container; ``max`` if there is no limit."""


def default_memory(device: torch.device) -> int:
    """Return a quarter of the memory of the machine, its container or its GPU, in bytes.

    The result depends on the total memory, not on the free memory, so that a repeated run has the
    same blocks of clients.
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
    """Let this process reuse memory that it frees, instead of returning it to the system.

    Processes that only train call this function. By default, the C library of Linux returns large
    tensors, and memory at the end of its heap, to the system as soon as they are freed; when the
    next step creates the same tensors, their memory has to be mapped again, page by page.
    """
    with suppress(AttributeError):  # other C libraries have no mallopt
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_TRIM_THRESHOLD, LARGEST_THRESHOLD)
        # Older versions of the C library accept at most 32 MiB.
        if not set_option(M_MMAP_THRESHOLD, LARGEST_THRESHOLD):
            set_option(M_MMAP_THRESHOLD, RECEIVED)


def return_freed_memory() -> None:
    """Return all memory that this process has freed to the system.

    The client of a network calls this function after training and after each reply. Its model,
    gradients and update are blocks of slightly different sizes, so that a new block often does not
    fit where another was freed, and the C library of Linux keeps the freed one.
    """
    with suppress(AttributeError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def hot_bytes(module: nn.Module, layout: Layout) -> int:
    """Return the bytes of the parameters of one client that every training step reads.

    Embeddings are not counted, since a step reads only a few of their rows.
    """
    tables = [layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding)]
    rows = sum(table.numel() for table in tables if table.requires_grad)
    return (layout.n_parameters - rows) * layout.dtype.itemsize


def clients_in_cache(hot: int, threads: int) -> int:
    """Return the number of clients that a CPU should train at the same time.

    ``hot`` is the number of bytes of one client, as :func:`hot_bytes` returns it. With more
    clients, the parameters do not fit into the caches of ``threads`` threads, and are read from
    memory in each step.
    """
    return max(1, threads * CACHE // max(1, hot))


def updates_at_once(size: int, device: torch.device, budget: int) -> int:
    """Return the number of updates of ``size`` bytes that a streaming run receives at a time.

    A streaming run aggregates updates in groups instead of storing all of them. The updates of a
    group and their copies must not use up the memory budget.
    """
    largest = RECEIVED if device.type == "cpu" else budget
    return max(1, min(largest, budget // 8) // size)


def bytes_per_client(module: nn.Module, layout: Layout, batch: Tensor, spec: LocalTraining) -> int:
    """Estimate the bytes that the training of one more client takes, given a typical batch.

    The estimate counts the client's parameters, gradients, momentum or other state of the
    optimizer, and update; the model to which a proximal term pulls; the gradients before they are
    clipped; and the tensors that a step saves for the backward pass, counted twice, since the
    backward pass creates as many again.
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
    states = 1 if optimizer.is_plain else len(optimizer.states)
    vectors = 3 + states + (spec.mu > 0) + (spec.clip_norm is not None)
    return vectors * layout.size * layout.dtype.itemsize + 2 * sum(kept.values())


# Blocks of clients that train at the same time: as many as fit into memory.


class Blocks:
    """Division of clients into blocks that train at the same time and fit into memory.

    The data and the module are on one device.

    Parameters
    ----------
    federation
        The clients.
    module
        The model's structure.
    layout
        Layout of the whole model.
    stages
        Data that has been gathered, whose bytes are subtracted from ``memory``.
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
        self, sizes: Indices, query: TrainQuery, held: Held, models: int = 1
    ) -> Sequence[Sequence[int]]:
        """Divide the clients of a query into blocks, with the largest clients in the first blocks.

        For each block, the result has the positions of its clients in the query.

        Parameters
        ----------
        sizes
            Number of examples of each of n clients, ``[n]``.
        query
            The training query.
        held
            The clients' data in the stage of the query.
        models
            Number of models that each client trains one after the other. The updates of all models
            are in memory at the end.
        """
        spec = query.local
        by_size = sorted(range(len(sizes)), key=lambda place: -sizes[place])
        if spec not in self._bytes_by_spec:
            largest = int(held.data.splits["train"].sizes.max())
            some = np.resize(self._federation.clients[0].train, min(spec.batch_size, largest))
            batch = self._federation.pool.inputs(some).to(held.data.device)
            self._bytes_by_spec[spec] = bytes_per_client(self._module, self._layout, batch, spec)
        own_data = 0
        if not held.data.bytes_kept:  # the data of the clients that train is fetched for them
            own_data = held.data.bytes_each * int(max(sizes))
        vectors = (models - 1) + query.work.steps.vectors
        each = (
            self._bytes_by_spec[spec]
            + own_data
            + vectors * self._layout.size * self._layout.dtype.itemsize
        )
        at_once = max(1, (self._memory - self._stages.bytes_kept) // each)
        return [block.tolist() for block in np.array_split(by_size, -(-len(sizes) // at_once))]


# Check of a model with the data of a federation.

MODULE_ERRORS = (RuntimeError, ValueError, IndexError)
"""Exceptions that torch modules usually raise if they do not fit a client's data."""


def check_model_fits(
    module: nn.Module, federation: Federation, device: torch.device, task: FittedTask | None = None
) -> None:
    """Check that a model accepts two examples, and that its outputs fit the targets of the task.

    If the loss and all metrics of the task are the user's own, outputs may have any shape.

    Raises
    ------
    ModelError
        If the model fails on the examples, or the shape of its outputs does not fit the targets.
    """
    pool = federation.pool
    inputs = pool.inputs(federation.clients[0].train[:2])
    module.eval()
    try:
        with torch.inference_mode():
            outputs = module(inputs.to(device))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model cannot take {_describe_inputs(pool)} ({pool.name}): {error}"
        ) from error
    got: tuple[int, ...] | str = type(outputs).__name__
    if isinstance(outputs, Tensor):
        got = tuple(outputs.shape)
    is_batch = isinstance(got, tuple) and got[:1] == (len(inputs),)
    if task is not None and task.has_own_widths and is_batch:
        return
    expected, of_what = _expected_outputs(pool, len(inputs))
    if pool.outputs == 1 and got == (len(inputs),) and pool.y.dim() == 1:
        got = (len(inputs), 1)
    if got != expected:
        raise ModelError(
            f"the model should return outputs of shape {_as_returned(pool, expected)} for {of_what} "
            f"of {pool.name}, got {_as_returned(pool, got)}"
            f"{_ignored_hint(pool, got, expected)}"
        )


def _expected_outputs(pool: Pool, inputs: int) -> tuple[tuple[int, ...], str]:
    """Return the shape of a model's outputs that fits a pool, and a description of the targets."""
    if pool.task == "classification" or pool.task in DENSE:
        return (inputs, *pool.y.shape[1:], pool.outputs), f"{pool.outputs} labels"
    of_what = f"the targets of a {pool.task} task"
    if pool.y.dim() > 2:
        return (inputs, *pool.y.shape[1:]), of_what
    return (inputs, pool.outputs), of_what


def _as_returned(pool: Pool, shape: tuple[int, ...] | str) -> tuple[int, ...] | str:
    """Return the shape of outputs as a model returns them: scores of pixels in dimension 1."""
    if pool.task != "segmentation" or isinstance(shape, str) or len(shape) < 3:
        return shape
    return (shape[0], shape[-1], *shape[1:-1])


def _describe_inputs(pool: Pool) -> str:
    """Return the shape of the inputs of a pool, or their structure, for messages."""
    if pool.structure is None:
        return f"inputs of shape {pool.input_shape}"
    return f"the inputs {pool.structure.described}"


def _ignored_hint(pool: Pool, got: object, expected: tuple[int, ...]) -> str:
    """Return a hint for the error that a model has too few outputs for the labels in the data.

    In many data sets, a special number such as 255 marks examples without a label. If the model has
    an output for every label except the largest, the largest label may be such a mark, and the hint
    is to remove the examples with this label. Otherwise the hint is an empty string.
    """
    if pool.task != "classification" or not isinstance(got, tuple) or got[:-1] != expected[:-1]:
        return ""
    outputs = int(got[-1])
    largest = int(pool.y.max())
    beyond = pool.y[pool.y >= outputs]
    if len(beyond) == 0 or int(beyond.min()) < largest:
        return ""
    return (
        f"; if label {largest} stands for a missing label, remove the {len(beyond)} examples that "
        "have this label"
    )


def model_error(
    error: Exception,
    each: Iterable[tuple[int, Workload]],
    federation: Federation,
    number: int,
    engine: str,
    train: Callable[[Workload], object],
) -> ModelError:
    """Return the error to raise if clients could not be trained together in a round.

    The clients are trained one by one, so that the error can name the client on whose data the
    model fails.

    Parameters
    ----------
    error
        The error that occurred when the clients were trained together.
    each
        Id of each client, and a workload with only this client.
    federation
        The clients.
    number
        Number of the round.
    engine
        Name of the engine.
    train
        Function that trains a workload; it is called for one client after another.
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
        f"round {number}: engine {engine!r} fails on {len(together)} clients together, although "
        f"each client can be trained alone: {error}; use --engine loop, or a smaller --memory"
    )
