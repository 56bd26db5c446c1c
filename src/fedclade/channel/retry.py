"""Middleware for missing replies: absent clients, simulated faults, and repeated queries."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedclade import core
from fedclade.channel.example_privacy import noisy_steps
from fedclade.channel.middleware import Middleware
from fedclade.core import (
    DROPPED_OUT,
    LARGEST_NORM,
    NOT_ASKED,
    REJECTED_SUM,
    TOO_LATE,
    Ask,
    DataSpec,
    Evaluation,
    EvaluationQuery,
    Query,
    Round,
    RowQuery,
    TrainQuery,
    UpdateError,
    Updates,
    check_settings,
    checked,
    document_settings,
    has_replied,
    in_range,
    rng,
    setting,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fedclade.core import Event, LeftOut

# Absent clients are not queried, and a round continues without them.

AWAY = f"{NOT_ASKED}, because the client is absent in this round"
"""Reason for leaving out a client that is absent in the round."""


class Absence(Middleware):
    """Middleware that leaves out absent clients, and sends them nothing.

    The absent clients (``away``) may change between rounds. They are left out of all queries of a
    method: for updates, gradients, losses on training data, and rows of numbers about the data. An
    evaluation on test data measures a simulation from outside, and includes all clients.

    Parameters
    ----------
    n_parameters
        Number of parameters of the model.
    spec
        Specification of the examples of all clients.

    Attributes
    ----------
    away
        Ids of the clients that are absent in the current round.
    """

    queries = (TrainQuery, EvaluationQuery, RowQuery)

    def __init__(self, n_parameters: int, spec: DataSpec) -> None:
        self.away: frozenset[int] = frozenset()
        self._n_parameters = n_parameters
        self._spec = spec

    def handles(self, query: Query[Any]) -> bool:
        """Return whether any client of a query is absent."""
        return not self.away.isdisjoint(query.ids) and super().handles(query)

    def around(self, query: TrainQuery | EvaluationQuery | RowQuery, ask: Ask) -> Any:
        """Query the clients that are not absent (for scores on test data: all clients).

        In a reply with one row for each client, the rows of absent clients are zero.
        """
        away = {client: AWAY for client in query.ids if client in self.away}
        if isinstance(query, TrainQuery):
            return self._updates(query, ask, away)
        if isinstance(query, EvaluationQuery):
            return ask(query) if query.split == "test" else _scores(query, ask, away)
        return self._rows(query, ask)

    def _updates(self, query: TrainQuery, ask: Ask, away: Mapping[int, str]) -> Updates:
        """Return the updates of the clients that are not absent.

        Parameters
        ----------
        query
            Query to all clients.
        ask
            Function that sends a query on.
        away
            Reason for leaving out each absent client, by client id.
        """
        there = [client for client in query.ids if client not in away]
        if not there:
            return Updates.of_nobody(away, query.models.vectors, self._n_parameters)
        updates = ask(query.select(there))
        return replace(updates, left_out={**away, **updates.left_out})

    def _rows(self, query: RowQuery, ask: Ask) -> Tensor:
        """Query the clients that can be reached for rows of numbers, and return a row for each client.

        The rows of clients that cannot be reached (``away``) are zero.
        """
        places = [place for place, client in enumerate(query.ids) if client not in self.away]
        if not places:
            return query.no_rows(self._spec)
        found = ask(replace(query, ids=[query.ids[place] for place in places]))
        rows = found.new_zeros(len(query.ids), *found.shape[1:])
        rows[places] = found
        return rows


def _scores(query: EvaluationQuery, ask: Ask, away: Mapping[int, str]) -> Evaluation:
    """Return the scores of the clients that are not absent.

    Parameters
    ----------
    query
        Query to all clients.
    ask
        Function that sends a query on.
    away
        Reason for leaving out each absent client, by client id.
    """
    places = [place for place, client in enumerate(query.ids) if client not in away]
    if not places:
        none = torch.zeros(0, dtype=torch.float64)
        return Evaluation((), none[:, None], none, none.to(torch.int64), away)
    ids = [query.ids[place] for place in places]
    rows = [query.assignment[place] for place in places]
    evaluation = ask(replace(query, ids=ids, assignment=rows))
    return replace(evaluation, left_out={**away, **evaluation.left_out})


# Simulated faults: clients drop out of a round, reply too late, or send updates that cannot be
# used.

_BAD_ENTRIES = {"nan": math.nan, "infinite": math.inf, "huge": 10 * LARGEST_NORM}

CORRUPTIONS = (*_BAD_ENTRIES, "misshapen")
"""Kinds of corrupt updates, equally likely: one bad entry, or a wrong shape."""


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities of simulated faults, which are drawn for each client in each training query.

    Raises
    ------
    ConfigError
        If a share is not in [0, 1], or the sum of all shares is more than 1; one line for each.
    """

    dropout: float = setting(0.0, in_range("[0, 1]"), doc="Share of replies that never arrive.")
    slow: float = setting(
        0.0, in_range("[0, 1]"), doc="Share of replies that arrive too late to be waited for."
    )
    corrupt: float = setting(
        0.0,
        in_range("[0, 1]"),
        doc="""Share of replies that cannot be used: with an entry that is NaN, infinite or huge, or
        of a wrong shape.""",
    )

    def __post_init__(self) -> None:
        total = self.dropout + self.slow + self.corrupt
        check_settings(self, "faults", ("the sum of faults", total, total <= 1, "at most 1"))

    def __bool__(self) -> bool:
        """Whether any fault has a probability above 0."""
        return self.dropout + self.slow + self.corrupt > 0

    def drawn(self, draw: np.random.Generator) -> str | None:
        """Draw the fault of one reply from a generator; None if the reply has no fault."""
        at = draw.random()
        if at < self.dropout:
            return DROPPED_OUT
        if at < self.dropout + self.slow:
            return TOO_LATE
        return (
            CORRUPTIONS[draw.integers(len(CORRUPTIONS))]
            if at < self.dropout + self.slow + self.corrupt
            else None
        )


