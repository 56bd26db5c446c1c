"""Ray cluster: connection or start, number of actors that fit, and their start and end."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pickle import PicklingError
from time import monotonic
from typing import Any

import torch

from fedclade.core import ConfigError, EngineError, checked, import_extra, require
from fedclade.training.auto import ENGINES, check_engine
from fedclade.training.remote.actor import Place, Setup, Shard, packed
from fedclade.training.threads import cores

READY_SECONDS = 300.0
"""Seconds that the start of all actors may take, for example while nodes are added."""

_log = logging.getLogger(__name__)


@checked()
@dataclass(frozen=True, kw_only=True)
class Actors:
    """Actors of a run with the engine ``ray``.

    Parameters
    ----------
    count
        Number of actors. None: one for each GPU; without GPUs, or on the CPU, one for each node, or
        as many with ``cores`` cores each as fit.
    cores
        Number of cores, and so of training threads, of each actor. None: all cores of the smallest
        node where there is one actor for each node, otherwise 1.
    address
        Address of a running Ray cluster, such as ``auto`` or ``10.0.0.1:6379``. None: the address
        in ``RAY_ADDRESS``; if that is unset, this machine by itself.
    engine
        Engine with which each actor trains its clients: one of :data:`~fedclade.training.ENGINES`.

    Raises
    ------
    ConfigError
        If a number is below 1, or the engine is unknown.
    """

    count: int | None = None
    cores: int | None = None
    address: str | None = None
    engine: str = "auto"

    def __post_init__(self) -> None:
        require(
            ("actors", self.count, self.count is None or self.count >= 1, "at least 1"),
            ("actor cores", self.cores, self.cores is None or self.cores >= 1, "at least 1"),
        )
        check_engine(self.engine, ENGINES)


def actors_from(actors: Actors | int | None, engine: str) -> Actors:
    """Return the actors as given, or this number of actors.

    Raises
    ------
    ConfigError
        If actors are given, but the engine is not ``ray``.
    """
    if actors is not None and engine != "ray":
        raise ConfigError(
            f"actors are those of engine 'ray', and this run has engine {engine!r}; use --engine "
            "ray"
        )
    return actors if isinstance(actors, Actors) else Actors(count=actors)


@dataclass(frozen=True)
class Room:
    """Number of actors of a run, and the resources of each on the cluster."""

    count: int
    cores: int
    gpus: int  # number of GPUs of each actor: 0 or 1
    beside: int  # largest number of actors on one machine

    @classmethod
    def of(cls, nodes: Sequence[tuple[int, int]], actors: Actors, device: str) -> Room:
        """Return the number and resources of the actors that fit.

        Parameters
        ----------
        nodes
            Number of cores and of GPUs of each node.
        actors
            Settings of the run.
        device
            ``auto``, ``cpu`` or ``cuda``.

        Raises
        ------
        ConfigError
            If the actors do not fit, or the device is ``cuda`` and the cluster has no GPU.
        """
        gpus = 0 if device == "cpu" or not any(gpu for _, gpu in nodes) else 1
        if device == "cuda" and not gpus:
            raise ConfigError(
                "device 'cuda' was asked for, but the Ray cluster has no GPU; use --device cpu"
            )
        smallest = min((cpu for cpu, _ in nodes if cpu), default=1)
        each = actors.cores or (1 if gpus or actors.count else smallest)
        rooms = rooms_of(nodes, each, gpus)
        count = actors.count or max(1, sum(rooms))
        if count > sum(rooms):
            needed = f"{each} core{'s' * (each > 1)}" + " and a GPU" * gpus
            raise ConfigError(
                f"{count} actors of {needed} each do not fit on the Ray cluster, which has room "
                f"for {sum(rooms)}; ask for fewer (--actors), or for fewer cores of each"
            )
        return cls(count, each, gpus, min(count, max(rooms)))


def rooms_of(nodes: Sequence[tuple[int, int]], cores: int, gpus: int) -> list[int]:
    """Return the number of actors that fit on each node, with these cores and GPUs each."""
    return [min(cpu // cores, gpu) if gpus else cpu // cores for cpu, gpu in nodes]


class Cluster:
    """Ray cluster that this process has joined, or has started by itself and then also ends.

    Parameters
    ----------
    actors
        Settings of the run.
    device
        ``auto``, ``cpu`` or ``cuda``.
    """

    def __init__(self, actors: Actors, device: str) -> None:
        self.ray: Any = import_ray()
        self._engine, self.pickler = actors.engine, pickler()
        self._ours = not self.ray.is_initialized()
        if self._ours:
            self._join(actors)
        try:
            self.room = Room.of(self._nodes(), actors, device)
        except ConfigError:
            self.leave()
            raise
        self._actor = self.ray.remote(Shard)

    def leave(self) -> None:
        """Leave the cluster; end it if this process has started it."""
        if self._ours and self.ray.is_initialized():
            with _signals_kept():
                self.ray.shutdown()

    def started(self, setup: Any) -> Any:
        """Start an actor and return it; it may have to wait for its cores."""
        place = Place(
            self._engine,
            "cuda" if self.room.gpus else "cpu",
            self.room.cores,
            self.room.beside,
            bool(torch.backends.cuda.matmul.allow_tf32),
        )
        options = {"num_cpus": self.room.cores, "num_gpus": self.room.gpus, "max_restarts": 0}
        return self._actor.options(**options, scheduling_strategy="SPREAD").remote(
            setup, place, self.pickler
        )

    def are_ready(self, actors: Sequence[Any], seconds: float) -> bool:
        """Wait for actors to start; return whether they did within a number of seconds.

        Raises
        ------
        Exception
            One of the :attr:`deaths`, if an actor died.
        """
        refs = [actor.process.remote() for actor in actors]
        ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=seconds)
        self.ray.get(ready)
        return len(ready) == len(refs)

    def has_room_for(self, count: int) -> bool:
        """Return whether the nodes that are alive have the cores and GPUs for ``count`` actors."""
        return sum(rooms_of(self._nodes(), self.room.cores, self.room.gpus)) >= count

    def end(self, actor: Any) -> None:
        """End an actor, unless it has ended already."""
        with suppress(Exception):  # the cluster may have ended
            self.ray.kill(actor)

    @property
    def deaths(self) -> tuple[type[Exception], ...]:
        """Exceptions raised if an actor or its node has died, so that its reply is lost."""
        errors = self.ray.exceptions
        return (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
        )

    def _nodes(self) -> list[tuple[int, int]]:
        """Return the cores and GPUs of each node that is alive."""
        alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return [(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in alive]

    def _join(self, actors: Actors) -> None:
        address = actors.address or os.environ.get("RAY_ADDRESS") or "local"
        # A cluster that is started here sends no usage statistics.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            fitting = max(cores(), (actors.count or 1) * (actors.cores or 1))
            options |= {"num_cpus": fitting, "include_dashboard": False}
        with _signals_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("ray").setLevel(logging.ERROR)
            try:
                self.ray.init(address=address, **options)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise EngineError(f"there is no Ray cluster at {address!r}: {error}") from error


def pickler() -> Any:
    """Return the class of Ray's pickler, which also pickles objects that a script defines."""
    return import_extra("ray.cloudpickle", "ray", "ray", "engine 'ray'").CloudPickler


