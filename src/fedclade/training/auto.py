"""Engines by name, and the one that chooses by itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic

import torch
from torch import Tensor, nn

from fedclade.core import (
    ConfigError,
    EngineError,
    Layout,
    unknown,
)
from fedclade.training.autotune import fastest, forget
from fedclade.training.channels_last import ChannelsLastLoop
from fedclade.training.jobs import CannotTrainTogether, Engine, Task
from fedclade.training.loop import LoopEngine
from fedclade.training.processes import cannot_fork, tried
from fedclade.training.stacked import StackedEngine
from fedclade.training.stacking.replay import Replay, can_record
from fedclade.training.threads import using_threads
from fedclade.training.vmap import VmapEngine
from fedclade.training.workers import WorkersEngine

ENGINES: Mapping[str, str] = {
    "auto": "measures, chooses, remembers",
    "stacked": "all clients in one batched program",
    "workers": "clients side by side, in a process for each core (CPU, Linux)",
    "vmap": "all clients by torch.func.vmap",
    "loop": "one client after another",
}
"""Every engine with a line for people."""

TOGETHER: Mapping[str, Callable[[], Engine]] = {"stacked": StackedEngine, "vmap": VmapEngine}
"""Engines that train clients together, the faster first; not every module can be trained so."""

REPLAYED = "stacked, replayed"
"""The stacked engine that records its steps."""

TOLERANCE = 1e-3
"""How far the updates of two engines may be apart after a few steps, relative to their norm."""

FINE_TOLERANCE = 1e-9
"""The same in float64."""

LONGEST, TIMES_THE_LOOP = 60.0, 30
"""Seconds that a trial may take, and how many times what the loop took besides."""

_FAILURES = (RuntimeError, ValueError, IndexError, TypeError)
"""What a module raises that an engine cannot run."""

_log = logging.getLogger(__name__)


def build_engine(name: str, taken: str | None = None) -> ChosenEngine:
    """Return an engine by its name.

    Parameters
    ----------
    name
        One of :data:`ENGINES`.
    taken
        What :attr:`ChosenEngine.taken` was in the part of the run that is continued: it is taken again, unseen.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    check_engine(name)
    return ChosenEngine(name, taken)


def check_engine(name: str) -> None:
    """Check the name of an engine.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    if name not in ENGINES:
        raise ConfigError(unknown("engine", name, ENGINES))


class ChosenEngine:
    """The engine that the user asked for; or the fastest that can train the module, chosen in the first call and kept.

    A module that cannot be stacked goes to ``vmap``, and if that fails to the loop or the workers; that is logged. So
    it is where a worker process dies, by ``auto`` to the loop.

    Parameters
    ----------
    name
        One of :data:`ENGINES`.
    taken
        What to train with, without trying or measuring anything; a name that :attr:`taken` had.
    """

    def __init__(self, name: str, taken: str | None = None) -> None:
        self.taken = taken
        """The engine that trains, with the way inside worker processes, on which rounding depends; None at first."""
        self._name = name
        self._engine = None if taken is None else _named(taken)

    @property
    def name(self) -> str:
        """Name of the engine; ``auto`` as long as nothing has been chosen."""
        return self._name if self.taken is None else self.taken.split(",")[0]

    def train(self, task: Task, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.training.jobs.Engine`.

        Raises
        ------
        ConfigError
            If the engine that was asked for cannot train this module.
        EngineError
            If worker processes were asked for, and die whatever they train with.
        """
        if self._engine is None:
            self.taken, self._engine = _chosen(task) if self._name == "auto" else _asked_for(self._name, task)
        try:
            return self._engine.train(task, into)
        except EngineError as error:
            instead = {"auto": "loop", "workers": "workers, loop"}.get(self._name, self.taken)
            if instead == self.taken:
                raise
            forget(str(self.taken))
            _log.warning("%s; training with engine %s from now on", error, instead)
            self.taken, self._engine = instead, _named(str(instead))
            return self.train(task.redrawn(), into)


def _chosen(task: Task) -> tuple[str, Engine]:
    engines: dict[str, Engine] = {}
    objections: list[str] = []
    for name in TOGETHER:
        found, reason = _together(name, task)
        if found is not None:
            engines[name] = found
            break
        objections.append(f"{name}: {reason}")
    if "stacked" in engines:
        engines |= _replaying(task)
    if torch.get_num_threads() > 1 and len(task.jobs) > 1 and not cannot_fork(task.models.device):
        engines |= _workers(task, stackable="stacked" in engines)
    engines["loop"] = LoopEngine()
    chosen = fastest(engines, task) if len(engines) > 1 else "loop"
    if objections:
        _log.warning("%s; training with engine %s", "; ".join(objections), chosen.split(",")[0])
    return chosen, engines[chosen]


def _asked_for(name: str, task: Task) -> tuple[str, Engine]:
    reason = None
    engine: Engine | None = None
    if name in TOGETHER:
        engine, reason = _together(name, task)
        if name == "stacked" and engine is not None and (others := _replaying(task)):
            engines = {name: engine, **others}
            name = fastest(engines, task)
            engine = engines[name]
    elif name == "workers":
        if (reason := cannot_fork(task.models.device)) is None:
            workers = _workers(task, stackable=_together("stacked", task)[0] is not None)
            name = fastest(workers, task)
            engine = workers[name]
    else:
        engine = LoopEngine()
    if engine is None:
        raise ConfigError(f"engine {name!r} cannot train this model: {reason}; use --engine auto")
    return name, engine


