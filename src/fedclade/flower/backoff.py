"""Clients that are not queried for a while, since they were too late the last time."""

from __future__ import annotations

from collections.abc import Collection

from fedclade.core import NOT_ASKED

LONGEST = 32  # queries that skip a client, at most, between two that do not


class Backoff:
    """A client that is too late is skipped by the next query; late again, by the next 2, then 4, 8, up to 32.

    Otherwise one that hangs would cost the whole deadline at every query. It is counted in queries that would have
    been put to it, and not in seconds, so that a run does not depend on its speed.
    """

    def __init__(self) -> None:
        self._late: dict[int, int] = {}  # how often in a row each was too late
        self._skips: dict[int, int] = {}  # queries that are still to skip each

    def skipped(self, clients: Collection[int], connected: Collection[int]) -> dict[int, str]:
        """Return which of the clients this query skips, and why; none if all that are connected would be."""
        if all(self._skips.get(client, 0) for client in connected):
            return {}
        skipped = [client for client in clients if self._skips.get(client, 0)]
        for client in skipped:
            self._skips[client] -= 1
        return {client: f"{NOT_ASKED}, as it was too late the last {self._times(client)}" for client in skipped}

    def late(self, client: int) -> None:
        """Note that a client was too late."""
        self._late[client] = self._late.get(client, 0) + 1
        self._skips[client] = min(LONGEST, 2 ** (self._late[client] - 1))

    def reset(self, client: int) -> None:
        """Note that a client has answered, or is gone."""
        self._late.pop(client, None)
        self._skips.pop(client, None)

    def _times(self, client: int) -> str:
        return "time" if self._late[client] == 1 else f"{self._late[client]} times"