def import_ray() -> Any:
    """Import Ray and return it.

    Raises
    ------
    MissingExtraError
        If Ray is not installed; the message says how to install it.
    """
    return import_extra("ray", "ray", "ray", "engine 'ray'")


def how(error: Exception) -> str:
    """Return, in one line, how an actor died."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500] or type(error).__name__


@contextmanager
def _signals_kept() -> Generator[None]:
    """Restore the handlers of Ctrl-C and similar signals after the block: Ray sets its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


# The actors of a run: started at its first query, replaced if they die, and ended with the run.

REPLACED_SECONDS = 60.0
"""Seconds in which a replacement must start; otherwise other actors get a dead actor's clients."""


@dataclass(eq=False)
class Slot:
    """An actor, the clients whose data it has, and whether it has trained with these."""

    actor: Any
    holds: frozenset[int] | None = None
    is_warm: bool = False


class ActorPool:
    """Actors of a run, by slot number; a dead actor is replaced if the cluster has room.

    Parameters
    ----------
    setup
        Configuration that all actors share.
    actors
        Number and resources of the actors.
    device
        ``auto``, ``cpu`` or ``cuda``.
    """

    def __init__(self, setup: Setup, actors: Actors, device: str) -> None:
        self._setup = setup
        self._actors = actors
        self._device = device
        self._setup_ref: Any = None
        self.slots: list[Slot] = []
        self._joined: list[Cluster] = []  # has one cluster from the first query on
        self.close = weakref.finalize(self, _leave, self.slots, self._joined)
        """Ends the actors, and the cluster if this process has started it."""

    def begun(self) -> Cluster:
        """Return the cluster, with actors that are ready.

        Raises
        ------
        ConfigError
            If the actors do not fit on the cluster, or the setup cannot be pickled.
        EngineError
            If the actors do not start, or have ended.
        """
        if self._joined:
            return self._joined[0]
        if not self.close.alive:
            raise EngineError("the actors of this run have ended; run it again")
        cluster = Cluster(self._actors, self._device)
        self._joined.append(cluster)
        try:
            message = packed(self._setup, cluster.pickler)
        except (TypeError, AttributeError, ValueError, PicklingError) as error:
            raise ConfigError(
                f"engine 'ray' cannot send the model, the data or the task to its actors: {error}; "
                "use another engine"
            ) from error
        self._setup_ref = cluster.ray.put(message)
        self.slots += [Slot(cluster.started(self._setup_ref)) for _ in range(cluster.room.count)]
        try:
            are_ready = cluster.are_ready([slot.actor for slot in self.slots], READY_SECONDS)
        except cluster.deaths as error:
            raise EngineError(f"an actor died before it could begin: {how(error)}") from error
        if not are_ready:
            raise EngineError(
                f"not all of {len(self.slots)} actors could start within {READY_SECONDS:.0f} s; "
                "the cluster's cores may be taken: ask for fewer actors"
            )
        return cluster

    def replace(self, slot: Slot, error: Exception) -> int | None:
        """Start another actor in place of one that died.

        Parameters
        ----------
        slot
            The slot of the dead actor.
        error
            The error by which it died.

        Returns
        -------
        int or None
            None if the actor was replaced. Without room for another actor, the slot is removed,
            later slots move up, and the result is the number that the slot had.

        Raises
        ------
        EngineError
            If there is no room, and no other actor.
        """
        cluster = self._joined[0]
        cluster.end(slot.actor)
        _log.warning("an actor died, and its part of the round is repeated: %s", how(error))
        slot.actor = cluster.started(self._setup_ref)
        slot.holds = None
        end = monotonic() + REPLACED_SECONDS
        while cluster.has_room_for(len(self.slots)) and monotonic() < end:
            try:
                if cluster.are_ready([slot.actor], 1.0):
                    return None
            except cluster.deaths:  # for example on a node that is not yet known to be dead
                slot.actor = cluster.started(self._setup_ref)
        cluster.end(slot.actor)
        if len(self.slots) == 1:
            raise EngineError(
                f"the only actor has died, and there is no room for another: {how(error)}"
            ) from error
        lost = self.slots.index(slot)
        _log.warning(
            "there is no room for another actor; its clients go to the other %d",
            len(self.slots) - 1,
        )
        del self.slots[lost]
        return lost


def _leave(slots: list[Slot], joined: list[Cluster]) -> None:
    for cluster in joined:
        for slot in slots:
            cluster.end(slot.actor)
        cluster.leave()
    slots.clear()
    joined.clear()
