"""Clients that join a run after its start, and clients that leave before its end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedclade.algorithms import Algorithm, State
from fedclade.channel import Channel
from fedclade.core import Clients, Event, Left, Round, checked, require, rng
from fedclade.data import Federation


class ComingAndGoing(Clients):
    """Clients of which some join late and some leave early; only those that are there in the round can be queried."""

    @abstractmethod
    def begin(self, algorithm: Algorithm, state: State, this_round: Round) -> tuple[State, list[Event]]:
        """Begin a round: let clients come and go; return the next state and the events of that."""


@checked()
@dataclass(frozen=True, kw_only=True)
class Churn:
    """When newcomers join a run, and when as many clients leave it.

    Parameters
    ----------
    join_round
        Newcomers take part from this round on, at least 2; if left out, they stay outside.
    leave_round
        From this round on, at least 2, as many clients as there are newcomers, drawn from all, take no part any more;
        their models stay.

    Raises
    ------
    ConfigError
        If a round is below 2, or clients would leave before others join.
    """

    join_round: int | None = None
    leave_round: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("join_round", self.join_round), ("leave_round", self.leave_round)):
            require((f"newcomers.{name}", number, number is None or number >= 2, "at least 2, or left out"))
        if self.join_round is not None and self.leave_round is not None:
            holds = self.leave_round > self.join_round
            require(("newcomers.leave_round", self.leave_round, holds, f"after join_round, {self.join_round}"))

    def check(self, newcomers: int, clients: int, rounds: int) -> None:
        """Check that a run of so many newcomers, clients and rounds can have clients come and go.

        Raises
        ------
        ConfigError
            If there are no newcomers, a round is after the last, or all clients would leave.
        """
        for name, number in (("join_round", self.join_round), ("leave_round", self.leave_round)):
            if number is not None:
                rule = f"at most {rounds}, the number of rounds, with newcomers.clients at least 1"
                require((f"newcomers.{name}", number, number <= rounds and newcomers > 0, rule))
        if self.leave_round is not None and self.join_round is None:
            require(("newcomers.clients", newcomers, newcomers < clients, f"below {clients}, or all would leave"))

    def everybody(self, federation: Federation) -> Federation:
        """Return all that are there at some time: the clients, and the newcomers if they join."""
        if self.join_round is None or federation.newcomers is None:
            return federation
        return federation.joined(federation.newcomers)

    def among(self, clients: Clients, federation: Federation, seed: int) -> ChurningClients:
        """Return the clients of :meth:`everybody`, of which an algorithm sees those that are there.

        Those that leave are drawn from all, by the seed.
        """
        late = () if federation.newcomers is None else federation.newcomers.ids
        joins = {} if self.join_round is None else dict.fromkeys(late, self.join_round)
        leaves: dict[int, int] = {}
        if self.leave_round is not None:
            drawn = rng.generator(seed, "leave").choice(list(clients.ids), len(late), replace=False).tolist()
            leaves = dict.fromkeys(sorted(drawn), self.leave_round)
        return ChurningClients(clients, joins, leaves)


class ChurningClients(Channel, ComingAndGoing):
    """Clients with the first round of each that ``joins`` late, and the first round without each that ``leaves``."""

    def __init__(self, clients: Clients, joins: Mapping[int, int], leaves: Mapping[int, int]) -> None:
        super().__init__(clients)
        self._joins, self._leaves = joins, leaves
        self._number = 1

    @property
    def ids(self) -> Sequence[int]:
        """All that are there, in a fixed order."""
        if not self._joins and not self._leaves:
            return self._clients.ids
        return [c for c in self._clients.ids if self._joins.get(c, 1) <= self._number and not self._gone(c)]

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client that is there."""
        sizes = self._clients.sizes
        if not self._joins and not self._leaves:
            return sizes
        return {client: sizes[client] for client in self.ids}

    def begin(self, algorithm: Algorithm, state: State, this_round: Round) -> tuple[State, list[Event]]:
        """Begin a round: let clients come and go; return the next state and the events of that."""
        self._number = this_round.number
        events: list[Event] = []
        if left := [client for client, number in self._leaves.items() if number == self._number]:
            state = replace(state, tree=state.tree.without(left))
            events.append(Left(0, tuple(left)))
        if joined := [client for client, number in self._joins.items() if number == self._number]:
            state, more = algorithm.join(state, joined, self, this_round)
            events += more
        return state, events

    def _gone(self, client: int) -> bool:
        return client in self._leaves and self._number >= self._leaves[client]
