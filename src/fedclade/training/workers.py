"""Clients side by side: one process for each core, each with one thread.

On a CPU, convolutions and recurrent layers gain little from training clients together: they are
near the machine's limit already when every core has a client of its own.
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

# Forked processes: workers, and trials that may die without taking this process with them.
#
# A forked process has the data and the module without a copy: nothing is pickled, and a script
# needs no main guard.


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

    The work runs in the thread that is left of this process: torch may use one thread there, or
    those of a thread of its own. Connections in ``others`` are closed there, so that the end of
    this process is the end of them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of forking with threads, which may hold a lock. The child touches torch and
        # its pipe alone.
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
        # OpenMP waits for ever for the parent's threads, which were not forked, but not in a thread
        # that had none.
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
    """Leave no core file and no traceback: this process may die, and its parent reports it."""
    import resource  # not on Windows, where nothing is forked

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)


CHUNKS_EACH = 8
"""So many chunks for each process where clients train one after another, so that all end at about the same time."""

_Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Where a tensor lies in what the processes have seen when they were forked: storage, offset, shape and stride."""


class _Client(NamedTuple):
    """A job without its data and its generator, for which the seed stands."""

    row: int
    anchor: int | None
    inputs: _Place
    targets: _Place
    seed: int
    weights: NDArray[Any] | None


class _Chunk(NamedTuple):
    """Clients for a process to train, each of which has a row among the updates."""

    rows: range
    clients: Sequence[_Client]
    n_models: int
    spec: LocalTraining
    lr: float
    fixed: frozenset[str]
    private: PrivateSteps | None


class WorkersEngine:
    """Trains clients in processes, as many as torch has threads, that are forked at the first use and kept.

    They see the data and the module as these were when they were forked, at no cost; models and
    updates pass through shared memory. Other data or another module make new processes. They end
    with the engine, or with this process. Each trains its clients with one of :data:`INSIDE`.
    """

    def __init__(self, inside: str = "loop") -> None:
        self.inside = inside
        self.busy = 0.0
        """Seconds that training would have taken so far, were there nothing else to do for the cores."""
        self._pool: _WorkerPool | None = None

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.training.jobs.Engine`. Generators should be fresh.

        Raises
        ------
        CannotTrainTogether
            If this system or this process cannot fork, or optimizers keep their state; or if
            clients inside cannot be stacked.
        EngineError
            If a process cannot be started, or dies.
        RuntimeError
            If a client's training fails.
        """
        jobs = work.jobs
        if reason := cannot_work(work):
            raise CannotTrainTogether(reason)
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
            # shared memory, so not to be given away
            updates, losses, busy = self._pool.train(ordered)
        except BaseException:  # some processes may still be at it, and answer late
            self.stop()
            raise
        self.busy += busy
        back = torch.tensor(largest_first).argsort()
        return torch.index_select(updates, 0, back, out=work.room(out)), losses[back]

    def stop(self) -> None:
        """End the processes; the next call makes new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool = None


class _WorkerPool:
    """The processes, and the memory that they share with this one."""

    def __init__(self, count: int, inside: str, work: Workload) -> None:
        module = work.module
        layout = work.layout
        models = work.models
        jobs = work.jobs
        self._module = module
        self._layout = layout
        self._task = work.task
        # By address. The tensors are held, so that nothing else can come to lie there.
        storages = {_address(t): t for job in jobs for t in (job.inputs, job.targets)}
        self._storages = tuple(storages.values())
        self._number = {address: i for i, address in enumerate(storages)}
        # More rows than now: pages that nobody touches cost nothing.
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
        """Whether the processes have seen this module and this data, and have room for so many clients."""
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
        """Hand out the clients; return their updates and losses in order, and how long the processes are busy."""
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
            # anew in every round
            weights = None if job.weights is None else job.weights.cpu().numpy()
            clients.append(
                _Client(job.row, job.anchor, *examples, job.generator.initial_seed(), weights)
            )
        common = len(work.models), work.spec, work.lr, work.fixed, work.private
        # Every so-many-th client of the sorted ones, so that no chunk has all the large ones.
        return [_Chunk(range(i, n, count), clients[i::count], *common) for i in range(count)]

    def _place(self, tensor: Tensor) -> _Place:
        return (
            self._number[_address(tensor)],
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
        )

    def _exchange(self, connection: Connection, chunk: _Chunk, send: bool) -> Any:
        """Send a process its chunk, or return its answer."""
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
        """Train chunks until there are none: the life of a process."""
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
        """Return the losses and the seconds of this process's CPU time, or what went wrong."""
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
            # whatever a user's module raises, in a class that the other side knows
            return RuntimeError(f"{type(error).__name__}: {error}")
        return losses.tolist(), thread_time() - start

    def _tensor(self, place: _Place) -> Tensor:
        number, offset, shape, stride = place
        return self._storages[number].as_strided(shape, stride, offset)


def cannot_work(work: Workload) -> str | None:
    """Return why worker processes cannot train these clients; None if they can, so far."""
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
"""What a process trains its clients with: blocks of them together, or one after another."""


def _makespan(seconds: Sequence[float], processes: int) -> float:
    """Return how long it takes so many processes to train chunks, each taken by the next that is free."""
    ends = [0.0] * processes
    for each in seconds:
        heapreplace(ends, ends[0] + each)
    return max(ends)


def _stop(owner: int, processes: Mapping[Connection, int]) -> None:
    if os.getpid() != owner:  # a fork of the owner's has nothing to end
        return
    for connection, process in processes.items():
        connection.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _shared(rows: int, layout: Layout) -> Tensor:
    """Return memory ``[rows, S]`` that forked processes share."""
    size = rows * layout.size
    memory = mmap.mmap(-1, size * layout.dtype.itemsize)
    return torch.frombuffer(memory, dtype=layout.dtype, count=size).view(rows, layout.size)


def _address(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype
