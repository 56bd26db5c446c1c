"""Choice of the fastest engine for a model on this machine.

Engines are measured on a few steps of the clients' training. The choice is cached in a file, so
that a repeated run uses the same engine, and its results have the same rounding.
"""

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
# On a CPU, CPU time is measured. It gives the duration on a machine that runs no other programs,
# which must not influence the choice. On a GPU, wall-clock time is measured.

SECONDS = 0.6
"""Seconds after which a measurement ends, if it has had at least ``FEWEST_REPEATS`` repeats."""

FEWEST_REPEATS = 3
MOST_REPEATS = 12
SURE = 2
FAR_BEHIND = 3
"""Factor by which an engine must be slower than the fastest engine to be dropped early.

It is dropped after ``SURE`` repeats of the measurement, or, for slow models, after one repeat.
"""

STEPS = 3
MORE_STEPS = 30
"""Number of steps of every client in a repeat of the measurement; fast models take ``MORE_STEPS``.

With more steps, the fixed cost of each client before its first step is a small part of the
measurement, as it is a small part of a round.
"""

MOST_CLIENTS = 32
FEW_CLIENTS = 3
"""Number of clients with which engines that train one client at a time are measured."""


@dataclass(frozen=True)
class Measured:
    """Measured speeds of engines, and how reliable the measurement is."""

    #: samples/s of each engine as if no other programs ran: the best of all repeats
    speeds: Mapping[str, float]
    share: float
    """Share of the time in which the engines could use all of their CPU cores.

    It is less than 1 if other programs run on the machine.
    """

    @property
    def best(self) -> str:
        """Name of the fastest engine."""
        return max(self.speeds, key=lambda engine: self.speeds[engine])


def measure(engines: Mapping[str, Engine], work: Workload) -> Measured:
    """Measure the speeds of engines on the first few steps of a workload.

    The engines train in turn, repeatedly. An engine whose worker processes die is left out.

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
        If the worker processes of all engines die.
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
        # Speeds of a few short steps are not reliable enough to drop an engine.
        sure_from = SURE if fast else 1
        if repeat == sure_from:
            timed.leave_out_what_is_far_behind()
        if fast and repeat >= SURE:
            timed.repeat(MORE_STEPS)
        else:
            timed.repeat(STEPS)
    return Measured(timed.speeds, timed.seconds / max(timed.passed, timed.seconds))


class _Timed:
    """Measurement in progress: the engines that are compared, with their speeds so far."""

    def __init__(self, engines: dict[str, Engine], work: Workload) -> None:
        self._engines = engines
        self._task = work
        self.speeds: dict[str, float] = {}
        self.seconds = self.passed = 0.0

    def repeat(self, steps: int) -> None:
        """Let each engine train ``steps`` steps, and update the best speed of each engine.

        An engine whose worker processes die is left out from then on.
        """
        for name, engine in list(self._engines.items()):
            small = self._task.cut(_count_clients(engine), steps * self._task.batch_size)
            try:
                seconds, passed = _measure_seconds(engine, small)
            except EngineError as error:
                del self._engines[name]
                self.speeds.pop(name, None)
                _log.warning("engine %s is left out: %s", name, error)
                if not self._engines and not self.speeds:
                    raise
                continue
            self.speeds[name] = max(
                self.speeds.get(name, 0.0), sum(job.size for job in small.jobs) / seconds
            )
            self.seconds += seconds
            self.passed += passed

    def leave_out_what_is_far_behind(self) -> None:
        """Drop the engines that are several times slower than the fastest engine so far."""
        enough = max(self.speeds.values()) / FAR_BEHIND
        self._engines = {
            name: engine for name, engine in self._engines.items() if self.speeds[name] > enough
        }


def _count_clients(engine: Engine) -> int:
    """Return the number of clients that is sufficient to measure an engine's speed."""
    if isinstance(engine, LoopEngine):
        return FEW_CLIENTS
    if isinstance(engine, WorkersEngine) and engine.inside != "stacked":
        return FEW_CLIENTS * torch.get_num_threads()
    return MOST_CLIENTS


