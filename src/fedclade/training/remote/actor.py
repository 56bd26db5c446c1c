"""Actors: each has a shard of the federation, and replies to queries for its clients."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedclade.channel import Channel, Meter, Middleware
from fedclade.core import DataQuery, EvaluationQuery, Query, UpdateQuery
from fedclade.data import Federation
from fedclade.tasks import FittedTask
from fedclade.training.clients import SimulatedClients
from fedclade.training.jobs import PrivateSteps
from fedclade.training.memory import default_memory, keep_freed_memory
from fedclade.training.threads import float32_products

# Messages between the server's process and the actors: objects whose large arrays are not copied
# for pickling.
#
# Ray stores NumPy arrays in its object store, where all processes of a machine read them without a
# copy. It would copy tensors three times. So a tensor is packed as an array of bytes with its type
# and shape.

SMALL = 2**16
"""Bytes below which an array is copied into the message: the object store aligns larger arrays."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Packed:
    """An object as a message, with its large arrays separately."""

    message: bytes
    arrays: tuple[Bytes, ...]


def packed(thing: object, pickler: Any) -> Packed:
    """Pack an object by a pickler, such as Ray's, which also pickles objects of ``__main__``."""
    arrays: list[Bytes] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= SMALL:
            arrays.append(np.frombuffer(raw, dtype=np.uint8))
        return raw.nbytes < SMALL  # True: pickle writes the buffer into the message

    with io.BytesIO() as file:
        _packer(pickler)(file, protocol=5, buffer_callback=is_small).dump(thing)
        return Packed(file.getvalue(), tuple(arrays))


def unpacked(packed: Packed, *, copies: bool = False) -> Any:
    """Return the object of a message.

    Its large arrays are those of the message, and read-only, unless ``copies`` is set.
    """
    arrays = [array.copy() for array in packed.arrays] if copies else packed.arrays
    return pickle.loads(packed.message, buffers=arrays)


@cache
def _packer(pickler: Any) -> Any:
    class Packer(pickler):
        def reducer_override(self, obj: Any) -> Any:
            return _reduced(obj) if type(obj) is Tensor else super().reducer_override(obj)

    return Packer


