"""How fast engines are on this machine.

What is measured is CPU time, from which follows how long an engine takes where nothing else is going on: how much else
there is must not decide. On a GPU it is the time that passes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter, process_time, thread_time

import torch

from fedclade.core import EngineError
from fedclade.training.jobs import Engine, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.threads import cores
from fedclade.training.workers import WorkersEngine

SECONDS = 0.6
"""How long to measure, but for the fewest repeats, which slow models get however long they take."""

FEWEST_REPEATS, MOST_REPEATS = 3, 12
SURE, FAR_BEHIND = 2, 3
"""After so many repeats, of slow models after one, what is so many times slower than the best is not measured again."""

STEPS, MORE_STEPS = 3, 30
"""Of every client. What a client costs before its first step counts little in a round, so fast models get more."""

MOST_CLIENTS = 32
FEW_CLIENTS = 3
"""One at a time, clients need no more of them to show their speed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """What was measured of engines."""

    speeds: Mapping[str, float]  #: samples/s on a machine with nothing else to do: the best of some repeats
    share: float
    """Part of the time that passed for which they had the cores that they could use; less than 1 beside other work."""

    @property
    def best(self) -> str:
        """The fastest engine."""
        return max(self.speeds, key=lambda engine: self.speeds[engine])


def measure(engines: Mapping[str, Engine], work: Workload) -> Measured:
    """Measure engines on the first few steps of a workload, in interleaved repeats; without those whose processes die.

    Raises
    ------
    EngineError
        If none is left.
    """
    timed = _Timed(dict(engines), work)
    timed.repeat(1)  # a warm-up: processes are forked, threads started
    timed.speeds, timed.seconds, timed.passed = {}, 0.0, 0.0
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
    """Engines while they are measured."""

    def __init__(self, engines: dict[str, Engine], work: Workload) -> None:
        self._engines, self._task = engines, work
        self.speeds: dict[str, float] = {}
        self.seconds = self.passed = 0.0

    def repeat(self, steps: int) -> None:
        """Let each train once."""
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
            self.speeds[name] = max(self.speeds.get(name, 0.0), sum(job.size for job in small.jobs) / seconds)
            self.seconds += seconds
            self.passed += passed

    def leave_out_what_is_far_behind(self) -> None:
        """Train no more with engines that cannot be the fastest."""
        enough = max(self.speeds.values()) / FAR_BEHIND
        self._engines = {name: engine for name, engine in self._engines.items() if self.speeds[name] > enough}


def _enough(engine: Engine) -> int:
    """Return how many clients are enough to measure an engine."""
    if isinstance(engine, LoopEngine):
        return FEW_CLIENTS
    if isinstance(engine, WorkersEngine) and engine.inside != "stacked":
        return FEW_CLIENTS * torch.get_num_threads()
    return MOST_CLIENTS


def _seconds(engine: Engine, work: Workload) -> tuple[float, float]:
    """Return how long an engine takes: were there nothing else to do for the cores, and as it was."""
    cuda = work.models.is_cuda
    if cuda:
        torch.cuda.synchronize()
    start, of_thread, of_process, of_workers = perf_counter(), thread_time(), process_time(), _of_workers(engine)
    engine.train(work)
    if cuda:
        torch.cuda.synchronize()
        passed = perf_counter() - start
        return passed, passed
    # The thread that waits for others computes as long, or turns round and round; but all have to find a core.
    here = max(thread_time() - of_thread, (process_time() - of_process) / cores())
    return max(1e-9, here + _of_workers(engine) - of_workers), perf_counter() - start


def _of_workers(engine: Engine) -> float:
    return engine.busy if isinstance(engine, WorkersEngine) else 0.0
