"""Executors of trials: in this process, in other processes, or as tasks on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedclade.core import RunError, RunInterrupted
from fedclade.runs import OnRound
from fedclade.sweeps.study import Job, Outcome, run_trial
from fedclade.training import Actors, Cluster

SECONDS = 0.2
"""Interval of the checks whether a sweep should stop, in seconds."""

PATIENCE = 10.0
"""Seconds to wait for the end of a process."""

MAIN_GUARD = "put the call under: if __name__ == '__main__':"

_READY = "ready"
"""First message of each process, once it has started."""

Stop = Callable[[], bool]


class Executor(ABC):
    """Executor of trials, with a number of parallel ones."""

    count: int
    """Number of parallel trials."""

    @abstractmethod
    def begin(self, job: Job) -> Any:
        """Start a trial, and return a handle for :meth:`outcome`."""

    @abstractmethod
    def outcome(self, begun: Any, stop: Stop) -> Outcome:
        """Wait for a trial, and return its outcome.

        Raises
        ------
        RunError
            If its process or task has died.
        """

    def close(self) -> None:  # noqa: B027 -- most executors have nothing to close
        """Stop all other processes of the executor."""


class SerialExecutor(Executor):
    """Executor that runs trials one after the other, in this process."""

    count = 1

    def __init__(self, start: Callable[[str, int], OnRound], stop: Stop) -> None:
        self._start = start
        self._stop = stop

    def begin(self, job: Job) -> Outcome:
        """Run a trial."""
        return run_trial(job, self._start, self._stop)

    def outcome(self, begun: Outcome, stop: Stop) -> Outcome:
        """Return the outcome of a trial."""
        return begun


class ProcessExecutor(Executor):
    """Executor that runs trials in other processes, each with its share of the threads.

    Processes are spawned, not forked, and each imports the calling script, which therefore needs a
    main guard. They stop after a round if requested, or if this process dies.

    Parameters
    ----------
    count
        Number of processes.

    Raises
    ------
    RunError
        If this process is being spawned itself, as the script has no main guard.
    """

    def __init__(self, count: int) -> None:
        check_main_guard()
        context = multiprocessing.get_context("spawn")
        self.count = count
        threads = max(1, torch.get_num_threads() // count)
        self._processes: dict[Connection, Any] = {}
        self._is_stopping = False
        for _ in range(count):
            local, remote = context.Pipe()
            process = context.Process(target=_serve, args=(remote, threads, list(sys.path)))
            process.start()
            remote.close()
            self._processes[local] = process
        self._idle = list(self._processes)
        self._started: set[Connection] = set()

    def begin(self, job: Job) -> Connection:
        """Send a trial to an idle process."""
        connection = self._idle.pop(0)
        try:
            connection.send(job)
        except OSError as error:
            raise self._build_error(connection) from error
        return connection

    def outcome(self, begun: Connection, stop: Stop) -> Outcome:
        """Wait for the outcome that a process sends."""
        while not begun.poll(SECONDS):
            if stop() and not self._is_stopping:
                self._request_stop()
        try:
            outcome = begun.recv()
            if outcome == _READY:  # the first message of each process
                self._started.add(begun)
                return self.outcome(begun, stop)
        except (EOFError, OSError) as error:
            raise self._build_error(begun) from error
        self._idle.append(begun)
        return outcome

    def close(self) -> None:
        """Stop the processes; those that are running a trial are killed."""
        if len(self._idle) == self.count:
            self._request_stop()
        for connection, process in self._processes.items():
            if connection in self._idle or self._is_stopping:
                process.join(PATIENCE)
            process.kill()
            process.join()
            connection.close()

    def _request_stop(self) -> None:
        """Request all processes to stop after the round."""
        self._is_stopping = True
        for connection in self._processes:
            with suppress(OSError):
                connection.send(None)

    def _build_error(self, connection: Connection) -> RunError:
        """Return the error of a process that has ended before its trial."""
        process = self._processes[connection]
        process.join(PATIENCE)
        has_failed = process.exitcode is not None and process.exitcode > 0
        if has_failed and connection not in self._started:
            return RunError(
                f"a process of the sweep ended with status {process.exitcode} as it started; each "
                f"process imports the script that calls sweep, so {MAIN_GUARD}, and see what the "
                "process printed above"
            )
        return RunError(
            "a process of the sweep has died, perhaps because it ran out of memory; set fewer "
            "--processes or a lower --memory for each, and continue with --resume"
        )


def check_main_guard() -> None:
    """Check that this process is not being spawned by a sweep in the same script.

    Raises
    ------
    RunError
        If it is: without a main guard, importing the script starts another sweep.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RunError(
            f"a process that a sweep starts imports the script that calls sweep; {MAIN_GUARD}"
        )


def _serve(server: Connection, threads: int, path: list[str]) -> None:
    """Run trials until there are no more, or the other process has ended."""
    # Signals reach all processes; the main process handles them, and requests this one to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.path[:] = path
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):
        server.send(_READY)
        while (job := server.recv()) is not None:
            server.send(run_trial(job, stop=server.poll))


class RayExecutor(Executor):
    """Executor that runs trials as tasks on a Ray cluster.

    Its nodes should share the folders of the sweep and of the data.
    """

    def __init__(self, actors: Actors, device: str) -> None:
        self._cluster = Cluster(actors, device)
        room = self._cluster.room
        self.count = room.count
        options = {"num_cpus": room.cores, "num_gpus": room.gpus, "max_retries": 0}
        self._task = self._cluster.ray.remote(**options)(_run_on_ray)
        self._threads = room.cores
        self._path = list(sys.path)

    def begin(self, job: Job) -> Any:
        """Start a task."""
        return self._task.remote(job, self._threads, self._path)

    def outcome(self, begun: Any, stop: Stop) -> Outcome:
        """Wait for a task.

        If the sweep should stop, the task is cancelled; a checkpoint allows it to continue.
        """
        ray = self._cluster.ray
        while not ray.wait([begun], timeout=SECONDS)[0]:
            if stop():
                ray.cancel(begun, force=True)
                raise RunInterrupted("stopped at once", "")
        try:
            return ray.get(begun)
        except ray.exceptions.RayError as error:
            raise RunError(
                f"a Ray task of the sweep has died: {error}; continue with --resume"
            ) from error

    def close(self) -> None:
        """Disconnect from the cluster."""
        self._cluster.leave()


def _run_on_ray(job: Job, threads: int, path: list[str]) -> Outcome:
    sys.path[:] = [*dict.fromkeys([*path, *sys.path])]
    torch.set_num_threads(threads)
    return run_trial(job)
