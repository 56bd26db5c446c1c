"""How much memory a round may take, and how much a client takes of it."""

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
"""By default, one part in so many of the machine's memory."""

SMALLEST = 2**30
"""What is taken for the memory of a machine that does not report it."""

CACHE = 2**22
"""Bytes of parameters that a CPU's thread goes through at every step without waiting for memory."""

RECEIVED = 2**25
"""Bytes of updates that a run that streams receives at a time on a CPU.

From 32 MiB on the C library of Linux gives memory back as soon as it is freed: to have each page of
it mapped again, block after block, can take as long as the training.
"""

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Options of the C library's ``mallopt``, as ``malloc.h`` has them."""

LARGEST_THRESHOLD = 2**30
"""Bytes from which on a process that keeps its memory still gives it back."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says how much memory a container may have; ``max`` where there is no limit."""

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def memory_bytes(memory: int | str) -> int:
    """Return a size such as ``"2GB"``, ``"500 MiB"`` or a number of bytes, in bytes.

    Raises
    ------
    ConfigError
        If it is no size, or none above 0.
    """
    size: float = 0.0 if isinstance(memory, str | bool) else memory
    if isinstance(memory, str) and (
        found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", memory.strip())
    ):
        size = float(found[1]) * UNITS.get((found[2] or "B").upper(), 0)
    if not 1 <= size < 2**63:  # of many digits it is infinite
        raise ConfigError(
            f"memory should be a size such as 2GB, 500MiB or a number of bytes, got {shown(memory)}"
        )
    return int(size)


def default_memory(device: torch.device) -> int:
    """Return a quarter of what the machine, its container or its GPU has, in bytes.

    Of all there is, not of what happens to be free: so a run is cut into the same blocks whenever
    it is repeated.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // SHARE
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        total = SMALLEST
    with suppress(OSError, ValueError):  # no container, or no limit
        total = min(total, int(CGROUP_LIMIT.read_text()))
    return total // SHARE


def keep_freed_memory() -> None:
    """Let this process, which does nothing but training, keep the memory that it frees for its next use.

    By default the C library of Linux gives large tensors, and what lies at the end of its heap,
    back to the system as soon as they are freed, and has them mapped anew, page by page, when the
    next step makes the same tensors.
    """
    with suppress(AttributeError):  # a C library of another kind
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_TRIM_THRESHOLD, LARGEST_THRESHOLD)
        # an older one, which takes 32 MiB at most
        if not set_option(M_MMAP_THRESHOLD, LARGEST_THRESHOLD):
            set_option(M_MMAP_THRESHOLD, RECEIVED)


def hot_bytes(module: nn.Module, layout: Layout) -> int:
    """Return how many bytes of a client's parameters a step goes through; of embeddings it touches few rows."""
    tables = [layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding)]
    rows = sum(table.numel() for table in tables if table.requires_grad)
    return (layout.n_parameters - rows) * layout.dtype.itemsize


def clients_in_cache(hot: int, threads: int) -> int:
    """Return how many clients of so many :func:`hot_bytes` a CPU should train at the same time.

    With more, parameters come from memory at each step.
    """
    return max(1, threads * CACHE // max(1, hot))


def updates_at_once(size: int, device: torch.device, budget: int) -> int:
    """Return of how many clients a run that streams receives updates of so many bytes at a time.

    Not so many that the updates, and copies of them on their way, take up the budget.
    """
    largest = RECEIVED if device.type == "cpu" else budget
    return max(1, min(largest, budget // 8) // size)


def bytes_per_client(module: nn.Module, layout: Layout, batch: Tensor, spec: LocalTraining) -> int:
    """Return about how many bytes it takes to train one client at the same time as others, on batches like this.

    Its parameters, their gradients, momentum or what else the optimizer keeps, and update; the
    model that a proximal term pulls it towards; the gradients before they are clipped; and what a
    step keeps for the backward pass, twice, since the backward pass makes as much again.
    """
    kept: dict[int, int] = {}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # there once, for all clients
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


# Which clients train at the same time: as many as the memory holds.


class Blocks:
    """Cuts clients into blocks that fit the memory, in bytes; what they hold and the module are on one device."""

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
        """Return the places of clients with so many examples ``[n]`` by blocks; clients of one size side by side.

        Each has so many ``models``, which train one after the other, and whose updates are kept
        until all have.
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


# Whether a model fits the data of a federation.

MODULE_ERRORS = (RuntimeError, ValueError, IndexError)
"""What a module raises that does not fit a client's data."""


def check_model_fits(module: nn.Module, federation: Federation, device: torch.device) -> None:
    """Run two examples through the model and compare its outputs with the targets; a ModelError if they differ."""
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
    """Return advice if a model lacks outputs only for a last label that may mean "no label", such as 255."""
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
    """Return the error of clients that could not be trained together in a round, given the workload of each by itself.

    It names the client on whose data training by ``train`` fails.
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
