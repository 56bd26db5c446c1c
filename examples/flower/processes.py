"""Processes that can be stopped together with all their child processes."""

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
"""Number of lines of a log in an error message."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class DeploymentError(FedcladeError):
    """A process of the deployment ended early, was not ready in time, or reported an error.

    If the error is about a process, the message ends with the last lines of its log.
    """


class Guard:
    """Process that ends the processes of this script if the script is killed; see :mod:`guard`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def tell(self, line: str) -> None:
        """Send a line to the guard; the first call starts the guard."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("guard.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C and a closed terminal must not end the guard
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the guard was killed
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


_GUARD = Guard()


class Process:
    """A command that runs in its own session and writes to a log.

    Its child processes belong to its process group, unless they leave the group on purpose, and are
    stopped with it. The group is also ended if this script is killed.

    Parameters
    ----------
    name
        Name of the process in error messages.
    command
        Program and arguments.
    log
        File to which the output is appended.
    environment
        All environment variables of the process.
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
        """Whether the command itself is still running."""
        return self._process.poll() is None

    @property
    def group(self) -> int:
        """Id of the process group."""
        return self._process.pid

    def output(self) -> str:
        """Return the output of the command so far, without colour codes."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return _COLOURS.sub("", file.read().decode(errors="replace"))

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float) -> None:
        """Wait until the process is ready.

        Parameters
        ----------
        ready
            Function that returns whether the process is ready.
        what
            Verb phrase for error messages, such as ``"answers"``.
        timeout
            Maximum time to wait, in seconds.

        Raises
        ------
        DeploymentError
            If the process ends before it is ready, or is not ready in time.
        """
        end = time.monotonic() + timeout
        while not ready():
            if not self.running:
                raise self.error(
                    f"ended with exit status {self._process.returncode} before it {what}"
                )
            if time.monotonic() > end:
                raise self.error(f"was not ready within {timeout:g} s (ready: it {what})")
            time.sleep(0.1)

    def error(self, problem: str) -> DeploymentError:
        """Return an error about this process that shows the end of its log."""
        tail = "\n".join(f"  {line}" for line in self.output().splitlines()[-TAIL:])
        return DeploymentError(f"{self.name} {problem}; the end of {self.log}:\n{tail}")

    def terminate(self) -> None:
        """Send SIGTERM to the process and its child processes."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process and its child processes, and wait for its end."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        _GUARD.tell(f"-{self.group}")

    def wait(self, timeout: float) -> bool:
        """Wait for the end of the process, at most ``timeout`` seconds; return whether it ended."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group, which may still exist after the command has ended."""
        with suppress(ProcessLookupError):  # all processes of the group have ended
            os.killpg(self.group, number)
