"""What an actor does: it holds a shard of the federation, and replies to queries for its clients."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.channel import Channel, Meter, Middleware
from fedclade.core import EvaluationQuery, Query, ShiftQuery, UpdateQuery
from fedclade.data import Federation
from fedclade.tasks import FittedTask
from fedclade.training.clients import SimulatedClients
from fedclade.training.device import float32_products
from fedclade.training.memory import default_memory, keep_freed_memory
from fedclade.training.private_steps import PrivateSteps
from fedclade.training.remote.packing import Packed, packed, unpacked


@dataclass(frozen=True, eq=False)
class Setup:
    """What all actors of a run have in common.

    Parameters
    ----------
    federation
        All clients. Its pool lies once on each machine, where the object store does; one that is opened from files may
        pickle as their path.
    module, task, personal, private, always_replies
        See :class:`~fedclade.training.SimulatedClients`.
    middleware
        What replies pass before they are sent, from the clients' end on.
    meter
        Of the traffic that the middleware counts.
    memory
        Bytes that all actors of a machine together may take; None for a quarter of each machine or GPU.
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
    """Where an actor is, and with what it trains."""

    engine: str
    device: str  #: ``cpu`` or ``cuda``
    cores: int
    beside: int  #: how many actors share the machine
    tf32: bool = False


@dataclass(frozen=True, eq=False)
class Part:
    """An actor's part of a query.

    Parameters
    ----------
    query
        To some of its clients. Models travel by themselves, once for all actors.
    rows
        Which of the models it names, in order.
    kept
        What its clients have kept from earlier rounds.
    shard
        The clients that the actor holds from now on; None if they are as before.
    resolved
        The engine to train with, where another actor has chosen it.
    """

    query: Query[Any]
    rows: Sequence[int] | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    shard: frozenset[int] | None = None
    resolved: str | None = None


@dataclass(frozen=True, eq=False)
class Reply:
    """What comes back: the reply itself, and what else is to be known of it."""

    answer: Any
    seconds: float
    resolved: str | None
    up: int
    down: int
    kept: Mapping[str, Tensor]
    logged: Sequence[tuple[int, str]]
    cuda: bool


class Shard:
    """The life of an actor."""

    def __init__(self, setup: Packed, place: Place, pickler: Any) -> None:
        torch.set_num_threads(place.cores)
        keep_freed_memory()
        self._place, self._pickler = place, pickler
        self._setup: Setup = unpacked(setup)
        # The module is written to, and what the object store holds must not be.
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
        """Reply to a part of a query."""
        with float32_products(self._place.tf32):
            reply = self._answer(unpacked(part), None if models is None else unpacked(models))
        return packed(reply, self._pickler)

    def _answer(self, part: Part, models: Tensor | None) -> Reply:
        if part.shard is not None or self._clients is None:
            self._clients = self._holding(part.shard or frozenset(), part.resolved)
        clients, meter, query = self._clients, self._setup.meter, part.query
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
        setup, place = self._setup, self._place
        device = torch.device(place.device)
        memory = default_memory(device) if setup.memory is None or device.type == "cuda" else setup.memory
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
    """Return whether clients may keep something else after a query: also the weights that a mixture is scored by."""
    if isinstance(query, EvaluationQuery):
        return query.mixture is not None
    return isinstance(query, UpdateQuery | ShiftQuery)


class _Kept(logging.Handler):
    """Keeps what is logged, so that it can be said where the run is."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append((record.levelno, record.getMessage()))

    def taken(self) -> Sequence[tuple[int, str]]:
        """Return what was kept, and forget it."""
        lines, self._lines = self._lines, []
        return lines
