"""Engine that trains clients in parallel, in one worker process per CPU core with one thread each.

With a client on every core, convolutions and recurrent layers already use a CPU almost fully, so
training several clients in one batched program would gain little.

Processes are forked: a fork shares the data and the module without a copy, nothing is pickled, and
a user's script needs no ``if __name__ == "__main__"`` guard.
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
from multiprocessing.reduction import ForkingPickler
from time import thread_time
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import ClientTrainer, ConfigError, EngineError, Layout, LocalTraining
from fedclade.training.channels_last import ChannelsLastLoop
from fedclade.training.jobs import CannotTrainTogether, Engine, Job, PrivateSteps, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.memory import clients_in_cache, hot_bytes, keep_freed_memory
from fedclade.training.stacked import StackedEngine
from fedclade.training.threads import cores

# Forked processes: workers, and trials that may die without ending this process.


def cannot_fork(device: torch.device) -> str | None:
    """Return the reason why worker processes cannot be used with a device, or None if they can."""
    if device.type != "cpu":
        return f"worker processes train on the CPU only, not on device {device.type}"
    if sys.platform != "linux":
        return f"worker processes must be forked, which is not safe on platform {sys.platform}"
    if torch.accelerator.is_available():
        return (
            "torch has started threads for an accelerator, and a process with such threads cannot be "
            "forked"
        )
    return None


def fork(work: Callable[[], None], others: Sequence[Connection] = ()) -> int:
    """Fork a process that calls a function and then ends; return the id of the process.

    The function runs in the only thread of the new process. In that thread, torch may use one CPU
    thread; to use more, the function has to start a new thread.

    Parameters
    ----------
    work
        The function that the new process calls.
    others
        Connections that the new process closes. Otherwise these connections would stay open after
        this process has ended.

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
        # Ctrl-C and similar signals reach the whole process group. The parent handles them, and
        # ends the child.
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
    """Wait for a child process to end, and return its signal or exit code as text."""
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def tried(attempt: Callable[[], str | None], limit: float) -> str | None:
    """Run a trial in a separate process, and return what is wrong, or None.

    A failure that ends the separate process, such as a crash inside torch, does not end this
    process. The separate process has as many CPU threads as torch has in this process.

    Parameters
    ----------
    attempt
        Function that makes the trial, and returns a description of what is wrong, or None.
    limit
        Seconds after which the separate process is killed.

    Returns
    -------
    str or None
        The result of ``attempt``; or a description of its exception, of the end of the process, or
        of the exceeded time limit.
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
        # In the forked thread, OpenMP would wait forever for the parent's threads, which are not
        # copied by a fork. In a new thread, OpenMP starts new threads.
        thread = threading.Thread(target=report)
        thread.start()
        thread.join()

    with ours:
        try:
            process = fork(work, [ours])
        except OSError as error:
            return f"the trial process cannot be started: {error}"
        finally:
            theirs.close()
        try:
            if not ours.poll(limit):
                return f"the trial process did not end within {limit:.0f} s"
            return ours.recv()
        except EOFError:
            how = how_it_ended(process)
            process = 0
            return f"the trial process died ({how})"
        finally:
            if process:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _be_silent() -> None:
    """Suppress core files, tracebacks and output of this trial process.

    The process may crash, and its parent reports the crash.
    """
    import resource  # not on Windows, where nothing is forked

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)


CHUNKS_EACH = 8
"""Number of chunks of clients per process, if a process trains clients one after another.

With several chunks, all processes finish a round at about the same time.
"""

_Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Location of a tensor in memory at the time of the fork: storage, offset, shape and stride."""


class _Client(NamedTuple):
    """Training job of one client in the form that is sent to a worker process.

    In place of the client's examples it has their location in memory that the processes share, and
    in place of the job's random generator the generator's seed.
    """

    row: int
    anchor: int | None
    inputs: _Place
    targets: _Place
    seed: int
    weights: NDArray[Any] | None


class _Chunk(NamedTuple):
    """Clients that a worker process trains in one call, with the settings of local training.

    ``rows`` are the rows of these clients in the shared tensor of updates.
    """

    rows: range
    clients: Sequence[_Client]
    n_models: int
    spec: LocalTraining
    lr: float
    fixed: frozenset[str]
    private: PrivateSteps | None
    trainer: ClientTrainer | None
    number: int


