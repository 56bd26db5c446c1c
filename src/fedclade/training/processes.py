"""Forked processes: workers, and trials that may die without taking this process with them.

A forked process has the data and the module without a copy: nothing is pickled, and a script needs no main guard.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch


def cannot_fork(device: torch.device) -> str | None:
    """Return why there can be no worker processes for this device, or None."""
    if device.type != "cpu":
        return f"workers train on the CPU, not on {device.type}"
    if sys.platform != "linux":
        return f"workers need a system where processes can be forked safely, not {sys.platform}"
    if torch.accelerator.is_available():
        return "torch has started threads for an accelerator, and a process with such threads cannot be forked"
    return None


def fork(work: Callable[[], None], others: Sequence[Connection] = ()) -> int:
    """Return the id of a new process that does some work and ends; raises OSError.

    The work runs in the thread that is left of this process: torch may use one thread there, or those of a thread of
    its own. Connections in ``others`` are closed there, so that the end of this process is the end of them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of forking with threads, which may hold a lock. The child touches torch and its pipe alone.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # but meant for the parent, who ends us
            signal.signal(sent_to_all, signal.SIG_IGN)
        gc.freeze()  # looking through the parent's objects would copy their pages
        for other in others:
            other.close()
        work()
        code = 0
    finally:
        os._exit(code)


def how_it_ended(process: int) -> str:
    """Wait for a process of ours to end; return its signal or exit code."""
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def tried(attempt: Callable[[], str | None], limit: float) -> str | None:
    """Return what an attempt returns in a process of its own, or how that process ended; it has ``limit`` seconds.

    An attempt returns what is wrong, or None. It has as many threads as torch has here.
    """
    threads = torch.get_num_threads()
    ours, theirs = Pipe(duplex=False)

    def report() -> None:
        torch.set_num_threads(threads)
        try:
            theirs.send(attempt())
        except Exception as failure:
            theirs.send(f"{type(failure).__name__}: {failure}")

    def work() -> None:
        _be_silent()
        # OpenMP waits for ever for the parent's threads, which were not forked, but not in a thread that had none.
        thread = threading.Thread(target=report)
        thread.start()
        thread.join()

    with ours:
        try:
            process = fork(work, [ours])
        except OSError as error:
            return f"no process to try it in can be started: {error}"
        finally:
            theirs.close()
        try:
            ended = ours.poll(limit)
            return ours.recv() if ended else f"the process that tried it did not end within {limit:.0f} s"
        except EOFError:
            how, process = how_it_ended(process), 0
            return f"the process that tried it died ({how})"
        finally:
            if process:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _be_silent() -> None:
    """Leave no core file and no traceback: this process may die, and its parent reports it."""
    import resource  # not on Windows, where nothing is forked

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
