"""A limit on newcomers: how many clients may join a run within some rounds, where nobody has listed their keys."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedclade.flower.registration import RegisteredClient

NEW_FOR = 10
"""Rounds for which a client counts as a newcomer."""

AT_LEAST = 2
"""Newcomers that are always allowed, so that a federation of a few clients can grow."""


@dataclass(frozen=True)
class NewcomerLimit:
    """A limit on the newcomers of a run.

    Anybody can start as many clients as they like and let them join together. Without a list of
    keys nothing says that they are different parties. So a client counts as a newcomer in its first
    :data:`NEW_FOR` rounds, unless it was there when the first round began. The newcomers are at
    most a share of the other clients that are connected, but :data:`AT_LEAST` as many. This gives
    the clients that know each other time to see what newcomers do. It does not keep out a crowd
    that is patient, and a crowd that waits delays honest newcomers.

    Parameters
    ----------
    share
        The number of newcomers over the number of other clients. Infinity is no limit, and 0 admits
        nobody.
    """

    share: float = math.inf

    def room(
        self, number: int, registered: Mapping[int, RegisteredClient], connected: Collection[int]
    ) -> int | None:
        """Return how many more clients may join in a round; None if there is no limit.

        ``connected`` are nodes. Newcomers that have left count on, or others could take their
        places at once.
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