class WorkersEngine:
    """Engine that trains clients in worker processes, forked at the first use and then reused.

    There are as many processes as torch has threads. The processes share the data and the module as
    of the time of the fork, without a copy. Models and updates are exchanged through shared memory.
    If the data or the module changes, new processes are forked. The processes end with the engine,
    or with this process.

    Parameters
    ----------
    inside
        Name of the engine by which each process trains its clients: a key of :data:`INSIDE`.
    """

    def __init__(self, inside: str = "loop") -> None:
        self.inside = inside
        self.busy = 0.0
        """Total seconds of training so far, as if no other programs used the cores."""
        self._pool: _WorkerPool | None = None

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :meth:`fedclade.training.jobs.Engine.train`.

        The jobs' random generators should be new: only their seeds are sent to the processes.

        Raises
        ------
        CannotTrainTogether
            If this system or this process cannot fork, the workload has a local rule, optimizers
            store their state between rounds, or the engine inside cannot stack the clients.
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
        """End the worker processes; the next call of :meth:`train` starts new processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool = None


class _WorkerPool:
    """Worker processes, and the memory that this process shares with them."""

    def __init__(self, count: int, inside: str, work: Workload) -> None:
        module = work.module
        layout = work.layout
        models = work.models
        jobs = work.jobs
        self._module = module
        self._layout = layout
        self._task = work.task
        # Tensors by memory address. The references keep the tensors alive, so that no later tensor
        # can get the same address.
        storages = {_get_address(t): t for job in jobs for t in (job.inputs, job.targets)}
        self._storages = tuple(storages.values())
        self._number = {address: i for i, address in enumerate(storages)}
        # More rows than needed now, for later rounds: pages that are not used cost nothing.
        self._models = _share_memory(2 * max(len(models), len(jobs)), layout)
        self._updates = _share_memory(2 * len(jobs), layout)
        # Number of clients that a process trains together; None if it trains one after another.
        self._at_once: int | None = None
        if inside == "stacked":
            self._at_once = clients_in_cache(hot_bytes(module, layout), threads=1)
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
        """Return whether the processes can train a workload, and need not be forked again.

        They can if they share the workload's module and data, and if the memory for models and
        updates is large enough.
        """
        return (
            self._module is work.module
            and self._layout == work.layout
            and self._task is work.task
            and len(self._connections) == torch.get_num_threads()
            and len(work.models) <= len(self._models)
            and len(work.jobs) <= len(self._updates)
            and all(
                _get_address(t) in self._number
                for job in work.jobs
                for t in (job.inputs, job.targets)
            )
        )

    def train(self, work: Workload) -> tuple[Tensor, Tensor, float]:
        """Distribute the clients of a workload over the processes, and collect the results.

        Returns
        -------
        tuple
            Updates ``[n, S]``, losses ``[n]``, and the seconds of the busiest process, as if no
            other programs used the cores.
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
                of_chunk, seconds[chunk.rows.start], taken = answer
                losses[chunk.rows] = torch.tensor(of_chunk, dtype=torch.float64)
                for k, steps in taken.items():
                    work.taken[work.jobs[chunk.rows[k]].client] = steps
                free.append(connection)
        return (
            self._updates[: len(work.jobs)],
            losses,
            _makespan(seconds, min(len(self._connections), cores())),
        )

    def _chunks(self, work: Workload) -> list[_Chunk]:
        """Divide the clients of a workload into chunks of about equal work."""
        n = len(work.jobs)
        processes = len(self._connections)
        rounds = CHUNKS_EACH
        if self._at_once is not None:
            rounds = -(-n // (processes * self._at_once))
        count = min(n, processes * rounds)
        clients: list[_Client] = []
        for job in work.jobs:
            client = _Client(
                job.row,
                job.anchor,
                inputs=self._place(job.inputs),
                targets=self._place(job.targets),
                seed=job.generator.initial_seed(),
                # Weights change in every round, so they are sent, not shared.
                weights=None if job.weights is None else job.weights.cpu().numpy(),
            )
            clients.append(client)
        # Clients are sorted by size. A chunk has every count-th of them, so that no chunk has all
        # the large ones.
        return [
            _Chunk(
                range(i, n, count),
                clients[i::count],
                n_models=len(work.models),
                spec=work.spec,
                lr=work.lr,
                fixed=work.fixed,
                private=work.private,
                trainer=work.trainer,
                number=work.number,
            )
            for i in range(count)
        ]

    def _place(self, tensor: Tensor) -> _Place:
        """Return the location of a tensor in the memory that is shared with the processes."""
        return (
            self._number[_get_address(tensor)],
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
        )

    def _exchange(self, connection: Connection, chunk: _Chunk, send: bool) -> Any:
        """Send a chunk of clients to a process if ``send``; otherwise receive the reply for it.

        Raises
        ------
        EngineError
            If the process has died.
        """
        try:
            if send:
                return connection.send(chunk)
            return connection.recv()
        except (EOFError, OSError) as error:
            how = how_it_ended(self._processes.pop(connection))
            raise EngineError(
                f"a worker process died ({how}) while it trained {len(chunk.clients)} clients; if "
                "the system ran out of memory, use --engine loop, or set OMP_NUM_THREADS to a "
                "smaller number of threads"
            ) from error

    def _work(self, inside: str, connection: Connection) -> None:
        """Run the main loop of a worker process: train chunks until the connection is closed."""
        torch.set_num_threads(1)
        keep_freed_memory()
        engine = INSIDE[inside]()
        while True:
            try:
                chunk: _Chunk = connection.recv()
            except EOFError:
                return
            connection.send(self._done(engine, chunk))

    def _done(
        self, engine: Engine, chunk: _Chunk
    ) -> tuple[list[float], float, dict[int, int]] | Exception:
        """Train a chunk; return its losses, CPU seconds and steps, or the exception that occurred.

        The steps are those of a user's own code, by the client's position in the chunk.
        """
        start = thread_time()
        jobs: list[Job] = []
        for k, client in enumerate(chunk.clients):
            job = Job(
                k,
                client.row,
                inputs=self._tensor(client.inputs),
                targets=self._tensor(client.targets),
                generator=torch.Generator().manual_seed(client.seed),
                anchor=client.anchor,
                weights=None if client.weights is None else torch.from_numpy(client.weights),
            )
            jobs.append(job)
        work = Workload(
            self._module,
            self._layout,
            models=self._models[: chunk.n_models],
            jobs=jobs,
            spec=chunk.spec,
            lr=chunk.lr,
            task=self._task,
            fixed=chunk.fixed,
            private=chunk.private,
            trainer=chunk.trainer,
            number=chunk.number,
        )
        try:
            _, losses = engine.train(
                work, self._updates[chunk.rows.start : chunk.rows.stop : chunk.rows.step]
            )
        except CannotTrainTogether as reason:
            return CannotTrainTogether(str(reason))
        except ConfigError as error:  # of a user's own training code
            return ConfigError(str(error))
        except Exception as error:
            # A user's module may raise any exception; this class can be unpickled by the parent.
            return RuntimeError(f"{type(error).__name__}: {error}")
        return losses.tolist(), thread_time() - start, work.taken

    def _tensor(self, place: _Place) -> Tensor:
        """Return the tensor at a location in the memory that is shared with the parent process."""
        number, offset, shape, stride = place
        return self._storages[number].as_strided(shape, stride, offset)


def cannot_work(work: Workload) -> str | None:
    """Return the reason why worker processes cannot train the clients of a workload.

    The result is None if no reason is known.
    """
    if work.rule is not None:
        return "worker processes cannot return the state that local rules store between rounds"
    if work.trainer is not None and work.trainer.stores:
        return "worker processes cannot return the tensors that own trainers store between rounds"
    if work.trainer is not None and (reason := _why_not_sent(work.trainer)) is not None:
        return reason
    if work.spec.keep_state:
        return "worker processes cannot return the state of optimizers (local.keep_state = true)"
    return cannot_fork(work.models.device)


def _why_not_sent(trainer: ClientTrainer) -> str | None:
    """Return the reason why a user's code cannot be sent to worker processes; None if it can."""
    try:
        ForkingPickler.dumps(trainer)  # as a connection does when it sends an object
    except Exception as error:  # errors of several classes
        return (
            f"trainer {trainer.label} cannot be sent to worker processes ({error}); define it at "
            "the top level of a module"
        )
    return None


INSIDE: Mapping[str, Callable[[], Engine]] = {
    "stacked": StackedEngine,
    "channels last": ChannelsLastLoop,
    "loop": LoopEngine,
}
"""Engines inside a worker process, by name.

``stacked`` trains blocks of clients together; the other engines train one client after another.
"""


def _makespan(seconds: Sequence[float], processes: int) -> float:
    """Return the seconds until all chunks are trained, given the seconds of each chunk.

    The next free process takes the next chunk.
    """
    ends = [0.0] * processes
    for each in seconds:
        heapreplace(ends, ends[0] + each)
    return max(ends)


def _stop(owner: int, processes: Mapping[Connection, int]) -> None:
    """End worker processes, unless this process is only a fork of the process that owns them."""
    if os.getpid() != owner:  # this is a fork of the owner, and must not end its processes
        return
    for connection, process in processes.items():
        connection.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _share_memory(rows: int, layout: Layout) -> Tensor:
    """Return memory ``[rows, S]`` that this process shares with processes that it forks."""
    size = rows * layout.size
    memory = mmap.mmap(-1, size * layout.dtype.itemsize)
    return torch.frombuffer(memory, dtype=layout.dtype, count=size).view(rows, layout.size)


def _get_address(tensor: Tensor) -> tuple[int, torch.dtype]:
    """Return the memory address of a tensor's storage, and the tensor's data type."""
    return tensor.untyped_storage().data_ptr(), tensor.dtype
