"""Ends processes once whoever started them is gone, be it by SIGKILL: then the pipe that this reads from closes.

Each line names a process group: ``+123`` is to be ended then, ``-123`` no more.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

PATIENCE = 8.0
"""Seconds that processes are given to end by themselves."""


def main() -> None:
    """Read until the pipe closes, and end what is left."""
    groups: set[int] = set()
    for line in sys.stdin:
        note = groups.add if line.startswith("+") else groups.discard
        note(int(line[1:]))
    end(groups)


def end(groups: Iterable[int]) -> None:
    """Ask process groups to end, and kill those that do not."""
    left = [group for group in groups if sent(group, signal.SIGTERM)]
    until = time.monotonic() + PATIENCE
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left = [group for group in left if sent(group, 0)]
    for group in left:
        sent(group, signal.SIGKILL)


def sent(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether it is there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main()
