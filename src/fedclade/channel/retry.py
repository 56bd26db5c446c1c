"""Replies query by query: absent clients, simulated faults, repeated queries and failed rounds."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedclade.channel.example_privacy import noisy_steps
from fedclade.channel.middleware import Middleware
from fedclade.core import (
    DROPPED_OUT,
    LARGEST_NORM,
    NOT_ASKED,
    REJECTED_SUM,
    TOO_LATE,
    Ask,
    DataQuery,
    DataSpec,
    Evaluation,
    EvaluationQuery,
    Event,
    LeftOut,
    Limited,
    R,
    Released,
    Retried,
    Round,
    RowQuery,
    Stepped,
    UpdateError,
    UpdateQuery,
    Updates,
    checked,
    has_replied,
    require,
    rng,
)

# Absent clients are not queried, and a round goes on without them.

AWAY = f"{NOT_ASKED}, as it is away"
"""Reason for leaving out a client that is absent in the round."""


class Absence(Middleware):
    """Middleware that leaves out absent clients, and sends them nothing.

    The clients ``away`` may change between rounds. They are left out of all queries of a method:
    updates, gradients, losses on training data, and rows of numbers about the data. An evaluation
    on test data measures a simulation from outside, and includes all clients.

    Parameters
    ----------
    n_parameters
        Number of parameters of the model, D.
    spec
        Specification of the examples of all clients.
    """

    def __init__(self, n_parameters: int, spec: DataSpec) -> None:
        self.away: frozenset[int] = frozenset()
        self._n_parameters = n_parameters
        self._spec = spec

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates of the clients that are not absent."""
        if not (away := self._left_out(query.ids)):
            return ask(query)
        there = [client for client in query.ids if client not in away]
        if not there:
            return Updates.of_nobody(away, query.models, self._n_parameters)
        updates = ask(query.select(there))
        return replace(updates, left_out={**away, **updates.left_out})

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return the scores of the clients that are not absent; on test data, of all clients."""
        if query.split == "test" or not (away := self._left_out(query.ids)):
            return ask(query)
        places = [place for place, client in enumerate(query.ids) if client not in away]
        if not places:
            none = torch.zeros(0, dtype=torch.float64)
            return Evaluation((), none[:, None], none, none.to(torch.int64), away)
        ids = [query.ids[place] for place in places]
        rows = [query.assignment[place] for place in places]
        found = ask(replace(query, ids=ids, assignment=rows))
        return replace(found, left_out={**away, **found.left_out})

    def data(self, query: DataQuery[R], ask: Ask) -> R:
        """Return the rows of the clients that are not absent, and zeros for absent clients.

        Replies to queries without rows include all clients.
        """
        if isinstance(query, RowQuery):
            return cast("R", self._rows(query, ask))
        return ask(query)

    def _rows(self, query: RowQuery, ask: Ask) -> Tensor:
        if not (away := self._left_out(query.ids)):
            return ask(query)
        places = [place for place, client in enumerate(query.ids) if client not in away]
        if not places:
            return query.no_rows(self._spec)
        found = ask(replace(query, ids=[query.ids[place] for place in places]))
        rows = found.new_zeros(len(query.ids), *found.shape[1:])
        rows[places] = found
        return rows

    def _left_out(self, ids: Collection[int]) -> dict[int, str]:
        return {client: AWAY for client in ids if client in self.away} if self.away else {}


# Simulated faults: clients drop out of a round, reply too late, or send updates that cannot be
# used.

_BAD_ENTRIES = {"nan": math.nan, "infinite": math.inf, "huge": 10 * LARGEST_NORM}

CORRUPTIONS = (*_BAD_ENTRIES, "misshapen")
"""Kinds of corrupt updates, equally likely: one bad entry, or a wrong shape."""


@checked()
@dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities with which a client fails when it is requested to train, drawn for each query.

    Parameters
    ----------
    dropout
        Share of replies that never arrive.
    slow
        Share of replies that arrive too late to be waited for.
    corrupt
        Share of replies that cannot be used: with an entry that is NaN, infinite or huge, or of a
        wrong shape.

    Raises
    ------
    ConfigError
        If a share is not in [0, 1], or all together are more than 1; one line for each.
    """

    dropout: float = 0.0
    slow: float = 0.0
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        shares = {
            "faults.dropout": self.dropout,
            "faults.slow": self.slow,
            "faults.corrupt": self.corrupt,
        }
        require(
            *((name, share, 0 <= share <= 1, "in [0, 1]") for name, share in shares.items()),
            ("the sum of faults", sum(shares.values()), sum(shares.values()) <= 1, "at most 1"),
        )

    def __bool__(self) -> bool:
        """Whether there are any faults."""
        return self.dropout + self.slow + self.corrupt > 0

    def drawn(self, draw: np.random.Generator) -> str | None:
        """Draw the fault of one reply; None, mostly, for no fault."""
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
    """Middleware that injects faults when clients are requested to train or for gradients.

    A fault depends on seed, round, query and the client's key. So it does not depend on the other
    clients of the query, nor on the block in which a client trains. Models that clients store (a
    round in which no updates travel) cannot arrive corrupt. Replies about subspaces, which belong
    to no round, never fail. Updates are corrupted as they travel, so after their permutation.

    Parameters
    ----------
    faults
        Probabilities of faults.
    keys
        Key of each client.
    n_parameters
        Number of parameters of the model, D.
    """

    faults: Faults
    keys: Mapping[int, int]
    n_parameters: int

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates that arrive and can be used."""
        draws = {client: self._draw(client, query.round) for client in query.ids}
        wrong = {client: why for client, draw in draws.items() if (why := self.faults.drawn(draw))}
        absent = {client: why for client, why in wrong.items() if why not in CORRUPTIONS}
        there = [client for client in query.ids if client not in absent]
        if not there:
            return Updates.of_nobody(absent, query.models, self.n_parameters)
        updates = ask(query.select(there))
        corrupt = {
            client: (wrong[client], draws[client]) for client in updates.ids if client in wrong
        }
        if corrupt and query.round.sends_updates:
            updates = _spoilt(updates, corrupt, query.round.number)
        return replace(updates, left_out={**absent, **updates.left_out})

    def _draw(self, client: int, this_round: Round) -> np.random.Generator:
        key = this_round.number, this_round.query, self.keys[client]
        return rng.generator(this_round.seed, f"faults in {this_round.purpose}", *key)


def _spoilt(
    updates: Updates, corrupt: Mapping[int, tuple[str, np.random.Generator]], number: int
) -> Updates:
    """Corrupt the updates of some clients, and receive them again, which leaves them out."""
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
        One of :data:`CORRUPTIONS`; ``misshapen`` for the first half.
    draw
        Generator of the position.
    """
    if how == "misshapen":
        return update[: len(update) // 2]
    spoilt = update.clone()
    spoilt[draw.integers(len(update))] = _BAD_ENTRIES[how]
    return spoilt


RETRIES = 2
"""Default number of repetitions of a query without replies, or without all required replies."""


class Retrying(Middleware):
    """Middleware that repeats queries, and counts the clients that reply.

    A query is repeated up to ``retries`` times: if no client replied, or, with ``require_all``,
    until all have. Clients that already replied, or are absent for the whole round, are not queried
    again. Algorithms receive the replies that came, even if there are none. Only a round in which
    no reply arrived to any query is an error.

    Parameters
    ----------
    retries
        Largest number of repetitions of a query.
    tells_releases
        Whether a round reports the number of updates that each client sent, usable or not. This
        number determines the privacy that clients spend.
    sizes
        Numbers of examples of clients that train by DP-SGD; the round then also reports the number
        of noisy steps that each client took. None without DP-SGD.
    """

    def __init__(
        self,
        retries: int = RETRIES,
        tells_releases: bool = False,
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        self._retries = retries
        self._tells_releases = tells_releases
        self._sizes = sizes
        self._begin()

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates of the clients that reply, in the order of the query."""
        what = query.round.purpose if query.kind == "train" else query.kind
        updates = self._asked(query, ask)
        for _ in range(self._retries):
            absent = [
                client for client in query.ids if _may_reply(updates.left_out.get(client, AWAY))
            ]
            if not absent or (updates.ids and not query.round.require_all):
                break
            more = self._asked(query.select(absent), ask)
            self._events.append(Retried(0, what, clients=len(absent), answered=len(more.ids)))
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
            self._events.append(Limited(0, what, dict(sorted(updates.limited.items()))))
        self._count(updates, travels=query.round.sends_updates)
        return updates

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return the scores of the clients that reply, and report the clients that do not."""
        evaluation = ask(query)
        if evaluation.left_out:
            self._events.append(_left_out(f"evaluate on {query.split} data", evaluation.left_out))
        # Training losses are a part of a round. Other scores only describe it, so they do not
        # count.
        if query.split == "train":
            self._evaluations += 1
            self._count(evaluation, travels=True)
        return evaluation

    def data(self, query: DataQuery[R], ask: Ask) -> R:
        """Return a reply; clients without a row of numbers are queried again."""
        if _shows_silence(query):
            return cast("R", self._rows(cast("RowQuery", query), ask))
        return ask(query)

    def _rows(self, query: RowQuery, ask: Ask) -> Tensor:
        rows = ask(query)
        for _ in range(self._retries):
            if not (absent := _silent(rows)):
                break
            rows = rows.clone()
            rows[absent] = ask(replace(query, ids=[query.ids[place] for place in absent]))
        if absent := _silent(rows):
            why = {query.ids[place]: DROPPED_OUT for place in absent}
            self._events.append(_left_out(query.kind, why))
        return rows

    def closed(self, number: int) -> tuple[Event, ...]:
        """End the step of a round, and return the events of the clients that it left out.

        Raises
        ------
        UpdateError
            If clients were queried and none replied; states the reasons.
        """
        queries = self._queries + self._evaluations
        left_out = self._left_out
        # If the server awaits replies that travel, results that clients store are not replies. If
        # nothing travels, they are the only replies.
        unanswered = queries > 0 and self._awaited not in self._answered
        events = self.told()
        if unanswered:
            raise UpdateError(
                f"round {number}: nobody answered, though asked {queries} times: "
                f"{_reasons(left_out)}"
            )
        return events

    def told(self) -> tuple[Event, ...]:
        """Return the events since the last call, and forget them.

        Events of an evaluation after the step are returned by the next call.
        """
        events = self._events
        if self._tells_releases and self._sent:
            events.append(
                Released(0, {client: self._sent[client] for client in sorted(self._sent)})
            )
        events += [
            Stepped(0, rate, dict(sorted(steps.items())))
            for rate, steps in sorted(self._steps.items())
        ]
        self._begin()
        return tuple(events)

    def _begin(self) -> None:
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

        ``travels`` states whether the reply is sent to the server.
        """
        self._awaited |= travels
        # Clients whose sum was rejected did reply. The round continues, since otherwise one
        # malicious client could end the run.
        is_rejected = any(why.startswith(REJECTED_SUM) for why in reply.left_out.values())
        self._answered |= {travels} if reply.ids or is_rejected else set()
        self._left_out |= reply.left_out

    def _asked(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Send one query; clients without a reply or a reason have dropped out."""
        updates = ask(replace(query, round=replace(query.round, query=self._queries)))
        self._queries += 1
        if query.round.sends_updates:
            self._sent.update(updates.senders * query.round.replicates)
        if (sizes := self._sizes) is not None:
            for client in updates.senders:
                for rate, steps in noisy_steps(query.round, sizes[client]).items():
                    self._steps[rate][client] += steps
        known = {*updates.ids, *updates.left_out}
        silent = {client: DROPPED_OUT for client in query.ids if client not in known}
        return replace(updates, left_out={**updates.left_out, **silent}) if silent else updates


def _may_reply(why: str) -> bool:
    """Return whether a client that was left out for this reason may reply to a repeated query."""
    return why != AWAY and not why.startswith(REJECTED_SUM)


def _left_out(query: str, why: Mapping[int, str]) -> LeftOut:
    return LeftOut(0, query, {client: why[client] for client in sorted(why)})


def _shows_silence(query: DataQuery[Any]) -> bool:
    """Return whether the reply to a query shows which clients did not reply."""
    return isinstance(query, RowQuery) and not query.zeros_are_a_reply


def _silent(rows: Tensor) -> list[int]:
    """Return the positions of the clients whose rows ``[n, ...]`` did not arrive."""
    return (~has_replied(rows)).nonzero().flatten().tolist()


def _reasons(left_out: dict[int, str]) -> str:
    """Describe why clients were left out.

    Each kind of reason is stated once, with the numbers of one client and the count of similar
    clients.
    """
    kinds: dict[str, list[int]] = {}
    for client, why in left_out.items():
        kinds.setdefault(re.sub(r"\d[\d.e+]*", "#", why), []).append(client)
    reasons = [
        f"client {first}: {left_out[first]}"
        + (f" (and {len(others)} more like it)" if others else "")
        for first, *others in sorted(kinds.values(), key=len, reverse=True)
    ]
    absent = all(why.startswith((DROPPED_OUT, TOO_LATE, NOT_ASKED)) for why in left_out.values())
    advice = (
        "raise client_fraction to ask more of them"
        if absent
        else "if training diverged, lower local.lr"
    )
    return f"{'; '.join(reasons)}; {advice}"
