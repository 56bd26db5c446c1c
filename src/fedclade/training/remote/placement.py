"""Which actor holds which clients: shards that take equally long, by how fast each actor was seen to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ENOUGH_SECONDS = 1.0
"""Of training by each actor, after which its speed is known."""

CLEARLY = 1.15
"""Shards are dealt anew if a round then takes less by so much: what speeds vary by from round to round costs less."""


def dealt(work: Mapping[int, float], speeds: Sequence[float], homes: Mapping[int, int]) -> dict[int, int]:
    """Return the actor of each client, so that all take about equally long.

    Clients stay where they are, as far as that is no more than the actor's share; the others go, the largest first, to
    where they would be done first.

    Parameters
    ----------
    work
        Of each client, in training examples.
    speeds
        Of each actor, in examples a second; all positive.
    homes
        The actor of each client so far. Clients in none, or in one that is none of the actors, have to go.
    """
    share = {actor: sum(work.values()) * speed / sum(speeds) for actor, speed in enumerate(speeds)}
    loads = dict.fromkeys(share, 0.0)
    for client, actor in homes.items():
        if actor in loads:
            loads[actor] += work[client]
    largest_first = sorted(work, key=lambda client: (-work[client], client))
    stays: dict[int, int] = {}
    for client in largest_first:
        actor = homes.get(client, -1)
        if actor in loads and loads[actor] - work[client] >= share[actor]:  # without it there still is enough
            loads[actor] -= work[client]
        elif actor in loads:
            stays[client] = actor
    for client in largest_first:
        if client not in stays:
            first = min(loads, key=lambda actor: ((loads[actor] + work[client]) / speeds[actor], actor))
            loads[first] += work[client]
            stays[client] = first
    return {client: stays[client] for client in work}


def makespan(work: Mapping[int, float], speeds: Sequence[float], homes: Mapping[int, int]) -> float:
    """Return the seconds until the last actor is done with its clients."""
    loads = [0.0] * len(speeds)
    for client, actor in homes.items():
        loads[actor] += work[client]
    return max(load / speed for load, speed in zip(loads, speeds, strict=True))


@dataclass
class Speeds:
    """How fast each actor trains, since shards were last dealt."""

    actors: int
    needed: float = ENOUGH_SECONDS  #: seconds of each, twice as many after every time that shards were dealt
    examples: dict[int, float] = field(default_factory=dict[int, float])
    seconds: dict[int, float] = field(default_factory=dict[int, float])

    def note(self, actor: int, examples: float, seconds: float) -> None:
        """Note what an actor has trained, and how long that took."""
        self.examples[actor] = self.examples.get(actor, 0.0) + examples
        self.seconds[actor] = self.seconds.get(actor, 0.0) + seconds

    def known(self) -> list[float] | None:
        """Return the speed of each actor, in examples a second; None as long as one of them is not sure."""
        if any(self.seconds.get(actor, 0.0) < self.needed for actor in range(self.actors)):
            return None
        return [self.examples[actor] / self.seconds[actor] for actor in range(self.actors)]

    def rebalanced(self, work: Mapping[int, float], homes: Mapping[int, int]) -> dict[int, int] | None:
        """Return the actor of each client, if shards dealt anew would be done clearly earlier."""
        if (speeds := self.known()) is None:
            return None
        self.examples.clear()
        self.seconds.clear()
        new = dealt(work, speeds, homes)
        if makespan(work, speeds, homes) < CLEARLY * makespan(work, speeds, new):
            return None
        self.needed *= 2
        return new
