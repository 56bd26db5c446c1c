"""The actors of a run: started at its first query, replaced where they die, and ended with it."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from pickle import PicklingError
from time import monotonic
from typing import Any

from fedclade.core import ConfigError, EngineError
from fedclade.training.remote.actor import Setup
from fedclade.training.remote.cluster import READY_SECONDS, Actors, Cluster, how
from fedclade.training.remote.packing import packed

REPLACED_SECONDS = 60.0
"""How long a new actor may take to start in place of a dead one, before that one's clients go to the others."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Slot:
    """An actor, the clients that it was told to hold, and whether it has trained since."""

    actor: Any
    holds: frozenset[int] | None = None
    is_warm: bool = False


class ActorPool:
    """The actors, by number; an actor that has died leaves its slot to another, if there is room for one."""

    def __init__(self, setup: Setup, actors: Actors, device: str) -> None:
        self._setup, self._actors, self._device = setup, actors, device
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
                f"engine 'ray' cannot send the model, the data or the task to its actors: {error}; use another engine"
            ) from error
        self._setup_ref = cluster.ray.put(message)
        self.slots += [Slot(cluster.started(self._setup_ref)) for _ in range(cluster.room.count)]
        try:
            are_ready = cluster.are_ready([slot.actor for slot in self.slots], READY_SECONDS)
        except cluster.deaths as error:
            raise EngineError(f"an actor died before it could begin: {how(error)}") from error
        if not are_ready:
            raise EngineError(
                f"not all of {len(self.slots)} actors could start within {READY_SECONDS:.0f} s; the cluster's cores "
                "may be taken: ask for fewer actors"
            )
        return cluster

    def replace(self, slot: Slot, error: Exception) -> int | None:
        """Start another actor in place of one that died by an error.

        Returns
        -------
        int or None
            The number of the slot, where there is no room for another actor: it is gone, and those behind it move up.
        """
        cluster = self._joined[0]
        cluster.end(slot.actor)
        _log.warning("an actor died, and its part of the round is repeated: %s", how(error))
        slot.actor, slot.holds = cluster.started(self._setup_ref), None
        end = monotonic() + REPLACED_SECONDS
        while cluster.has_room_for(len(self.slots)) and monotonic() < end:
            try:
                if cluster.are_ready([slot.actor], 1.0):
                    return None
            except cluster.deaths:  # as on a node that is not yet known to be gone
                slot.actor = cluster.started(self._setup_ref)
        cluster.end(slot.actor)
        if len(self.slots) == 1:
            raise EngineError(f"the only actor has died, and there is no room for another: {how(error)}") from error
        lost = self.slots.index(slot)
        _log.warning("there is no room for another actor; its clients go to the other %d", len(self.slots) - 1)
        del self.slots[lost]
        return lost


def _leave(slots: list[Slot], joined: list[Cluster]) -> None:
    for cluster in joined:
        for slot in slots:
            cluster.end(slot.actor)
        cluster.leave()
    slots.clear()
    joined.clear()
