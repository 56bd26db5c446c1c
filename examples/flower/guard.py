"""Script that ends process groups after the process that started them has ended.

The starting process writes to the standard input of this script. The input closes when the process
ends, even by SIGKILL. Each line names a process group: ``+123`` adds it to the groups to end, and
``-123`` removes it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

PATIENCE = 8.0
"""Seconds that processes have to end by themselves before they are killed."""


def main() -> None:
    """Read lines until the input closes; then end the process groups that are left."""
    groups: set[int] = set()
    for line in sys.stdin:
        note = groups.add if line.startswith("+") else groups.discard
        note(int(line[1:]))
    end(groups)


def end(groups: Iterable[int]) -> None:
    """Terminate process groups, and kill those that have not ended after a while."""
    left = [group for group in groups if sent(group, signal.SIGTERM)]
    until = time.monotonic() + PATIENCE
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left = [group for group in left if sent(group, 0)]
    for group in left:
        sent(group, signal.SIGKILL)


def sent(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether the group exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main()
