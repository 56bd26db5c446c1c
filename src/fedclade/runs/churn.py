"""Availability of clients: late joining, early leaving, and the hours at which they are online."""

from __future__ import annotations

import hashlib
import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedclade.algorithms import Algorithm, State
from fedclade.channel import Absence, Channel, Lying
from fedclade.core import (
    Clients,
    ConfigError,
    DataChanged,
    DataError,
    DataSpec,
    Event,
    Left,
    ParameterTree,
    Query,
    R,
    Round,
    TooFew,
    checked,
    require,
    rng,
    shown,
)
from fedclade.data import ColumnRoles, Federation, Notation, Rows, prepare_sheets, read_sheet

# Availability traces: the hours at which each client is online, from a file or generated.

DAY = 86_400.0
"""Seconds of a day."""

DAILY = "daily"
"""Name of the generated trace.

Each client is online once a day, for a number of hours in the range :data:`HOURS`, starting at a
time of day of its own.
"""

HOURS = (4.0, 12.0)
"""Shortest and longest time that a client of the ``daily`` trace is online, in hours a day."""

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Trace:
    """Availability trace of n clients: m intervals ``[start, end)`` that repeat after a period.

    Parameters
    ----------
    places
        Index of the client of each interval, ``[m]``, from 0 to n - 1.
    starts, ends
        Beginning and end of each interval, ``[m]``, in seconds from 0 to the period.
    period
        Seconds after which the trace repeats.
    always
        Mask ``[n]`` of the clients that are always available.
    """

    places: Places
    starts: Numbers
    ends: Numbers
    period: float
    always: NDArray[np.bool_]

    def there(self, seconds: float) -> NDArray[np.bool_]:
        """Return the mask ``[n]`` of the clients available ``seconds`` after the run's start."""
        at = seconds % self.period
        found = self.always.copy()
        found[self.places[(self.starts <= at) & (at < self.ends)]] = True
        return found

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the trace."""
        found = hashlib.sha256(np.float64(self.period).tobytes())
        for array in (self.places, self.starts, self.ends, self.always):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    @classmethod
    def daily(cls, keys: Sequence[int], seed: int) -> Trace:
        """Generate a trace in which each client is online once a day.

        A client's hours depend on the seed and its key only. The time of day at which they start is
        uniformly distributed.

        Parameters
        ----------
        keys
            Key of each client, ``[n]``.
        seed
            Seed of the run.
        """
        root = rng.generator(seed, "hours of the day").integers(2**64, size=2, dtype=np.uint64)
        of_keys = np.array(keys, dtype=np.int64).view(np.uint64)
        starts, lengths = (_uniform(of_keys, number) for number in root)
        starts = starts * DAY
        lengths = 3600 * (HOURS[0] + lengths * (HOURS[1] - HOURS[0]))
        places = np.arange(len(keys))
        ends = starts + lengths
        late = ends > DAY  # past midnight: two intervals
        return cls(
            np.concatenate([places, places[late]]),
            np.concatenate([starts, np.zeros(late.sum())]),
            np.concatenate([np.minimum(ends, DAY), ends[late] - DAY]),
            DAY,
            np.zeros(len(keys), dtype=bool),
        )

    @classmethod
    def read(cls, path: Path, federation: Federation, period: float | None = None) -> Trace:
        """Read a trace from a CSV, TSV or Parquet file.

        The file has the columns ``client``, ``from`` and ``to``, and a row for each interval.
        ``client`` is the name of a client, or else its id; a client without any row is always
        available.

        Parameters
        ----------
        path
            The file.
        federation
            All clients.
        period
            Seconds after which the trace repeats; if left out, after its last day.

        Raises
        ------
        DataError
            If the file cannot be read, a column is missing, a client is unknown, a number is
            missing, an interval is reversed or begins before 0, or two intervals of a client
            overlap.
        ConfigError
            If an interval ends after the period.
        """
        roles = ColumnRoles(inputs=("from", "to"), as_texts=("client",))
        rows = Rows(prepare_sheets([read_sheet(path)], roles, Notation()))
        starts = _seconds(rows, "from", path)
        ends = _seconds(rows, "to", path)
        places = _places(rows.texts("client"), federation, path)
        if len(odd := np.flatnonzero((starts < 0) | (ends <= starts))):
            row = int(odd[0])
            raise DataError(
                f"{path}: 'from' should be at least 0 and below 'to', got from {starts[row]:g} to "
                f"{ends[row]:g} in row {row + 1}"
            )
        order = np.lexsort((starts, places))
        places = places[order]
        starts = starts[order]
        ends = ends[order]
        if len(odd := np.flatnonzero((places[1:] == places[:-1]) & (starts[1:] < ends[:-1]))):
            i = int(odd[0])
            raise DataError(
                f"{path}: intervals of client {federation.clients[places[i]].name!r} overlap: from "
                f"{starts[i]:g} to {ends[i]:g} and from {starts[i + 1]:g} to {ends[i + 1]:g}; join "
                "them to one row"
            )
        last = float(ends.max())
        if period is not None and period < last:
            raise ConfigError(
                f"presence.trace_period should be at least {last:g}, the last 'to' of {path}, got "
                f"{period:g}"
            )
        always = np.ones(len(federation), dtype=bool)
        always[places] = False
        if always.any():
            _log.info(
                "%s has no row of %d of %d clients, which are always there",
                path,
                always.sum(),
                len(always),
            )
        return cls(places, starts, ends, period or DAY * math.ceil(last / DAY), always)


def _seconds(rows: Rows, column: str, path: Path) -> Numbers:
    if rows.kind(column) not in ("whole", "number"):
        raise DataError(
            f"{path}: column {column!r} should hold seconds since the start, as numbers"
        )
    return rows.numbers(column)


def _places(named: NDArray[np.object_], federation: Federation, path: Path) -> Places:
    """Return the index of the client that each row names, ``[m]``."""
    place_of = {str(client.id): place for place, client in enumerate(federation.clients)}
    place_of |= {client.name: place for place, client in enumerate(federation.clients)}
    names, which = np.unique(named.astype(str), return_inverse=True)
    if unknown := [str(name) for name in names.tolist() if name not in place_of]:
        raise DataError(
            f"{path} names clients that are not there: {shown(unknown)}; they should be names or "
            f"ids, such as {federation.clients[0].name!r} or {federation.clients[0].id}"
        )
    return np.array([place_of[name] for name in names.tolist()], dtype=np.int64)[which]


def _uniform(keys: NDArray[np.uint64], salt: np.uint64) -> Numbers:
    """Return a number in [0, 1) for each key by SplitMix64.

    A generator for each of 10⁶ clients would take seconds.
    """
    z = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + salt
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class ComingAndGoing(Clients):
    """Clients that may join late or leave early; only those available in a round can be queried."""

    @abstractmethod
    def begin(
        self, algorithm: Algorithm, state: State, this_round: Round
    ) -> tuple[State, list[Event]]:
        """Begin a round: add clients that join, remove clients that leave.

        Returns
        -------
        tuple
            The state after these changes, and their events.
        """

    def stay(self, number: int, tree: ParameterTree) -> None:
        """Select the clients of a round that is over, so that they can be evaluated after it.

        This has an effect only in a run that is continued, since its clients have not run that
        round in this process.

        Parameters
        ----------
        number
            Number of the round, from 1.
        tree
            The tree of that round.
        """

    @property
    def present(self) -> int | None:
        """Number of available clients of the round; None if it is not known in advance."""
        return None

    def there(self, state: State) -> State:
        """Return a state whose tree has the available clients only; cohorts are sampled from it."""
        return state

    def left_alone(self, before: ParameterTree, after: ParameterTree) -> list[Event]:
        """Return events for clusters whose model did not change as no member was available.

        ``before`` and ``after`` are the trees before and after the round.
        """
        return []


@checked()
@dataclass(frozen=True, kw_only=True)
class Churn:
    """Rules by which newcomers join a run, clients leave it, and clients are available.

    Parameters
    ----------
    join_round
        Newcomers take part from this round on, at least 2; if left out, they never join.
    leave_round
        From this round on, at least 2, clients that are drawn from all clients no longer take part,
        as many as there are newcomers; models that they have trained stay.
    trace
        Availability trace of the clients: a file, see :meth:`Trace.read
        <fedclade.runs.churn.Trace.read>`, or ``daily`` for a generated trace; if left out, all
        clients are always available. A cohort is sampled from the clients that are available when a
        round begins; the others stay in their clusters and keep their models.
    round_seconds
        Seconds of the trace from the beginning of a round to that of the next; an hour by default.
    trace_period
        Seconds after which the trace of a file repeats; by default, after its last day.

    Raises
    ------
    ConfigError
        If a round is below 2, clients would leave before others join, a number of seconds is not
        above 0, or ``trace_period`` is given without a file.
    """

    join_round: int | None = None
    leave_round: int | None = None
    trace: str | None = None
    round_seconds: float = 3600.0
    trace_period: float | None = None

    def __post_init__(self) -> None:
        for name, number in (("join_round", self.join_round), ("leave_round", self.leave_round)):
            require(
                (
                    f"newcomers.{name}",
                    number,
                    number is None or number >= 2,
                    "at least 2, or left out",
                )
            )
        if self.join_round is not None and self.leave_round is not None:
            holds = self.leave_round > self.join_round
            require(
                (
                    "newcomers.leave_round",
                    self.leave_round,
                    holds,
                    f"after join_round, {self.join_round}",
                )
            )
        period = self.trace_period
        of_file = self.trace not in (None, DAILY)
        require(
            ("presence.trace", self.trace, self.trace != "", "a file, 'daily', or left out"),
            (
                "presence.round_seconds",
                self.round_seconds,
                self.round_seconds > 0,
                "greater than 0",
            ),
            ("presence.trace_period", period, period is None or period > 0, "greater than 0"),
            (
                "presence.trace_period",
                period,
                period is None or of_file,
                "left out unless presence.trace is a file",
            ),
        )

    def check(self, newcomers: int, clients: int, rounds: int) -> None:
        """Check that these rules suit a run.

        Parameters
        ----------
        newcomers, clients, rounds
            Numbers of newcomers, of clients and of rounds of the run.

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
            require(
                (
                    "newcomers.clients",
                    newcomers,
                    newcomers < clients,
                    f"below {clients}, or all would leave",
                )
            )

    def everybody(self, federation: Federation) -> Federation:
        """Return all clients that can take part in some round: with the newcomers, if they join."""
        if self.join_round is None or federation.newcomers is None:
            return federation
        return federation.join(federation.newcomers)

    @property
    def of_trace(self) -> dict[str, str | float | None]:
        """The ``[presence]`` section of a config."""
        return {
            "trace": self.trace,
            "round_seconds": self.round_seconds,
            "trace_period": self.trace_period,
        }

    def timetable(self, everybody: Federation, seed: int) -> Timetable | None:
        """Return the timetable of unavailable clients; None without a trace.

        Raises
        ------
        DataError, ConfigError
            If the trace cannot be read; see :meth:`Trace.read`.
        """
        if self.trace is None:
            return None
        if self.trace == DAILY:
            trace = Trace.daily(list(everybody.keys.values()), seed)
        else:
            trace = Trace.read(Path(self.trace), everybody, self.trace_period)
        return Timetable(trace, everybody.ids, self.round_seconds)

    def among(
        self,
        clients: Clients,
        federation: Federation,
        seed: int,
        timetable: Timetable | None = None,
        absence: Absence | None = None,
        lying: Lying | None = None,
    ) -> ChurningClients:
        """Return the clients of :meth:`everybody`; an algorithm sees the available ones only.

        Parameters
        ----------
        clients
            All clients.
        federation
            Their data, and the newcomers.
        seed
            Draws the clients that leave, from all clients.
        timetable
            Unavailable clients by round; None without a trace.
        absence
            Middleware that leaves out unavailable clients, and adversaries that have not joined
            yet.
        lying
            Middleware of the adversaries; None if all clients are honest.
        """
        late = () if federation.newcomers is None else federation.newcomers.ids
        joins = {} if self.join_round is None else dict.fromkeys(late, self.join_round)
        leaves: dict[int, int] = {}
        if self.leave_round is not None:
            drawn = (
                rng.generator(seed, "leave")
                .choice(list(clients.ids), len(late), replace=False)
                .tolist()
            )
            leaves = dict.fromkeys(sorted(drawn), self.leave_round)
        everybody = self.everybody(federation) if federation.stages else None
        return ChurningClients(clients, joins, leaves, timetable, absence, everybody, lying)


