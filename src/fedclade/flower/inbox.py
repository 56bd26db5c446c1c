"""Answers from a grid, read one at a time: one that cannot be read is left out, and costs no other."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from fedclade.core import UpdateError
from fedclade.flower import wire

_log = logging.getLogger(__name__)


class Inbox:
    """The answers to messages, from any of Flower's grids."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def read(self, pending: Mapping[str, int]) -> Iterator[tuple[str, Message | str]]:
        """Yield the answers that are there by now, each with the id of its request, or why one cannot be read.

        ``pending`` is how many bytes the vectors of an answer take at most, by the id of its request.
        """
        for request in pending:
            try:
                # One alone: whatever is pulled together is lost together.
                with wire.untrusted():
                    messages = list(self._grid.pull_messages([request]))
            except UpdateError as error:
                yield request, str(error)
                continue
            yield from ((message.metadata.reply_to_message_id, message) for message in messages)


def inbox_of(grid: Grid) -> Inbox:
    """Return the inbox of a grid; a SuperLink's fetches no more of an answer than its limit."""
    try:
        from flwr.superlink.grid import HttpGrid

        from fedclade.flower.http_inbox import HttpInbox
    except ImportError as error:
        _log.warning(
            "this version of flwr is built differently inside (%s): answers are fetched one by one, and how large they "
            "are is seen only then; flwr 1.41 does better",
            error,
        )
        return Inbox(grid)
    return HttpInbox(grid) if isinstance(grid, HttpGrid) else Inbox(grid)
