"""Ctrl-C: once to stop after the round, twice to stop at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from fedclade.errors import RunInterrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what a system that shuts down or a scheduler sends."""

_TOLD = b"\nstopping after this round; Ctrl-C again stops at once\n"
_STDERR = 2


@contextmanager
def interruptible(then: Callable[[], str]) -> Generator[Callable[[], bool]]:
    """Let what runs in the block be interrupted; yield what says whether it was asked to stop.

    Parameters
    ----------
    then
        Says what the user can do after an interrupt.

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
        os.write(_STDERR, _TOLD)  # print could be interrupted in the middle of another print, and would then raise

    here = threading.current_thread() is threading.main_thread()  # signals reach no other
    before = {number: signal.signal(number, ask) for number in SIGNALS} if here else {}
    try:
        yield lambda: asked
    except RunInterrupted as interrupted:
        raise RunInterrupted(interrupted.happened, then()) from None
    except KeyboardInterrupt:
        raise RunInterrupted("stopped at once", then()) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
