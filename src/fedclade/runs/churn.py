"""Availability of clients: late joining, early leaving, and the hours at which they are online.

Churn is the change of a run's clients over its rounds. An availability trace is a list of time
intervals in which each client is online.
"""

from __future__ import annotations

import hashlib
import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedclade import core
from fedclade.algorithms import Algorithm, State
from fedclade.channel import Absence, Channel, Lying
from fedclade.core import (
    Clients,
    ConfigError,
    DataError,
    DataSpec,
    ParameterTree,
    Query,
    R,
    Range,
    Round,
    Sink,
    at_least,
    check_settings,
    checked,
    document_settings,
    greater_than,
    require,
    rng,
    setting,
    shown,
)
from fedclade.data import ColumnRoles, Federation, Notation, Rows, prepare_sheets, read_sheet

if TYPE_CHECKING:
    from fedclade.core import Event

# Availability traces: the hours at which each client is online, from a file or generated.

DAY = 86_400.0
"""Seconds of a day."""

DAILY = "daily"
"""Name of the generated availability trace.

In it, each client is online once a day, for a random number of hours in the range :data:`HOURS`
from a random time of day.
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
        Start and end of each interval, ``[m]``, in seconds from 0 to the period.
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
        """Return which clients are available at a time.

        Parameters
        ----------
        seconds
            Time since the start of the run, in seconds.

        Returns
        -------
        array
            Mask ``[n]`` with an entry for each of the n clients.
        """
        at = seconds % self.period
        found = self.always.copy()
        found[self.places[(self.starts <= at) & (at < self.ends)]] = True
        return found

    @property
    def fingerprint(self) -> str:
        """SHA-256 digest of the trace, by which a continued run recognizes a changed trace."""
        found = hashlib.sha256(np.float64(self.period).tobytes())
        for array in (self.places, self.starts, self.ends, self.always):
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    @classmethod
    def daily(cls, keys: Sequence[int], seed: int) -> Trace:
        """Generate a trace in which each client is online once a day.

        A client's hours depend only on the seed and on the client's key, not on other clients. The
        time of day at which they start is uniformly distributed.

        Parameters
        ----------
        keys
            Key of each client, ``[n]``.
        seed
            Seed of the run.
        """
        root = rng.generator(seed, "hours of the day").integers(2**64, size=2, dtype=np.uint64)
        of_keys = np.array(keys, dtype=np.int64).view(np.uint64)
        starts, lengths = (_hash_to_uniform(of_keys, number) for number in root)
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

        The file has a row for each interval and the columns ``client``, ``from`` and ``to``, the
        latter two in seconds. ``client`` is the name of a client or its id. A client without any
        row is always available.

        Parameters
        ----------
        path
            The file.
        federation
            All clients.
        period
            Seconds after which the trace repeats; if None, the smallest number of whole days that
            contains all intervals.

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
        starts = _read_seconds(rows, "from", path)
        ends = _read_seconds(rows, "to", path)
        places = _find_places(rows.texts("client"), federation, path)
        if len(odd := np.flatnonzero((starts < 0) | (ends <= starts))):
            row = int(odd[0])
            raise DataError(
                f"{path}: 'from' should be at least 0 and less than 'to', got from {starts[row]:g} "
                f"to {ends[row]:g} in row {row + 1}"
            )
        order = np.lexsort((starts, places))
        places = places[order]
        starts = starts[order]
        ends = ends[order]
        if len(odd := np.flatnonzero((places[1:] == places[:-1]) & (starts[1:] < ends[:-1]))):
            i = int(odd[0])
            raise DataError(
                f"{path}: intervals of client {federation.clients[places[i]].name!r} overlap: from "
                f"{starts[i]:g} to {ends[i]:g} and from {starts[i + 1]:g} to {ends[i + 1]:g}; "
                "merge the two rows into one"
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
                "%s has no row for %d of %d clients, so these clients are always available",
                path,
                always.sum(),
                len(always),
            )
        return cls(places, starts, ends, period or DAY * math.ceil(last / DAY), always)


def _read_seconds(rows: Rows, column: str, path: Path) -> Numbers:
    """Return a column of a trace file that contains times in seconds, ``[m]`` for m rows."""
    if rows.kind(column) not in ("whole", "number"):
        raise DataError(
            f"{path}: column {column!r} should contain numbers, the seconds since the run's start, "
            f"got values of kind {rows.kind(column)!r}"
        )
    return rows.numbers(column)


def _find_places(named: NDArray[np.object_], federation: Federation, path: Path) -> Places:
    """Return the index of the client that each of the m rows of a trace file names, ``[m]``."""
    place_of = {str(client.id): place for place, client in enumerate(federation.clients)}
    place_of |= {client.name: place for place, client in enumerate(federation.clients)}
    names, which = np.unique(named.astype(str), return_inverse=True)
    if unknown := [str(name) for name in names.tolist() if name not in place_of]:
        raise DataError(
            f"{path} contains unknown clients in the column 'client': {shown(unknown)}; expected "
            "names or ids of the run's clients, such as "
            f"{federation.clients[0].name!r} or {federation.clients[0].id}"
        )
    return np.array([place_of[name] for name in names.tolist()], dtype=np.int64)[which]


def _hash_to_uniform(keys: NDArray[np.uint64], salt: np.uint64) -> Numbers:
    """Return a pseudo-random number in [0, 1) for each key, by the hash function SplitMix64.

    Hashing all keys at once is fast: a random generator for each of 10⁶ clients would take seconds.
    """
    z = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + salt
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class ComingAndGoing(Clients):
    """Clients that may join late or leave early.

    Only clients that are available in the current round can be queried.
    """

    @abstractmethod
    def begin(
        self, algorithm: Algorithm, state: State, this_round: Round
    ) -> tuple[State, list[Event]]:
        """Begin a round: add joining clients to the clusters, and remove leaving clients.

        Returns
        -------
        tuple
            The algorithm's state after these changes, and the events that report them.
        """

    def stay(self, number: int, tree: ParameterTree) -> None:
        """Make the clients of a finished round available, so that they can be evaluated after it.

        A continued run needs this if its last round was not evaluated before the interruption: in
        the new process, no round has selected the available clients yet.

        Parameters
        ----------
        number
            Number of the round, from 1.
        tree
            The tree of that round.
        """

    @property
    def away(self) -> frozenset[int]:
        """Ids of the clients that are unavailable in the current round; by default no client."""
        return frozenset()

    @property
    def reachable(self) -> Sequence[int]:
        """Ids of the clients that are available in the current round."""
        away = self.away
        if not away:
            return self.ids
        return [client for client in self.ids if client not in away]

    @property
    def present(self) -> int | None:
        """Number of clients that are available in the current round; None if it is not known."""
        return None

    def there(self, state: State) -> State:
        """Return a state whose clusters contain available clients only.

        The cohort of a round (the clients that train in it) is sampled from the clusters of this
        state.
        """
        if not (away := self.away):
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
        """List the clusters that did not train in a round because no member was available.

        Parameters
        ----------
        before, after
            The trees before and after the round.

        Returns
        -------
        list
            A :class:`~fedclade.core.TooFew` event for each of these clusters.
        """
        if not (away := self.away):
            return []
        alone = [leaf for leaf in before.leaves if leaf.members and away.issuperset(leaf.members)]
        return [
            core.TooFew(leaf.id, 0) for leaf in alone if after.nodes[leaf.id].params is leaf.params
        ]


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class Churn:
    """Rules of a simulation by which newcomers join, clients leave, and clients are available.

    Newcomers are clients that have data but do not train from round 1.

    Raises
    ------
    ConfigError
        If newcomers would join or clients leave before round 2, clients would leave before
        newcomers join, a number of seconds is not greater than 0, or ``trace_period`` is given
        without a trace file.
    """

    join_round: int | None = setting(
        None,
        at_least(2, "at least 2, or left out"),
        doc="Round from which newcomers train, at least 2; if left out, they never join.",
        key="newcomers.join_round",
    )
    leave_round: int | None = setting(
        None,
        at_least(2, "at least 2, or left out"),
        doc="""Round from which some clients no longer train, at least 2. As many clients as there
        are newcomers are drawn from all clients; models that they have trained stay.""",
        key="newcomers.leave_round",
    )
    trace: str | None = setting(
        None,
        Range("a file, 'daily', or left out", bool),
        doc="""Availability trace of the clients: a file, see :meth:`Trace.read
        <fedclade.runs.churn.Trace.read>`, or ``daily`` for a generated trace; if left out, all
        clients are always available. A cohort is sampled from the clients that are available when a
        round begins; unavailable clients stay in their clusters and keep their models.""",
        key="presence.trace",
    )
    round_seconds: float = setting(
        3600.0,
        greater_than(0),
        doc="""Seconds of the trace from the start of a round to the start of the next round; by
        default, an hour.""",
        key="presence.round_seconds",
    )
    trace_period: float | None = setting(
        None,
        greater_than(0),
        doc="Seconds after which the trace of a file repeats; by default, after its last day.",
        key="presence.trace_period",
    )

    def __post_init__(self) -> None:
        leaves = self.leave_round
        joins = self.join_round
        is_after = leaves is None or joins is None or leaves > joins
        period = self.trace_period
        of_file = self.trace not in (None, DAILY)
        check_settings(
            self,
            "",
            ("newcomers.leave_round", leaves, is_after, f"after join_round, {joins}"),
            (
                "presence.trace_period",
                period,
                period is None or of_file,
                "left out unless presence.trace is a file",
            ),
        )

    def check(self, newcomers: int, clients: int, rounds: int) -> None:
        """Check that these rules suit a run with given numbers of newcomers, clients and rounds.

        Parameters
        ----------
        newcomers, clients, rounds
            Numbers of newcomers, of clients and of rounds of the run.

        Raises
        ------
        ConfigError
            If ``join_round`` or ``leave_round`` is set but there are no newcomers, one of them is
            after the last round, or all clients would leave.
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
                    f"less than {clients}, so that not all of these clients leave",
                )
            )

    def everybody(self, federation: Federation) -> Federation:
        """Return all clients that take part in any round, including newcomers that join later."""
        if self.join_round is None or federation.newcomers is None:
            return federation
        return federation.join(federation.newcomers)

    def timetable(self, everybody: Federation, seed: int) -> Timetable | None:
        """Return the unavailable clients of every round; None if no availability trace is set.

        Raises
        ------
        DataError, ConfigError
            If the trace file cannot be read; see :meth:`Trace.read`.
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
        """Wrap the clients of a run, so that an algorithm can query available clients only.

        Parameters
        ----------
        clients
            All clients, as returned by :meth:`everybody`.
        federation
            The clients' data, and the newcomers.
        seed
            Seed by which the clients that leave are drawn.
        timetable
            Unavailable clients by round; None without a trace.
        absence
            Middleware that does not forward queries to unavailable clients and to adversaries that
            have not joined yet; None if all clients are always available.
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
    """Clients that are unavailable in each round, according to an availability trace.

    Parameters
    ----------
    trace
        The availability trace.
    ids
        Ids of the trace's clients, in the order of the trace.
    round_seconds
        Seconds of the trace from the start of a round to the start of the next round.
    """

    trace: Trace
    ids: Sequence[int]
    round_seconds: float

    def away(self, number: int) -> frozenset[int]:
        """Return the clients that are unavailable when a round begins.

        Parameters
        ----------
        number
            Number of the round, from 1.
        """
        there = self.trace.there((number - 1) * self.round_seconds)
        return frozenset(np.array(self.ids, dtype=np.int64)[~there].tolist())