@dataclass(frozen=True)
class FaultInjection(Middleware):
    """Middleware that injects simulated faults into clients' replies to training queries.

    A fault depends on seed, round, query and the client's key. So a fault does not depend on the
    other clients of the query, nor on the group in which a client trains. If clients store their
    models and send no updates, no update can be corrupted. Replies about subspaces, which belong to
    no round, never fail. Updates are corrupted as the server receives them: after their
    permutation.

    Parameters
    ----------
    faults
        Probabilities of faults.
    keys
        Key of each client, by client id.
    n_parameters
        Number of parameters of the model.
    """

    queries = (TrainQuery,)

    faults: Faults
    keys: Mapping[int, int]
    n_parameters: int

    def around(self, query: TrainQuery, ask: Ask) -> Updates:
        """Return the updates that arrive and can be used, with the reasons why others do not."""
        draws = {client: self._draw(client, query.round) for client in query.ids}
        wrong = {client: why for client, draw in draws.items() if (why := self.faults.drawn(draw))}
        absent = {client: why for client, why in wrong.items() if why not in CORRUPTIONS}
        there = [client for client in query.ids if client not in absent]
        if not there:
            return Updates.of_nobody(absent, query.models.vectors, self.n_parameters)
        # No sink may receive updates early: these updates would not be corrupted.
        updates = ask(query.select(there), None)
        corrupt = {
            client: (wrong[client], draws[client]) for client in updates.ids if client in wrong
        }
        if corrupt and query.work.sends_update:
            updates = _corrupt_updates(updates, corrupt, query.round.number)
        return replace(updates, left_out={**absent, **updates.left_out})

    def _draw(self, client: int, this_round: Round) -> np.random.Generator:
        """Return the generator of a client's fault in one query of a round."""
        key = this_round.number, this_round.query, self.keys[client]
        return rng.generator(this_round.seed, f"faults in {this_round.purpose}", *key)


def _corrupt_updates(
    updates: Updates, corrupt: Mapping[int, tuple[str, np.random.Generator]], number: int
) -> Updates:
    """Corrupt the updates of some clients, and check them on arrival, so that they are left out.

    Parameters
    ----------
    updates
        Updates of all clients.
    corrupt
        Kind of corruption and generator of each client whose update is corrupted, by client id.
    number
        Number of the round.
    """
    theirs = updates.select(list(corrupt))
    size = theirs.required_deltas.shape[1]
    rows = [
        spoil(row, *corrupt[client])
        for client, row in zip(theirs.ids, theirs.required_deltas, strict=True)
    ]
    sizes = [int(n) for n in theirs.sizes.tolist()]
    again = Updates.received_singly(
        theirs.ids, sizes, rows, size, theirs.n_parameters, theirs.losses, number
    )
    return updates.select([client for client in updates.ids if client not in corrupt]).concat(again)


def spoil(update: Tensor, how: str, draw: np.random.Generator) -> Tensor:
    """Corrupt an update ``[S]``: one bad entry at a random position, or only the first half.

    Parameters
    ----------
    update
        The update, ``[S]``.
    how
        Kind of corruption, from :data:`CORRUPTIONS`; ``misshapen`` keeps only the first half of the
        entries.
    draw
        Generator of the position of the bad entry.
    """
    if how == "misshapen":
        return update[: len(update) // 2]
    spoilt = update.clone()
    spoilt[draw.integers(len(update))] = _BAD_ENTRIES[how]
    return spoilt


RETRIES = 2
"""Default number of repetitions of a query without replies, or without all required replies."""

MOST_SILENT_ROUNDS = 5
"""Number of rounds in a row whose cohorts may all be unreachable before the run ends.

Only rounds count in which other clients were available that the cohort did not contain.
"""

_log = logging.getLogger(__name__)


class Retrying(Middleware):
    """Middleware that repeats queries without replies, and records the clients that do not reply.

    A query is repeated up to ``retries`` times: if no client replied, or, with ``require_all``,
    until all clients have replied. Clients that already replied, or are absent for the whole round,
    are not queried again. Algorithms receive the replies that arrived, even if there are none. It
    is an error only if no reply arrived to any query of a round. If the cohort of a round was only
    unreachable, and other clients are available, a few such rounds in a row are allowed.

    Parameters
    ----------
    retries
        Largest number of repetitions of a query.
    tells_releases
        Whether a round reports the number of updates that each client sent, usable or not. This
        number determines the privacy that clients spend.
    sizes
        Number of examples of each client that trains by DP-SGD, by client; the round then also
        reports the number of noisy steps that each client took. None without DP-SGD.
    """

    queries = (TrainQuery, EvaluationQuery, RowQuery)

    def __init__(
        self,
        retries: int = RETRIES,
        tells_releases: bool = False,
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        self._retries = retries
        self._tells_releases = tells_releases
        self._sizes = sizes
        self._silent_rounds = 0
        self._begin()

    def around(self, query: TrainQuery | EvaluationQuery | RowQuery, ask: Ask) -> Any:
        """Return the replies that arrive, and record the clients that do not reply."""
        if isinstance(query, TrainQuery):
            return self._updates(query, ask)
        if isinstance(query, EvaluationQuery):
            return self._evaluation(query, ask)
        # A row of zeros means that a client did not reply, unless zeros are a possible reply.
        return ask(query) if query.zeros_are_a_reply else self._rows(query, ask)

    def _updates(self, query: TrainQuery, ask: Ask) -> Updates:
        """Send a training query, repeat it if needed, and return updates in the query's order."""
        what = query.round.purpose if query.kind == "train" else query.kind
        updates = self._send_once(query, ask)
        for _ in range(self._retries):
            absent = [
                client for client in query.ids if _may_reply(updates.left_out.get(client, AWAY))
            ]
            if not absent or (updates.ids and not query.require_all):
                break
            more = self._send_once(query.select(absent), ask)
            self._events.append(core.Retried(0, what, clients=len(absent), answered=len(more.ids)))
            updates = updates.concat(more).select(query.ids)
        self._events += updates.events
        # A rejected sum has an event of its own, so its clients are not reported as failed.
        absent = {
            client: why
            for client, why in updates.left_out.items()
            if not why.startswith(REJECTED_SUM)
        }
        if absent:
            self._events.append(_left_out(what, absent))
        if updates.limited:
            self._events.append(core.Limited(0, what, dict(sorted(updates.limited.items()))))
        self._count(updates, travels=query.work.sends_update)
        return updates

    def _evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return the scores that arrive, and record an event with the clients that do not reply."""
        evaluation = ask(query)
        if evaluation.left_out:
            self._events.append(_left_out(f"evaluate on {query.split} data", evaluation.left_out))
        # Training losses are a part of a round. Other scores only describe it, so they do not
        # count.
        if query.split == "train":
            self._evaluations += 1
            self._count(evaluation, travels=True)
        return evaluation

    def _rows(self, query: RowQuery, ask: Ask) -> Tensor:
        """Return one row of numbers for each client; query clients without a row again."""
        rows = ask(query)
        for _ in range(self._retries):
            if not (absent := _find_silent(rows)):
                break
            rows = rows.clone()
            rows[absent] = ask(replace(query, ids=[query.ids[place] for place in absent]))
        if absent := _find_silent(rows):
            why = {query.ids[place]: DROPPED_OUT for place in absent}
            self._events.append(_left_out(query.kind, why))
        return rows

    def closed(self, number: int, *, has_others: bool = False) -> tuple[Event, ...]:
        """End the step of a round, and return its events, such as the clients that were left out.

        Parameters
        ----------
        number
            Number of the round, for the error message.
        has_others
            Whether clients were available that the cohort of the round did not contain.

        Raises
        ------
        UpdateError
            If clients were queried and no client replied; the message states the reasons. If the
            queried clients were only unreachable, and ``has_others``, the error is raised after
            :data:`MOST_SILENT_ROUNDS` such rounds in a row.
        """
        queries = self._queries + self._evaluations
        left_out = self._left_out
        # If some query of the round requests replies that are sent to the server, results that
        # clients only store do not count as replies. Otherwise stored results are the only replies.
        unanswered = queries > 0 and self._awaited not in self._answered
        events = self.told()
        if not unanswered:
            self._silent_rounds = 0
            return events
        self._silent_rounds += 1
        may_continue = has_others and _are_unreachable(left_out)
        if not may_continue or self._silent_rounds > MOST_SILENT_ROUNDS:
            raise UpdateError(
                f"round {number}: no client replied to any of {queries} queries: "
                f"{_describe_reasons(left_out)}"
            )
        _log.warning(
            "round %d: no client replied, so no model changes; the next round draws other clients: "
            "%s",
            number,
            _describe_reasons(left_out),
        )
        return events

    def told(self) -> tuple[Event, ...]:
        """Return the events since the last call, and clear the list.

        Events of an evaluation after the step are returned by the next call.
        """
        events = self._events
        if self._tells_releases and self._sent:
            events.append(
                core.Released(0, {client: self._sent[client] for client in sorted(self._sent)})
            )
        events += [
            core.Stepped(0, rate, dict(sorted(steps.items())))
            for rate, steps in sorted(self._steps.items())
        ]
        self._begin()
        return tuple(events)

    def _begin(self) -> None:
        """Clear the events and counts of the last step."""
        self._events: list[Event] = []
        self._sent: Counter[int] = Counter()
        self._steps: defaultdict[float, Counter[int]] = defaultdict(Counter)
        # Counted separately, since the number of an update query determines its faults.
        self._queries = self._evaluations = 0
        self._awaited = False
        self._answered = set[bool]()
        self._left_out: dict[int, str] = {}

    def _count(self, reply: Updates | Evaluation, *, travels: bool) -> None:
        """Record whether a query of the round had a reply.

        Parameters
        ----------
        reply
            The reply, which may be empty.
        travels
            Whether the query requests a reply that is sent to the server.
        """
        self._awaited |= travels
        # Clients whose sum was rejected did reply. The round continues, since otherwise one
        # malicious client could end the run.
        is_rejected = any(why.startswith(REJECTED_SUM) for why in reply.left_out.values())
        self._answered |= {travels} if reply.ids or is_rejected else set()
        self._left_out |= reply.left_out

    def _send_once(self, query: TrainQuery, ask: Ask) -> Updates:
        """Send a training query once, and record its releases and noisy steps.

        Clients without a reply and without another reason are recorded as dropped out.
        """
        updates = ask(replace(query, round=replace(query.round, query=self._queries)))
        self._queries += 1
        if query.work.sends_update:
            self._sent.update(updates.senders * query.work.split_count)
        if (sizes := self._sizes) is not None:
            for client in updates.senders:
                for rate, steps in noisy_steps(query, sizes[client]).items():
                    self._steps[rate][client] += steps
        known = {*updates.ids, *updates.left_out}
        silent = {client: DROPPED_OUT for client in query.ids if client not in known}
        return replace(updates, left_out={**updates.left_out, **silent}) if silent else updates


def _may_reply(why: str) -> bool:
    """Return whether a client that was left out for this reason may reply to a repeated query."""
    return why != AWAY and not why.startswith(REJECTED_SUM)


def _left_out(query: str, why: Mapping[int, str]) -> LeftOut:
    """Return the event that clients were left out of a query, with the reasons by client."""
    return core.LeftOut(0, query, {client: why[client] for client in sorted(why)})


def _find_silent(rows: Tensor) -> list[int]:
    """Return the positions of the clients whose row of numbers ``[n, ...]`` did not arrive."""
    return (~has_replied(rows)).nonzero().flatten().tolist()


def _are_unreachable(left_out: Mapping[int, str]) -> bool:
    """Return whether all clients were left out because they could not be reached in time."""
    unreachable = (DROPPED_OUT, TOO_LATE, NOT_ASKED)
    return all(why.startswith(unreachable) for why in left_out.values())


def _describe_reasons(left_out: dict[int, str]) -> str:
    """Describe why clients were left out of a round, with advice to the user.

    Reasons that differ only in their numbers are stated once: for one client, with the number of
    further clients.
    """
    kinds: dict[str, list[int]] = {}
    for client, why in left_out.items():
        kinds.setdefault(re.sub(r"\d[\d.e+]*", "#", why), []).append(client)
    reasons = [
        f"client {first}: {left_out[first]}"
        + (f" (and {len(others)} more with a similar reason)" if others else "")
        for first, *others in sorted(kinds.values(), key=len, reverse=True)
    ]
    advice = (
        "raise client_fraction to query more clients"
        if _are_unreachable(left_out)
        else "if training diverged, lower local.lr"
    )
    return f"{'; '.join(reasons)}; {advice}"
