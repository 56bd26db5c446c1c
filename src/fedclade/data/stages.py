"""Stages: what clients hold from some round on, where their data changes during a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fedclade.core import DataError, checked
from fedclade.data.client_data import ClientData


@checked()
@dataclass(frozen=True, eq=False)
class Stage:
    """What all clients hold from a round on, until the next stage.

    Parameters
    ----------
    first_round
        From 2 on; what clients hold before the first stage is the federation's own.
    clients
        The federation's clients, by ids, names and keys, in its order, with what they hold now.
    true_clusters
        Cluster of each client by id in this stage, where it is known.
    """

    first_round: int
    clients: tuple[ClientData, ...]
    true_clusters: Mapping[int, int] | None = None

    def of(self, ids: Collection[int]) -> Stage:
        """Return the stage of some of the clients."""
        mine = tuple(client for client in self.clients if client.id in ids)
        truth = None if self.true_clusters is None else {c: k for c, k in self.true_clusters.items() if c in ids}
        return replace(self, clients=mine, true_clusters=truth)


def check_stages(stages: Sequence[Stage], clients: Sequence[ClientData]) -> None:
    """Check that stages follow each other, and that all have the same clients; what they hold is not looked at."""
    rounds = [1, *(stage.first_round for stage in stages)]
    if any(later <= earlier for earlier, later in pairwise(rounds)):
        raise DataError(f"stages should begin after round 1, each after the one before, got {rounds[1:]}")
    expected = [(client.id, client.name, client.key) for client in clients]
    for stage in stages:
        if [(client.id, client.name, client.key) for client in stage.clients] != expected:
            raise DataError(
                f"the stage from round {stage.first_round} on should have the federation's clients, in its order, with "
                "their names and keys"
            )
