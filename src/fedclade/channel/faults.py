"""Faults drawn on purpose: simulated clients that drop out of a round, answer too late, or send what cannot be used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import DROPPED_OUT, LARGEST_NORM, TOO_LATE, Ask, Round, UpdateQuery, Updates, checked, require, rng

_BAD_ENTRIES = {"nan": math.nan, "infinite": math.inf, "huge": 10 * LARGEST_NORM}

CORRUPTIONS = (*_BAD_ENTRIES, "misshapen")
"""What can be wrong with an update, each as likely: one entry of it, or its shape."""


@checked()
@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often a client fails when it is asked to train; each time is drawn anew.

    Parameters
    ----------
    dropout
        Share of answers that never come.
    slow
        Share of answers that come too late to be waited for.
    corrupt
        Share of answers that cannot be used: with an entry that is NaN, infinite or huge, or of a wrong shape.

    Raises
    ------
    ConfigError
        If a share is not in [0, 1], or all together are more than 1; one line for each.
    """

    dropout: float = 0.0
    slow: float = 0.0
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        shares = {"faults.dropout": self.dropout, "faults.slow": self.slow, "faults.corrupt": self.corrupt}
        require(
            *((name, share, 0 <= share <= 1, "in [0, 1]") for name, share in shares.items()),
            ("the sum of faults", sum(shares.values()), sum(shares.values()) <= 1, "at most 1"),
        )

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.dropout + self.slow + self.corrupt > 0

    def drawn(self, draw: np.random.Generator) -> str | None:
        """Draw what goes wrong with one answer; mostly nothing."""
        at = draw.random()
        if at < self.dropout:
            return DROPPED_OUT
        if at < self.dropout + self.slow:
            return TOO_LATE
        return CORRUPTIONS[draw.integers(len(CORRUPTIONS))] if at < self.dropout + self.slow + self.corrupt else None


@dataclass(frozen=True)
class FaultInjection(Middleware):
    """Lets clients fail now and then when they are asked to train or for gradients.

    A fault belongs to seed, round, query and the client's key. So it depends neither on which others are asked, nor on
    the block in which a client trains. What clients keep (a round in which no updates travel) cannot arrive corrupt.
    Subspaces, which belong to no round, always come. Updates are spoilt as they travel, so after their permutation.
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
        corrupt = {client: (wrong[client], draws[client]) for client in updates.ids if client in wrong}
        if corrupt and query.round.sends_updates:
            updates = _spoilt(updates, corrupt, query.round.number)
        return replace(updates, left_out={**absent, **updates.left_out})

    def _draw(self, client: int, this_round: Round) -> np.random.Generator:
        key = this_round.number, this_round.query, self.keys[client]
        return rng.generator(this_round.seed, f"faults in {this_round.purpose}", *key)


def _spoilt(updates: Updates, corrupt: Mapping[int, tuple[str, np.random.Generator]], number: int) -> Updates:
    """Spoil the updates of some clients, and receive them again, which leaves them out."""
    theirs = updates.select(list(corrupt))
    size = theirs.required_deltas.shape[1]
    rows = [spoil(row, *corrupt[client]) for client, row in zip(theirs.ids, theirs.required_deltas, strict=True)]
    sizes = [int(n) for n in theirs.sizes.tolist()]
    again = Updates.received_singly(theirs.ids, sizes, rows, size, theirs.n_parameters, theirs.losses, number)
    return updates.select([client for client in updates.ids if client not in corrupt]).concat(again)


def spoil(update: Tensor, how: str, draw: np.random.Generator) -> Tensor:
    """Return an update ``[S]`` with one bad entry at a random place, or only its first half (``misshapen``)."""
    if how == "misshapen":
        return update[: len(update) // 2]
    spoilt = update.clone()
    spoilt[draw.integers(len(update))] = _BAD_ENTRIES[how]
    return spoilt
