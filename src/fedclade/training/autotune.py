"""Choice of the fastest engine for a model on this machine, by measurements that are cached."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any

import torch

from fedclade.core import EngineError
from fedclade.data import cache_folder
from fedclade.training.data import is_augmented
from fedclade.training.jobs import Engine, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.threads import cores
from fedclade.training.workers import WorkersEngine

# Speeds of engines on this machine.
#
# On a CPU, CPU time is measured. From it follows the duration on a machine with no other work:
# other work must not influence the choice. On a GPU, wall-clock time is measured.

SECONDS = 0.6
"""Duration of a measurement in seconds, except that the fewest repeats are always completed."""

FEWEST_REPEATS = 3
MOST_REPEATS = 12
SURE = 2
FAR_BEHIND = 3
"""Engines slower than the best by this factor are dropped after ``SURE`` repeats.

For slow models, they are dropped after one repeat.
"""

STEPS = 3
MORE_STEPS = 30
"""Numbers of steps of every client in a repeat; fast models take ``MORE_STEPS``.

The cost of a client before its first step is a small part of a round, so it should be a small part
of a measurement.
"""

MOST_CLIENTS = 32
FEW_CLIENTS = 3
"""Number of clients with which engines that train one client at a time are measured."""


@dataclass(frozen=True)
class Measured:
    """Measured speeds of engines."""

    #: samples/s on a machine with no other work: the best of all repeats
    speeds: Mapping[str, float]
    share: float
    """Share of the time in which the engines had the cores that they could use.

    It is less than 1 if the machine does other work.
    """

    @property
    def best(self) -> str:
        """Name of the fastest engine."""
        return max(self.speeds, key=lambda engine: self.speeds[engine])


def measure(engines: Mapping[str, Engine], work: Workload) -> Measured:
    """Measure engines on the first few steps of a workload, in interleaved repeats.

    Engines whose processes die are left out.

    Parameters
    ----------
    engines
        Engines by name.
    work
        The workload.

    Returns
    -------
    Measured
        Speeds of the engines.

    Raises
    ------
    EngineError
        If the processes of all engines die.
    """
    timed = _Timed(dict(engines), work)
    timed.repeat(1)  # warm-up: forks processes and starts threads
    # The warm-up does not count.
    timed.speeds = {}
    timed.seconds = 0.0
    timed.passed = 0.0
    timed.repeat(STEPS)
    fast = timed.seconds < SECONDS / 4
    for repeat in range(1, MOST_REPEATS):
        if repeat >= FEWEST_REPEATS and timed.seconds > SECONDS:
            break
        if repeat == (SURE if fast else 1):
            timed.leave_out_what_is_far_behind()
        timed.repeat(MORE_STEPS if fast and repeat >= SURE else STEPS)
    return Measured(timed.speeds, timed.seconds / max(timed.passed, timed.seconds))


class _Timed:
    """Engines during a measurement, with their speeds so far."""

    def __init__(self, engines: dict[str, Engine], work: Workload) -> None:
        self._engines = engines
        self._task = work
        self.speeds: dict[str, float] = {}
        self.seconds = self.passed = 0.0

    def repeat(self, steps: int) -> None:
        """Measure a training of ``steps`` steps by each engine."""
        for name, engine in list(self._engines.items()):
            small = self._task.cut(_enough(engine), steps * self._task.batch_size)
            try:
                seconds, passed = _seconds(engine, small)
            except EngineError as error:
                del self._engines[name]
                self.speeds.pop(name, None)
                _log.warning("engine %s is not taken: %s", name, error)
                if not self._engines and not self.speeds:
                    raise
                continue
            self.speeds[name] = max(
                self.speeds.get(name, 0.0), sum(job.size for job in small.jobs) / seconds
            )
            self.seconds += seconds
            self.passed += passed

    def leave_out_what_is_far_behind(self) -> None:
        """Drop the engines that are too slow to be the fastest."""
        enough = max(self.speeds.values()) / FAR_BEHIND
        self._engines = {
            name: engine for name, engine in self._engines.items() if self.speeds[name] > enough
        }


def _enough(engine: Engine) -> int:
    """Return the number of clients that is sufficient to measure an engine."""
    if isinstance(engine, LoopEngine):
        return FEW_CLIENTS
    if isinstance(engine, WorkersEngine) and engine.inside != "stacked":
        return FEW_CLIENTS * torch.get_num_threads()
    return MOST_CLIENTS


def _seconds(engine: Engine, work: Workload) -> tuple[float, float]:
    """Return the duration of a training without other work on the machine, and as measured."""
    cuda = work.models.is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = perf_counter()
    of_thread = thread_time()
    of_process = process_time()
    of_workers = _of_workers(engine)
    engine.train(work)
    if cuda:
        torch.cuda.synchronize()
        passed = perf_counter() - start
        return passed, passed
    # CPU time of this thread is the duration: while other threads compute, it computes as well, or
    # waits actively. The CPU time of all threads, divided by the number of cores, is a lower bound.
    here = max(thread_time() - of_thread, (process_time() - of_process) / cores())
    return max(1e-9, here + _of_workers(engine) - of_workers), perf_counter() - start


def _of_workers(engine: Engine) -> float:
    return engine.busy if isinstance(engine, WorkersEngine) else 0.0


FORMAT = 10
"""Part of every key of the cache; increase it whenever the speed of an engine changes."""

QUIET = 0.8
"""Share of the time with cores available from which a measurement counts as sure."""

RUNS = 16
"""Number of runs after which a sure choice is measured again.