class ChurningClients(Channel, ComingAndGoing):
    """Clients of a simulation that join late, leave early, or are unavailable in some rounds.

    Parameters
    ----------
    clients
        All clients.
    joins
        First round of each client that joins late, by client id.
    leaves
        For each client that leaves, the first round without it, by client id.
    timetable
        Unavailable clients by round; None if all clients are always available.
    absence
        Middleware of ``clients`` that does not forward queries to unavailable clients.
    federation
        Data of the clients, if it changes during the run; None if it does not change. Queries are
        about the data of the current round, unless they name another round.
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
        if absence is None:  # not a middleware of any channel: only stores unavailable clients
            absence = Absence(0, DataSpec("", (), outputs=0))
        self._absence = absence
        self._set_round(1)

    @property
    def ids(self) -> Sequence[int]:
        """Ids of the clients that have joined and not left, in a fixed order."""
        if not self._joins and not self._leaves:
            return self._clients.ids
        return [
            c
            for c in self._clients.ids
            if self._joins.get(c, 1) <= self._number and not self._has_left(c)
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

    def weigh(self, weights: Mapping[int, float]) -> Mapping[int, float]:
        """Return the weights of clients in means over clients."""
        return self._clients.weigh(weights)

    @property
    def stage(self) -> int:
        """Number of times that the clients' data has changed up to the current round."""
        return 0 if self._federation is None else self._federation.stage_in(self._number)

    def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
        """Send a query to the clients, and return the combined reply.

        The query is about the clients' data of the current round, unless it names another round.
        """
        if self._federation is not None and query.data_round == 0:
            query = replace(query, data_round=self._number)
        return self._clients.ask(query, sink)

    def begin(
        self, algorithm: Algorithm, state: State, this_round: Round
    ) -> tuple[State, list[Event]]:
        """Begin a round: add joining clients to the clusters, and remove leaving clients.

        Returns
        -------
        tuple
            The algorithm's state after these changes, and the events that report them.
        """
        self._set_round(this_round.number, state.tree)
        changed = self._find_changed_clients()
        events: list[Event] = [core.DataChanged(0, changed)] if changed else []
        if left := [client for client, number in self._leaves.items() if number == self._number]:
            state = replace(state, tree=state.tree.without(left))
            events.append(core.Left(0, tuple(left)))
        if joined := [client for client, number in self._joins.items() if number == self._number]:
            state, more = algorithm.join(state, joined, self, this_round)
            events += more
        return state, events

    def stay(self, number: int, tree: ParameterTree) -> None:
        """Make the clients of a finished round available, so that they can be evaluated now."""
        self._set_round(number, tree)

    @property
    def away(self) -> frozenset[int]:
        """Ids of the clients that are unavailable in the current round."""
        return self._absence.away

    @property
    def present(self) -> int | None:
        """Number of clients that are available in the current round; None without a trace."""
        return None if self._timetable is None else len(self.reachable)

    def _find_changed_clients(self) -> tuple[int, ...]:
        """Return the clients whose data differs from their data in the previous round."""
        if self._federation is None or self.stage == self._federation.stage_in(self._number - 1):
            return ()
        now, before = (
            self._federation.in_round(number).by_id for number in (self._number, self._number - 1)
        )
        return tuple(client for client in self.ids if now[client] is not before[client])

    def _set_round(self, number: int, tree: ParameterTree | None = None) -> None:
        """Set the current round, and determine the clients that are unavailable in it.

        Parameters
        ----------
        number
            Number of the round, from 1.
        tree
            The clusters at the start of the round, which some attacks use; None before the first
            round.
        """
        self._number = number
        if self._timetable is not None:
            self._absence.away = self._timetable.away(number)
        if self._lying is not None:
            self._lying.begin(number, tree)
            there = frozenset[int]() if self._timetable is None else self._absence.away
            self._absence.away = there | self._lying.late

    def _has_left(self, client: int) -> bool:
        """Return whether a client has left the run by the current round."""
        return client in self._leaves and self._number >= self._leaves[client]


def fingerprint(everybody: Federation, timetable: Timetable | None) -> str:
    """Return a digest of the clients' data and, if set, of the availability trace.

    A run can be continued only if its digest has not changed.
    """
    found = everybody.fingerprint
    return found if timetable is None else f"{found} {timetable.trace.fingerprint}"
