"""Faults drawn on purpose: simulated clients that drop out of a round, answer too late, or send what cannot be used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    DROPPED_OUT,
    LARGEST_NORM,
    TOO_LATE,
    Ask,
    Round,
    UpdateQuery,
    Updates,
    checked,
    require,
    rng,
)

Absence = Literal["dropped out", "too late"]
Corruption = Literal["nan", "infinite", "huge", "misshapen"]

CORRUPTIONS: tuple[Corruption, ...] = ("nan", "infinite", "huge", "misshapen")
"""What can be wrong with an update, each as likely: one entry of it, or its shape."""

_BAD_ENTRIES = {"nan": math.nan, "infinite": math.inf, "huge": 10 * LARGEST_NORM}


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

    def drawn(self, draw: np.random.Generator) -> Absence | Corruption | None:
        """Draw what goes wrong with one answer; mostly nothing."""
        at = draw.random()
        if at < self.dropout:
            return DROPPED_OUT
        if at < self.dropout + self.slow:
            return TOO_LATE
        return CORRUPTIONS[draw.integers(len(CORRUPTIONS))] if at < self.dropout + self.slow + self.corrupt else None


class FaultInjection(Middleware):
    """Lets clients fail now and then when they are asked to train or for gradients.

    A fault belongs to seed, round, query and client. So it depends neither on who else is asked, nor on the block in
    which a client trains. What clients do at home (a round in which nothing travels) cannot arrive corrupt. Subspaces,
    which belong to no round, always come. Updates are spoilt as they travel, so after their permutation.

    Parameters
    ----------
    faults
        How often.
    keys
        The key of each client, that its draws belong to.
    n_parameters
        D, for the updates of a query that nobody answers.
    """

    def __init__(self, faults: Faults, keys: Mapping[int, int], n_parameters: int) -> None:
        self._faults = faults
        self._keys = keys
        self._n_parameters = n_parameters

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates that arrive and can be used."""
        draws = {client: self._draw(client, query.round) for client in query.ids}
        wrong = {client: self._faults.drawn(draw) for client, draw in draws.items()}
        absent = {client: str(why) for client, why in wrong.items() if why in (DROPPED_OUT, TOO_LATE)}
        there = [client for client in query.ids if client not in absent]
        if not there:
            return Updates.of_nobody(absent, query.models, self._n_parameters)
        updates = ask(query.select(there))
        corrupt = [client for client in updates.ids if wrong[client]]
        if corrupt and query.round.communicates != "nothing":
            updates = _spoilt(updates, corrupt, {c: (str(wrong[c]), draws[c]) for c in corrupt}, query.round.number)
        return replace(updates, left_out={**absent, **updates.left_out})

    def _draw(self, client: int, this_round: Round) -> np.random.Generator:
        key = this_round.number, this_round.query, self._keys[client]
        return rng.generator(this_round.seed, f"faults in {this_round.purpose}", *key)


def _spoilt(
    updates: Updates, corrupt: Sequence[int], how: Mapping[int, tuple[str, np.random.Generator]], number: int
) -> Updates:
    """Spoil the updates of some clients, and receive them again, which leaves them out."""
    theirs = updates.select(corrupt)
    size = theirs.required_deltas.shape[1]
    rows = [spoil(row, *how[client]) for client, row in zip(theirs.ids, theirs.required_deltas, strict=True)]
    sizes = [int(n) for n in theirs.sizes.tolist()]
    again = Updates.received_singly(theirs.ids, sizes, rows, size, theirs.n_parameters, theirs.losses, number)
    return updates.select([client for client in updates.ids if client not in how]).concat(again)


def spoil(update: Tensor, how: str, draw: np.random.Generator) -> Tensor:
    """Return an update ``[S]`` with one bad entry at a random place, or only its first half (``misshapen``)."""
    if how == "misshapen":
        return update[: len(update) // 2]
    spoilt = update.clone()
    spoilt[draw.integers(len(update))] = _BAD_ENTRIES[how]
    return spoilt
