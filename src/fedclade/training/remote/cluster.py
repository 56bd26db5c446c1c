"""Ray cluster of a run: connection or start, and the start, replacement and end of actors.

An actor is a worker process on a node (machine) of the cluster.
"""

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
from fedclade.training.engine_names import ENGINES, check_engine
from fedclade.training.remote.actor import Place, Setup, Shard, packed
from fedclade.training.threads import cores

READY_SECONDS = 300.0
"""Seconds that the start of all actors may take, for example while nodes join the cluster."""

_log = logging.getLogger(__name__)


@checked()
@dataclass(frozen=True, kw_only=True)
class Actors:
    """Settings of the actors of a run with the engine ``ray``.

    Parameters
    ----------
    count
        Number of actors. None: one actor for each GPU. Without GPUs, or on the CPU: one actor for
        each node, or, if ``cores`` is set, as many actors as fit.
    cores
        Number of CPU cores, and so of training threads, of each actor. None: with one actor for
        each node, all cores of the smallest node; otherwise 1.
    address
        Address of a running Ray cluster, such as ``auto`` or ``10.0.0.1:6379``. None: the address
        in the environment variable ``RAY_ADDRESS``, or, if it is unset, a new cluster on this
        machine alone.
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
        """Check the numbers and the name of the engine; raise a ConfigError if one is invalid."""
        require(
            ("actors", self.count, self.count is None or self.count >= 1, "at least 1"),
            ("actor cores", self.cores, self.cores is None or self.cores >= 1, "at least 1"),
        )
        check_engine(self.engine, ENGINES)


def actors_from(actors: Actors | int | None, engine: str) -> Actors:
    """Return settings of actors, given settings, a number of actors, or None for default settings.

    Raises
    ------
    ConfigError
        If actors are given, but the engine is not ``ray``.
    """
    if actors is not None and engine != "ray":
        raise ConfigError(
            f"actors can be used with engine 'ray' only, but this run has engine {engine!r}; use "
            "--engine ray"
        )
    if isinstance(actors, Actors):
        return actors
    return Actors(count=actors)


@dataclass(frozen=True)
class Room:
    """Number of actors of a run that fit on a cluster, and the resources of each actor."""

    count: int
    cores: int
    gpus: int  # number of GPUs of each actor: 0 or 1
    beside: int  # largest number of actors that share one machine

    @classmethod
    def of(cls, nodes: Sequence[tuple[int, int]], actors: Actors, device: str) -> Room:
        """Find out how many actors fit on a cluster, and the resources of each actor.

        Parameters
        ----------
        nodes
            Number of CPU cores and number of GPUs of each node.
        actors
            Settings of the actors of the run.
        device
            ``auto``, ``cpu`` or ``cuda``.

        Raises
        ------
        ConfigError
            If the actors do not fit, the device is a numbered GPU, or the device is ``cuda`` and
            the cluster has no GPU.
        """
        if device.startswith("cuda:"):
            raise ConfigError(
                f"device {device!r} is not possible with the engine ray, which assigns the GPUs of "
                "the cluster to its actors; use --device cuda"
            )
        gpus = int(device != "cpu" and any(gpu for _, gpu in nodes))
        if device == "cuda" and not gpus:
            raise ConfigError(
                "device 'cuda' was requested, but the Ray cluster has no GPU; use --device cpu"
            )
        if actors.cores:
            each = actors.cores
        elif gpus or actors.count:
            each = 1
        else:  # one actor on each node, with as many cores as the smallest node has
            each = min((cpu for cpu, _ in nodes if cpu), default=1)
        rooms = rooms_of(nodes, each, gpus)
        count = actors.count or max(1, sum(rooms))
        if count > sum(rooms):
            needed = f"{each} core{'s' * (each > 1)}" + " and a GPU" * gpus
            raise ConfigError(
                f"{count} actors of {needed} each do not fit on the Ray cluster, which has room "
                f"for {sum(rooms)}; use fewer actors (--actors), or fewer cores for each actor"
            )
        return cls(count, each, gpus, min(count, max(rooms)))


def rooms_of(nodes: Sequence[tuple[int, int]], cores: int, gpus: int) -> list[int]:
    """Return the number of actors that fit on each node of a cluster.

    Parameters
    ----------
    nodes
        Number of CPU cores and number of GPUs of each node.
    cores
        Number of cores of each actor.
    gpus
        Number of GPUs of each actor: 0 or 1.
    """
    if gpus:
        return [min(cpu // cores, gpu) for cpu, gpu in nodes]
    return [cpu // cores for cpu, _ in nodes]


class Cluster:
    """Ray cluster that this process has joined, or has started and will also end.

    Parameters
    ----------
    actors
        Settings of the actors of the run.
    device
        ``auto``, ``cpu`` or ``cuda``.
    """

    def __init__(self, actors: Actors, device: str) -> None:
        self.ray: Any = import_ray()
        self._engine = actors.engine
        self.pickler = pickler()
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
        """Disconnect from the Ray cluster; end the cluster if this process has started it."""
        if self._ours and self.ray.is_initialized():
            with _signals_kept():
                self.ray.shutdown()

    def started(self, setup: Any) -> Any:
        """Start an actor, and return its Ray handle.

        The actor may have to wait until its CPU cores are free. ``setup`` is the configuration that
        all actors share, or a reference to it in Ray's object store.
        """
        place = Place(
            self._engine,
            device="cuda" if self.room.gpus else "cpu",
            cores=self.room.cores,
            beside=self.room.beside,
            tf32=bool(torch.backends.cuda.matmul.allow_tf32),
        )
        options = {"num_cpus": self.room.cores, "num_gpus": self.room.gpus, "max_restarts": 0}
        return self._actor.options(**options, scheduling_strategy="SPREAD").remote(
            setup, place, self.pickler
        )

    def are_ready(self, actors: Sequence[Any], seconds: float) -> bool:
        """Wait until all given actors have started; return False if that takes too many seconds.

        Raises
        ------
        Exception
            If an actor died: one of the exceptions in :attr:`deaths`.
        """
        refs = [actor.process.remote() for actor in actors]
        ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=seconds)
        self.ray.get(ready)
        return len(ready) == len(refs)

    def has_room_for(self, count: int) -> bool:
        """Return whether the living nodes have enough CPU cores and GPUs for ``count`` actors."""
        return sum(rooms_of(self._nodes(), self.room.cores, self.room.gpus)) >= count

    def end(self, actor: Any) -> None:
        """End an actor, unless the actor or the cluster has ended already."""
        with suppress(Exception):  # the cluster may have ended
            self.ray.kill(actor)

    @property
    def deaths(self) -> tuple[type[Exception], ...]:
        """Exceptions of Ray that mean that an actor or its node has died and a reply is lost."""
        errors = self.ray.exceptions
        return (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
        )

    def _nodes(self) -> list[tuple[int, int]]:
        """Return the number of CPU cores and of GPUs of each living node of the cluster."""
        alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return [(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in alive]

    def _join(self, actors: Actors) -> None:
        """Connect to a running Ray cluster, or start a cluster on this machine.

        Raises
        ------
        EngineError
            If the connection or the start fails.
        """
        address = actors.address or os.environ.get("RAY_ADDRESS") or "local"
        # A cluster that this process starts does not send usage statistics to Ray's developers.
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
                raise EngineError(
                    f"cannot connect to the Ray cluster at {address!r}, or start it: {error}; check "
                    "the address (--ray-address or environment variable RAY_ADDRESS)"
                ) from error


def pickler() -> Any:
    """Return the class of Ray's pickler.

    In contrast to Python's pickler, it also pickles functions and classes that a script defines.
    """
    return import_extra("ray.cloudpickle", "ray", "ray", "engine 'ray'").CloudPickler


def import_ray() -> Any:
    """Import the package Ray, and return it.

    Raises
    ------
    MissingExtraError
        If Ray is not installed; the message has the command that installs it.
    """
    return import_extra("ray", "ray", "ray", "engine 'ray'")


def how(error: Exception) -> str:
    """Return the text of an actor's error in one line, for messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500] or type(error).__name__