def _reduced(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:  # possible for a single entry
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    data: Any = flat.view(torch.uint8).numpy() if len(flat) else np.empty(0, np.uint8)
    return _tensor, (pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # Torch warns about read-only memory, but nothing writes to these tensors.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=dtype).view(shape)


@dataclass(frozen=True, eq=False)
class Setup:
    """Configuration that all actors of a run share.

    Parameters
    ----------
    federation
        All clients. Its pool is stored once on each machine, in the object store; a pool that is
        opened from files may be pickled as their path.
    module, task, personal, private, always_replies
        See :class:`~fedclade.training.SimulatedClients`.
    middleware
        Middleware for replies before they are sent, starting at the clients' end.
    meter
        Meter of the traffic that the middleware counts.
    memory
        Bytes that all actors of a machine together may take; None for a quarter of each machine or
        GPU.
    """

    federation: Federation
    module: nn.Module
    task: FittedTask
    personal: Sequence[str] = ()
    middleware: Sequence[Middleware] = ()
    meter: Meter = field(default_factory=Meter)
    memory: int | None = None
    private: PrivateSteps | None = None
    always_replies: bool = False


@dataclass(frozen=True)
class Place:
    """Engine and resources of an actor."""

    engine: str
    device: str  #: ``cpu`` or ``cuda``
    cores: int
    beside: int  #: number of actors that share the machine
    tf32: bool = False


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a query for one actor.

    Parameters
    ----------
    query
        The query, for some of the actor's clients. Models are sent separately, once for all actors.
    rows
        Rows of the models to which the part refers, in order.
    kept
        State that its clients have stored in earlier rounds.
    shard
        Clients that the actor has from now on; None if they are unchanged.
    resolved
        The engine with which to train, if another actor has chosen it.
    """

    query: Query[Any]
    rows: Sequence[int] | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    shard: frozenset[int] | None = None
    resolved: str | None = None


@dataclass(frozen=True, eq=False)
class Reply:
    """Reply of an actor, with its measurements, the clients' stored state, and log lines."""

    answer: Any
    seconds: float
    resolved: str | None
    up: int
    down: int
    kept: Mapping[str, Tensor]
    logged: Sequence[tuple[int, str]]
    cuda: bool


class Shard:
    """Actor: the clients of a shard, in a process of their own.

    Parameters
    ----------
    setup
        The packed :class:`Setup`.
    place
        Engine and resources.
    pickler
        The class of Ray's pickler.
    """

    def __init__(self, setup: Packed, place: Place, pickler: Any) -> None:
        torch.set_num_threads(place.cores)
        keep_freed_memory()
        self._place = place
        self._pickler = pickler
        self._setup: Setup = unpacked(setup)
        # Training writes to the module, and tensors in the object store must not be written to.
        self._module = copy.deepcopy(self._setup.module)
        self._clients: SimulatedClients | None = None
        self._log = _Kept()
        logger = logging.getLogger("fedclade")
        logger.addHandler(self._log)
        logger.setLevel(logging.INFO)

    def process(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def answer(self, part: Packed, models: Packed | None = None) -> Packed:
        """Reply to a part of a query, given its models."""
        with float32_products(self._place.tf32):
            reply = self._answer(unpacked(part), None if models is None else unpacked(models))
        return packed(reply, self._pickler)

    def _answer(self, part: Part, models: Tensor | None) -> Reply:
        if part.shard is not None or self._clients is None:
            self._clients = self._holding(part.shard or frozenset(), part.resolved)
        clients = self._clients
        meter = self._setup.meter
        query = part.query
        clients.store.load(part.kept, self._place.device)
        before = meter.bytes_up, meter.bytes_down
        start = perf_counter()
        if isinstance(query, UpdateQuery | EvaluationQuery):
            assert models is not None
            assert part.rows is not None
            some = models if len(part.rows) == len(models) else models[list(part.rows)]
            query = replace(query, models=some.to(self._place.device))
        answer = Channel(clients, *self._setup.middleware).ask(query)
        return Reply(
            answer,
            perf_counter() - start,
            clients.engine_taken,
            meter.bytes_up - before[0],
            meter.bytes_down - before[1],
            clients.store.tensors(before=True) if _changes_what_is_kept(query) else {},
            self._log.taken(),
            self._place.device == "cuda",
        )

    def _holding(self, shard: frozenset[int], resolved: str | None) -> SimulatedClients:
        setup = self._setup
        place = self._place
        device = torch.device(place.device)
        memory = (
            default_memory(device)
            if setup.memory is None or device.type == "cuda"
            else setup.memory
        )
        return SimulatedClients(
            setup.federation.shard(shard),
            self._module,
            place.device,
            place.engine,
            memory if device.type == "cuda" else memory // place.beside,
            resolved if self._clients is None else self._clients.engine_taken,
            setup.task,
            setup.personal,
            setup.private,
            setup.always_replies,
        )


def _changes_what_is_kept(query: Query[Any]) -> bool:
    """Return whether a query may change the clients' stored state.

    An evaluation of a mixture may store weights.
    """
    if isinstance(query, EvaluationQuery):
        return query.mixture is not None
    if isinstance(query, DataQuery):
        return bool(query.stores)
    return isinstance(query, UpdateQuery)


class _Kept(logging.Handler):
    """Log handler that stores log lines, so that they can be logged in the process of the run."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store a line."""
        self._lines.append((record.levelno, record.getMessage()))

    def taken(self) -> Sequence[tuple[int, str]]:
        """Return the stored lines, and remove them."""
        lines = self._lines
        self._lines = []
        return lines
