"""Clients of a network, as an algorithm sees them: new ones are admitted, those that are gone are left out."""

from __future__ import annotations

import logging
from pathlib import Path

from fedclade.algorithms import Algorithm, State
from fedclade.channel import Channel
from fedclade.core import Clients, Disconnected, Event, ParameterTree, Reconnected, Refused, Round, UpdateError, Waiting
from fedclade.flower.node_registry import NodeRegistry
from fedclade.runs import ComingAndGoing

_log = logging.getLogger(__name__)


class ConnectedClients(Channel, ComingAndGoing):
    """Clients that may join before any round, and may be gone for a while or for good.

    A client that is gone stays in its cluster: it is left out of rounds without a wait, and takes part again as soon as
    it is back. If none is connected, the round waits. The registry is saved in the folder of the run, if it has one.
    """

    def __init__(self, clients: Clients, registry: NodeRegistry, folder: Path | None, wait: float) -> None:
        super().__init__(clients)
        self._registry = registry
        self._folder = folder
        self._wait = wait

    def begin(self, algorithm: Algorithm, state: State, this_round: Round) -> tuple[State, list[Event]]:
        """Begin a round: add the clients that have joined; return the next state and the events."""
        self._registry.begin(this_round.number)
        if not self._registry.connected:
            self._registry.wait(1, self._wait)
        changes = self._registry.changes()
        if self._folder is not None:
            self._registry.save(self._folder)
        events: list[Event] = [
            happened(0, tuple(clients))
            for happened, clients in ((Disconnected, changes.disconnected), (Reconnected, changes.reconnected))
            if clients
        ]
        if changes.refused:
            events.append(Refused(0, dict(changes.refused)))
        if changes.postponed:
            events.append(Waiting(0, tuple(changes.postponed)))
            _log.warning(
                "%d newcomers wait for a later round, as network.newcomers = %g allows no more at once; list the keys "
                "of the clients in network.keys, or raise it",
                len(changes.postponed),
                self._registry.newcomers,
            )
        known = state.tree.leaf_of
        if new := [client for client in self.ids if client not in known]:
            state, joined = algorithm.join(state, new, self, this_round)
            events += joined
        return state, events

    def stay(self, number: int, tree: ParameterTree) -> None:
        """See which clients are connected, of those that are in the run; wait for one if none is."""
        if not self._registry.wait_for_any(self._wait):
            raise UpdateError(
                f"round {number}, the last, was not evaluated, and no client is connected within {self._wait:g} s; "
                "start the SuperNodes and the ServerApp, with network.finish = true"
            )
