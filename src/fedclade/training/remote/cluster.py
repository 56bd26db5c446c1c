"""The Ray cluster: joined or started, how many actors it has room for, and their beginning and end."""

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
"""How long all actors may take to start, such as where nodes are added first."""

_log = logging.getLogger(__name__)


@checked()
@dataclass(frozen=True, kw_only=True)
class Actors:
    """The actors of a run with the engine ``ray``.

    Parameters
    ----------
    count
        How many. None: one for each GPU; without GPUs, or on the CPU, one for each node, or as many
        of ``cores`` as there is room for.
    cores
        Of each, which are the threads that it trains with. None: all of the smallest node where
        there is one actor for each node, otherwise 1.
    address
        Of a running Ray cluster, such as ``auto`` or ``10.0.0.1:6379``. None: that in
        ``RAY_ADDRESS``, or if there is none, this machine by itself.
    engine
        What each trains its clients with: one of :data:`~fedclade.training.ENGINES`.

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
    """Return the actors as given, or so many of them; a ConfigError if the engine has none."""
    if actors is not None and engine != "ray":
        raise ConfigError(
            f"actors are those of engine 'ray', and this run has engine {engine!r}; use --engine "
            "ray"
        )
    return actors if isinstance(actors, Actors) else Actors(count=actors)


@dataclass(frozen=True)
class Room:
    """What the actors of a run get of a cluster."""

    count: int
    cores: int
    gpus: int  # 1 or 0, of each
    beside: int  # at most so many on one machine

    @classmethod
    def of(cls, nodes: Sequence[tuple[int, int]], actors: Actors, device: str) -> Room:
        """Return how many actors there are, and what each gets, of nodes with so many cores and GPUs each.

        Raises
        ------
        ConfigError
            If they do not fit.
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
    """Return for how many actors each node has room, of so many cores and GPUs each."""
    return [min(cpu // cores, gpu) if gpus else cpu // cores for cpu, gpu in nodes]


class Cluster:
    """A Ray cluster that this process has joined, or started by itself and then also ends."""

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
        """Leave the cluster; end it if it was started here."""
        if self._ours and self.ray.is_initialized():
            with _signals_kept():
                self.ray.shutdown()

    def started(self, setup: Any) -> Any:
        """Start an actor; it may have to wait for its cores."""
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
        """Wait for actors to start; return whether they did within so many seconds. Raises one of the ``deaths``."""
        refs = [actor.process.remote() for actor in actors]
        ready, _ = self.ray.wait(refs, num_returns=len(refs), timeout=seconds)
        self.ray.get(ready)
        return len(ready) == len(refs)

    def has_room_for(self, count: int) -> bool:
        """Whether the nodes that are alive have the cores, and GPUs, for so many actors."""
        return sum(rooms_of(self._nodes(), self.room.cores, self.room.gpus)) >= count

    def end(self, actor: Any) -> None:
        """End an actor, if it has not ended."""
        with suppress(Exception):  # of a cluster that is gone
            self.ray.kill(actor)

    @property
    def deaths(self) -> tuple[type[Exception], ...]:
        """What is raised where an actor or its node has died, and its reply with it."""
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
        # a cluster that is started here reports to nobody
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
    """Return the class of Ray's pickler, which also takes what a script defines."""
    return import_extra("ray.cloudpickle", "ray", "ray", "engine 'ray'").CloudPickler


def import_ray() -> Any:
    """Return Ray; a MissingExtraError says how to install it."""
    return import_extra("ray", "ray", "ray", "engine 'ray'")


def how(error: Exception) -> str:
    """Return in a line how an actor died."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500] or type(error).__name__


@contextmanager
def _signals_kept() -> Generator[None]:
    """Let Ctrl-C and the like mean what they meant before: Ray sets handlers of its own."""
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


# The actors of a run: started at its first query, replaced where they die, and ended with it.

REPLACED_SECONDS = 60.0
"""How long a new actor may take to start in place of a dead one, before that one's clients go to the others."""


@dataclass(eq=False)
class Slot:
    """An actor, the clients that it was told to hold, and whether it has trained since."""

    actor: Any
    holds: frozenset[int] | None = None
    is_warm: bool = False


class ActorPool:
    """The actors, by number; an actor that has died leaves its slot to another, if there is room for one."""

    def __init__(self, setup: Setup, actors: Actors, device: str) -> None:
        self._setup = setup
        self._actors = actors
        self._device = device
        self._setup_ref: Any = None
        self.slots: list[Slot] = []
        self._joined: list[Cluster] = []  # one, from the first query on
        self.close = weakref.finalize(self, _leave, self.slots, self._joined)
        """Ends the actors, and the cluster if this process has started it."""

    def begun(self) -> Cluster:
        """Return the cluster, with actors that are ready.

        Raises
        ------
        ConfigError
            If the actors do not fit on the cluster, or what they need cannot be sent to them.
        EngineError
            If they do not start, or have ended.
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
        """Start another actor in place of one that died by an error.

        Returns
        -------
        int or None
            The number of the slot, where there is no room for another actor: it is gone, and those
            behind it move up.
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
            except cluster.deaths:  # as on a node that is not yet known to be gone
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
