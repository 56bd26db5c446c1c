"""Processes that can be stopped together with everything that they have started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedclade.core.errors import FedcladeError

TAIL = 15
"""Lines of a log that an error shows."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class DeploymentError(FedcladeError):
    """A process of the deployment ended, or did not get ready in time; the message ends with its log's last lines."""


class Guard:
    """A process of its own that ends what this one has started, should this one be killed; see :mod:`guard`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def tell(self, line: str) -> None:
        """Tell it of a process group; it is started with the first."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("guard.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C and the end of a terminal are not for it
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed it
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


_GUARD = Guard()


class Process:
    """A command that runs in a session of its own, and writes into a log.

    What it starts belongs to its process group, unless it leaves that on purpose, and ends with it. The group also
    ends if this process is killed.

    Parameters
    ----------
    name
        What errors call it.
    command
        The program and its arguments.
    log
        File that its output is added to.
    environment
        All of its environment variables.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self._begin = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        _GUARD.tell(f"+{self.group}")

    @property
    def running(self) -> bool:
        """Whether the command itself has not ended."""
        return self._process.poll() is None

    @property
    def group(self) -> int:
        """The id of its process group."""
        return self._process.pid

    def output(self) -> str:
        """Return what it has written so far, without colours."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return _COLOURS.sub("", file.read().decode(errors="replace"))

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float) -> None:
        """Poll until something holds.

        Parameters
        ----------
        ready
            Whether it holds.
        what
            What it is, for errors: ``"answers"``.
        timeout
            Seconds.

        Raises
        ------
        DeploymentError
            If the process ends before, or the time is over.
        """
        end = time.monotonic() + timeout
        while not ready():
            if not self.running:
                raise self.error(
                    f"ended with exit status {self._process.returncode} before it {what}"
                )
            if time.monotonic() > end:
                raise self.error(f"has been started {timeout:g} seconds ago, and still not: {what}")
            time.sleep(0.1)

    def error(self, problem: str) -> DeploymentError:
        """Return an error about it that shows the end of its log."""
        tail = "\n".join(f"  {line}" for line in self.output().splitlines()[-TAIL:])
        return DeploymentError(f"{self.name} {problem}; the end of {self.log}:\n{tail}")

    def terminate(self) -> None:
        """Ask it, and all that it has started, to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, and all that it has started, at once."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        _GUARD.tell(f"-{self.group}")

    def wait(self, timeout: float) -> bool:
        """Wait for its end; return whether it came within so many seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the group. The group outlives the command if what that started still runs."""
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.group, number)
