"""Limit on newcomers: the number of clients that may join a run within some rounds.

It applies if no list of clients' keys is set.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedclade.flower.registration import RegisteredClient

NEW_FOR = 10
"""Number of rounds for which a client counts as a newcomer."""

AT_LEAST = 2
"""Number of newcomers that are always allowed, so that a small federation can grow."""


@dataclass(frozen=True)
class NewcomerLimit:
    """Limit on the newcomers of a run.

    One party can start any number of clients and let them join together. Without a list of keys
    there is no evidence that they are different parties. So a client counts as a newcomer in its
    first :data:`NEW_FOR` rounds, unless it was connected when the first round began. Newcomers are
    at most a share of the other connected clients, but at least :data:`AT_LEAST` are allowed. This
    gives the earlier clients time to observe the effect of newcomers. It does not keep out a
    patient group of malicious clients, and such a group delays honest newcomers while it waits.

    Parameters
    ----------
    share
        Largest number of newcomers divided by the number of other clients. Infinity means no limit,
        and 0 admits no newcomers.
    """

    share: float = math.inf

    def room(
        self, number: int, registered: Mapping[int, RegisteredClient], connected: Collection[int]
    ) -> int | None:
        """Return the number of further clients that may join in a round; None if unlimited.

        Newcomers that have left still count, or others could take their places at once.

        Parameters
        ----------
        number
            Number of the round, from 1.
        registered
            Registered clients by number.
        connected
            Nodes that are connected.
        """
        if math.isinf(self.share) or number <= 1:
            return None
        newcomers = [one for one in registered.values() if is_new(one, number)]
        others = sum(
            one.node in connected and not is_new(one, number) for one in registered.values()
        )
        most = max(AT_LEAST, math.floor(round(self.share * others, 9))) if self.share else 0
        return max(0, most - len(newcomers))


def is_new(one: RegisteredClient, number: int) -> bool:
    """Return whether a client counts as a newcomer in a round."""
    return one.since > 0 and number - one.since < NEW_FOR