def _measure_seconds(engine: Engine, work: Workload) -> tuple[float, float]:
    """Train a workload, and return how long it took.

    Returns
    -------
    tuple
        First, an estimate of the seconds on a machine without other programs, from the used CPU
        time (on a GPU, seconds by the clock). Second, the seconds by the clock.
    """
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
    # The CPU time of this thread is the duration: while other threads compute, this thread computes
    # as well, or waits actively. The CPU time of all threads, divided by the number of cores, is a
    # lower bound.
    here = max(thread_time() - of_thread, (process_time() - of_process) / cores())
    return max(1e-9, here + _of_workers(engine) - of_workers), perf_counter() - start


def _of_workers(engine: Engine) -> float:
    """Return the CPU seconds that an engine's worker processes have spent on training so far."""
    if not isinstance(engine, WorkersEngine):
        return 0.0
    return engine.busy


FORMAT = 10
"""Version number in every key of the cache, to be increased if the speed of an engine changes."""

QUIET = 0.8
"""Least share of the time with free CPU cores for which a measurement counts as reliable."""

RUNS = 16
"""Number of runs after which a reliable choice is measured again.

A choice that is not reliable is measured again after one run. Each measurement that confirms the
choice doubles the number of runs, up to ``MOST_RUNS``.
"""

MOST_RUNS = 256

CLEARLY = 1.1
"""Factor by which another engine must be faster to replace the engine in the cache."""

_log = logging.getLogger(__name__)

_of_this_process: dict[str, str] = {}
"""Engine chosen in this process, by path of the cache file.

It is used for the whole process, even if no cache file can be written.
"""


