"""Where trials run: in this process, in others beside it, or as tasks of a Ray cluster."""

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
"""How often somebody who waits for a trial looks whether the sweep is to stop."""

PATIENCE = 10.0
"""Seconds that a process may take to end."""

MAIN_GUARD = "put the call under: if __name__ == '__main__':"

_READY = "ready"
"""What a process says when it has started."""

Stop = Callable[[], bool]


class Place(ABC):
    """Runs trials, as many side by side as it has room for."""

    count: int

    @abstractmethod
    def begin(self, job: Job) -> Any:
        """Begin a trial; return what :meth:`outcome` takes."""

    @abstractmethod
    def outcome(self, begun: Any, stop: Stop) -> Outcome:
        """Wait for a trial.

        Raises
        ------
        RunError
            If what it ran in has died.
        """

    def close(self) -> None:  # noqa: B027 -- nothing does, unless a place says so
        """End whatever runs beside this process."""


class Here(Place):
    """Runs trials one after the other, in this process."""

    count = 1

    def __init__(self, start: Callable[[str, int], OnRound], stop: Stop) -> None:
        self._start, self._stop = start, stop

    def begin(self, job: Job) -> Outcome:
        """Run a trial."""
        return run_trial(job, self._start, self._stop)

    def outcome(self, begun: Outcome, stop: Stop) -> Outcome:
        """Return how it went."""
        return begun


class Processes(Place):
    """Runs trials in processes beside this one, each with its share of this one's threads.

    They are started anew rather than forked, so that a script that sweeps needs a main guard: each process imports the
    script. They stop after a round when they are told to, or when this process dies.

    Raises
    ------
    RunError
        If this process is itself one that is just being started, as its script has no main guard.
    """

    def __init__(self, count: int) -> None:
        check_main_guard()
        context, self.count = multiprocessing.get_context("spawn"), count
        threads = max(1, torch.get_num_threads() // count)
        self._processes: dict[Connection, Any] = {}
        self._told = False
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, threads, list(sys.path)))
            process.start()
            theirs.close()
            self._processes[ours] = process
        self._idle = list(self._processes)
        self._started: set[Connection] = set()

    def begin(self, job: Job) -> Connection:
        """Give a trial to a process that has none."""
        process = self._idle.pop(0)
        try:
            process.send(job)
        except OSError as error:
            raise self._death(process) from error
        return process

    def outcome(self, begun: Connection, stop: Stop) -> Outcome:
        """Wait for the process."""
        while not begun.poll(SECONDS):
            if stop() and not self._told:
                self._tell()
        try:
            outcome = begun.recv()
            if outcome == _READY:  # the first message of each process
                self._started.add(begun)
                return self.outcome(begun, stop)
        except (EOFError, OSError) as error:
            raise self._death(begun) from error
        self._idle.append(begun)
        return outcome

    def close(self) -> None:
        """End the processes; those that are in the middle of a trial are killed."""
        if len(self._idle) == self.count:
            self._tell()
        for connection, process in self._processes.items():
            if connection in self._idle or self._told:
                process.join(PATIENCE)
            process.kill()
            process.join()
            connection.close()

    def _tell(self) -> None:
        """Tell all processes to stop after the round."""
        self._told = True
        for connection in self._processes:
            with suppress(OSError):
                connection.send(None)

    def _death(self, connection: Connection) -> RunError:
        """Return the error of a process that has ended before its trial has."""
        process = self._processes[connection]
        process.join(PATIENCE)
        if connection not in self._started and process.exitcode is not None and process.exitcode > 0:
            return RunError(
                f"a process of the sweep ended with status {process.exitcode} as it started; each process imports the "
                f"script that calls sweep, so {MAIN_GUARD}, and see what the process printed above"
            )
        return RunError(
            "a process of the sweep has died, perhaps for want of memory; give fewer --processes, or a --memory for "
            "each, and continue with --resume"
        )


def check_main_guard() -> None:
    """Check that this process is not one that another one is just starting, which imports the same script.

    Raises
    ------
    RunError
        If it is: the script begins a sweep wherever it is imported.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RunError(f"a process that a sweep starts imports the script that calls sweep; {MAIN_GUARD}")


def _serve(server: Connection, threads: int, path: list[str]) -> None:
    """Run trials until there are no more, or the other process is gone."""
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # but meant for the process that tells this one
        signal.signal(sent_to_all, signal.SIG_IGN)
    sys.path[:] = path
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):
        server.send(_READY)
        while (job := server.recv()) is not None:
            server.send(run_trial(job, stop=server.poll))


class OnRay(Place):
    """Runs trials as tasks of a Ray cluster, whose nodes should share the sweep's folder and the data's."""

    def __init__(self, actors: Actors, device: str) -> None:
        self._cluster = Cluster(actors, device)
        self.count, room = self._cluster.room.count, self._cluster.room
        options = {"num_cpus": room.cores, "num_gpus": room.gpus, "max_retries": 0}
        self._task = self._cluster.ray.remote(**options)(_on_ray)
        self._arguments = room.cores, list(sys.path)

    def begin(self, job: Job) -> Any:
        """Begin a task."""
        return self._task.remote(job, *self._arguments)

    def outcome(self, begun: Any, stop: Stop) -> Outcome:
        """Wait for a task; to stop, it is cancelled, and goes on from its run's last checkpoint."""
        ray = self._cluster.ray
        while not ray.wait([begun], timeout=SECONDS)[0]:
            if stop():
                ray.cancel(begun, force=True)
                raise RunInterrupted("stopped at once", "")
        try:
            return ray.get(begun)
        except ray.exceptions.RayError as error:
            raise RunError(f"a Ray task of the sweep has died: {error}; continue with --resume") from error

    def close(self) -> None:
        """Leave the cluster."""
        self._cluster.leave()


def _on_ray(job: Job, threads: int, path: list[str]) -> Outcome:
    sys.path[:] = [*dict.fromkeys([*path, *sys.path])]
    torch.set_num_threads(threads)
    return run_trial(job)
