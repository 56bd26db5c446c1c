"""What a run's log says of privacy: what was released, and of what nothing is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedclade.core.events import Event


@dataclass(frozen=True)
class Released(Event):
    """How many updates private clients sent in the round, by client."""

    kind = "released"

    clients: Mapping[int, int]


@dataclass(frozen=True)
class Stepped(Event):
    """How many noisy steps clients took in the round that sample each example at this rate, by client."""

    kind = "stepped"

    rate: float
    clients: Mapping[int, int]


@dataclass(frozen=True)
class PrivateRelease(Event):
    """What the server was given by noise on sums, or by choices: at most once by each client.

    Of a sum: the noise multiplier, for clients that count once and lie up to two units apart, and the rate at which
    each client was sampled. Of a choice: its ε, and among how many it was.
    """

    kind = "private_release"

    about: str
    noise_multiplier: float | None = None
    sampling: float | None = None
    epsilon: float | None = None
    options: int | None = None


@dataclass(frozen=True)
class Withheld(Event):
    """So many clusters had fewer members than ``least``, and were merged into others: nothing is said of them."""

    kind = "withheld"

    clusters: int
    least: int
