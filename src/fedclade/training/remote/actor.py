"""Actors of the engine ``ray``, and the messages between them and the server's process.

Each actor has a shard of the federation (some of its clients), and replies to queries for these
clients.
"""

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
from fedclade.core import DataQuery, EvaluationQuery, Query, TrainQuery
from fedclade.data import Federation
from fedclade.tasks import FittedTask
from fedclade.training.clients import SimulatedClients
from fedclade.training.jobs import PrivateSteps
from fedclade.training.memory import default_memory, keep_freed_memory
from fedclade.training.threads import float32_products

# Messages between the server's process and the actors: pickled objects, with large arrays stored
# separately.
#
# Ray stores NumPy arrays in its object store, where all processes of a machine read them without a
# copy. Ray would copy a tensor three times. So a tensor is packed as a NumPy array of bytes, with
# its data type and shape.

SMALL = 2**16
"""Bytes below which an array is copied into the message, instead of being stored separately."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Packed:
    """Message with a pickled object; the object's large arrays are stored separately."""

    message: bytes
    arrays: tuple[Bytes, ...]


def packed(thing: object, pickler: Any) -> Packed:
    """Pack an object into a message.

    ``pickler`` is a class, such as Ray's pickler, which also pickles objects that a script defines.
    """
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

    The object's large arrays are read-only and use the memory of the message, unless ``copies`` is
    set.
    """
    arrays = packed.arrays
    if copies:
        arrays = [array.copy() for array in arrays]
    return pickle.loads(packed.message, buffers=arrays)


@cache
def _packer(pickler: Any) -> Any:
    """Return a subclass of a pickler that pickles tensors without a copy of their data."""

    class Packer(pickler):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is Tensor:
                return _reduce_tensor(obj)
            return super().reducer_override(obj)

    return Packer


def _reduce_tensor(tensor: Tensor) -> Any:
    """Return the function, and its arguments, by which pickle restores a tensor.

    The tensor's data is passed as a buffer, so that it can be stored outside the pickled message.
    """
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:  # possible for a single entry
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    data: Any = np.empty(0, np.uint8)
    if len(flat):
        data = flat.view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Restore a tensor from its data, as the inverse of :func:`_reduce_tensor`."""
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
        All clients. Its pool is stored once on each machine, in Ray's object store; a pool in files
        may be pickled as the path of the files.
    module, task, personal, private, always_replies
        Parameters of :class:`~fedclade.training.SimulatedClients`.
    middleware
        Middleware that processes queries and replies between the server and the clients. A reply
        passes through the middleware in the given order, and a query in the reverse order.
    meter
        Meter of the traffic that the middleware counts.
    memory
        Bytes that all actors of a machine together may use; None for a quarter of the memory of
        each machine or GPU.
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
    tf32: bool = False  #: whether a GPU may use TF32 for float32 products


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a query that is sent to one actor, for the clients of this actor.

    Parameters
    ----------
    query
        The query, for some of the actor's clients. Models are sent separately, once for all actors.
    rows
        Rows of the models to which the part refers, in ascending order; None without models.
    kept
        Tensors that the clients of the part have stored in earlier rounds.
    shard
        Ids of all clients of the actor from now on; None if they have not changed.
    resolved
        The engine with which to train, if another actor has chosen it; otherwise None.
    """

    query: Query[Any]
    rows: Sequence[int] | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    shard: frozenset[int] | None = None
    resolved: str | None = None


@dataclass(frozen=True, eq=False)
class Reply:
    """Reply of an actor to its part of a query, with measurements, stored tensors and log lines."""

    answer: Any  #: reply of the actor's clients
    seconds: float  #: duration of the clients' work
    resolved: str | None  #: engine that the actor trains with; None before its first training
    up: int  #: bytes that the clients have sent, as the middleware counts them
    down: int  #: bytes that the clients have received, as the middleware counts them
    kept: Mapping[str, Tensor]  #: tensors that the clients store
    logged: Sequence[tuple[int, str]]  #: level and text of log lines
    cuda: bool  #: whether the actor has a GPU


class Shard:
    """Actor: simulates the clients of a shard in a separate process.

    Parameters
    ----------
    setup
        The packed :class:`Setup` of the run.
    place
        Engine and resources of the actor.
    pickler
        The class of Ray's pickler, which packs replies.
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
        """Return the operating system's id of the actor's process."""
        return os.getpid()

    def answer(self, part: Packed, models: Packed | None = None) -> Packed:
        """Return the packed reply to a part of a query, given the packed models of the query."""
        vectors = None if models is None else unpacked(models)
        with float32_products(self._place.tf32):
            reply = self._answer(unpacked(part), vectors)
        return packed(reply, self._pickler)

    def _answer(self, part: Part, models: Tensor | None) -> Reply:
        """Let the actor's clients reply to a part of a query, given its models ``[K, S]``."""
        if part.shard is not None or self._clients is None:
            self._clients = self._build_clients(part.shard or frozenset(), part.resolved)
        clients = self._clients
        meter = self._setup.meter
        query = part.query
        clients.store.load(part.kept, self._place.device)
        up_before = meter.bytes_up
        down_before = meter.bytes_down
        start = perf_counter()
        if models is not None:
            assert part.rows is not None
            if len(part.rows) < len(models):
                models = models[list(part.rows)]
            query = _with_models(query, models.to(self._place.device))
        answer = Channel(clients, *self._setup.middleware).ask(query)
        seconds = perf_counter() - start
        kept: Mapping[str, Tensor] = {}
        if _changes_what_is_kept(query):
            kept = clients.store.tensors(before=True)
        return Reply(
            answer=answer,
            seconds=seconds,
            resolved=clients.engine_taken,
            up=meter.bytes_up - up_before,
            down=meter.bytes_down - down_before,
            kept=kept,
            logged=self._log.taken(),
            cuda=self._place.device == "cuda",
        )

    def _build_clients(self, shard: frozenset[int], resolved: str | None) -> SimulatedClients:
        """Return the simulated clients of a shard.

        If the actor has trained before, the clients train with the same engine; otherwise with the
        engine ``resolved``, or with a new choice if it is None.
        """
        setup = self._setup
        place = self._place
        if self._clients is not None:
            resolved = self._clients.engine_taken
        return SimulatedClients(
            setup.federation.shard(shard),
            self._module,
            place.device,
            place.engine,
            memory=self._memory(),
            resolved=resolved,
            task=setup.task,
            personal=setup.personal,
            private=setup.private,
            always_replies=setup.always_replies,
        )

    def _memory(self) -> int:
        """Return the number of bytes that this actor may use.

        Actors on a CPU share the memory of their machine.
        """
        device = torch.device(self._place.device)
        if device.type == "cuda":
            return default_memory(device)
        memory = self._setup.memory
        if memory is None:
            memory = default_memory(device)
        return memory // self._place.beside


def _changes_what_is_kept(query: Query[Any]) -> bool:
    """Return whether a query may change the tensors that clients store between rounds.

    The evaluation of a mixture may change them, since a client that has not trained yet computes
    its weights of the mixture during the evaluation, and stores them.
    """
    if isinstance(query, EvaluationQuery):
        return query.mixture is not None
    if isinstance(query, DataQuery):
        return bool(query.stores)
    return isinstance(query, TrainQuery)


def _with_models(query: Query[Any], models: Tensor) -> Query[Any]:
    """Return a query with models ``[K, S]`` added, which were sent separately from the query."""
    if isinstance(query, TrainQuery):
        return replace(query, models=replace(query.models, vectors=models))
    assert isinstance(query, EvaluationQuery)  # no other query has models
    return replace(query, models=models)


class _Kept(logging.Handler):
    """Log handler that stores log lines of an actor.

    The lines are sent with the next reply, and logged by the process of the run.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store the level and the text of a log record."""
        self._lines.append((record.levelno, record.getMessage()))

    def taken(self) -> Sequence[tuple[int, str]]:
        """Return all stored log lines, and remove them from the handler."""
        lines = self._lines
        self._lines = []
        return lines
