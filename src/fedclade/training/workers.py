"""Engine that trains clients in parallel: one process for each core, each with one thread.

On a CPU, convolutions and recurrent layers gain little from training clients together: with a
client on every core, they are already near the limit of the machine.
"""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from time import thread_time
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import EngineError, Layout, LocalTraining
from fedclade.training.channels_last import ChannelsLastLoop
from fedclade.training.jobs import CannotTrainTogether, Engine, Job, PrivateSteps, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.memory import clients_in_cache, hot_bytes, keep_freed_memory
from fedclade.training.stacked import StackedEngine
from fedclade.training.threads import cores

# Forked processes: workers, and trials that may die without ending this process.
#
# A forked process shares the data and the module without a copy: nothing is pickled, and a script
# needs no main guard.


def cannot_fork(device: torch.device) -> str | None:
    """Return why worker processes cannot be used with this device, or None if they can."""
    if device.type != "cpu":
        return f"workers train on the CPU, not on {device.type}"
    if sys.platform != "linux":
        return f"workers need a system where processes can be forked safely, not {sys.platform}"
    if torch.accelerator.is_available():
        return "torch has started threads for an accelerator, and a process with such threads cannot be forked"
    return None


def fork(work: Callable[[], None], others: Sequence[Connection] = ()) -> int:
    """Fork a process that does some work and then ends; return its id.

    The work runs in the only thread that the new process has: torch may use one thread there, or
    start others from a new thread.

    Parameters
    ----------
    work
        The work.
    others
        Connections that the new process closes. Otherwise it would keep them open after this
        process has ended.

    Raises
    ------
    OSError
        If the process cannot be forked.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns about forking while other threads may hold a lock. The child uses only torch
        # and its pipe.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        # These signals reach the whole process group. The parent handles them, and ends the child.
        for sent_to_all in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sent_to_all, signal.SIG_IGN)
        gc.freeze()  # a garbage collection of the parent's objects would copy their pages
        for other in others:
            other.close()
        work()
        code = 0
    finally:
        os._exit(code)


def how_it_ended(process: int) -> str:
    """Wait for a child process to end; return its signal or exit code."""
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def tried(attempt: Callable[[], str | None], limit: float) -> str | None:
    """Run an attempt in a process of its own; return its result, or how the process ended.

    The process has as many threads as torch has here.

    Parameters
    ----------
    attempt
        Returns what is wrong, or None.
    limit
        Time limit in seconds.
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
        # In the forked thread, OpenMP waits for ever for the parent's threads, which were not
        # forked. In a new thread it starts threads of its own.
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
            return (
                ours.recv()
                if ended
                else f"the process that tried it did not end within {limit:.0f} s"
            )
        except EOFError:
            how = how_it_ended(process)
            process = 0
            return f"the process that tried it died ({how})"
        finally:
            if process:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _be_silent() -> None:
    """Suppress core files and tracebacks: this process may die, and its parent reports it."""
    import resource  # not on Windows, where nothing is forked

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)


CHUNKS_EACH = 8
"""Number of chunks per process where clients train one after another.

Several chunks let all processes end at about the same time.
"""

_Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Location of a tensor in memory at the time of the fork: storage, offset, shape and stride."""


class _Client(NamedTuple):
    """Job without its data, and with the seed in place of its generator."""

    row: int
    anchor: int | None
    inputs: _Place
    targets: _Place
    seed: int
    weights: NDArray[Any] | None


class _Chunk(NamedTuple):
    """Clients that a process trains; each has a row in the shared updates."""

    rows: range
    clients: Sequence[_Client]
    n_models: int
    spec: LocalTraining
    lr: float
    fixed: frozenset[str]
    private: PrivateSteps | None


class WorkersEngine:
    """Trains clients in processes that are forked at the first use and then kept.

    There are as many processes as torch has threads. They share the data and the module as of the
    time of the fork, without a copy; models and updates are exchanged through shared memory. If the
    data or the module change, new processes are forked. They end with the engine, or with this
    process.

    Parameters
    ----------
    inside
        The engine that each process trains its clients with: a key of :data:`INSIDE`.
    """

    def __init__(self, inside: str = "loop") -> None:
        self.inside = inside
        self.busy = 0.0
        """Total seconds of training, as they would be without other work on the cores."""
        self._pool: _WorkerPool | None = None

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.training.jobs.Engine`.

        Generators should be fresh, as only their seeds are sent to the processes.

        Raises
        ------
        CannotTrainTogether
            If this system or this process cannot fork, the workload has a local rule, optimizers
            keep their state, or the engine inside cannot stack the clients.
        EngineError
            If a process cannot be started, or dies.
        RuntimeError
            If a client's training fails.
        """
        jobs = work.jobs
        if reason := cannot_work(work):
            raise CannotTrainTogether(reason)
        # Chunks take clients in turn from this order, so each has large and small clients.
        largest_first = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].inputs))
        ordered = replace(work, jobs=[jobs[i] for i in largest_first])
        if self._pool is None or not self._pool.serves(ordered):
            self.stop()
            try:
                self._pool = _WorkerPool(torch.get_num_threads(), self.inside, ordered)
            except OSError as error:  # too little memory, or too many processes
                raise EngineError(
                    f"worker processes cannot be started: {error}; use --engine loop"
                ) from error
        try:
            # These updates are in shared memory, which the next call overwrites.
            updates, losses, busy = self._pool.train(ordered)
        except BaseException:  # some processes may still train, and would reply to the next call
            self.stop()
            raise
        self.busy += busy
        back = torch.tensor(largest_first).argsort()
        return torch.index_select(updates, 0, back, out=work.room(out)), losses[back]

    def stop(self) -> None:
        """End the processes; the next call of :meth:`train` starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool = None


class _WorkerPool:
    """Worker processes, and the memory that they share with this one."""

    def __init__(self, count: int, inside: str, work: Workload) -> None:
        module = work.module
        layout = work.layout
        models = work.models
        jobs = work.jobs
        self._module = module
        self._layout = layout
        self._task = work.task
        # By address. The references keep the tensors alive, so that no other tensor can get the
        # same address.
        storages = {_address(t): t for job in jobs for t in (job.inputs, job.targets)}
        self._storages = tuple(storages.values())
        self._number = {address: i for i, address in enumerate(storages)}
        # More rows than needed now, for later rounds: pages that are not used cost nothing.
        self._models = _shared(2 * max(len(models), len(jobs)), layout)
        self._updates = _shared(2 * len(jobs), layout)
        self._at_once = (
            clients_in_cache(hot_bytes(module, layout), threads=1) if inside == "stacked" else None
        )
        self._connections: list[Connection] = []
        self._processes: dict[Connection, int] = {}
        for _ in range(count):
            ours, theirs = Pipe()
            process = fork(partial(self._work, inside, theirs), [ours, *self._connections])
            theirs.close()
            self._connections.append(ours)
            self._processes[ours] = process
        self.stop = weakref.finalize(self, _stop, os.getpid(), self._processes)

    def serves(self, work: Workload) -> bool:
        """Return whether the processes share this module and data, and have enough room."""
        return (
            self._module is work.module
            and self._layout == work.layout
            and self._task is work.task
            and len(self._connections) == torch.get_num_threads()
            and len(work.models) <= len(self._models)
            and len(work.jobs) <= len(self._updates)
            and all(
                _address(t) in self._number for job in work.jobs for t in (job.inputs, job.targets)
            )
        )

    def train(self, work: Workload) -> tuple[Tensor, Tensor, float]:
        """Distribute the clients; return updates and losses in order, and the duration in seconds.

        The duration is that of the busiest process, as it would be without other work on the cores.
        """
        self._models[: len(work.models)] = work.models
        losses = torch.empty(len(work.jobs), dtype=torch.float64)
        chunks = self._chunks(work)
        pending = deque(chunks)
        seconds = [0.0] * len(chunks)
        at_work: dict[Connection, _Chunk] = {}
        free = list(self._connections)
        while pending or at_work:
            while pending and free:
                connection = free.pop()
                at_work[connection] = pending.popleft()
                self._exchange(connection, at_work[connection], send=True)
            for connection in wait(list(at_work)):
                assert isinstance(connection, Connection)
                chunk = at_work.pop(connection)
                answer = self._exchange(connection, chunk, send=False)
                if isinstance(answer, Exception):
                    raise answer
                of_chunk, seconds[chunk.rows.start] = answer
                losses[chunk.rows] = torch.tensor(of_chunk, dtype=torch.float64)
                free.append(connection)
        return (
            self._updates[: len(work.jobs)],
            losses,
            _makespan(seconds, min(len(self._connections), cores())),
        )

    def _chunks(self, work: Workload) -> list[_Chunk]:
        n = len(work.jobs)
        processes = len(self._connections)
        rounds = CHUNKS_EACH if self._at_once is None else -(-n // (processes * self._at_once))
        count = min(n, processes * rounds)
        clients: list[_Client] = []
        for job in work.jobs:
            examples = self._place(job.inputs), self._place(job.targets)
            # Weights change in every round, so they are sent, not shared.
            weights = None if job.weights is None else job.weights.cpu().numpy()
            clients.append(
                _Client(job.row, job.anchor, *examples, job.generator.initial_seed(), weights)
            )
        common = len(work.models), work.spec, work.lr, work.fixed, work.private
        # Clients are sorted by size. A chunk has every count-th of them, so that no chunk has all
        # the large ones.
        return [_Chunk(range(i, n, count), clients[i::count], *common) for i in range(count)]

    def _place(self, tensor: Tensor) -> _Place:
        return (
            self._number[_address(tensor)],
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
        )

    def _exchange(self, connection: Connection, chunk: _Chunk, send: bool) -> Any:
        """Send a process its chunk, or receive its reply."""
        try:
            return connection.send(chunk) if send else connection.recv()
        except (EOFError, OSError) as error:
            how = how_it_ended(self._processes.pop(connection))
            raise EngineError(
                f"a worker process died ({how}) while it trained {len(chunk.clients)} clients; if "
                "the system ran out of memory, use --engine loop, or fewer threads "
                "(OMP_NUM_THREADS)"
            ) from error

    def _work(self, inside: str, connection: Connection) -> None:
        """Train chunks until the connection is closed: the main loop of a process."""
        torch.set_num_threads(1)
        keep_freed_memory()
        engine = INSIDE[inside]()
        while True:
            try:
                chunk: _Chunk = connection.recv()
            except EOFError:
                return
            connection.send(self._done(engine, chunk))

    def _done(self, engine: Engine, chunk: _Chunk) -> tuple[list[float], float] | Exception:
        """Return losses and CPU seconds of a chunk, or the exception that occurred."""
        start = thread_time()
        jobs: list[Job] = []
        for k, client in enumerate(chunk.clients):
            examples = self._tensor(client.inputs), self._tensor(client.targets)
            weights = None if client.weights is None else torch.from_numpy(client.weights)
            generator = torch.Generator().manual_seed(client.seed)
            jobs.append(Job(k, client.row, *examples, generator, client.anchor, weights))
        models = self._models[: chunk.n_models]
        todo = (chunk.spec, chunk.lr, self._task, chunk.fixed)
        work = Workload(self._module, self._layout, models, jobs, *todo, private=chunk.private)
        try:
            _, losses = engine.train(
                work, self._updates[chunk.rows.start : chunk.rows.stop : chunk.rows.step]
            )
        except CannotTrainTogether as reason:
            return CannotTrainTogether(str(reason))
        except Exception as error:
            # A user's module may raise any exception; this class can be unpickled by the parent.
            return RuntimeError(f"{type(error).__name__}: {error}")
        return losses.tolist(), thread_time() - start

    def _tensor(self, place: _Place) -> Tensor:
        number, offset, shape, stride = place
        return self._storages[number].as_strided(shape, stride, offset)


def cannot_work(work: Workload) -> str | None:
    """Return why worker processes cannot train these clients; None if no reason is known."""
    if work.rule is not None:
        return "what local rules keep does not come back from worker processes"
    if work.spec.keep_state:
        return "what optimizers keep does not come back from worker processes"
    return cannot_fork(work.models.device)


INSIDE: Mapping[str, Callable[[], Engine]] = {
    "stacked": StackedEngine,
    "channels last": ChannelsLastLoop,
    "loop": LoopEngine,
}
"""Engines inside a process: blocks of clients together, or one client after another."""


def _makespan(seconds: Sequence[float], processes: int) -> float:
    """Return the duration of chunks in seconds, if the next free process takes the next chunk."""
    ends = [0.0] * processes
    for each in seconds:
        heapreplace(ends, ends[0] + each)
    return max(ends)


def _stop(owner: int, processes: Mapping[Connection, int]) -> None:
    if os.getpid() != owner:  # this is a fork of the owner, and must not end its processes
        return
    for connection, process in processes.items():
        connection.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _shared(rows: int, layout: Layout) -> Tensor:
    """Return memory ``[rows, S]`` that is shared with forked processes."""
    size = rows * layout.size
    memory = mmap.mmap(-1, size * layout.dtype.itemsize)
    return torch.frombuffer(memory, dtype=layout.dtype, count=size).view(rows, layout.size)


def _address(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype
