"""Which engine is fastest for a model on this machine: measured once, and remembered in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import torch

from fedclade.data.cache import cache_folder
from fedclade.engine.jobs import Engine, Task
from fedclade.engine.loop import LoopEngine
from fedclade.engine.workers import WorkersEngine

FORMAT = 8
"""Part of every key: raise it whenever an engine has become faster or slower."""

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

_of_this_process: dict[str, str] = {}
"""Choices by key, so that they hold for the whole process even where no cache folder can be written."""


def fastest(engines: Mapping[str, Engine], task: Task) -> str:
    """Return the name of the engine that trains the clients of a task fastest on this machine.

    It is measured once for each structure of a module, device, batch size, order of magnitude of the number of clients,
    and number of threads, and then read from the cache folder: rounding depends on the engine, and a run that is
    repeated should give the same bytes.
    """
    key = _key(list(engines), task)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    path = cache_folder() / f"engine-{name}.json"
    known = _of_this_process.get(str(path)) or _read(path, engines)
    if known is None:
        speeds = measure(engines, task)
        known = max(speeds, key=lambda engine: speeds[engine])
        told = ", ".join(f"{engine} {speed:,.0f}" for engine, speed in speeds.items())
        _log.info("engine %s is the fastest for this model (samples/s: %s)", known, told)
        known = _keep(path, {"engine": known, "samples_per_second": speeds, "key": key}) or known
    _of_this_process[str(path)] = known
    return known


def measure(engines: Mapping[str, Engine], task: Task) -> dict[str, float]:
    """Return the samples/s of each engine on the first few steps of a task: the best of some interleaved repeats."""
    _measured_once(engines, task, 1)  # a warm-up: processes are forked, threads started
    start = perf_counter()
    best = _measured_once(engines, task, STEPS)
    fast = perf_counter() - start < SECONDS / 4
    for repeat in range(1, MOST_REPEATS):
        if repeat >= FEWEST_REPEATS and perf_counter() - start > SECONDS:
            break
        if repeat == (SURE if fast else 1):
            engines = {name: engine for name, engine in engines.items() if FAR_BEHIND * best[name] > max(best.values())}
        speeds = _measured_once(engines, task, MORE_STEPS if fast and repeat >= SURE else STEPS)
        best |= {name: max(best[name], speed) for name, speed in speeds.items()}
    return best


def _measured_once(engines: Mapping[str, Engine], task: Task, steps: int) -> dict[str, float]:
    speeds: dict[str, float] = {}
    for name, engine in engines.items():
        small = task.cut(_enough(engine), steps * task.spec.batch_size)
        speeds[name] = sum(job.size for job in small.jobs) / _seconds(engine, small)
    return speeds


def _enough(engine: Engine) -> int:
    """Return how many clients are enough to measure an engine."""
    if isinstance(engine, LoopEngine):
        return FEW_CLIENTS
    if isinstance(engine, WorkersEngine) and engine.inside != "stacked":
        return FEW_CLIENTS * torch.get_num_threads()
    return MOST_CLIENTS


def _seconds(engine: Engine, task: Task) -> float:
    cuda = task.models.is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = perf_counter()
    engine.train(task)
    if cuda:
        torch.cuda.synchronize()
    return perf_counter() - start


def _key(engines: list[str], task: Task) -> dict[str, object]:
    clients = min(len(task.jobs), 2 * MOST_CLIENTS)
    cuda = task.models.is_cuda
    return {
        "format": FORMAT,
        "engines": engines,
        "module": str(task.module),
        "tensors": [[slot.name, *slot.shape] for slot in (*task.layout.parameters, *task.layout.buffers)],
        "type": str(task.layout.dtype),
        "inputs": list(task.jobs[0].inputs.shape[1:]),
        "batch_size": task.batch_size,
        "clients": 1 << (clients - 1).bit_length(),  # the next power of two
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _read(path: Path, engines: Mapping[str, Engine]) -> str | None:
    try:
        name = json.loads(path.read_text())["engine"]
    except OSError:  # there is none, or no folder that could be read
        return None
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("cannot use the choice of an engine in %s (%s); measuring again", path, error)
        path.unlink(missing_ok=True)
        return None
    return name if name in engines else None


def _keep(path: Path, choice: Mapping[str, object]) -> str | None:
    """Write a choice; if another process was faster, return what that one chose."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as beside:
            whole = Path(beside) / path.name
            whole.write_text(json.dumps(choice, indent=2) + "\n")
            path.hardlink_to(whole)  # in one step, and only if there is none
    except FileExistsError:
        return json.loads(path.read_text())["engine"]
    except OSError as error:
        _log.warning("cannot keep the choice of an engine in %s (%s); the next start measures again", path, error)
    return None
