"""Executors, which run the trials of a sweep: in this process, in other processes, or on Ray."""

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
"""Interval in seconds at which a waiting sweep checks whether it should stop."""

PATIENCE = 10.0
"""Seconds to wait for a process to end before it is killed."""

MAIN_GUARD = "put the call under: if __name__ == '__main__':"

_READY = "ready"
"""Message that each process sends first, once it has started."""

Stop = Callable[[], bool]


class Executor(ABC):
    """Base class of executors, which run the trials of a sweep, several of them in parallel.

    A sweep starts each trial by :meth:`begin`, and later waits for its outcome by :meth:`outcome`.
    """

    count: int
    """Number of trials that run in parallel."""

    @abstractmethod
    def begin(self, job: Job) -> Any:
        """Start a trial; return a handle with which :meth:`outcome` waits for it."""

    @abstractmethod
    def outcome(self, begun: Any, stop: Stop) -> Outcome:
        """Wait until a trial has ended, and return its outcome.

        Parameters
        ----------
        begun
            Handle of the trial, from :meth:`begin`.
        stop
            Function that returns whether the sweep should stop.

        Raises
        ------
        RunError
            If the process or task that runs the trial has died.
        """

    def close(self) -> None:  # noqa: B027 -- most executors have nothing to close
        """Stop all processes that the executor has started; by default there are none."""


class SerialExecutor(Executor):
    """Executor that runs trials one after the other, in the calling process."""

    count = 1

    def __init__(self, start: Callable[[str, int], OnRound], stop: Stop) -> None:
        self._start = start
        self._stop = stop

    def begin(self, job: Job) -> Outcome:
        """Run a trial to its end, and return its outcome as the handle for :meth:`outcome`."""
        return run_trial(job, self._start, self._stop)

    def outcome(self, begun: Outcome, stop: Stop) -> Outcome:
        """Return the outcome of a trial, which has already ended."""
        return begun


class ProcessExecutor(Executor):
    """Executor that runs trials in several other processes, each with a share of the threads.

    Processes are spawned, not forked, and each imports the calling script, which therefore needs a
    main guard (``if __name__ == "__main__":``). If the sweep should stop, or the calling process
    dies, the spawned processes stop after the current round.

    Parameters
    ----------
    count
        Number of processes.

    Raises
    ------
    RunError
        If the calling process is itself being spawned, since the script has no main guard.
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
            process = context.Process(target=_run_trials, args=(remote, threads, list(sys.path)))
            process.start()
            remote.close()
            self._processes[local] = process
        self._idle = list(self._processes)
        self._started: set[Connection] = set()

    def begin(self, job: Job) -> Connection:
        """Send a trial to an idle process; return the connection to the process as the handle."""
        connection = self._idle.pop(0)
        try:
            connection.send(job)
        except OSError as error:
            raise self._build_error(connection) from error
        return connection

    def outcome(self, begun: Connection, stop: Stop) -> Outcome:
        """Wait until a process sends the outcome of its trial."""
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
        """Stop all processes; kill processes that are still running a trial."""
        if len(self._idle) == self.count:
            self._request_stop()
        for connection, process in self._processes.items():
            if connection in self._idle or self._is_stopping:
                process.join(PATIENCE)
            process.kill()
            process.join()
            connection.close()

    def _request_stop(self) -> None:
        """Send all processes a request to stop after the current round."""
        self._is_stopping = True
        for connection in self._processes:
            with suppress(OSError):
                connection.send(None)

    def _build_error(self, connection: Connection) -> RunError:
        """Return the error to raise for a process that ended before it sent an outcome."""
        process = self._processes[connection]
        process.join(PATIENCE)
        has_failed = process.exitcode is not None and process.exitcode > 0
        if has_failed and connection not in self._started:
            return RunError(
                f"a process of the sweep ended with status {process.exitcode} as it started; each "
                f"process imports the script that calls sweep(), so {MAIN_GUARD} (the process may "
                "have printed its error above)"
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
        If this process is being spawned: without a main guard, the import of the script would start
        another sweep.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RunError(
            f"each process of a sweep imports the script that calls sweep(), and would start "
            f"another sweep; {MAIN_GUARD}"
        )


def _run_trials(server: Connection, threads: int, path: list[str]) -> None:
    """Run the trials that the main process sends, until it sends None or has ended.

    This is the main function of each process of :class:`ProcessExecutor`.

    Parameters
    ----------
    server
        Connection to the main process.
    threads
        Number of threads that torch may use.
    path
        Import path (``sys.path``) of the main process.
    """
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

    All nodes of the cluster must have access to the folders of the sweep and of the data.
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
        """Start a Ray task that runs a trial; return the reference to its result as the handle."""
        return self._task.remote(job, self._threads, self._path)

    def outcome(self, begun: Any, stop: Stop) -> Outcome:
        """Wait until the Ray task of a trial has ended, and return its outcome.

        If the sweep should stop, the task is cancelled at once; when the sweep is continued, the
        trial's runs continue from their last checkpoints.
        """
        ray = self._cluster.ray
        while not ray.wait([begun], timeout=SECONDS)[0]:
            if stop():
                ray.cancel(begun, force=True)
                raise RunInterrupted(
                    "the sweep was stopped during a trial", "continue the sweep with --resume"
                )
        try:
            return ray.get(begun)
        except ray.exceptions.RayError as error:
            raise RunError(
                f"a Ray task of the sweep has died: {error}; continue with --resume"
            ) from error

    def close(self) -> None:
        """Disconnect from the Ray cluster."""
        self._cluster.leave()


def _run_on_ray(job: Job, threads: int, path: list[str]) -> Outcome:
    """Run a trial in a Ray task; this is the function that Ray calls.

    Parameters
    ----------
    job
        The trial.
    threads
        Number of threads that torch may use.
    path
        Import path (``sys.path``) of the main process, which precedes the path of the task.
    """
    sys.path[:] = [*dict.fromkeys([*path, *sys.path])]
    torch.set_num_threads(threads)
    return run_trial(job)