@dataclass(frozen=True)
class Choice:
    """Engine that was found to be the fastest, with the reliability of the measurement."""

    engine: str
    #: speeds of the engines, see :class:`~fedclade.training.autotune.Measured`
    samples_per_second: Mapping[str, float]
    share: float
    confirmed: int = 0  #: number of later measurements that confirmed the choice
    runs: int = 1  #: number of runs that used the choice since it was measured

    @property
    def is_sure(self) -> bool:
        """Whether the measurement is reliable: other programs hardly used the CPU cores meanwhile."""
        return self.share >= QUIET

    @property
    def is_due(self) -> bool:
        """Whether so many runs have used the choice that the engines should be measured again."""
        runs = RUNS if self.is_sure else 1
        return self.runs >= min(MOST_RUNS, runs << min(self.confirmed, 20))

    def after(self, found: Measured) -> Choice:
        """Return the choice after another measurement.

        The engine changes only if it is clearly slower than the fastest engine. A choice that was
        measured without other programs on the machine is not replaced because of a measurement with
        other programs.
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

    @classmethod
    def first(cls, found: Measured) -> Choice:
        """Return the choice of an engine that follows from a first measurement."""
        return cls(found.best, found.speeds, found.share)


def fastest(engines: Mapping[str, Engine], work: Workload) -> str:
    """Return the name of the engine that trains the clients of a workload fastest on this machine.

    Engines are measured once for each structure of a module, device, batch size, order of magnitude
    of the number of clients, and number of threads. Later calls read the choice from the cache
    folder: engines round differently, and a repeated run should give the same bytes. Engines are
    measured again after 16 runs (later, if measurements confirm the choice, after up to 256 runs),
    or already after one run if other programs used the machine during the measurement.

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
        If all engines have worker processes, and all of these processes die.
    """
    key = _build_key(list(engines), work)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    path = cache_folder() / f"engine-{name}.json"
    if str(path) in _of_this_process:
        return _of_this_process[str(path)]
    known = _read_choice(path, engines)
    if known is not None and not known.is_due:
        # A shared folder may be read-only; runs are not counted then.
        with suppress(OSError):
            _write_choice(path, replace(known, runs=known.runs + 1), key)
    else:
        found = measure(engines, work)
        choice = Choice.first(found) if known is None else known.after(found)
        _log_choice(choice, found)
        known = _store_choice(path, choice, key, first=known is None)
    _of_this_process[str(path)] = known.engine
    return known.engine


def _log_choice(choice: Choice, found: Measured) -> None:
    """Log which engine is chosen after a measurement, and the reason for the choice."""
    reason = "the fastest for this model"
    if choice.engine != found.best:
        reason = "still used, since it is not clearly slower than the fastest engine"
    speeds = ", ".join(f"{engine} {speed:,.0f}" for engine, speed in found.speeds.items())
    busy = ""
    if found.share < QUIET:
        busy = f"; the cores were busy for {1 - found.share:.0%} of the time"
    _log.info("engine %s is %s (samples/s: %s%s)", choice.engine, reason, speeds, busy)


def forget(engine: str) -> None:
    """Delete all choices of an engine by this process, also from the cache folder.

    The next call of :func:`fastest` then measures the engines again. The caller forgets an engine
    whose worker processes have died.

    Parameters
    ----------
    engine
        Name of the engine.
    """
    for path in [path for path, chosen in _of_this_process.items() if chosen == engine]:
        del _of_this_process[path]
        with suppress(OSError):
            Path(path).unlink()


def _build_key(engines: list[str], work: Workload) -> dict[str, object]:
    """Return all properties of a workload on which the speeds of engines depend, as a cache key."""
    clients = min(len(work.jobs), 2 * MOST_CLIENTS)
    if work.models.is_cuda:
        device = torch.cuda.get_device_name()
    else:
        device = f"{platform.machine()}, {os.cpu_count()} cores"
    key: dict[str, object] = {
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
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    # Further entries are added only for settings that differ from plain training, so that the keys
    # of plain training stay the same when a setting is added.
    if work.spec.precision != "float32":
        key["precision"] = work.spec.precision
    if not LocalOptimizer.of(work.spec, work.lr).is_plain:
        key["optimizer"] = work.spec.optimizer
        key["options"] = {**work.spec.options}
    if is_augmented(work.module):
        key["augmented"] = True
    if work.private is not None:
        key["private"] = True
    if work.rule is not None:
        key["rule"] = [work.rule.name, work.rule.gradients]
    if work.trainer is not None:
        key["trainer"] = work.trainer.label
    return key


def _read_choice(path: Path, engines: Collection[str]) -> Choice | None:
    """Read a choice from a cache file.

    The result is None if there is no valid file, or its engine is not one of ``engines``.
    """
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
        speeds = {str(engine): float(speed) for engine, speed in kept["samples_per_second"].items()}
        counts = int(kept["confirmed"]), int(kept["runs"])
        choice = Choice(str(kept["engine"]), speeds, float(kept["share"]), *map(abs, counts))
    except OSError:  # no such file, or no readable folder
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        _log.warning(
            "cannot read the cached choice of an engine in %s (%s); the engines are measured again",
            path,
            error,
        )
        with suppress(OSError):
            path.unlink()
        return None
    if choice.engine not in engines:
        return None
    return choice


def _write_choice(
    path: Path, choice: Choice, key: Mapping[str, object], *, first: bool = False
) -> None:
    """Write a choice to its cache file, atomically.

    Raises
    ------
    FileExistsError
        If ``first`` is set, and another process has written the file already.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as beside:
        whole = Path(beside) / path.name
        whole.write_text(json.dumps({**asdict(choice), "key": key}, indent=2) + "\n")
        if first:
            path.hardlink_to(whole)
        else:
            whole.replace(path)


def _store_choice(path: Path, choice: Choice, key: Mapping[str, object], *, first: bool) -> Choice:
    """Write a choice to its cache file, and return the choice that is valid.

    If another process has written a first choice already, that choice is returned, so that both
    processes use the same engine.
    """
    try:
        _write_choice(path, choice, key, first=first)
    except FileExistsError:
        return _read_choice(path, choice.samples_per_second) or choice
    except OSError as error:
        _log.warning(
            "cannot write the choice of an engine to %s (%s); the next run measures engines again",
            path,
            error,
        )
    return choice
