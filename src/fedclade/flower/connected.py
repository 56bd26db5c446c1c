"""Clients of a network, as an algorithm sees them: who joins is taken in, who is gone is missed."""

from __future__ import annotations

from pathlib import Path

from fedclade.algorithms import Algorithm, State
from fedclade.channel import Channel
from fedclade.core import (
    Clients,
    Disconnected,
    Event,
    Reconnected,
    Refused,
    Round,
)
from fedclade.flower.node_registry import NodeRegistry
from fedclade.runs import ComingAndGoing


class ConnectedClients(Channel, ComingAndGoing):
    """Clients who may join before any round, and who may be gone for a while or for good.

    Who is gone stays in its cluster: it is left out of a round without being waited for, and takes part again as soon
    as it is back. If nobody at all is connected, the round waits.

    Parameters
    ----------
    clients
        All who ever joined, through all that wraps them.
    members
        Who is connected.
    folder
        Of the run, where it is written down who is who; None for a run without one.
    wait
        Seconds to wait for the first, if nobody is connected.
    """

    def __init__(self, clients: Clients, members: NodeRegistry, folder: Path | None, wait: float) -> None:
        super().__init__(clients)
        self._members = members
        self._folder = folder
        self._wait = wait

    def begin(self, algorithm: Algorithm, state: State, this_round: Round) -> tuple[State, list[Event]]:
        """Begin a round: take in who has joined; return the next state and what there is to tell.

        Raises
        ------
        UpdateError
            If nobody is connected, and nobody comes in time.
        RunError
            If it cannot be written down who is who.
        """
        self._members.look()
        if not self._members.connected:
            self._members.wait(1, self._wait)
        news = self._members.news()
        if self._folder is not None:
            self._members.save(self._folder)
        events: list[Event] = [
            happened(0, tuple(clients))
            for happened, clients in ((Disconnected, news.disconnected), (Reconnected, news.reconnected))
            if clients
        ]
        if news.refused:
            events.append(Refused(0, dict(news.refused)))
        known = state.tree.leaf_of
        if new := [client for client in self.ids if client not in known]:
            state, joined = algorithm.join(state, new, self, this_round)
            events += joined
        return state, events
