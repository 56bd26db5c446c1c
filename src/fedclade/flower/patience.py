"""Whom a server does not ask for a while, since it let everybody wait the last time."""

from __future__ import annotations

from collections.abc import Collection

from fedclade.core import NOT_ASKED

LONGEST = 32
"""Questions that a client is not asked, at most, between two that it is."""


class Patience:
    """A client that is too late is not asked the next question; late again, not the next 2, then 4, 8, up to 32.

    Otherwise one that hangs would cost the whole deadline at every question. It is counted in questions that it would
    have been asked, and not in seconds, so that a run does not depend on how fast it goes.
    """

    def __init__(self) -> None:
        self._late: dict[int, int] = {}
        """How often in a row each was too late."""
        self._spared: dict[int, int] = {}
        """Questions that each is not asked yet."""

    def spare(self, clients: Collection[int], everybody: Collection[int]) -> dict[int, str]:
        """Return which of the clients are not asked now, and why; nobody is spared where everybody would be.

        Parameters
        ----------
        clients
            Who is to be asked.
        everybody
            Who is connected.
        """
        if all(self._spared.get(client, 0) for client in everybody):
            return {}
        spared = [client for client in clients if self._spared.get(client, 0)]
        for client in spared:
            self._spared[client] -= 1
        return {client: f"{NOT_ASKED}, as it was too late the last {self._times(client)}" for client in spared}

    def late(self, client: int) -> None:
        """Note that a client was too late."""
        self._late[client] = self._late.get(client, 0) + 1
        self._spared[client] = min(LONGEST, 2 ** (self._late[client] - 1))

    def forget(self, client: int) -> None:
        """Note that a client has answered, or has gone: it begins anew."""
        self._late.pop(client, None)
        self._spared.pop(client, None)

    def _times(self, client: int) -> str:
        return "time" if self._late[client] == 1 else f"{self._late[client]} times"