@dataclass(frozen=True, eq=False)
class Timetable:
    """Clients that are unavailable in each round, by a trace.

    Parameters
    ----------
    trace
        The trace.
    ids
        Ids of its clients, in the order of the trace.
    round_seconds
        Seconds of the trace from the beginning of a round to that of the next.
    """

    trace: Trace
    ids: Sequence[int]
    round_seconds: float

    def away(self, number: int) -> frozenset[int]:
        """Return the clients that are unavailable when a round, from 1, begins."""
        there = self.trace.there((number - 1) * self.round_seconds)
        return frozenset(np.array(self.ids, dtype=np.int64)[~there].tolist())


class ChurningClients(Channel, ComingAndGoing):
    """Clients that join late, leave early, or are unavailable in some rounds.

    Parameters
    ----------
    clients
        All clients.
    joins
        First round of each client that joins late, by id.
    leaves
        First round without each client that leaves, by id.
    timetable
        Unavailable clients by round; None if all are always available.
    absence
        Middleware of ``clients`` that leaves out unavailable clients.
    federation
        Data of the clients that changes during the run; None if it does not change. Queries are
        about the data of the current round, unless they name another.
    lying
        Middleware of the adversaries; None if all clients are honest.
    """

    def __init__(
        self,
        clients: Clients,
        joins: Mapping[int, int],
        leaves: Mapping[int, int],
        timetable: Timetable | None = None,
        absence: Absence | None = None,
        federation: Federation | None = None,
        lying: Lying | None = None,
    ) -> None:
        super().__init__(clients)
        self._joins = joins
        self._leaves = leaves
        self._federation = federation
        self._timetable = timetable
        self._lying = lying
        if absence is None:  # passed by no query, it only stores the unavailable clients
            absence = Absence(0, DataSpec("", (), outputs=0))
        self._absence = absence
        self._at(1)

    @property
    def ids(self) -> Sequence[int]:
        """Clients that have joined and not left, in a fixed order."""
        if not self._joins and not self._leaves:
            return self._clients.ids
        return [
            c
            for c in self._clients.ids
            if self._joins.get(c, 1) <= self._number and not self._gone(c)
        ]

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client that has joined and not left."""
        held = self._federation
        sizes = self._clients.sizes if held is None else held.in_round(self._number).sizes
        if held is not None and self._lying is not None:
            sizes = self._lying.weights(sizes)
        if not self._joins and not self._leaves:
            return sizes
        return {client: sizes[client] for client in self.ids}

    @property
    def stage(self) -> int:
        """Number of changes of the clients' data so far."""
        return 0 if self._federation is None else self._federation.stage_in(self._number)

    def ask(self, query: Query[R], /) -> R:
        """Send a query to the clients, and return their reply.

        It is about the data of the current round unless it names another round.
        """
        if self._federation is not None and query.data_round == 0:
            query = replace(query, data_round=self._number)
        return super().ask(query)

    def begin(
        self, algorithm: Algorithm, state: State, this_round: Round
    ) -> tuple[State, list[Event]]:
        """Begin a round: add clients that join, remove clients that leave.

        Returns
        -------
        tuple
            The state after these changes, and their events.
        """
        self._at(this_round.number, state.tree)
        changed = self._changed()
        events: list[Event] = [DataChanged(0, changed)] if changed else []
        if left := [client for client, number in self._leaves.items() if number == self._number]:
            state = replace(state, tree=state.tree.without(left))
            events.append(Left(0, tuple(left)))
        if joined := [client for client, number in self._joins.items() if number == self._number]:
            state, more = algorithm.join(state, joined, self, this_round)
            events += more
        return state, events

    def stay(self, number: int, tree: ParameterTree) -> None:
        """Select the clients of a round that is over."""
        self._at(number, tree)

    @property
    def reachable(self) -> Sequence[int]:
        """Available clients of the round."""
        return [client for client in self.ids if client not in self._absence.away]

    @property
    def present(self) -> int | None:
        """Number of available clients of the round; None without a trace."""
        return None if self._timetable is None else len(self.reachable)

    def there(self, state: State) -> State:
        """Return a state whose tree has the available clients only; cohorts are sampled from it."""
        if not (away := self._absence.away):
            return state
        nodes = [
            replace(
                node,
                members=tuple(client for client in node.members if client not in away),
                cached=None,
            )
            for node in state.tree.nodes
        ]
        return replace(state, tree=ParameterTree(tuple(nodes)))

    def left_alone(self, before: ParameterTree, after: ParameterTree) -> list[Event]:
        """Return events for clusters whose model did not change as no member was available."""
        if not (away := self._absence.away):
            return []
        alone = [leaf for leaf in before.leaves if leaf.members and away.issuperset(leaf.members)]
        return [TooFew(leaf.id, 0) for leaf in alone if after.nodes[leaf.id].params is leaf.params]

    def _changed(self) -> tuple[int, ...]:
        """Return the clients of this round with other data than in the round before."""
        if self._federation is None or self.stage == self._federation.stage_in(self._number - 1):
            return ()
        now, before = (
            self._federation.in_round(number).by_id for number in (self._number, self._number - 1)
        )
        return tuple(client for client in self.ids if now[client] is not before[client])

    def _at(self, number: int, tree: ParameterTree | None = None) -> None:
        """Set the current round, and the clusters at its beginning."""
        self._number = number
        if self._timetable is not None:
            self._absence.away = self._timetable.away(number)
        if self._lying is not None:
            self._lying.begin(number, tree)
            there = frozenset[int]() if self._timetable is None else self._absence.away
            self._absence.away = there | self._lying.late

    def _gone(self, client: int) -> bool:
        return client in self._leaves and self._number >= self._leaves[client]


def fingerprint(everybody: Federation, timetable: Timetable | None) -> str:
    """Return the fingerprint of the data and, if set, of the availability trace."""
    found = everybody.fingerprint
    return found if timetable is None else f"{found} {timetable.trace.fingerprint}"
