"""Ctrl-C, or a terminal that goes away: once to stop after the round, twice to stop at once."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

from fedclade.core import RunInterrupted

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Of Ctrl-C, of a scheduler or a system that shuts down, and of a terminal that is closed; Windows has no SIGHUP."""

_TOLD = b"\nstopping after this round; Ctrl-C again stops at once\n"
_STDERR = 2


@contextmanager
def interruptible(then: Callable[[], str]) -> Generator[Callable[[], bool]]:
    """Let what runs in the block be interrupted; yield a function that says whether it was asked to stop.

    ``then`` says what the user can do after an interrupt.

    Raises
    ------
    RunInterrupted
        If the run in the block was, or if a second signal stopped it at once.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        if number == getattr(signal, "SIGHUP", None):
            _leave_terminal()
        with suppress(OSError):  # nobody can read it any more
            os.write(_STDERR, _TOLD)  # print could be interrupted in the middle of another, and would then raise

    here = threading.current_thread() is threading.main_thread()  # signals reach no other
    caught = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, ask) for number in caught} if here else {}
    try:
        yield lambda: asked
    except RunInterrupted as interrupted:
        raise RunInterrupted(interrupted.happened, then()) from None
    except KeyboardInterrupt:
        raise RunInterrupted("stopped at once", then()) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Let what is still to be printed to a terminal that is gone vanish: writing there would end the run."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for opened in (1, 2):
        if stat.S_ISCHR(os.fstat(opened).st_mode):
            os.dup2(nowhere, opened)
    os.close(nowhere)