@contextmanager
def _signals_kept() -> Generator[None]:
    """Restore the handlers of Ctrl-C and of termination signals after a ``with`` block.

    Ray replaces these handlers when it connects to a cluster.
    """
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


# The actors of a run, which start at the first query, are replaced if they die, and end with the
# run.

REPLACED_SECONDS = 60.0
"""Seconds within which the replacement of a dead actor must start.

Otherwise the clients of the dead actor are assigned to the other actors.
"""


@dataclass(eq=False)
class Slot:
    """Actor of a run, the ids of its clients, and whether it has trained these clients before."""

    actor: Any
    holds: frozenset[int] | None = None
    is_warm: bool = False


class ActorPool:
    """All actors of a run, numbered by slots.

    A slot is the place of an actor among the actors: if the actor dies and the cluster has room,
    another actor takes the slot.

    Parameters
    ----------
    setup
        Configuration that all actors share.
    actors
        Settings of the actors: number, resources and cluster.
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
        """Function that ends the actors, and the cluster if this process has started it."""

    def begun(self) -> Cluster:
        """Return the cluster, with all actors ready.

        The first call joins the cluster and starts the actors.

        Raises
        ------
        ConfigError
            If the actors do not fit on the cluster, or the setup cannot be pickled.
        EngineError
            If the actors do not start, or have been ended by :attr:`close`.
        """
        if self._joined:
            return self._joined[0]
        if not self.close.alive:
            raise EngineError("the actors of this run have been ended; start the run again")
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
            raise EngineError(
                f"an actor died while it was starting: {how(error)}; if memory ran out, use fewer "
                "actors (--actors)"
            ) from error
        if not are_ready:
            raise EngineError(
                f"not all of {len(self.slots)} actors started within {READY_SECONDS:.0f} s; other "
                "programs may use the cores of the cluster: use fewer actors (--actors)"
            )
        return cluster

    def replace(self, slot: Slot, error: Exception) -> int | None:
        """Start another actor in place of an actor that has died.

        Parameters
        ----------
        slot
            The slot of the dead actor.
        error
            The error by which it died.

        Returns
        -------
        int or None
            None if the actor was replaced. If the cluster has no room for another actor, the slot
            is removed, the numbers of later slots decrease by 1, and the result is the number that
            the slot had.

        Raises
        ------
        EngineError
            If the cluster has no room for another actor, and the dead actor was the only actor.
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
            except cluster.deaths:  # for example on a dead node that Ray still counts as alive
                slot.actor = cluster.started(self._setup_ref)
        cluster.end(slot.actor)
        if len(self.slots) == 1:
            raise EngineError(
                "the only actor has died, and the Ray cluster has no room for another actor: "
                f"{how(error)}; start the run again when the cluster has free cores"
            ) from error
        lost = self.slots.index(slot)
        _log.warning(
            "the Ray cluster has no room for another actor; the clients of the dead actor are "
            "assigned to the other %d actors",
            len(self.slots) - 1,
        )
        del self.slots[lost]
        return lost


def _leave(slots: list[Slot], joined: list[Cluster]) -> None:
    """End actors, and leave the cluster if it has been joined."""
    for cluster in joined:
        for slot in slots:
            cluster.end(slot.actor)
        cluster.leave()
    slots.clear()
    joined.clear()
