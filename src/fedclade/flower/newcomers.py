"""Limit on the number of newcomers: clients that have joined a run recently.

The limit applies only if no list of clients' keys is set.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedclade.flower.registration import RegisteredClient

NEW_FOR = 10
"""Number of rounds for which a client counts as a newcomer."""

AT_LEAST = 2
"""Number of newcomers that are allowed regardless of the limit, so that small federations grow."""


@dataclass(frozen=True)
class NewcomerLimit:
    """Limit on the number of newcomers of a run at one time, against Sybil attacks.

    One party can start any number of clients and let all of them join together. Without a list of
    keys the server cannot tell whether clients belong to different parties. So a client counts as a
    newcomer in its first :data:`NEW_FOR` rounds, unless it was connected when the first round
    began. The number of newcomers is limited to a share of the other connected clients, but at
    least :data:`AT_LEAST` newcomers are allowed. The limit gives earlier clients time to observe
    the effect of newcomers. It does not stop malicious clients that join slowly, and malicious
    clients that wait to be admitted delay honest newcomers.

    Parameters
    ----------
    share
        Largest allowed number of newcomers, divided by the number of other connected clients.
        Infinity means no limit, and 0 admits no newcomers.
    """

    share: float = math.inf

    def room(
        self, number: int, registered: Mapping[int, RegisteredClient], connected: Collection[int]
    ) -> int | None:
        """Return the number of further clients that may join in a round; None if unlimited.

        Newcomers that have disconnected still count. Otherwise new clients could replace them at
        once.

        Parameters
        ----------
        number
            Number of the round, from 1.
        registered
            Registered clients by number.
        connected
            Ids of the connected nodes.
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
    """Return whether a registered client counts as a newcomer in the round ``number``."""
    return one.since > 0 and number - one.since < NEW_FOR