def _named(taken: str) -> Engine:
    name, _, inside = taken.partition(", ")
    if name == "workers":
        return WorkersEngine(inside)
    if taken == REPLAYED:
        return StackedEngine(Replay())
    return TOGETHER.get(name, LoopEngine)()


def _together(name: str, task: Task) -> tuple[Engine | None, str | None]:
    """Return an engine that trains clients together, or why it cannot."""
    engine = TOGETHER[name]()
    reason = objection(engine, task)
    return (engine, None) if reason is None else (None, reason)


def _replaying(task: Task) -> dict[str, Engine]:
    """Return the stacked engine that records its steps, if this is a GPU, and nothing of them resists."""
    if not can_record(task.models.device):
        return {}
    engine = StackedEngine(Replay())
    # In the first round steps are met, in the second recorded, in the third only launched.
    reason = objection(engine, task, rounds=3)
    if reason is not None:
        _log.info("steps are not recorded as CUDA graphs: %s", reason)
    return {REPLAYED: engine} if reason is None else {}


def _workers(task: Task, stackable: bool) -> dict[str, Engine]:
    """Return the ways in which worker processes can train the clients."""
    convolves = any(parameter.dim() == 4 for parameter in task.module.parameters())
    last = convolves and _channels_last(task)
    inside = [*(["stacked"] if stackable else []), "channels last" if last else "loop"]
    return {f"workers, {way}": WorkersEngine(way) for way in inside}


def _channels_last(task: Task) -> bool:
    with using_threads(1):  # as in a worker process
        reason = objection(ChannelsLastLoop(), task)
    if reason is not None:
        _log.info("convolutions do not keep their channels last: %s", reason)
    return reason is None


def objection(engine: Engine, task: Task, rounds: int = 1) -> str | None:
    """Say why an engine cannot train the clients of a task, or return None.

    It has to give the same updates as the loop on two steps of three clients. What this finds besides layers that the
    engine does not know: modules whose forward pass mixes the examples of a batch, which would mix clients.

    Some layers in some layout make torch end the process. So the engine is tried in another one, wherever a process can
    be forked; elsewhere only engines are tried for which no such layer is known.

    Parameters
    ----------
    engine
        To be tried.
    task
        Its clients are cut short, and their draws stay unused.
    rounds
        How many have to come out right: an engine may go about a later one in another way.
    """
    clients, batch = 3, task.spec.batch_size
    examples = 2 * batch + min(2, batch - 1)  # a ragged batch, but not of one example, which BatchNorm does not take
    small = task.cut(clients, examples)
    calm = replace(small, module=without_dropout(task.module))  # whose draws differ between engines
    start = monotonic()
    expected = _by_loop(calm)
    limit = LONGEST + TIMES_THE_LOOP * (monotonic() - start)

    def attempt() -> str | None:
        try:
            for _ in range(rounds):
                engine.train(small)
            error = max(_relative_error(engine, calm, expected) for _ in range(rounds))
            if error <= TOLERANCE or _rounding_explains(engine, calm):
                return None
        except CannotTrainTogether as reason:
            return str(reason)
        except _FAILURES as failure:
            return f"{type(task.module).__name__} fails on clients together: {failure}"
        return f"{type(task.module).__name__} gives other updates for clients together (relative error {error:.1e})"

    return attempt() if cannot_fork(task.models.device) else tried(attempt, limit)


def _by_loop(task: Task) -> Tensor:
    """Return the loop's updates; the draws of the task stay unused."""
    return LoopEngine().train(task.redrawn())[0]


def _relative_error(engine: Engine, task: Task, expected: Tensor) -> float:
    """Return how far an engine's updates are from those expected, relative to their norms: that of the worst client."""
    got, _ = engine.train(task.redrawn())
    apart, norms = (torch.linalg.vector_norm(difference, dim=1) for difference in (got - expected, expected))
    # Updates are differences of models: tiny ones keep few digits. Those that diverge are left to the run to tell.
    models = torch.linalg.vector_norm(task.models[[job.row for job in task.jobs]], dim=1)
    rounding = 100 * torch.finfo(models.dtype).eps * models
    return float(((apart - rounding).clamp(min=0) / norms).nan_to_num(0).max())


def _rounding_explains(engine: Engine, task: Task) -> bool:
    """Say whether an engine and the loop differ only because rounding has fallen on two sides of a kink.

    Where the input of a ReLU is all but 0, its sign, and with it the gradient, is a matter of rounding. In float64 that
    is so fine that both agree to many more digits; and in float32 they agree for other orders of the examples. What
    mixes clients does it in float64 too, and what computes coarsely does it in any order.
    """
    fine = _in_float64(task)
    try:
        if _relative_error(engine, fine, _by_loop(fine)) > FINE_TOLERANCE:
            return False
    except (CannotTrainTogether, *_FAILURES):  # such as a module that makes float32 tensors in its forward pass
        return False
    others = (task.redrawn(by) for by in range(1, 4))
    return any(_relative_error(engine, other, _by_loop(other)) <= TOLERANCE for other in others)


def _in_float64(task: Task) -> Task:
    module = copy.deepcopy(task.module).double()
    layout = replace(Layout.of(module), resting=task.layout.resting)  # checks leave modules in evaluation mode
    jobs = [replace(j, inputs=j.inputs.double() if j.inputs.is_floating_point() else j.inputs) for j in task.jobs]
    return replace(task, module=module, layout=layout, models=task.models.double(), jobs=jobs)


def without_dropout(module: nn.Module) -> nn.Module:
    """Return a copy of a module that drops nothing."""
    calm = copy.deepcopy(module)
    for layer in calm.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return calm