A choice that is not sure is measured again after one run. Each confirmation doubles the number, up
to ``MOST_RUNS``.
"""

MOST_RUNS = 256

CLEARLY = 1.1
"""Factor by which another engine must be faster to replace the known choice."""

_log = logging.getLogger(__name__)

_of_this_process: dict[str, str] = {}
"""Choices by path in the cache, valid for the whole process.

They hold even if no cache folder can be written.
"""


@dataclass(frozen=True)
class Choice:
    """The engine that was found to be the fastest, and the reliability of that measurement."""

    engine: str
    #: speeds of the engines, see :class:`~fedclade.training.autotune.Measured`
    samples_per_second: Mapping[str, float]
    share: float
    confirmed: int = 0  #: number of later measurements that confirmed the choice
    runs: int = 1  #: number of runs that used the choice since it was measured

    @property
    def is_sure(self) -> bool:
        """Whether the machine was quiet during the measurement."""
        return self.share >= QUIET

    @property
    def is_due(self) -> bool:
        """Whether enough runs have used the choice that it should be measured again."""
        return self.runs >= min(MOST_RUNS, (RUNS if self.is_sure else 1) << min(self.confirmed, 20))

    def after(self, found: Measured) -> Choice:
        """Return the choice after another measurement: the same engine unless clearly slower.

        A choice that was measured on a quiet machine is not replaced by a measurement on a busy
        one.
        """
        speeds = found.speeds
        best = found.best
        if self.engine not in speeds:
            return Choice(best, speeds, found.share)
        if self.is_sure and found.share < QUIET:
            return replace(self, runs=1)
        if speeds[best] > CLEARLY * speeds[self.engine]:
            return Choice(best, speeds, found.share)
        return Choice(self.engine, speeds, found.share, self.confirmed + 1)


def fastest(engines: Mapping[str, Engine], work: Workload) -> str:
    """Return the name of the engine that trains the clients of a workload fastest on this machine.

    Engines are measured once for each structure of a module, device, batch size, order of magnitude
    of the number of clients, and number of threads; later calls read the choice from the cache
    folder. The choice is kept because engines round differently, and a repeated run should give the
    same bytes. It is measured again after some runs, and already after one run if the machine was
    busy during the measurement.

    Parameters
    ----------
    engines
        Engines by name.
    work
        The workload.

    Returns
    -------
    str
        Name of the fastest engine.

    Raises
    ------
    EngineError
        If all engines have worker processes, and the processes of all die.
    """
    key = _key(list(engines), work)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    path = cache_folder() / f"engine-{name}.json"
    if str(path) in _of_this_process:
        return _of_this_process[str(path)]
    known = _read(path, engines)
    if known is not None and not known.is_due:
        # A shared folder may be read-only: then runs are not counted.
        with suppress(OSError):
            _write(path, replace(known, runs=known.runs + 1), key)
    else:
        found = measure(engines, work)
        choice = (
            Choice(found.best, found.speeds, found.share) if known is None else known.after(found)
        )
        kept = choice.engine != found.best
        how = (
            "kept, being not clearly slower than the fastest"
            if kept
            else "the fastest for this model"
        )
        speeds = ", ".join(f"{engine} {speed:,.0f}" for engine, speed in found.speeds.items())
        busy = (
            ""
            if found.share >= QUIET
            else f"; the cores were busy for {1 - found.share:.0%} of the time"
        )
        _log.info("engine %s is %s (samples/s: %s%s)", choice.engine, how, speeds, busy)
        known = _keep(path, choice, key, first=known is None)
    _of_this_process[str(path)] = known.engine
    return known.engine


def forget(engine: str) -> None:
    """Forget all choices of an engine in this process, so that it is measured again.

    Used when the engine has broken down.
    """
    for path in [path for path, chosen in _of_this_process.items() if chosen == engine]:
        del _of_this_process[path]
        with suppress(OSError):
            Path(path).unlink()


def _key(engines: list[str], work: Workload) -> dict[str, object]:
    clients = min(len(work.jobs), 2 * MOST_CLIENTS)
    optimizer = LocalOptimizer.of(work.spec, work.lr)
    cuda = work.models.is_cuda
    return {
        "format": FORMAT,
        "engines": engines,
        "module": str(work.module),
        "tensors": [
            [slot.name, *slot.shape] for slot in (*work.layout.parameters, *work.layout.buffers)
        ],
        "at rest": [*work.layout.frozen, *work.layout.resting],
        "type": str(work.layout.dtype),
        "inputs": list(work.jobs[0].inputs.shape[1:]),
        "batch_size": work.batch_size,
        "clients": 1 << (clients - 1).bit_length(),  # the next power of two
        "device": torch.cuda.get_device_name()
        if cuda
        else f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **({} if work.spec.precision == "float32" else {"precision": work.spec.precision}),
        **(
            {}
            if optimizer.is_plain
            else {"optimizer": work.spec.optimizer, "options": {**work.spec.options}}
        ),
        **({"augmented": True} if is_augmented(work.module) else {}),
        **({} if work.private is None else {"private": True}),
        **({} if work.rule is None else {"rule": [work.rule.name, work.rule.gradients]}),
    }


def _read(path: Path, engines: Collection[str]) -> Choice | None:
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
        speeds = {str(engine): float(speed) for engine, speed in kept["samples_per_second"].items()}
        counts = int(kept["confirmed"]), int(kept["runs"])
        choice = Choice(str(kept["engine"]), speeds, float(kept["share"]), *map(abs, counts))
    except OSError:  # no such file, or no readable folder
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        _log.warning("cannot use the choice of an engine in %s (%s); measuring again", path, error)
        with suppress(OSError):
            path.unlink()
        return None
    return choice if choice.engine in engines else None


def _write(path: Path, choice: Choice, key: Mapping[str, object], *, first: bool = False) -> None:
    """Write a choice atomically; the first choice only if the file does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as beside:
        whole = Path(beside) / path.name
        whole.write_text(json.dumps({**asdict(choice), "key": key}, indent=2) + "\n")
        if first:
            path.hardlink_to(whole)
        else:
            whole.replace(path)


def _keep(path: Path, choice: Choice, key: Mapping[str, object], *, first: bool) -> Choice:
    """Write a choice; if another process has written the first one before, return its choice."""
    try:
        _write(path, choice, key, first=first)
    except FileExistsError:
        return _read(path, choice.samples_per_second) or choice
    except OSError as error:
        _log.warning(
            "cannot keep the choice of an engine in %s (%s); the next start measures again",
            path,
            error,
        )
    return choice
